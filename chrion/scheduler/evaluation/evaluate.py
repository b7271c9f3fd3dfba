"""The evaluator: the one definition of a schedule's latency and memory, by which every policy is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.contention import CoreClock, RunTimes, barrier_ms, deadlock, simulate_contention
from chrion.scheduler.evaluation.memory import estimated_mb, paper_mb
from chrion.scheduler.evaluation.transfers import Transfers
from chrion.scheduler.evaluation.weight_cache import durations_ms
from chrion.scheduler.schedule import Schedule, validate


@dataclass(frozen=True, slots=True)
class Timeline:
    """The predicted run of a schedule. Times are in ms from the request's arrival, indexed by operator."""

    start_ms: tuple[float, ...]
    #: AFT: the actual finish times.
    finish_ms: tuple[float, ...]
    #: L, Equation 1: when the last operator has finished and the host has all outputs.
    latency_ms: float
    #: M, Equation 4, with the accelerator's base memory if any operator runs on it.
    memory_mb: float
    #: Resident memory: an estimate while solutions are searched, exact in a plan; see
    #: :mod:`chrion.scheduler.evaluation.memory`.
    resident_mb: float
    #: Busy time of each lane, by lane number.
    busy_ms: tuple[float, ...]
    #: The part of exact resident memory that every further request in flight adds; 0 with an estimate.
    frame_mb: float = 0.0

    def cost(self, alpha: float) -> float:
        """Return L + alpha * M, Equation 5; ``alpha`` in ms per MB."""
        return self.latency_ms + alpha * self.memory_mb


def evaluate(
    dag: Dag, costs: Costs, schedule: Schedule, segments: Sequence[Sequence[int]] | None = None, *, check: bool = True
) -> Timeline:
    """Predict a schedule's timeline.

    A segment starts when its lane is available and all values that it reads from other lanes have arrived (Equation 2).
    Its operators run back to back (Equation 3), and other lanes see their results when the segment ends: lanes of the
    same device after the handoff latency, lanes of the other device after a copy (see
    :mod:`chrion.scheduler.evaluation.transfers`). Request inputs that the accelerator reads are copied to it first, and
    outputs that it makes are copied back. Every segment costs its lane a dispatch. Without ``segments``, each operator
    is a segment of its own, as in the paper.

    A segment on several cores occupies all of their lanes. It starts when all of them are available, and its dispatch
    includes waking the threads of the other cores. A core that another lane's thread has used last is available the
    handoff latency later, and if that segment was wide, after waking the core's own lane.

    Args:
        dag: The graph.
        costs: The machine's costs of its operators.
        schedule: Order, lanes and core count.
        segments: The schedule's segments in topological order; see :func:`chrion.graph.segments.cut`.
        check: Validate the schedule first. Searches skip this check, because they make only valid schedules.

    Raises:
        ScheduleError: The schedule breaks a rule (see :func:`chrion.scheduler.schedule.validate`), or at some point
            no lane can continue.
    """
    if check:
        validate(dag, costs, schedule)
    pieces = segments if segments is not None else [(i,) for i in schedule.order]
    return complete(dag, costs, schedule, run_times(dag, costs, schedule, pieces))


def segment_spans_ms(
    timeline: Timeline, costs: Costs, schedule: Schedule, segments: Sequence[Sequence[int]]
) -> tuple[tuple[float, float], ...]:
    """Return the start of the dispatch and the end of each segment in ms, between which its lanes are busy."""
    spans = []
    for segment in segments:
        dispatch_ms = costs.dispatch_ms + (costs.wake_ms if schedule.width(segment[0]) > 1 else 0.0)
        spans.append((max(0.0, timeline.start_ms[segment[0]] - dispatch_ms), timeline.finish_ms[segment[-1]]))
    return tuple(spans)


def run_times(dag: Dag, costs: Costs, schedule: Schedule, segments: Sequence[Sequence[int]]) -> RunTimes:
    """Return the run times of a schedule's segments, the first part of :func:`evaluate`.

    Raises:
        ScheduleError: At some point no lane can continue.
    """
    if schedule.streams > 1 and len({lane for lane in schedule.lanes if is_accelerator_lane(lane)}) > 1:
        return simulate_contention(dag, costs, schedule, segments)
    return _simulate(dag, costs, schedule, segments)


def complete(dag: Dag, costs: Costs, schedule: Schedule, times: RunTimes) -> Timeline:
    """Return the timeline of a schedule with given run times, the second part of :func:`evaluate`."""
    return Timeline(
        start_ms=tuple(times.start),
        finish_ms=tuple(times.finish),
        latency_ms=times.latency_ms,
        memory_mb=paper_mb(dag, costs, schedule.lanes),
        resident_mb=estimated_mb(dag, costs, schedule.order, schedule.lanes),
        busy_ms=tuple(times.busy),
    )


def _simulate(  # noqa: C901 - searches spend their time here; calls would double it
    dag: Dag, costs: Costs, schedule: Schedule, segments: Sequence[Sequence[int]]
) -> RunTimes:
    """Return the run times of a schedule without contention: segments in order, each as early as possible."""
    lanes, stages = schedule.lanes, schedule.stages
    received, handoff, dispatch = dag.received, costs.handoff_ms, costs.dispatch_ms
    duration = durations_ms(dag, costs, schedule)
    times = RunTimes.empty(len(dag), schedule)
    starts, finishes, busy = times.start, times.finish, times.busy
    transfers = Transfers(dag, costs, lanes, segments)
    inputs_ready, arrival_ms = transfers.inputs_ready_ms, transfers.arrival_ms
    available = [0.0] * len(busy)
    device_of = [is_accelerator_lane(lane) for lane in lanes]
    clock = CoreClock(costs) if schedule.widths else None
    # When other lanes see the result: at the end of its segment. None until then.
    visible: list[float | None] = [None] * len(dag)
    ended: dict[int, float] = {}  # end of the last segment of each lane so far
    barrier: dict[int, float] = {}  # end of the last segment of each lane before this stage
    stage = stages[segments[0][0]] if stages and segments else 0
    for segment in segments:
        lane = lanes[segment[0]]
        on_device = device_of[segment[0]]
        if stages and stages[segment[0]] != stage:
            stage, barrier = stages[segment[0]], dict(ended)
        occupied = schedule.occupied(segment[0]) if clock else (lane,)
        free = clock.available_ms(occupied) if clock else available[lane]
        time = max(free, barrier_ms(costs, barrier, lane)) if barrier else free
        for i in segment:
            time = max(time, inputs_ready(i)) if on_device else time
            for m, values in received[i]:
                if lanes[m] == lane:
                    continue
                end = visible[m]
                if end is None:  # in a valid schedule, a segment follows those that it reads from
                    raise deadlock(dag, [(lane, i)])
                # All earlier segments have ended, so arrivals in the other memory are known.
                arrival = end + handoff if device_of[m] == on_device else arrival_ms(values) or 0.0
                if arrival > time:  # noqa: PLR1730
                    time = arrival
        start = time
        time += dispatch if len(occupied) == 1 else dispatch + costs.wake_ms
        for i in segment:
            starts[i] = time
            time = finishes[i] = time + duration[i]
        for i in segment:
            visible[i] = time
        transfers.finish_segment(segment, time)
        available[lane] = ended[lane] = time
        if clock:
            clock.occupy(occupied, time)
        for core in occupied:
            busy[core] += time - start
    return replace(times, copied_ms=transfers.finish_ms)
