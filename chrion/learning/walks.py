"""Combined blocks as GPG walks through them: from the whole block, one ending after another, until nothing is left."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from chrion.learning.libraries import jnp
from chrion.learning.operators import NUMBERS, BlockGraph
from chrion.scheduler.policies.endings import Block, endings
from chrion.scheduler.policies.stages import Stage
from chrion.scheduler.search.stages import CountedCost, R, S

#: The most endings that the policy sees, and the most walks in which they are collected at random.
SEEN, _GROWTHS = 64, 16
#: The most endings that are enumerated for an index.
ENUMERATED = 1_000
#: Numbers of an ending beside the embedding of its operators: groups and operators over their limits, the share of the
#: work that is left, and the longest group's share of the ending's work.
ENDING_NUMBERS = 4
#: The number of operators is filled up to a multiple, for each of which an update is compiled once.
_ROWS = 16
#: Sets whose endings are remembered.
_KNOWN = 10_000

Array = np.ndarray[Any, Any]
#: An ending and its groups, as bit masks.
Ending = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class TrainingBlock:
    """A combined block, and the latency of its stages."""

    block: BlockGraph
    cost: CountedCost
    #: Endings and work of sets that are remembered.
    _known: dict[int, list[Ending]] = field(default_factory=dict, init=False)
    _work: dict[int, float] = field(default_factory=dict, init=False)

    @cached_property
    def units(self) -> Block:
        """The operators in the order of their indices, as the search of endings has them."""
        return Block.of(self.block.dag, [(i,) for i in range(len(self.block.dag))])

    @cached_property
    def alone_ms(self) -> Array:
        """The latency of each operator as a stage of its own."""
        return np.array([self.cost([(i,)]) for i in range(len(self.block.dag))])

    @cached_property
    def size(self) -> int:
        """The number of rows of its arrays."""
        return -(-len(self.block.dag) // _ROWS) * _ROWS

    @cached_property
    def arrays(self) -> tuple[Any, Any]:
        """The state of operators, and 1 for each pair (operator, parent); rows of zeros at the end."""
        n = len(self.block.dag)
        state, parents = np.zeros((self.size, NUMBERS), np.float32), np.zeros((self.size, self.size), np.float32)
        state[:n] = self.block.state
        for i, before in enumerate(self.block.dag.predecessors):
            parents[i, list(before)] = 1
        return jnp.asarray(state), jnp.asarray(parents)

    @cached_property
    def _after(self) -> list[int]:
        return [sum(1 << s for s in after) for after in self.block.dag.successors]

    def leaves(self, remaining: int) -> int:
        """Return the operators of a set that have no successor in it."""
        return sum(1 << v for v in _bits(remaining) if not self._after[v] & remaining)

    def work_ms(self, members: int) -> float:
        """Return the latency of the operators of a set one after another."""
        if members not in self._work:
            if len(self._work) > _KNOWN:
                self._work.clear()
            self._work[members] = float(sum(self.alone_ms[v] for v in _bits(members)))
        return self._work[members]

    def stage(self, groups: Sequence[int]) -> Stage:
        """Return a stage of groups."""
        return Stage(tuple(tuple(_bits(group)) for group in groups))

    def all_endings(self, remaining: int) -> list[Ending]:
        """Return the endings of a set in the order of their bit masks, the first 1 000 that are found."""
        return sorted(itertools.islice(endings(self.units, remaining, R, S), ENUMERATED))

    def some_endings(self, remaining: int, pick: np.random.Generator) -> list[Ending]:
        """Return all endings of a set if they are few; otherwise those that grow from nothing at random."""
        if remaining not in self._known:
            if len(self._known) > _KNOWN:
                self._known.clear()
            found = sorted(itertools.islice(endings(self.units, remaining, R, S), SEEN + 1))
            self._known[remaining] = found if len(found) <= SEEN else []
        return self._known[remaining] or self._grow(remaining, pick)

    def _grow(self, remaining: int, pick: np.random.Generator) -> list[Ending]:
        """Add one operator after another, until no further one fits; each set on the way is an ending."""
        found: dict[int, tuple[int, ...]] = {}
        for _ in range(_GROWTHS):
            grown = self._grown(remaining, 0, (), pick)
            while grown:
                found.setdefault(*grown)
                grown = self._grown(remaining, *grown, pick)
            if len(found) >= SEEN:
                break
        return list(found.items())[:SEEN]

    def _grown(self, remaining: int, ending: int, groups: tuple[int, ...], pick: np.random.Generator) -> Ending | None:
        """Return an ending with one more operator; None if none fits the limits."""
        fitting = []
        for v in _bits(remaining & ~ending):
            after = self._after[v]
            if not after & remaining & ~ending:
                joined = [group for group in groups if group & after]
                if sum(group.bit_count() for group in joined) < R and len(groups) - len(joined) < S:
                    fitting.append((v, joined))
        if not fitting:
            return None
        v, joined = fitting[pick.integers(len(fitting))]
        rest = tuple(group for group in groups if group not in joined)
        return ending | 1 << v, (*rest, sum(joined) | 1 << v)

    def numbers(self, remaining: int, seen: Sequence[Ending]) -> list[tuple[float, ...]]:
        """Return the further numbers of endings."""
        left = self.work_ms(remaining) or 1.0  # operators may take no time
        rows: list[tuple[float, ...]] = []
        for ending, groups in seen:
            parts = [self.work_ms(group) for group in groups]
            work = sum(parts)
            longest = max(parts) / (work or 1.0)
            rows.append((len(groups) / S, ending.bit_count() / (R * S), work / left, longest))
        return rows


@dataclass(frozen=True, slots=True)
class Choice:
    """One recursion of Algorithm 2."""

    #: The operators that are left, and their leaves.
    remaining: int
    leaves: int
    #: What the policy saw of the endings: their members and further numbers; nothing if it chooses an index.
    members: Array
    numbers: Array
    count: int
    #: The number of the ending that was taken, and the policy's action if it chooses an index.
    chosen: int
    action: float = 0.0


@dataclass(slots=True)
class Walk:
    """A way from the whole block to nothing."""

    remaining: int
    choices: list[Choice] = field(default_factory=list)
    #: The stages, last to first.
    backwards: list[Stage] = field(default_factory=list)

    @property
    def stages(self) -> list[Stage]:
        """The stages, first to last."""
        return self.backwards[::-1]

    def take(self, task: TrainingBlock, choice: Choice, ending: Ending) -> None:
        """Take an ending off what remains."""
        self.choices.append(choice)
        self.backwards.append(task.stage(ending[1]))
        self.remaining ^= ending[0]


def rows_of(masks: Sequence[int], size: int) -> Array:
    """Return bit masks as rows of 0 and 1."""
    data = b"".join(mask.to_bytes(size // 8, "little") for mask in masks)
    bits = np.unpackbits(np.frombuffer(data, np.uint8).reshape(len(masks), -1), axis=1, bitorder="little")
    return bits.astype(np.float32)


def _bits(mask: int) -> list[int]:
    return [v for v in range(mask.bit_length()) if mask >> v & 1]
