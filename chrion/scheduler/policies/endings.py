"""Endings: the search space of IOS, the possible last stages of a set of operators (Ding et al., 2021, section 4).

A stage can be the last one of a set of operators if no edge leads from the stage to the rest of the set. Such a stage
is an *ending*. Its operators fall into groups with no edge between them. As no edge leaves an ending, none leaves one
of its groups either. So an ending is a union of disjoint groups that are each closed under successors, and the endings
of a set are found by combining groups.

There are two definitions of a group:

- ``connected``, as in the paper's text: any weakly connected set closed under successors;
- ``rooted``, as in the paper's published counts: one operator and all its descendants.

Sets are bit masks over the operators of a block; bit 0 is first in topological order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chrion.common.wrong_values import wrong_value
from chrion.graph.dag import Dag

#: Definitions of a group.
GROUPS = ("connected", "rooted")


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a graph that is searched by itself."""

    #: Operators that are scheduled as one, in topological order: single operators, or several in sequence.
    units: tuple[tuple[int, ...], ...]
    #: For each unit, a mask of the unit and all its descendants in the block.
    below: tuple[int, ...]

    @classmethod
    def of(cls, dag: Dag, units: Sequence[tuple[int, ...]]) -> Block:
        """Return the block of the given units, which are in topological order."""
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
    """Yield each non-empty ending of a set of units once, with its groups; both are bit masks.

    Args:
        block: The block.
        remaining: The set, closed under predecessors.
        r: Most units of a group; None for any number.
        s: Most groups of an ending; None for any number.
        groups: One of :data:`GROUPS`.

    Raises:
        OptionError: ``groups`` is not one of them.
    """
    if groups not in GROUPS:
        raise wrong_value("groups", f"one of {', '.join(GROUPS)}", groups)
    largest = len(block.units) if r is None else r
    most = len(block.units) if s is None else s
    roots = [block.below[u] & remaining for u in range(remaining.bit_length()) if remaining >> u & 1]
    rooted = [mask for mask in roots if mask.bit_count() <= largest]
    choices = rooted if groups == "rooted" else _connected(rooted, largest)
    stack: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
    while stack:
        start, ending, chosen = stack.pop()
        if ending:
            yield ending, chosen
        if len(chosen) < most:
            for at in range(start, len(choices)):
                if not choices[at] & ending:
                    stack.append((at + 1, ending | choices[at], (*chosen, choices[at])))  # noqa: PERF401 - grows while walked


def _connected(rooted: Sequence[int], largest: int) -> list[int]:
    """Return unions of overlapping rooted groups, up to a size; the rooted ones first."""
    unions = dict.fromkeys(rooted)
    frontier = list(rooted)
    for mask in frontier:  # grows while it is walked
        for other in rooted:
            union = mask | other
            if mask & other and union.bit_count() <= largest and union not in unions:
                unions[union] = None
                frontier.append(union)
    return list(unions)
