"""IOS: the best sequence of stages, by dynamic programming over endings (Ding et al., 2021, Algorithm 1).

``L[S] = min over endings E of S of L[S - E] + stage_ms(E)``. The paper recurses from the whole set of operators. Here
the table is filled from the whole set downwards, as the least time of all that comes after S; so no recursion is as
deep as the graph, and a set is gone through once, after all those that it is left of.

The graph is split at its articulation points, operators that every other one leads to or comes from: whatever shares
a stage with such an operator shares its group. Each block is searched by itself, and equal ones once.

**Large blocks.** A search is given up when it has tried 600 000 endings, each stage whose latency it has asked for
counting as twenty; and when a graph has taken 2 000 000 already, after 10 000. The block is then searched with
operators in a row taken as one, and if that is still too much, in two halves along its topological order. Such a
schedule is valid, but only its parts are optimal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from chrion.graph.dag import Dag
from chrion.scheduler.policies.endings import GROUPS, Block, endings
from chrion.scheduler.policies.stages import Stage

#: From the groups of a stage, each in a topological order, to its latency in ms.
StageCost = Callable[[Sequence[Sequence[int]]], float]
#: From operators, in ascending order, to the latency in ms of a stage of what they become when they are merged.
MergedCosts = Mapping[tuple[int, ...], float]

#: Endings that one search tries at most, all searches of a graph together, and each one after that.
_MOST_ENDINGS, _MOST_IN_ALL, _MOST_AFTERWARDS = 600_000, 2_000_000, 10_000
#: What a stage's latency counts for.
_A_LATENCY = 20
#: A block that may have more states than a search may try endings, over this, is not even begun.
_ENDINGS_A_STATE = 30


def search_space(dag: Dag, r: int | None = None, s: int | None = None, groups: str = GROUPS[0]) -> tuple[int, int, int]:
    """Size of the search over a whole graph, without splitting it.

    Args:
        dag: The graph.
        r: Most operators of a group; None for any number.
        s: Most groups of a stage; None for any number.
        groups: ``connected`` or ``rooted``; see :mod:`chrion.scheduler.policies.endings`.

    Returns:
        States (distinct non-empty sets of remaining operators), transitions (endings tried over all states), and
        schedules (complete sequences of stages).

    Raises:
        OptionError: There is no such way to form groups.
    """
    block = Block.of(dag, [(i,) for i in dag.topological_order])
    levels: list[dict[int, int]] = [{} for _ in range(len(dag) + 1)]  # by size: set -> sequences that leave it
    levels[-1][block.whole] = 1
    states = transitions = 0
    for level in reversed(levels[1:]):
        for remaining, ways in level.items():
            states += 1
            for ending, _ in endings(block, remaining, r, s, groups):
                transitions += 1
                rest = levels[(remaining ^ ending).bit_count()]
                rest[remaining ^ ending] = rest.get(remaining ^ ending, 0) + ways
    return states, transitions, levels[0].get(0, 0)


def ios(  # noqa: PLR0913 - the algorithm's own parameters by name
    dag: Dag,
    stage_ms: StageCost,
    *,
    merged_ms: MergedCosts | None = None,
    r: int | None = 3,
    s: int | None = 8,
    groups: str = GROUPS[0],
) -> list[Stage]:
    """IOS's schedule.

    Args:
        dag: The graph.
        stage_ms: Latency of a stage whose groups run side by side: predicted, or measured.
        merged_ms: Latency of stages whose operators can be merged into one; without it, none is considered.
        r: Most operators of a group; None for any number.
        s: Most groups of a stage; None for any number.
        groups: ``connected`` or ``rooted``; see :mod:`chrion.scheduler.policies.endings`.

    Returns:
        The stages with the least total latency, first to last. Of equal ones the first found: more of the operators
        in earlier stages.

    Raises:
        OptionError: There is no such way to form groups.
    """
    search = _Search(dag, stage_ms, merged_ms, r, s, groups)
    return [stage for block in blocks(dag) for stage in search.stages([(i,) for i in block])]


def blocks(dag: Dag) -> list[list[int]]:
    """Split a graph after each of its articulation points: operators that all others lead to or come from."""
    found: list[list[int]] = [[]]
    for i in dag.topological_order:
        found[-1].append(i)
        if dag.ancestors[i].bit_count() + dag.descendants[i].bit_count() == len(dag) - 1:
            found.append([])
    return [block for block in found if block]


@dataclass(frozen=True, slots=True)
class _Step:
    """How a set of remaining units is best left."""

    ms: float
    #: The set it is left of, and the groups that were taken from it.
    source: int
    groups: tuple[int, ...]
    merged: bool


class _Search:
    """Searches the blocks of one graph."""

    def __init__(  # noqa: PLR0913, PLR0917 - what `ios` was given
        self, dag: Dag, stage_ms: StageCost, merged_ms: MergedCosts | None, r: int | None, s: int | None, groups: str
    ) -> None:
        self._dag = dag
        self._stage_ms, self._merged_ms = stage_ms, merged_ms or {}
        self._limits = (r, s, groups)
        self._tried = 0
        self._known: dict[object, list[tuple[tuple[int, ...], bool]] | None] = {}

    def stages(self, units: list[tuple[int, ...]]) -> list[Stage]:
        """The stages of a block of units; of its parts where it is too large."""
        block = Block.of(self._dag, units)
        key = self._key(block)
        if key not in self._known:
            self._known[key] = self._found(block)
        found = self._known[key]
        if found is not None:
            return [Stage(tuple(_members(block, group) for group in taken), merged) for taken, merged in found]
        rows = _in_rows(self._dag, units)
        if len(rows) < len(units):
            return self.stages(rows)
        half = len(units) // 2
        return self.stages(units[:half]) + self.stages(units[half:])

    def _key(self, block: Block) -> object:
        """Equal for blocks of equal operators, wired alike."""
        signatures = tuple(tuple(self._dag.signatures[i] for i in unit) for unit in block.units)
        home = {i: at for at, unit in enumerate(block.units) for i in unit}
        merges = (([home[i] for i in own if i in home], ms) for own, ms in self._merged_ms.items())
        inside = tuple(sorted((tuple(own), ms) for own, ms in merges if len(own) > 1))
        return block.below, signatures, inside

    def _found(self, block: Block) -> list[tuple[tuple[int, ...], bool]] | None:
        """Groups of each stage, first to last, and whether they are merged; None where the block is too large."""
        limit = _MOST_ENDINGS if self._tried < _MOST_IN_ALL else _MOST_AFTERWARDS
        if len(block.units) > 1 and _most_states(self._dag, block) > limit / _ENDINGS_A_STATE:
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
                        self._tried += _A_LATENCY
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
        """Latency of a stage by the better strategy, and whether that is to merge it."""
        beside = self._stage_ms([_members(block, group) for group in taken])
        merged = self._merged_ms.get(tuple(sorted(_members(block, ending)))) if len(taken) > 1 else None
        return (beside, False) if merged is None or merged >= beside else (merged, True)


def _members(block: Block, mask: int) -> tuple[int, ...]:
    """Operators of a mask, in topological order."""
    found: list[int] = []
    while mask:
        lowest = mask & -mask
        found += block.units[lowest.bit_length() - 1]
        mask ^= lowest
    return tuple(found)


def _walk_back(levels: Sequence[dict[int, _Step]]) -> list[tuple[tuple[int, ...], bool]]:
    found: list[tuple[tuple[int, ...], bool]] = []
    at = 0
    while True:
        step = levels[at.bit_count()][at]
        if not step.groups:
            return found
        found.append((step.groups, step.merged))
        at = step.source


def _in_rows(dag: Dag, units: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Units in a row as one: each that alone follows one that it alone waits for, within these units."""
    home = {i: at for at, unit in enumerate(units) for i in unit}
    before = [{home[m] for i in unit for m in dag.predecessors[i] if m in home} - {at} for at, unit in enumerate(units)]
    after = [{home[s] for i in unit for s in dag.successors[i] if s in home} - {at} for at, unit in enumerate(units)]
    rows: dict[int, tuple[int, ...]] = {}
    head = list(range(len(units)))
    for at, unit in enumerate(units):
        if len(before[at]) == 1 and len(after[next(iter(before[at]))]) == 1:
            head[at] = head[next(iter(before[at]))]
            rows[head[at]] += unit
        else:
            rows[at] = unit
    return list(rows.values())


def _most_states(dag: Dag, block: Block) -> float:
    """A bound on the number of states: along each of some chains that cover the block, any number may be left.

    The chains are Opara's, found in one pass.
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
