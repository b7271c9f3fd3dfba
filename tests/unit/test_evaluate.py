"""The evaluator, compared with a simulation in steps of one millisecond."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.errors import ScheduleError
from chrion.graph import Dag
from chrion.graph.segments import cut
from chrion.profiler import CopyCost, Costs, OperatorMemory, uniform_costs
from chrion.scheduler import Schedule, evaluate, validate
from chrion.scheduler.evaluation.lower_bound import divide_work, lower_bound_ms, machine_bound_ms
from strategies import costs_for, dags, schedules


def uploaded_inputs(dag: Dag, costs: Costs, on_device: Sequence[bool]) -> dict[int, float]:
    """Return when the accelerator's operators have the request's inputs, which are copied one after another."""
    clock, found = 0.0, {}
    for size, readers in dag.request_inputs:
        if any(on_device[i] for i in readers):
            clock += costs.upload.latency_ms + size * costs.upload.ms_per_byte
            found |= {i: clock for i in readers if on_device[i]}
    return found


def simulate(  # noqa: PLR0915 - one simulation
    dag: Dag, costs: Costs, schedule: Schedule, segments: Sequence[Sequence[int]]
) -> tuple[dict[int, float], dict[int, float], list[float], float]:
    """Simulate whole milliseconds: every segment that can start, starts.

    A value is copied to the other device once. Each direction is a queue in the order of the segments that make the
    values; the request's inputs are copied before all other values.

    Returns:
        Starts, finishes, busy times by lane, and the latency.
    """
    lanes = [*range(schedule.cores + 1), *range(1 - schedule.streams, 0)]
    waiting = {lane: [s for s in segments if lane in schedule.occupied(s[0])] for lane in lanes}
    busy = [0.0] * len(lanes)
    #: End of the last segment on each lane, the lane whose thread ran it, and when others may use the core.
    last = dict.fromkeys(lanes, (0.0, 0, 0.0))
    stages = schedule.stages or (0,) * len(dag)
    start: dict[int, float] = {}
    finish: dict[int, float] = {}
    on_device = [lane <= 0 for lane in schedule.lanes]
    copied = {m for m in range(len(dag)) if any(on_device[s] != on_device[m] for s in dag.successors[m])}
    copied |= {m for m, _ in dag.request_outputs if on_device[m]}
    queues = {
        download: [m for s in segments for m in s if m in copied and on_device[m] == download]
        for download in (True, False)
    }
    copier_free = {True: 0.0, False: 0.0}
    seen, arrivals = dict[int, float](), dict[int, float]()
    inputs = uploaded_inputs(dag, costs, on_device)
    copier_free[False] = max(inputs.values(), default=0.0)

    def copy(now: float) -> None:
        """Start the copies that are next in their queues."""
        for download, queue in queues.items():
            while queue and max(seen.get(queue[0], now + 1), copier_free[download]) <= now:
                m = queue.pop(0)
                cost = costs.download if download else costs.upload
                sent = [dag.edge_bytes[s][dag.predecessors[s].index(m)] for s in dag.successors[m]]
                largest = max(sent, default=0)
                arrivals[m] = copier_free[download] = now + cost.latency_ms + largest * cost.ms_per_byte

    def arrived(i: int, now: float) -> bool:
        """Return True if all that an operator reads from other lanes has arrived, and its stage may start."""
        for m in dag.predecessors[i]:
            source, target = schedule.lanes[m], schedule.lanes[i]
            if source == target:
                continue
            if m not in seen:
                return False
            if (source > 0) == (target > 0):
                if seen[m] + costs.handoff_ms > now:
                    return False
            elif arrivals.get(m, now + 1) > now:
                return False
        # A stage starts when all earlier ones have ended, on other lanes a handoff earlier.
        for m in range(len(dag)):
            if stages[m] < stages[i] and m not in seen:
                return False
            if stages[m] < stages[i] and schedule.lanes[m] != schedule.lanes[i] and seen[m] + costs.handoff_ms > now:
                return False
        return True

    def free(lane: int, now: float) -> bool:
        """Return True if a lane may run its next segment, which is also the next one on all cores that it uses."""
        used = schedule.occupied(waiting[lane][0][0])
        if used[0] != lane or any(waiting[other][:1] != waiting[lane][:1] for other in used):
            return False
        return all(now >= (end if by == lane else others) for end, by, others in (last[other] for other in used))

    def length(i: int) -> float:
        """Return the duration of an operator."""
        if schedule.width(i) > 1:
            return costs.wide_ms[costs.widths.index(schedule.width(i))][i]
        if schedule.lanes[i] <= 0:
            return (costs.accelerator_ms or ())[i]
        used = {lane for lane, stage in zip(schedule.lanes, stages, strict=True) if lane > 0 and stage == stages[i]}
        return costs.cpu_ms[(len(used) if schedule.stages else schedule.cores) - 1][i]

    for now in range(2000):
        # After operators of no duration, others may start in the same millisecond.
        for _ in range(len(segments) + 1):
            copy(now)
            for lane in lanes:
                if (
                    waiting[lane]
                    and free(lane, now)
                    and all(inputs.get(i, 0) <= now and arrived(i, now) for i in waiting[lane][0])
                ):
                    used = schedule.occupied(waiting[lane][0][0])
                    segment = [waiting[other].pop(0) for other in used].pop()
                    clock = now + costs.dispatch_ms + (costs.wake_ms if len(used) > 1 else 0.0)
                    for i in segment:
                        start[i] = clock
                        clock += length(i)
                        finish[i] = clock
                    seen.update(dict.fromkeys(segment, clock))
                    for other in used:
                        others = clock + costs.handoff_ms + (costs.wake_ms if len(used) > 1 else 0.0)
                        last[other] = (clock, lane, max(others, last[other][2]))
                        busy[other] += clock - now
        if not any(waiting.values()) and not any(queues.values()):
            return start, finish, busy, max([*finish.values(), *arrivals.values()])
    raise AssertionError("the schedule never ends")


def in_runs(schedule: Schedule) -> list[list[int]]:
    """Return segments of neighbours in the order that share a lane and a stage."""
    stages = schedule.stages or (0,) * len(schedule.order)

    def key(i: int) -> tuple[int, int, int]:
        return schedule.lanes[i], schedule.width(i), stages[i]

    return [list(run) for _, run in itertools.groupby(schedule.order, key=key)]


@given(st.data(), st.sampled_from(["one each", "cut", "runs"]), st.booleans())
def test_the_timeline_is_that_of_the_simulation(data: st.DataObject, how: str, wide: bool) -> None:  # noqa: FBT001 - drawn
    """Starts, finishes, latency and busy times are equal, with segments, handoffs, dispatch, copies and widths."""
    dag = data.draw(dags(requests=True))
    costs = data.draw(costs_for(dag, wide=wide))
    schedule = data.draw(schedules(dag, costs, staged=None))
    segments = {
        "one each": [(i,) for i in schedule.order],
        "cut": cut(dag, schedule.order, schedule.lanes, stages=schedule.stages, widths=schedule.widths),
        "runs": in_runs(schedule),
    }[how]
    timeline = evaluate(dag, costs, schedule, None if how == "one each" else segments)
    start, finish, busy, latency = simulate(dag, costs, schedule, segments)
    assert timeline.start_ms == tuple(start[i] for i in range(len(dag)))
    assert timeline.finish_ms == tuple(finish[i] for i in range(len(dag)))
    assert timeline.busy_ms == tuple(busy)
    exits = [i for i in range(len(dag)) if not any(i in before for before in dag.predecessors)]
    assert timeline.latency_ms == latency
    assert dag.request_outputs or latency == max(finish[i] for i in exits)  # Equation 1


@given(st.data(), st.booleans())
def test_lanes_without_a_share_of_the_device_are_not_slowed(data: st.DataObject, wide: bool) -> None:  # noqa: FBT001 - drawn
    """Several accelerator lanes without contention follow the same simulation, with stages, widths and without."""
    dag = data.draw(dags(requests=True))
    costs = replace(data.draw(costs_for(dag, accelerator=True, wide=wide)), accelerator_share=(0.0,) * len(dag))
    schedule = data.draw(schedules(dag, costs, most_streams=3, staged=None))
    segments = cut(dag, schedule.order, schedule.lanes, stages=schedule.stages, widths=schedule.widths)
    timeline = evaluate(dag, costs, schedule, segments)
    start, finish, busy, latency = simulate(dag, costs, schedule, segments)
    assert timeline.start_ms == pytest.approx([start[i] for i in range(len(dag))], abs=1e-9)
    assert timeline.finish_ms == pytest.approx([finish[i] for i in range(len(dag))], abs=1e-9)
    assert timeline.busy_ms == pytest.approx(busy, abs=1e-9)
    assert timeline.latency_ms == pytest.approx(latency, abs=1e-9)


@given(st.data(), st.booleans())
def test_no_schedule_is_below_the_lower_bound(data: st.DataObject, wide: bool) -> None:  # noqa: FBT001 - drawn
    """The bound holds with and without stages and widths, on any number of accelerator lanes with any shares."""
    dag = data.draw(dags(requests=True))
    shares = tuple(data.draw(st.integers(0, 4)) / 4 for _ in range(len(dag)))
    costs = replace(data.draw(costs_for(dag, wide=wide)), accelerator_share=shares)
    schedule = data.draw(schedules(dag, costs, most_streams=3, staged=None))
    bound_ms = lower_bound_ms(dag, costs, schedule)
    assert bound_ms <= evaluate(dag, costs, schedule).latency_ms + 1e-9
    assert machine_bound_ms(dag, costs.limited_to(schedule.cores, schedule.streams)) <= bound_ms + 1e-9


def test_work_is_divided_where_it_takes_least() -> None:
    """Two devices of equal speed halve the work, and each keeps what takes long or is impossible on the other."""
    assert divide_work([(2.0, 2.0), (4.0, 4.0)]) == 3.0
    assert divide_work([(1.0, 100.0), (100.0, 1.0), (math.inf, 5.0)]) == pytest.approx(5 + 1 - 5 / 101)
    assert divide_work([(3.0, math.inf)]) == 3.0


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=7))
def test_no_division_of_whole_operators_takes_less(times: list[tuple[int, int]]) -> None:
    """The bound is at most the best of all assignments of operators to two devices."""
    sides = itertools.product((0, 1), repeat=len(times))
    loads = ([sum(t[d] for t, d in zip(times, side, strict=True) if d == at) for at in (0, 1)] for side in sides)
    assert divide_work(times) <= min(map(max, loads)) + 1e-9


@given(st.data())
def test_memory_is_equation_4(data: st.DataObject) -> None:
    """M sums outputs, ephemeral tensors and weights of accelerator operators, and their inputs from the CPU."""
    dag = data.draw(dags())
    costs = data.draw(costs_for(dag))
    schedule = data.draw(schedules(dag, costs))
    expected = 0.0
    for i, s in enumerate(schedule.lanes):
        if s == 0:
            row = costs.memory[i]
            expected += row.outputs_mb + row.ephemeral_mb + row.weights_mb
            expected += sum(costs.memory[j].outputs_mb for j in dag.predecessors[i] if schedule.lanes[j] != 0)
    if 0 in schedule.lanes:
        expected += costs.base_memory_mb
    timeline = evaluate(dag, costs, schedule)
    assert timeline.memory_mb == expected
    assert timeline.cost(3.0) == timeline.latency_ms + 3.0 * expected


def test_two_lanes_by_hand() -> None:
    """Latency is the sum of operators and copies if 0 and 2 run on a core and 1 on the accelerator.

    Operator 0 takes 7 ms, the upload 2 + 4 * 3 ms, operator 1 5 ms, and the download 1 + 2 ms.
    """
    dag = Dag.from_edges(3, [(0, 1), (1, 2)], [4, 2])
    costs = Costs(
        (5.0,) * 3, ((7.0,) * 3,), (OperatorMemory(0.0, 1.0, 2.0, 4.0),) * 3, CopyCost(2.0, 3.0), CopyCost(1.0, 1.0)
    )
    timeline = evaluate(dag, costs, Schedule((0, 1, 2), (1, 0, 1), 1))
    assert timeline.start_ms == (0.0, 21.0, 29.0)
    assert timeline.finish_ms == (7.0, 26.0, 36.0)
    assert timeline.busy_ms == (5.0, 14.0)
    assert timeline.memory_mb == 8.0  # 1 + 2 + 4 of its own, and an input of 1


def test_results_of_a_segment_are_visible_when_it_ends() -> None:
    """A successor of the first of two operators starts after the second, a handoff and a dispatch."""
    dag = Dag.from_edges(3, [(0, 2)])
    costs = uniform_costs(dag, cpu_ms=(10.0, 10.0), handoff_ms=2.0, dispatch_ms=1.0)
    schedule = Schedule((0, 1, 2), (1, 1, 2), 2)
    assert evaluate(dag, costs, schedule, [(0, 1), (2,)]).start_ms == (1.0, 11.0, 24.0)
    assert evaluate(dag, costs, schedule, [(0,), (1,), (2,)]).start_ms == (1.0, 12.0, 14.0)


def test_the_number_of_cores_determines_the_speed() -> None:
    """With k* = 2, W[i, 2] applies to every core, even if one of them is idle."""
    dag = Dag.from_edges(1, [])
    costs = uniform_costs(dag, cpu_ms=(10.0, 13.0))
    assert evaluate(dag, costs, Schedule((0,), (1,), 1)).latency_ms == 10.0
    assert evaluate(dag, costs, Schedule((0,), (1,), 2)).latency_ms == 13.0


PAIR = Dag.from_edges(2, [(0, 1)])
PAIR_COSTS = Costs((1.0, float("inf")), ((1.0, 1.0),), (OperatorMemory(),) * 2)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule((1, 0), (1, 1), 1), "precedes its predecessor"),
        (Schedule((0,), (1, 1), 1), "each of the 2 operators once"),
        (Schedule((0, 0), (1, 1), 1), "each of the 2 operators once"),
        (Schedule((0, 1), (1,), 1), "each of the 2 operators once"),
        (Schedule((0, 1), (1, 2), 1), "on lane 2"),
        (Schedule((0, 1), (1, -1), 1), "on lane -1"),
        (Schedule((0, 1), (1, -2), 1, 2), "on lane -2"),
        (Schedule((0, 1), (1, 1), 1, 0), "0 accelerator lanes"),
        (Schedule((0, 1), (1, 1), 1, 1, (0,)), "stages must be given"),
        (Schedule((0, 1), (1, 1), 1, 1, (1, 0)), "stages must be given"),
        (Schedule((0, 1), (1, 1), 2), "2 cores, but the costs are for 0 to 1"),
        (Schedule((0, 1), (1, 1), -1), "-1 cores, but"),
        (Schedule((0, 1), (1, 0), 1), "not supported on the accelerator"),
    ],
)
def test_invalid_schedules_are_refused(schedule: Schedule, message: str) -> None:
    """Violations of constraints 6 to 10, and operators on a lane that does not support them, are refused."""
    with pytest.raises(ScheduleError, match=message):
        validate(PAIR, PAIR_COSTS, schedule)
    with pytest.raises(ScheduleError, match=message):
        evaluate(PAIR, PAIR_COSTS, schedule)


def test_lane_0_needs_an_accelerator() -> None:
    """A schedule that uses lane 0 is refused without an accelerator."""
    with pytest.raises(ScheduleError, match="not supported on the accelerator"):
        evaluate(PAIR, PAIR_COSTS.without_accelerator(), Schedule((0, 1), (0, 1), 1))


def test_an_empty_graph_takes_no_time() -> None:
    """The latency and memory of an empty graph are 0."""
    dag = Dag.from_edges(0, [])
    timeline = evaluate(dag, uniform_costs(dag), Schedule((), (), 0))
    assert (timeline.latency_ms, timeline.memory_mb) == (0.0, 0.0)
