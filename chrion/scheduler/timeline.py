"""The one definition of a schedule's latency and memory; every scheduler is judged by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from chrion.errors import ScheduleError
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.memory import paper_mb, resident_mb


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who runs what, and in which order; lane 0 is the accelerator, lanes 1..cores are CPU cores."""

    #: O: all operators, every predecessor before its successors. Each lane runs its share in this order.
    order: tuple[int, ...]
    #: S: the lane of each operator, by operator index.
    lanes: tuple[int, ...]
    #: k*: CPU lanes in use, which decides their speed (W[i, k*]).
    cores: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a schedule is predicted to do. Times are in ms from the request's arrival, indexed by operator."""

    start_ms: tuple[float, ...]
    #: AFT: the actual finish times.
    finish_ms: tuple[float, ...]
    #: L, Equation 1: when the last operator has finished.
    latency_ms: float
    #: M, Equation 4, with the accelerator's base memory if anything runs there.
    memory_mb: float
    #: What an arena must hold: weights once, activations by lifetime; see :mod:`chrion.scheduler.memory`.
    resident_mb: float
    #: Time each lane computes, lane 0 first.
    busy_ms: tuple[float, ...]

    def cost(self, alpha: float) -> float:
        """L + alpha * M, Equation 5; ``alpha`` in ms per MB."""
        return self.latency_ms + alpha * self.memory_mb


def evaluate(
    dag: Dag, costs: Costs, schedule: Schedule, segments: Sequence[Sequence[int]] | None = None, *, check: bool = True
) -> Timeline:
    """Predict a schedule's timeline.

    A segment starts when its lane is free and all that its operators need from other lanes has arrived (Equation 2);
    its operators run back to back (Equation 3), and other lanes see their results when the segment ends. Another CPU
    lane sees them a handoff later, another device a copy later. Every segment costs its lane a dispatch. With
    ``segments`` missing each operator is its own segment, which is the paper's reading.

    Args:
        dag: The graph.
        costs: The machine's costs of its operators.
        schedule: Order, lanes and core count.
        segments: How the schedule is cut, in topological order; see :func:`chrion.graph.segments.cut`.
        check: Validate the schedule first. Searches that only make valid ones leave it out.

    Raises:
        ScheduleError: The schedule breaks a rule; see :func:`validate`.
    """
    if check:
        validate(dag, costs, schedule)
    lanes = schedule.lanes
    available = [0.0] * (schedule.cores + 1)
    busy = [0.0] * (schedule.cores + 1)
    start = [0.0] * len(dag)
    finish = [0.0] * len(dag)
    visible = [0.0] * len(dag)  # when other lanes may see the result: at the end of its segment
    speed = [costs.lane_ms(lane, schedule.cores) for lane in range(schedule.cores + 1)]
    for segment in segments if segments is not None else [(i,) for i in schedule.order]:
        lane = lanes[segment[0]]
        time = available[lane]
        for i in segment:
            for m, size in zip(dag.predecessors[i], dag.edge_bytes[i], strict=True):
                if lanes[m] != lane:
                    time = max(time, visible[m] + transfer_ms(costs, lanes[m], lane, size))
        begin = time
        time += costs.dispatch_ms
        for i in segment:
            start[i] = time
            time = finish[i] = time + speed[lane][i]
        for i in segment:
            visible[i] = time
        available[lane] = time
        busy[lane] += time - begin
    return Timeline(
        start_ms=tuple(start),
        finish_ms=tuple(finish),
        latency_ms=max(finish, default=0.0),
        memory_mb=paper_mb(dag, costs, lanes),
        resident_mb=resident_mb(dag, costs, schedule.order, lanes),
        busy_ms=tuple(busy),
    )


def transfer_ms(costs: Costs, source: int, target: int, size: int) -> float:
    """From the end of an operator on one lane until an operator on another may start on its result."""
    if source and target:
        return costs.handoff_ms
    return (costs.download if target else costs.upload).ms(size)


def lower_bound_ms(dag: Dag, costs: Costs, cores: int) -> float:
    """What no schedule on these lanes can beat, whatever its order.

    The larger of the longest path and of all work spread evenly over the lanes, each operator counted at the time it
    takes where it is fastest, and neither handoffs nor copies counted at all.
    """
    usable = [costs.lane_ms(lane, max(cores, 1)) for lane in ((0,) if costs.accelerator_ms is not None else ())]
    usable += [costs.lane_ms(1, cores)] if cores else []
    best = [min(times[i] for times in usable) for i in range(len(dag))]
    reach = [0.0] * len(dag)
    for i in dag.topological_order:
        reach[i] = best[i] + max((reach[m] for m in dag.predecessors[i]), default=0.0)
    lanes = cores + (costs.accelerator_ms is not None)
    return max(max(reach, default=0.0), sum(best) / lanes if lanes else 0.0)


def validate(dag: Dag, costs: Costs, schedule: Schedule) -> None:
    """Check Constraints 6 to 10 of the paper.

    Raises:
        ScheduleError: An operator is missing or repeated, precedes one it waits for, is on a lane that does not
            exist, or cannot run on its lane.
    """
    n = len(dag)
    if not 0 <= schedule.cores <= costs.cores:
        raise ScheduleError(f"schedule: {schedule.cores} cores asked for, the costs know 0 to {costs.cores}")
    if sorted(schedule.order) != list(range(n)) or len(schedule.lanes) != n:
        raise ScheduleError(f"schedule: its order and lanes must hold each of the {n} operators once")
    position = [0] * n
    for at, i in enumerate(schedule.order):
        position[i] = at
    for i, lane in enumerate(schedule.lanes):
        if not 0 <= lane <= schedule.cores:
            raise ScheduleError(
                f"schedule: operator {dag.names[i]!r} is on lane {lane}, there are {schedule.cores} cores"
            )
        if not math.isfinite(costs.lane_ms(lane, schedule.cores)[i]):
            raise ScheduleError(f"schedule: operator {dag.names[i]!r} cannot run on the accelerator")
        for m in dag.predecessors[i]:
            if position[m] > position[i]:
                raise ScheduleError(f"schedule: {dag.names[i]!r} comes before {dag.names[m]!r}, which it waits for")
