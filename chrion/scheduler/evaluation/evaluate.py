"""The one definition of a schedule's latency and memory; every scheduler is judged by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chrion.graph.dag import Dag
from chrion.lane_numbers import is_accelerator_lane
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.contention import Passage, barrier_ms, share_device
from chrion.scheduler.evaluation.memory import paper_mb, resident_mb
from chrion.scheduler.evaluation.transfers import Copying
from chrion.scheduler.evaluation.weight_cache import durations_ms
from chrion.scheduler.schedule import Schedule, validate


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a schedule is predicted to do. Times are in ms from the request's arrival, indexed by operator."""

    start_ms: tuple[float, ...]
    #: AFT: the actual finish times.
    finish_ms: tuple[float, ...]
    #: L, Equation 1: when the last operator has finished and the host has all outputs.
    latency_ms: float
    #: M, Equation 4, with the accelerator's base memory if anything runs there.
    memory_mb: float
    #: What an arena must hold: weights once, activations by lifetime; see :mod:`chrion.scheduler.evaluation.memory`.
    resident_mb: float
    #: Time each lane computes, by lane.
    busy_ms: tuple[float, ...]

    def cost(self, alpha: float) -> float:
        """L + alpha * M, Equation 5; ``alpha`` in ms per MB."""
        return self.latency_ms + alpha * self.memory_mb


def evaluate(
    dag: Dag, costs: Costs, schedule: Schedule, segments: Sequence[Sequence[int]] | None = None, *, check: bool = True
) -> Timeline:
    """Predict a schedule's timeline.

    A segment starts when its lane is free and all that its operators need from other lanes has arrived (Equation 2);
    its operators run back to back (Equation 3), and other lanes see their results when the segment ends. Another lane
    of the same side sees them a handoff later, the other side when they have been copied: once, one after another, in
    the order of the segments that make them (see :mod:`chrion.scheduler.evaluation.transfers`). The request's inputs
    are copied to the accelerator first, where it reads them, and outputs that it makes are copied back. Every segment
    costs its lane a dispatch. With ``segments`` missing each operator is its own segment, which is the paper's reading.

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
    pieces = segments if segments is not None else [(i,) for i in schedule.order]
    several = len({lane for lane in schedule.lanes if is_accelerator_lane(lane)}) > 1
    passage = (share_device if several else _walk)(dag, costs, schedule, pieces)
    return Timeline(
        start_ms=tuple(passage.start),
        finish_ms=tuple(passage.finish),
        latency_ms=max([passage.copied_ms, *passage.finish]),
        memory_mb=paper_mb(dag, costs, schedule.lanes),
        resident_mb=resident_mb(dag, costs, schedule.order, schedule.lanes),
        busy_ms=tuple(passage.busy),
    )


def _walk(dag: Dag, costs: Costs, schedule: Schedule, segments: Sequence[Sequence[int]]) -> Passage:
    """Segments in order, each as soon as it can: where no two lanes share a device, none changes another's speed."""
    lanes, stages = schedule.lanes, schedule.stages
    duration = durations_ms(dag, costs, schedule)
    passage = Passage.empty(len(dag), schedule)
    copying = Copying(dag, costs, lanes, segments)
    available = [0.0] * len(passage.busy)
    visible = [0.0] * len(dag)  # when other lanes may see the result: at the end of its segment
    ended: dict[int, float] = {}  # when each lane has ended what it has run so far
    barrier: dict[int, float] = {}  # and when it has ended the stages before this one
    stage = stages[segments[0][0]] if stages and segments else 0
    for segment in segments:
        lane = lanes[segment[0]]
        if stages and stages[segment[0]] != stage:
            stage, barrier = stages[segment[0]], dict(ended)
        time = max(available[lane], barrier_ms(costs, barrier, lane))
        for i in segment:
            time = max(time, copying.brought_ms(i)) if is_accelerator_lane(lane) else time
            for m, values in zip(dag.predecessors[i], dag.edge_values[i], strict=True):
                if lanes[m] == lane:
                    continue
                if is_accelerator_lane(lanes[m]) == is_accelerator_lane(lane):
                    time = max(time, visible[m] + costs.handoff_ms)
                else:
                    time = max(time, copying.arrival_ms(values) or 0.0)  # its segment stands before this one
        begin = time
        time += costs.dispatch_ms
        for i in segment:
            passage.start[i] = time
            time = passage.finish[i] = time + duration[i]
        for i in segment:
            visible[i] = time
        copying.end(segment, time)
        available[lane] = ended[lane] = time
        passage.busy[lane] += time - begin
    return replace(passage, copied_ms=copying.ended_ms)


def lower_bound_ms(dag: Dag, costs: Costs, schedule: Schedule) -> float:
    """What no schedule on the same lanes can beat, whatever its order.

    The larger of the longest path and of all work spread evenly over the lanes, each operator counted at the time it
    takes where it is fastest, and neither handoffs nor copies counted at all.
    """
    cores = schedule.cores
    usable: list[Sequence[float]] = [costs.accelerator_ms] if costs.accelerator_ms is not None else []
    usable += [costs.lane_ms(1, j) for j in range(1 if schedule.stages else max(cores, 1), cores + 1)]
    best = [min(times[i] for times in usable) for i in range(len(dag))]
    reach = [0.0] * len(dag)
    for i in dag.topological_order:
        reach[i] = best[i] + max((reach[m] for m in dag.predecessors[i]), default=0.0)
    lanes = cores + (schedule.streams if costs.accelerator_ms is not None else 0)
    return max(max(reach, default=0.0), sum(best) / lanes if lanes else 0.0)
