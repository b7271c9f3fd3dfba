"""Placements of groups as wholes: pipelines."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence

from chrion.profiler.costs import Costs, OperatorMemory
from chrion.scheduler.search.grouping import Groups

#: Steps of the bisection for the greatest load, down to the rounding of a number, and the time in ms that stands for
#: "not supported".
_BISECTIONS = 60
_UNSUPPORTED_MS = 1e12
#: A partial pipeline gives a multiple of one part in so many of the groups to the accelerator: a choice,
#: not measured.
_PARTS = 8


def pipeline(groups: Groups, costs: Costs) -> list[int] | None:
    """Return the lane of each group in a pipeline over all lanes of a machine; None without several groups."""
    if len(groups.members) < 2:
        return None
    lanes = range(0 if costs.accelerator_ms is not None else 1, costs.cores + 1)
    return balanced_stretches(_group_costs(groups, costs), lanes, costs.cores)


def partial_pipelines(groups: Groups, costs: Costs) -> Iterator[list[int]]:
    """Yield pipelines with the first or the last groups on the accelerator and the others on the CPU lanes.

    Their numbers are spread evenly between none and all, so that there is one for every memory budget.
    """
    n = len(groups.members)
    if not costs.cores:
        return
    loads = _group_costs(groups, costs.limited_to(costs.cores, 0))
    cores = range(1, costs.cores + 1)
    for on_device in sorted({n * part // _PARTS for part in range(1, _PARTS)} - {0, n}):
        for first in (True, False):
            rest = range(on_device, n) if first else range(n - on_device)
            placed = balanced_stretches(loads, cores, costs.cores, rest)
            own = [0] * on_device
            yield [*own, *placed] if first else [*placed, *own]


def _group_costs(groups: Groups, costs: Costs) -> Costs:
    """Return the times of groups as if each were one operator."""

    def total(times: Sequence[float]) -> tuple[float, ...]:
        return tuple(sum(times[i] for i in members) for members in groups.members)

    accelerator_ms = None if costs.accelerator_ms is None else total(costs.accelerator_ms)
    return Costs(accelerator_ms, tuple(map(total, costs.cpu_ms)), (OperatorMemory(),) * len(groups.members))


def balanced_stretches(loads: Costs, lanes: Sequence[int], cores: int, groups: range | None = None) -> list[int]:
    """Cut the groups, in order, into one stretch for each lane such that the greatest load is least.

    For a given greatest load, it is best that each lane in turn takes as many groups as it can. Bisection finds the
    least load for which that covers all groups. O(groups * lanes), whereas dynamic programming over prefixes takes
    O(groups^2 * lanes).

    Args:
        loads: The costs of the groups.
        lanes: The lanes, in the order of the stretches.
        cores: Number of busy CPU cores.
        groups: The groups to place; all if missing.

    Returns:
        The lane of each of the groups.
    """
    chosen = range(len(loads.memory)) if groups is None else groups
    n = len(chosen)
    sums = []
    for lane in lanes:
        times = loads.lane_ms(lane, cores)
        sums.append([0.0, *itertools.accumulate(min(times[g], _UNSUPPORTED_MS) for g in chosen)])

    def ends(most: float) -> list[int]:
        cuts = [0]
        for running in sums:
            cuts.append(max(cuts[-1], bisect.bisect_right(running, running[cuts[-1]] + most) - 1))
        return cuts[1:]

    low, high = 0.0, min(running[n] for running in sums)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if ends(middle)[-1] >= n else (middle, high)
    placed: list[int] = []
    for lane, end in zip(lanes, ends(math.nextafter(high, math.inf) * (1 + 1e-12)), strict=True):
        placed += [lane] * (end - len(placed))
    return placed
