"""Search of IOS: the best sequence of stages, by dynamic programming over endings (Ding et al., 2021, Algorithm 1).

``L[S] = min over endings E of S of L[S - E] + stage_ms(E)``. The paper recurses from the whole set of operators. Here
the table is filled iteratively from the whole set down to the empty set: an entry holds the least latency of the stages
after it. So the recursion is never as deep as the graph, and each set is expanded once, after all sets that lead to it.

The graph is split at its articulation points, operators that are related to every other operator by a path: any
operator that shares a stage with such an operator shares its group. Each block is searched by itself, and equal blocks
once.

**Large blocks.** A search is abandoned after 600 000 endings, or after 10 000 once the searches of the graph have used
2 000 000 together. Each stage whose latency is requested counts as twenty endings. If a search is abandoned, the block
is searched with sequences of operators joined into one, and if that is still too large, in two halves along its
topological order. Such a schedule is valid, but only its parts are optimal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chrion.graph.blocks import join_sequences, split_into_blocks
from chrion.graph.dag import Dag
from chrion.scheduler.policies.endings import GROUPS, Block, endings
from chrion.scheduler.policies.stages import Stage, StageCost

#: From operators, in ascending order, to the latency in ms of the stage that they become if they are merged.
MergedCosts = Mapping[tuple[int, ...], float]

#: Most endings of one search, of all searches of a graph together, and of each search after that.
_MOST_ENDINGS, _MOST_IN_ALL, _MOST_AFTERWARDS = 600_000, 2_000_000, 10_000
#: The number of endings that a request for the latency of a stage counts as.
_ENDINGS_PER_LATENCY = 20
#: A block is not searched if its states, times this number of endings, may exceed the limit.
_ENDINGS_PER_STATE = 30


def search_stages(  # noqa: PLR0913 - the algorithm's own parameters by name
    dag: Dag,
    stage_ms: StageCost,
    *,
    merged_ms: MergedCosts | None = None,
    r: int | None = 3,
    s: int | None = 8,
    groups: str = GROUPS[0],
    most_endings: int = _MOST_ENDINGS,
) -> list[Stage]:
    """Return the stages with the least total latency.

    Args:
        dag: The graph.
        stage_ms: Returns the latency of a stage whose groups run side by side: predicted, or measured.
        merged_ms: Latencies of stages whose operators can be merged into one; without it, no merge is considered.
        r: Most operators of a group; None for any number.
        s: Most groups of a stage; None for any number.
        groups: ``connected`` or ``rooted``; see :mod:`chrion.scheduler.policies.endings`.
        most_endings: Most endings of one search.

    Returns:
        The stages, first to last. Of equal sequences the first found: the one with more operators in earlier stages.

    Raises:
        OptionError: ``groups`` is not one of them.
    """
    search = _Search(dag, stage_ms, merged_ms or {}, (r, s, groups), most_endings)
    return [stage for block in split_into_blocks(dag) for stage in search.stages([(i,) for i in block])]


@dataclass(frozen=True, slots=True)
class _Step:
    """The best way to reach a set of remaining units."""

    #: Latency in ms of the stages that have been removed from the whole set.
    ms: float
    #: The set before the last stage was removed, and the groups of that stage.
    source: int
    groups: tuple[int, ...]
    merged: bool


class _Search:
    """The search over the blocks of one graph."""

    def __init__(
        self,
        dag: Dag,
        stage_ms: StageCost,
        merged_ms: MergedCosts,
        limits: tuple[int | None, int | None, str],
        most_endings: int,
    ) -> None:
        self._dag = dag
        self._stage_ms, self._merged_ms = stage_ms, merged_ms
        self._limits, self._most_endings = limits, most_endings
        self._tried = 0
        self._known: dict[object, list[tuple[tuple[int, ...], bool]] | None] = {}

    def stages(self, units: list[tuple[int, ...]]) -> list[Stage]:
        """Return the stages of a block of units; if the block is too large, the stages of its parts."""
        block = Block.of(self._dag, units)
        key = self._key(block)
        if key not in self._known:
            self._known[key] = self._search(block)
        steps = self._known[key]
        if steps is not None:
            return [Stage(tuple(_members(block, group) for group in taken), merged) for taken, merged in steps]
        rows = join_sequences(self._dag, units)
        if len(rows) < len(units):
            return self.stages(rows)
        half = len(units) // 2
        return self.stages(units[:half]) + self.stages(units[half:])

    def _key(self, block: Block) -> object:
        """Return a key that is equal for blocks of equal operators with equal edges."""
        signatures = tuple(tuple(self._dag.signatures[i] for i in unit) for unit in block.units)
        home = {i: at for at, unit in enumerate(block.units) for i in unit}
        merges = (([home[i] for i in own if i in home], ms) for own, ms in self._merged_ms.items())
        inside = tuple(sorted((tuple(own), ms) for own, ms in merges if len(own) > 1))
        return block.below, signatures, inside

    def _search(self, block: Block) -> list[tuple[tuple[int, ...], bool]] | None:
        """Return the groups of each stage, first to last, with True if they are merged; None for a block too large."""
        limit = self._most_endings if self._tried < _MOST_IN_ALL else _MOST_AFTERWARDS
        if len(block.units) > 1 and _bound_states(self._dag, block) > limit / _ENDINGS_PER_STATE:
            return None
        levels: list[dict[int, _Step]] = [{} for _ in range(len(block.units) + 1)]
        levels[-1][block.whole] = _Step(0.0, 0, (), merged=False)
        costs: dict[int, tuple[float, bool]] = {}
        end = self._tried + limit
        for level in reversed(levels[1:]):
            for remaining, so_far in level.items():
                for ending, taken in endings(block, remaining, *self._limits):
                    self._tried += 1
                    if ending not in costs:
                        self._tried += _ENDINGS_PER_LATENCY
                        costs[ending] = self._cost(block, ending, taken)
                    ms, merged = costs[ending]
                    rest = levels[(remaining ^ ending).bit_count()]
                    known = rest.get(remaining ^ ending)
                    if known is None or so_far.ms + ms < known.ms:
                        rest[remaining ^ ending] = _Step(so_far.ms + ms, remaining, taken, merged)
                if self._tried > end:
                    return None
        return _walk_back(levels)

    def _cost(self, block: Block, ending: int, taken: Sequence[int]) -> tuple[float, bool]:
        """Return the latency of a stage by the better strategy, and True if that is to merge it."""
        concurrent = self._stage_ms([_members(block, group) for group in taken])
        merged = self._merged_ms.get(tuple(sorted(_members(block, ending)))) if len(taken) > 1 else None
        return (concurrent, False) if merged is None or merged >= concurrent else (merged, True)


def _members(block: Block, mask: int) -> tuple[int, ...]:
    """Return the operators of a mask, in topological order."""
    operators: list[int] = []
    while mask:
        lowest = mask & -mask
        operators += block.units[lowest.bit_length() - 1]
        mask ^= lowest
    return tuple(operators)


def _walk_back(levels: Sequence[dict[int, _Step]]) -> list[tuple[tuple[int, ...], bool]]:
    """Return the stages of the best sequence from the filled table, first to last."""
    steps: list[tuple[tuple[int, ...], bool]] = []
    at = 0
    while True:
        step = levels[at.bit_count()][at]
        if not step.groups:
            return steps
        steps.append((step.groups, step.merged))
        at = step.source


def _bound_states(dag: Dag, block: Block) -> float:
    """Return an upper bound on the number of states: the product of (length + 1) over chains that cover the block.

    Any number of units of a chain may remain. The chains are those of Opara's stream assignment, found in one pass.
    """
    home = {i: at for at, unit in enumerate(block.units) for i in unit}
    chain = [-1] * len(block.units)
    followed: set[int] = set()
    sizes: list[int] = []
    for at, unit in enumerate(block.units):
        before = (home[m] for i in unit for m in dag.predecessors[i] if m in home)
        leader = next((m for m in before if m != at and m not in followed), None)
        if leader is None:
            chain[at] = len(sizes)
            sizes.append(1)
        else:
            followed.add(leader)
            chain[at] = chain[leader]
            sizes[chain[at]] += 1
    return math.prod(float(size + 1) for size in sizes)
