"""Lower bounds on the latency of schedules: the longest path, and the division of all work among the devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.schedule import Schedule


def lower_bound_ms(dag: Dag, costs: Costs, schedule: Schedule) -> float:
    """Return a lower bound on the latency of every schedule on the same lanes, in any order."""
    cores = schedule.cores
    busy = range(1 if schedule.stages else cores, cores + 1)
    return _bound_ms(dag, costs, [j for j in busy if j], schedule.streams)


def machine_bound_ms(dag: Dag, costs: Costs) -> float:
    """Return a lower bound on the latency of every schedule on a machine, with any number of its cores."""
    return _bound_ms(dag, costs, range(1, costs.cores + 1), costs.streams)


def _bound_ms(dag: Dag, costs: Costs, busy: Sequence[int], streams: int) -> float:
    """Return the longest path, or the least time in which the devices can share all work if that is more.

    There are no handoffs and no copies. While ``j`` cores are busy, an operator that occupies ``w`` of them for ``t``
    ms takes ``t * w / j`` ms of the CPU; concurrent operators share the accelerator by what each occupies of it.

    Args:
        dag: The graph.
        costs: The machine's costs.
        busy: The possible numbers of busy cores.
        streams: Number of accelerator lanes.
    """
    n = len(dag)
    path, shared = [math.inf] * n, [math.inf] * n
    for j in busy:
        for width in (1, *(w for w in costs.widths if w <= j)):
            times = [costs.core_ms(i, width, j) for i in range(n)]
            path = list(map(min, path, times))
            shared = [min(ms, time * width / j) for ms, time in zip(shared, times, strict=True)]
    device = list(costs.accelerator_ms or [math.inf] * n)
    path = list(map(min, path, device))
    device = [ms * max(costs.share(i), 1 / streams) for i, ms in enumerate(device)]
    reach = [0.0] * n
    for i in dag.topological_order:
        reach[i] = path[i] + max((reach[m] for m in dag.predecessors[i]), default=0.0)
    return max(max(reach, default=0.0), divide_work(zip(device, shared, strict=True)))


def divide_work(times: Iterable[tuple[float, float]]) -> float:
    """Return the least time in which two devices do all work if operators can be divided between them.

    The solution of the linear program is known: in the order of the ratio of their times, the first operators are the
    first device's, the last ones the second's, and at most one is divided.

    Args:
        times: The time of each operator on each device; infinite where it cannot run.
    """
    rows = [(first, second) for first, second in times if first and second]  # others take no time on one of the devices
    fixed_second = sum(second for first, second in rows if first == math.inf)
    fixed_first = sum(first for first, second in rows if second == math.inf)
    free = sorted((r for r in rows if math.inf not in r), key=lambda row: row[0] / row[1])
    done, left = fixed_first, fixed_second + sum(second for _, second in free)
    for first, second in free:
        if done + first >= left - second:
            # A share x of the operator is the first device's: done + x * first = left - x * second.
            share = max(0.0, (left - done) / (first + second))
            return max(done + share * first, left - share * second)
        done, left = done + first, left - second
    return max(done, left)
