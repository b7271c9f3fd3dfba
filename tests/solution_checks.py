"""Validation: the rules that every solution keeps, checked independently of the policy that made it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.errors import ScheduleError
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.solution import Solution
from chrion.scheduler.schedule import Schedule, validate


def check_solution(dag: Dag, costs: Costs, solution: Solution) -> None:
    """Check a solution of any policy.

    - Each operator occurs once, on a lane that supports it, after all its predecessors (Constraints 6 to 10).
    - Each operator is in one segment, on its lane and in its stage; a segment follows those that it depends on.
    - Each lane runs its operators in the schedule's order, one at a time; an operator on several cores occupies several
      lanes.
    - Operators that overlap in time are independent. Operators of a stage on different lanes of one device are too.
    - No operator starts before all earlier stages have ended.

    Raises:
        ScheduleError: A rule is broken; the message says which.
    """
    schedule = solution.schedule
    validate(dag, costs, schedule)
    _check_segments(dag, schedule, solution.segments)
    _check_times(dag, schedule, solution)
    if schedule.stages:
        _check_stages(dag, schedule, solution)


def _require(holds: object, message: str) -> None:
    if not holds:
        raise ScheduleError(f"schedule: {message}")


def _check_segments(dag: Dag, schedule: Schedule, segments: Sequence[Sequence[int]]) -> None:
    _require(sorted(itertools.chain(*segments)) == list(range(len(dag))), "each operator must be in one segment")
    home = {i: at for at, segment in enumerate(segments) for i in segment}
    for i, at in home.items():
        _require(all(home[m] <= at for m in dag.predecessors[i]), "a segment precedes one that it depends on")
    for segment in segments:
        _require(len({schedule.lanes[i] for i in segment}) == 1, "a segment is on two lanes")
        _require(not schedule.stages or len({schedule.stages[i] for i in segment}) == 1, "a segment is in two stages")
        _require(len({schedule.width(i) for i in segment}) == 1, "a segment has two widths")
    position = {i: at for at, i in enumerate(schedule.order)}
    for lane in {lane for i in range(len(dag)) for lane in schedule.occupied(i)}:
        own = [position[i] for segment in segments if lane in schedule.occupied(segment[0]) for i in segment]
        _require(own == sorted(own), "a lane does not follow the order")


def _check_times(dag: Dag, schedule: Schedule, solution: Solution) -> None:
    start, finish = solution.timeline.start_ms, solution.timeline.finish_ms
    rounding = 1e-9 * max(1.0, solution.timeline.latency_ms)
    running: list[int] = []
    for i in sorted(range(len(dag)), key=lambda v: (start[v], finish[v])):
        running = [m for m in running if finish[m] > start[i] + rounding]
        for m in running:
            if finish[i] <= start[i]:
                continue  # an operator of no duration overlaps with no other
            shared = set(schedule.occupied(m)).intersection(schedule.occupied(i))
            _require(not shared, "a lane runs two operators at once")
            path = (dag.descendants[m] >> i | dag.descendants[i] >> m) & 1
            _require(not path, f"{dag.names[m]!r} and {dag.names[i]!r} overlap, although one depends on the other")
        running.append(i)


def _check_stages(dag: Dag, schedule: Schedule, solution: Solution) -> None:
    by_stage: dict[int, list[int]] = defaultdict(list)
    for i, stage in enumerate(schedule.stages):
        by_stage[stage].append(i)
    ended = 0.0
    rounding = 1e-9 * max(1.0, solution.timeline.latency_ms)
    for _, members in sorted(by_stage.items()):
        started = min(solution.timeline.start_ms[i] for i in members)
        _require(started >= ended - rounding, "a stage starts before the previous one has ended")
        ended = max(solution.timeline.finish_ms[i] for i in members)
        for i, m in itertools.combinations(members, 2):
            apart = schedule.lanes[i] != schedule.lanes[m]
            same_device = is_accelerator_lane(schedule.lanes[i]) == is_accelerator_lane(schedule.lanes[m])
            path = (dag.descendants[m] >> i | dag.descendants[i] >> m) & 1
            _require(not (apart and same_device and path), "operators of a stage on two lanes depend on each other")
