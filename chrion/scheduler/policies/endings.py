"""What IOS searches: the last stages that a set of operators may have (Ding et al., 2021, section 4).

A stage may be the last one of a set of operators if no edge leaves it: an *ending*. Its operators fall into groups
with no edge between them. As no edge leaves an ending, none leaves a group of it either; so an ending is nothing but
some disjoint groups, each closed under successors, and the endings of a set are found by putting groups together.

Which groups there are:

- ``connected``, as the paper has it: any weakly connected set closed under successors;
- ``rooted``, as the published counts have it: one operator and all its descendants.

Sets are bit masks over the operators of a block, and bit 0 is first in topological order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chrion.errors import OptionError
from chrion.graph.dag import Dag

#: Ways to form groups.
GROUPS = ("connected", "rooted")


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a graph that is searched by itself."""

    #: What is scheduled as one, in topological order: single operators, or several in a row.
    units: tuple[tuple[int, ...], ...]
    #: For each unit, a mask of it and of all units of the block that a path leads to.
    below: tuple[int, ...]

    @classmethod
    def of(cls, dag: Dag, units: Sequence[tuple[int, ...]]) -> Block:
        """A block of some units, which are given in a topological order."""
        home = {i: at for at, unit in enumerate(units) for i in unit}
        below = [0] * len(units)
        for at in reversed(range(len(units))):
            after = {home[s] for i in units[at] for s in dag.successors[i] if s in home}
            below[at] = 1 << at
            for unit in after:
                below[at] |= below[unit]
        return cls(tuple(units), tuple(below))

    @property
    def whole(self) -> int:
        """The mask of all units."""
        return (1 << len(self.units)) - 1


def endings(
    block: Block, remaining: int, r: int | None, s: int | None, groups: str = GROUPS[0]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each ending of a set of units once, with its groups; never the empty one.

    Args:
        block: The block.
        remaining: The set, itself closed under predecessors.
        r: Most units of a group; None for any number.
        s: Most groups of an ending; None for any number.
        groups: One of :data:`GROUPS`.

    Raises:
        OptionError: There is no such way to form groups.
    """
    if groups not in GROUPS:
        raise OptionError(f"groups: there is no {groups!r}", hint=f"one of {', '.join(GROUPS)}")
    largest = len(block.units) if r is None else r
    most = len(block.units) if s is None else s
    roots = [block.below[u] & remaining for u in range(remaining.bit_length()) if remaining >> u & 1]
    rooted = [mask for mask in roots if mask.bit_count() <= largest]
    found = rooted if groups == "rooted" else _connected(rooted, largest)
    stack: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
    while stack:
        start, ending, chosen = stack.pop()
        if ending:
            yield ending, chosen
        if len(chosen) < most:
            for at in range(start, len(found)):
                if not found[at] & ending:
                    stack.append((at + 1, ending | found[at], (*chosen, found[at])))  # noqa: PERF401 - it is walked


def _connected(rooted: Sequence[int], largest: int) -> list[int]:
    """Unions of overlapping rooted groups, up to a size; the rooted ones first."""
    found = dict.fromkeys(rooted)
    frontier = list(rooted)
    for mask in frontier:  # grows while it is walked
        for other in rooted:
            union = mask | other
            if mask & other and union.bit_count() <= largest and union not in found:
                found[union] = None
                frontier.append(union)
    return list(found)
