"""Placements of weight groups for every size of the accelerator's memory: a knapsack problem.

A group gains the difference between its times on a CPU core and on the accelerator, and takes the memory of its
weights. Which groups to place for the most gain within a memory is the 0/1 knapsack problem; transfers are ignored.
Nemhauser and Ullmann, *Discrete dynamic programming and capital allocation* (1969), solve it for all memories at once:
they add one group after another to all selections known so far, and keep those that no other beats in both memory and
gain. The number of kept selections is bounded, so the result is exact for a few groups and an approximation for many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.policies.partial_offload import layer_units, one_by_one

#: Selections that are kept after each group: all of those of nine groups.
_KEPT = 512


@dataclass(frozen=True, slots=True)
class GroupSelection:
    """Groups on the accelerator, as a bit mask."""

    size: int
    gain_ms: float
    groups: int


def knapsack(sizes: Sequence[int], gains_ms: Sequence[float], kept: int = _KEPT) -> list[GroupSelection]:
    """Return the selections of items that none with less size and more gain beats, by increasing size.

    Args:
        sizes: The size of each item.
        gains_ms: The gain of each item; items without a gain are never selected.
        kept: The most selections; if there are more, those at even distances are kept, the first and the last included.
    """
    front = [GroupSelection(0, 0.0, 0)]
    # The items with the greatest gain for their size first: if selections are dropped, these are decided exactly.
    order = sorted(range(len(sizes)), key=lambda i: -gains_ms[i] / max(sizes[i], 1))
    for i in order:
        if gains_ms[i] <= 0:
            continue
        added = [GroupSelection(s.size + sizes[i], s.gain_ms + gains_ms[i], s.groups | 1 << i) for s in front]
        merged = sorted([*front, *added], key=lambda s: (s.size, -s.gain_ms))
        front, most = [], -math.inf
        for selection in merged:
            if selection.gain_ms > most:
                front.append(selection)
                most = selection.gain_ms
        front = _thin(front, kept)
    return front


def offload_lanes(dag: Dag, costs: Costs, most: int, operators: int) -> Iterator[tuple[int, ...]]:
    """Yield lanes of all operators for increasing amounts of accelerator memory, on one core and one accelerator lane.

    Each selection of groups is tried with the operators without weights on the accelerator, and with each of them on
    the device that most of the values that it reads come from. The placements of policies that fill the memory in a
    fixed order are tried as well.

    Args:
        dag: The graph.
        costs: The machine's costs.
        most: The most selections; at least two are tried.
        operators: The most operators in all selections together, which limits their number for large graphs.
    """
    accelerator_ms = costs.accelerator_ms or (math.inf,) * len(dag)
    units = _units(dag, [i for i in range(len(dag)) if accelerator_ms[i] < math.inf])
    sizes = [sum(dag.weight_bytes[w] for w in {w for i in unit for w in dag.weights[i]}) for unit in units]
    gains = [sum(costs.cpu_ms[0][i] - accelerator_ms[i] for i in unit) for unit in units]
    light = {i for i, ms in enumerate(accelerator_ms) if ms < math.inf and not dag.weights[i]}
    returned = max(2, min(most, operators // max(1, len(dag))))
    for selection in _thin(knapsack(sizes, gains), returned):
        placed = {i for g, unit in enumerate(units) if selection.groups >> g & 1 for i in unit}
        yield tuple(int(i not in placed and i not in light) for i in range(len(dag)))
        yield _follow(dag, [int(i not in placed) for i in range(len(dag))], light)
    for order in (one_by_one(dag), layer_units(dag)):
        yield from _prefixes(dag, accelerator_ms, order, returned)


def _prefixes(
    dag: Dag, accelerator_ms: Sequence[float], order: Sequence[Sequence[int]], most: int
) -> Iterator[tuple[int, ...]]:
    """Yield the placements at which a policy that fills the memory in a fixed order stops: before a large weight."""
    sizes = [sum(dag.weight_total(i) for i in unit) for unit in order]
    total = sum(sizes)
    stops = [at for at, size in enumerate(sizes) if at and size * 100 >= total]
    for stop in stops[:: math.ceil(len(stops) / most) or 1]:
        placed = {i for unit in order[:stop] for i in unit if accelerator_ms[i] < math.inf}
        yield tuple(int(i not in placed) for i in range(len(dag)))


def _units(dag: Dag, operators: Sequence[int]) -> list[list[int]]:
    """Return the groups of those of the operators that have weights: the ones whose largest weight is the same.

    Smaller weights that many operators share, such as masks and tables of positions, join no groups.
    """
    by_weight: dict[int, list[int]] = {}
    for i in operators:
        if dag.weights[i]:
            by_weight.setdefault(max(dag.weights[i], key=lambda w: (dag.weight_bytes[w], w)), []).append(i)
    return list(by_weight.values())


def _follow(dag: Dag, lanes: list[int], light: set[int]) -> tuple[int, ...]:
    """Place operators without weights on the device that most of the bytes that they read come from, or else go to."""
    decided = set(range(len(dag))) - light
    for i in [*dag.topological_order, *reversed(dag.topological_order)]:
        if i in decided:
            continue
        pairs = [(m, size) for m, size in zip(dag.predecessors[i], dag.edge_bytes[i], strict=True) if m in decided]
        pairs = pairs or [(m, dag.output_bytes[i]) for m in dag.successors[i] if m in decided]
        if pairs:
            on_device = sum(size if is_accelerator_lane(lanes[m]) else -size for m, size in pairs)
            lanes[i] = int(on_device <= 0)
            decided.add(i)
    return tuple(lanes)


def _thin(front: list[GroupSelection], most: int) -> list[GroupSelection]:
    """Return at most so many selections at even distances, the first and the last included."""
    if len(front) <= most:
        return front
    return [front[round(at * (len(front) - 1) / (most - 1))] for at in range(most)]
