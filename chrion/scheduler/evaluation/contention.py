"""Several lanes on one accelerator: what they do to each other's speed.

An operator occupies a share of the device while it runs alone (``Costs.accelerator_share``). As long as the shares of
those that run at once sum to no more than the whole, none is delayed; beyond that all are slowed alike, so that the
device is never given out twice. Two operators that fill it take as long side by side as one after the other. CPU lanes
have a core each and are not slowed.

Speeds change whenever an operator starts or ends; so the schedule is walked through event by event, in
O((n + segments) * lanes) steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from chrion.graph.dag import Dag
from chrion.lane_numbers import is_accelerator_lane
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.transfers import Copying
from chrion.scheduler.evaluation.weight_cache import durations_ms
from chrion.scheduler.schedule import Schedule

#: Work that rounding leaves over, relative to the time that has passed.
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Passage:
    """When a schedule's operators run, in ms, and how long each lane computes."""

    start: list[float]
    finish: list[float]
    busy: list[float]
    #: When the last copy has ended.
    copied_ms: float = 0.0

    @classmethod
    def empty(cls, n: int, schedule: Schedule) -> Passage:
        """Before anything has run."""
        return cls([0.0] * n, [0.0] * n, [0.0] * (schedule.cores + schedule.streams))


def barrier_ms(costs: Costs, ended: Mapping[int, float], lane: int) -> float:
    """When a lane may begin a stage: what the others end before it is seen a handoff later."""
    if not ended:
        return 0.0
    own = ended.get(lane, 0.0)
    return max(own, *(end + costs.handoff_ms if other != lane else own for other, end in ended.items()))


def side_by_side_ms(lanes: Sequence[Sequence[tuple[float, float]]]) -> float:
    """How long rows of operators, each (work in ms, share of the device), take that begin together on a lane each."""
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


def share_device(dag: Dag, costs: Costs, schedule: Schedule, segments: Sequence[Sequence[int]]) -> Passage:
    """When each operator runs, in a schedule with several accelerator lanes."""
    return _Walk(dag, costs, schedule, segments).passage()


@dataclass(slots=True)
class _Lane:
    waiting: deque[Sequence[int]] = field(default_factory=deque)
    #: The segment that runs or is about to; empty while the lane waits.
    segment: Sequence[int] = ()
    #: When it begins.
    begin: float = 0.0
    #: What is left of it, next last: (operator or None for the dispatch, work in ms, share of the device).
    steps: list[tuple[int | None, float, float]] = field(default_factory=list)


class _Walk:
    """One walk through a schedule."""

    def __init__(self, dag: Dag, costs: Costs, schedule: Schedule, segments: Sequence[Sequence[int]]) -> None:
        self.dag, self.costs, self.schedule = dag, costs, schedule
        self.duration = durations_ms(dag, costs, schedule)
        self.result = Passage.empty(len(dag), schedule)
        self.now = 0.0
        self.visible: dict[int, float] = {}
        self.copying = Copying(dag, costs, schedule.lanes, segments)
        self.ended: dict[int, float] = {}
        self.barrier: dict[int, float] = {}
        self.left = Counter(self._stage(segment) for segment in segments)
        self.lanes: dict[int, _Lane] = {}
        for segment in segments:
            self.lanes.setdefault(schedule.lanes[segment[0]], _Lane()).waiting.append(segment)

    def passage(self) -> Passage:
        """Walk to the end."""
        while True:
            for number, lane in self.lanes.items():
                if not lane.segment and lane.waiting:
                    self._begin(number, lane)
            if not any(lane.segment for lane in self.lanes.values()):
                return replace(self.result, copied_ms=self.copying.ended_ms)
            self._advance()

    def _stage(self, segment: Sequence[int]) -> int:
        return self.schedule.stages[segment[0]] if self.schedule.stages else 0

    def _begin(self, number: int, lane: _Lane) -> None:
        """Take up the lane's next segment, if all that it waits for has ended."""
        segment = lane.waiting[0]
        if self._stage(segment) != min(self.left):
            return
        begin = max(self.now, barrier_ms(self.costs, self.barrier, number))
        lanes = self.schedule.lanes
        for i in segment:
            begin = max(begin, self.copying.brought_ms(i)) if is_accelerator_lane(number) else begin
            for m, values in zip(self.dag.predecessors[i], self.dag.edge_values[i], strict=True):
                if lanes[m] == number:
                    continue
                arrival = self._arrival_ms(m, number, values)
                if arrival is None:
                    return
                begin = max(begin, arrival)
        lane.segment, lane.begin = lane.waiting.popleft(), begin
        shared = is_accelerator_lane(number)
        steps = [(i, self.duration[i], self.costs.share(i) if shared else 0.0) for i in segment]
        lane.steps = [*reversed(steps), (None, self.costs.dispatch_ms, 0.0)]

    def _arrival_ms(self, m: int, number: int, values: Sequence[int]) -> float | None:
        """When a lane sees some values of operator ``m``; None while that is not known."""
        if m not in self.visible:
            return None
        if is_accelerator_lane(self.schedule.lanes[m]) == is_accelerator_lane(number):
            return self.visible[m] + self.costs.handoff_ms
        return self.copying.arrival_ms(values)

    def _advance(self) -> None:
        """Go on to when the next step ends or the next segment begins."""
        active = [(number, lane) for number, lane in self.lanes.items() if lane.segment]
        running = [(number, lane) for number, lane in active if lane.begin <= self.now]
        slowdown = max(1.0, sum(lane.steps[-1][2] for _, lane in running))
        ahead = [lane.begin - self.now for _, lane in active if lane.begin > self.now]
        ahead += [lane.steps[-1][1] * (slowdown if lane.steps[-1][2] else 1.0) for _, lane in running]
        span = min(ahead)
        self.now = min((lane.begin for _, lane in active if 0 < lane.begin - self.now <= span), default=self.now + span)
        for number, lane in running:
            i, work, share = lane.steps.pop()
            work -= span / slowdown if share else span
            self.result.busy[number] += span
            if work > _ROUNDING * max(1.0, self.now):
                lane.steps.append((i, work, share))
            else:
                self._end(number, lane, i)

    def _end(self, number: int, lane: _Lane, i: int | None) -> None:
        """A step of a lane has ended."""
        if i is not None:
            self.result.finish[i] = self.now
        if lane.steps:
            following = lane.steps[-1][0]
            assert following is not None  # noqa: S101 - the dispatch comes first
            self.result.start[following] = self.now
            return
        self.visible.update(dict.fromkeys(lane.segment, self.now))
        self.copying.end(lane.segment, self.now)
        self.ended[number] = self.now
        stage = self._stage(lane.segment)
        lane.segment = ()
        self.left[stage] -= 1
        if not self.left[stage]:
            del self.left[stage]
            self.barrier = dict(self.ended)
