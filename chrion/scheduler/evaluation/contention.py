"""Contention on the accelerator: the run times of schedules with several lanes on one device.

An operator that runs alone occupies a share of the device (``Costs.accelerator_share``). While the shares of concurrent
operators sum to at most 1, none is slowed. Beyond that all are slowed by the same factor, so that the shares sum to 1:
two operators that each fill the device take as long side by side as one after the other. CPU lanes have a core each
and are not slowed: W contains the contention between cores.

Speeds change whenever an operator starts or ends; so the schedule is simulated event by event, in
O((n + segments) * lanes) steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from chrion.common.lane_numbers import is_accelerator_lane, lane_name
from chrion.errors import ScheduleError
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.transfers import Transfers
from chrion.scheduler.evaluation.weight_cache import durations_ms
from chrion.scheduler.schedule import Schedule

#: Remaining work that is attributed to rounding, relative to the simulated time.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class RunTimes:
    """The times of a schedule's run, in ms."""

    #: Start and finish of each operator, by operator index.
    start: list[float]
    finish: list[float]
    #: Busy time of each lane, by lane number; negative numbers index from the end.
    busy: list[float]
    #: The end of the last copy.
    copied_ms: float = 0.0

    @property
    def latency_ms(self) -> float:
        """L: when the last operator and the last copy have ended."""
        return max([self.copied_ms, *self.finish])

    @classmethod
    def empty(cls, n: int, schedule: Schedule) -> RunTimes:
        """Return the times of ``n`` operators before any has run."""
        return cls([0.0] * n, [0.0] * n, [0.0] * (schedule.cores + schedule.streams))


class CoreClock:
    """When each lane is free, and which lane's thread has used it last.

    Args:
        costs: The machine's costs.
    """

    def __init__(self, costs: Costs) -> None:
        self._handoff_ms = costs.handoff_ms
        self._after_wide_ms = costs.handoff_ms + costs.wake_ms
        #: By lane: the end of its last segment in ms, the lane that ran it, and when any other lane may use the core.
        self._last: dict[int, tuple[float, int, float]] = {}

    def available_ms(self, occupied: Sequence[int]) -> float:
        """Return when the first of some lanes may run a segment that occupies all of them, in ms."""
        first, latest = occupied[0], 0.0
        for lane in occupied:
            end, runner, others = self._last.get(lane, (0.0, first, 0.0))
            latest = max(latest, end if runner == first else others)
        return latest

    def occupy(self, occupied: Sequence[int], end_ms: float) -> None:
        """Record a segment that the first of some lanes has run on all of them."""
        others = end_ms + (self._handoff_ms if len(occupied) == 1 else self._after_wide_ms)
        for lane in occupied:
            before = self._last.get(lane)
            self._last[lane] = (end_ms, occupied[0], max(others, before[2]) if before else others)


def barrier_ms(costs: Costs, ended: Mapping[int, float], lane: int) -> float:
    """Return the earliest time in ms at which a lane may start a stage.

    It is the end of the lane's own previous stages, or the handoff latency after the end of another lane's, if later.

    Args:
        costs: The machine's costs.
        ended: The end of the previous stages in ms, by lane; empty for the first stage.
        lane: The lane.
    """
    if not ended:
        return 0.0
    own = ended.get(lane, 0.0)
    return max(own, *(end + costs.handoff_ms if other != lane else own for other, end in ended.items()))


def concurrent_ms(lanes: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Return the time in ms until all lanes have finished.

    Args:
        lanes: The operators of each lane, in order: time in ms of the operator alone, and its share of the device.
    """
    left = [list(reversed(row)) for row in lanes if row]
    now = 0.0
    while left:
        slowdown = max(1.0, sum([row[-1][1] for row in left]))
        span = min([row[-1][0] * (slowdown if row[-1][1] else 1.0) for row in left])
        now += span
        for row in left:
            work, share = row.pop()
            work -= span / slowdown if share else span
            if work > _ROUNDING * max(1.0, now):
                row.append((work, share))
        left = [row for row in left if row]
    return now


def deadlock(dag: Dag, blocked: Sequence[tuple[int, int]]) -> ScheduleError:
    """Return the error for a schedule in which no lane can continue.

    Args:
        dag: The graph.
        blocked: The lanes that wait for each other, and the next operator of each.
    """
    waiting = ", ".join(f"{lane_name(lane)} before operator {dag.names[i]!r}" for lane, i in blocked)
    return ScheduleError(f"schedule: all lanes with operators left wait for each other: {waiting}")


def simulate_contention(dag: Dag, costs: Costs, schedule: Schedule, segments: Sequence[Sequence[int]]) -> RunTimes:
    """Return the run times of a schedule with several accelerator lanes.

    Raises:
        ScheduleError: The schedule is invalid: at some point no lane can continue.
    """
    return _Simulation(dag, costs, schedule, segments).run()


@dataclass(slots=True)
class _Lane:
    """The state of one lane."""

    #: Segments that have not started, in order: the lane's own, and those of other lanes that occupy its core.
    waiting: deque[Sequence[int]] = field(default_factory=deque)
    #: Whether a segment of another lane occupies the core.
    held: bool = False
    #: The segment that runs or is about to start; empty while the lane waits.
    segment: Sequence[int] = ()
    #: Start of that segment, in ms.
    start: float = 0.0
    #: Its remaining steps, the next one last: operator (None for the dispatch), work in ms, share of the device.
    steps: list[tuple[int | None, float, float]] = field(default_factory=list)


class _Simulation:
    """The simulation of one schedule."""

    def __init__(self, dag: Dag, costs: Costs, schedule: Schedule, segments: Sequence[Sequence[int]]) -> None:
        self.dag, self.costs, self.schedule = dag, costs, schedule
        self.duration = durations_ms(dag, costs, schedule)
        self.times = RunTimes.empty(len(dag), schedule)
        self.now = 0.0
        self.visible: dict[int, float] = {}
        self.transfers = Transfers(dag, costs, schedule.lanes, segments)
        self.ended: dict[int, float] = {}
        self.barrier: dict[int, float] = {}
        self.segments_left = Counter(self._stage(segment) for segment in segments)
        self.clock = CoreClock(costs)
        self.lanes: dict[int, _Lane] = {}
        for segment in segments:
            for lane in schedule.occupied(segment[0]):
                self.lanes.setdefault(lane, _Lane()).waiting.append(segment)

    def run(self) -> RunTimes:
        """Simulate the whole schedule."""
        while True:
            for number, lane in self.lanes.items():
                if not lane.segment and not lane.held and lane.waiting:
                    self._try_start(number, lane)
            if not any(lane.segment for lane in self.lanes.values()):
                self._check_complete()
                return replace(self.times, copied_ms=self.transfers.finish_ms)
            self._advance()

    def _check_complete(self) -> None:
        """Check that no segment is left.

        Raises:
            ScheduleError: Every lane that has segments left waits for another one.
        """
        blocked = [(number, lane.waiting[0][0]) for number, lane in self.lanes.items() if lane.waiting]
        if blocked:
            raise deadlock(self.dag, blocked)

    def _stage(self, segment: Sequence[int]) -> int:
        return self.schedule.stages[segment[0]] if self.schedule.stages else 0

    def _try_start(self, number: int, lane: _Lane) -> None:
        """Start the lane's next segment if everything that the segment waits for has finished."""
        segment = lane.waiting[0]
        if self._stage(segment) != min(self.segments_left) or self.schedule.lanes[segment[0]] != number:
            return
        occupied = self.schedule.occupied(segment[0])
        others = [self.lanes[other] for other in occupied[1:]]
        if any(other.held or other.segment or other.waiting[0] is not segment for other in others):
            return
        start = max(self.now, barrier_ms(self.costs, self.barrier, number), self.clock.available_ms(occupied))
        on_device = is_accelerator_lane(number)
        for i in segment:
            start = max(start, self.transfers.inputs_ready_ms(i)) if on_device else start
            for m, values in zip(self.dag.predecessors[i], self.dag.edge_values[i], strict=True):
                if self.schedule.lanes[m] == number:
                    continue
                arrival = self._arrival_ms(m, number, values)
                if arrival is None:
                    return
                start = max(start, arrival)
        lane.segment, lane.start = lane.waiting.popleft(), start
        for other in others:
            other.waiting.popleft()
            other.held = True
        steps = [(i, self.duration[i], self.costs.share(i) if on_device else 0.0) for i in segment]
        lane.steps = [*reversed(steps), (None, self.costs.dispatch_ms + (self.costs.wake_ms if others else 0.0), 0.0)]

    def _arrival_ms(self, m: int, number: int, values: Sequence[int]) -> float | None:
        """Return when values of operator ``m`` are visible to lane ``number``, in ms; None if that is not known yet."""
        if m not in self.visible:
            return None
        if is_accelerator_lane(self.schedule.lanes[m]) == is_accelerator_lane(number):
            return self.visible[m] + self.costs.handoff_ms
        return self.transfers.arrival_ms(values)

    def _advance(self) -> None:
        """Advance the time to the next end of a step or start of a segment."""
        active = [(number, lane) for number, lane in self.lanes.items() if lane.segment]
        running = [(number, lane) for number, lane in active if lane.start <= self.now]
        slowdown = max(1.0, sum(lane.steps[-1][2] for _, lane in running))
        ahead = [lane.start - self.now for _, lane in active if lane.start > self.now]
        ahead += [lane.steps[-1][1] * (slowdown if lane.steps[-1][2] else 1.0) for _, lane in running]
        span = min(ahead)
        self.now = min((lane.start for _, lane in active if 0 < lane.start - self.now <= span), default=self.now + span)
        for number, lane in running:
            i, work, share = lane.steps.pop()
            work -= span / slowdown if share else span
            for occupied in self.schedule.occupied(lane.segment[0]):
                self.times.busy[occupied] += span
            if work > _ROUNDING * max(1.0, self.now):
                lane.steps.append((i, work, share))
            else:
                self._finish_step(number, lane, i)

    def _finish_step(self, number: int, lane: _Lane, i: int | None) -> None:
        """Record the end of a step, and of its segment if it was the last one."""
        if i is not None:
            self.times.finish[i] = self.now
        if lane.steps:
            following = lane.steps[-1][0]
            assert following is not None  # noqa: S101 - the dispatch comes first
            self.times.start[following] = self.now
            return
        self.visible.update(dict.fromkeys(lane.segment, self.now))
        self.transfers.finish_segment(lane.segment, self.now)
        self.ended[number] = self.now
        stage = self._stage(lane.segment)
        occupied = self.schedule.occupied(lane.segment[0])
        self.clock.occupy(occupied, self.now)
        for other in occupied[1:]:
            self.lanes[other].held = False
        lane.segment = ()
        self.segments_left[stage] -= 1
        if not self.segments_left[stage]:
            del self.segments_left[stage]
            self.barrier = dict(self.ended)
