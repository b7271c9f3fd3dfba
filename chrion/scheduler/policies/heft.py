"""HEFT: heterogeneous earliest finish time (Topcuoglu, Hariri, Wu, 2002), with this machine's overheads.

Operators are taken by falling upward rank (the longest way to an exit in mean times) and each goes where it finishes
first, into an idle gap of a lane if it fits. EST counts what a lane waits for another: a handoff between CPU lanes, a
copy between devices; and a dispatch for each operator that does not simply follow on its lane what it waits for.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from chrion.graph.dag import Dag
from chrion.lane_numbers import is_accelerator_lane
from chrion.profiler.costs import Costs
from chrion.scheduler.schedule import Schedule


def heft(dag: Dag, costs: Costs, cores: int, *, alpha: float = 0.0) -> Schedule:
    """HEFT on the accelerator, if there is one, and ``cores`` CPU lanes.

    Args:
        dag: The graph.
        costs: The machine's costs of its operators.
        cores: CPU lanes to use, from 0.
        alpha: ms that a megabyte is worth: the memory that the operator adds is priced by it when lanes are compared.

    Returns:
        A schedule whose order is that of the start times.
    """
    rank = upward_ranks(dag, costs)
    lanes = [0] * len(dag)
    start = [0.0] * len(dag)
    finish = [0.0] * len(dag)
    resident: set[int] = set()  # weights on the accelerator
    busy: list[list[tuple[float, float]]] = [[] for _ in range(cores + 1)]
    usable = range(0 if costs.accelerator_ms is not None else 1, cores + 1)
    speed = [costs.lane_ms(lane, cores) for lane in range(cores + 1)]
    position = {v: at for at, v in enumerate(dag.topological_order)}
    for i in sorted(range(len(dag)), key=lambda v: (-rank[v], position[v])):  # equal ranks: what is waited for first
        best = (math.inf, math.inf, 0, 0.0)
        for lane in usable:
            length = speed[lane][i]
            ready = _ready(dag, costs, i, lane, lanes, finish)
            follows = any(lanes[m] == lane for m in dag.predecessors[i])
            length += 0.0 if follows else costs.dispatch_ms
            begin = _first_gap(busy[lane], ready, length)
            price = alpha * _marginal_mb(dag, costs, i, resident) if is_accelerator_lane(lane) else 0.0
            best = min(best, (begin + length + price, begin, lane, length))
        _, begin, lane, length = best
        lanes[i], start[i], finish[i] = lane, begin, begin + length
        if is_accelerator_lane(lane):
            resident.update(dag.weights[i])
        bisect.insort(busy[lane], (begin, begin + length))
    order = sorted(range(len(dag)), key=lambda v: (start[v], position[v]))
    return Schedule(tuple(order), tuple(lanes), cores)


def upward_ranks(dag: Dag, costs: Costs) -> list[float]:
    """The longest way from the start of each operator to an exit: mean times and mean transfers."""
    rank = [0.0] * len(dag)
    for i in reversed(dag.topological_order):
        after = (rank[s] + mean_transfer_ms(dag, costs, i, s) for s in dag.successors[i])
        rank[i] = costs.mean_ms(i) + max(after, default=0.0)
    return rank


def mean_transfer_ms(dag: Dag, costs: Costs, before: int, after: int) -> float:
    """Time from one operator to the next if they are on different lanes."""
    if costs.accelerator_ms is None:
        return costs.handoff_ms
    size = dag.edge_bytes[after][dag.predecessors[after].index(before)]
    return (costs.upload.ms(size) + costs.download.ms(size)) / 2


def _marginal_mb(dag: Dag, costs: Costs, i: int, resident: set[int]) -> float:
    """Memory that operator ``i`` adds on the accelerator: a weight that is there already costs nothing more."""
    new = sum(dag.weight_bytes[w] for w in dag.weights[i] if w not in resident)
    return costs.memory[i].outputs_mb + new / 1e6 + (0.0 if resident else costs.base_memory_mb)


def _ready(  # noqa: PLR0913, PLR0917 - the state of the walk
    dag: Dag, costs: Costs, i: int, lane: int, lanes: Sequence[int], finish: Sequence[float]
) -> float:
    ready = 0.0
    for m, size in zip(dag.predecessors[i], dag.edge_bytes[i], strict=True):
        transfer = 0.0 if lanes[m] == lane else costs.transfer_ms(lanes[m], lane, size)
        ready = max(ready, finish[m] + transfer)
    return ready


def _first_gap(busy: Sequence[tuple[float, float]], ready: float, length: float) -> float:
    """When a task of ``length`` may first start on a lane that is busy at the given times."""
    at = bisect.bisect_right(busy, (ready, math.inf))
    begin = max(ready, busy[at - 1][1] if at else 0.0)
    for start, end in busy[at:]:
        if begin + length <= start:
            break
        begin = max(begin, end)
    return begin
