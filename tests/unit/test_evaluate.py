"""The definition of latency and memory, against a simulation that walks through time step by step."""

from __future__ import annotations

import itertools
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
from chrion.scheduler.evaluation.evaluate import lower_bound_ms
from strategies import costs_for, dags, schedules


def uploaded_inputs(dag: Dag, costs: Costs, there: Sequence[bool]) -> dict[int, float]:
    """When the accelerator's operators have the request's inputs: those that any of them reads go up in turn."""
    clock, found = 0.0, {}
    for size, readers in dag.request_inputs:
        if any(there[i] for i in readers):
            clock += costs.upload.latency_ms + size * costs.upload.ms_per_byte
            found |= {i: clock for i in readers if there[i]}
    return found


def simulate(
    dag: Dag, costs: Costs, schedule: Schedule, segments: Sequence[Sequence[int]]
) -> tuple[dict[int, float], dict[int, float], list[float], float]:
    """Walk through whole milliseconds; whoever can start, starts. Returns starts, finishes, busy time by lane, latency.

    A value goes to the other side once. Each direction is a queue in the order of the segments that make the values;
    the request's inputs go up before all else.
    """
    lanes = [*range(schedule.cores + 1), *range(1 - schedule.streams, 0)]
    waiting = {lane: [s for s in segments if schedule.lanes[s[0]] == lane] for lane in lanes}
    free, busy = [0.0 for _ in lanes], [0.0 for _ in lanes]
    stages = schedule.stages or (0,) * len(dag)
    start: dict[int, float] = {}
    finish: dict[int, float] = {}
    seen: dict[int, float] = {}
    there = [lane <= 0 for lane in schedule.lanes]
    taken = {m for m, _ in dag.request_outputs if there[m]}
    crossing = [m for s in segments for m in s if m in taken or any(there[t] != there[m] for t in dag.successors[m])]
    queues = {side: [m for m in crossing if there[m] == side] for side in (True, False)}
    copier_free = {True: 0.0, False: 0.0}
    copied: dict[int, float] = {}
    inputs = uploaded_inputs(dag, costs, there)
    copier_free[False] = max(inputs.values(), default=0.0)

    def copy(now: float) -> None:
        for side, queue in queues.items():
            while queue and max(seen.get(queue[0], now + 1), copier_free[side]) <= now:
                m = queue.pop(0)
                cost = costs.download if side else costs.upload
                sent = [dag.edge_bytes[s][dag.predecessors[s].index(m)] for s in dag.successors[m]]
                largest = max(sent, default=0)
                copied[m] = copier_free[side] = now + cost.latency_ms + largest * cost.ms_per_byte

    def arrived(i: int, now: float) -> bool:
        for m in dag.predecessors[i]:
            source, target = schedule.lanes[m], schedule.lanes[i]
            if source == target:
                continue
            if m not in seen:
                return False
            if (source > 0) == (target > 0):
                if seen[m] + costs.handoff_ms > now:
                    return False
            elif copied.get(m, now + 1) > now:
                return False
        # Everything of earlier stages has ended, and is known of elsewhere a handoff later.
        for m in range(len(dag)):
            if stages[m] < stages[i] and m not in seen:
                return False
            if stages[m] < stages[i] and schedule.lanes[m] != schedule.lanes[i] and seen[m] + costs.handoff_ms > now:
                return False
        return True

    def length(i: int) -> float:
        if schedule.lanes[i] <= 0:
            return (costs.accelerator_ms or ())[i]
        used = {lane for lane, stage in zip(schedule.lanes, stages, strict=True) if lane > 0 and stage == stages[i]}
        return costs.cpu_ms[(len(used) if schedule.stages else schedule.cores) - 1][i]

    for now in range(2000):
        # Operators that take no time let others start within the same millisecond.
        for _ in range(len(segments) + 1):
            copy(now)
            for lane in lanes:
                if (
                    waiting[lane]
                    and free[lane] <= now
                    and all(inputs.get(i, 0) <= now and arrived(i, now) for i in waiting[lane][0])
                ):
                    segment = waiting[lane].pop(0)
                    clock = now + costs.dispatch_ms
                    for i in segment:
                        start[i] = clock
                        clock += length(i)
                        finish[i] = clock
                    seen.update(dict.fromkeys(segment, clock))
                    free[lane] = clock
                    busy[lane] += clock - now
        if not any(waiting.values()) and not any(queues.values()):
            return start, finish, busy, max([*finish.values(), *copied.values()])
    raise AssertionError("the schedule never ends")


def in_runs(schedule: Schedule) -> list[list[int]]:
    """Neighbours in the order that share a lane and a stage, as one segment each."""
    stages = schedule.stages or (0,) * len(schedule.order)
    return [list(run) for _, run in itertools.groupby(schedule.order, key=lambda i: (schedule.lanes[i], stages[i]))]


@given(st.data(), st.sampled_from(["one each", "cut", "runs"]))
def test_the_timeline_is_the_simulated_one(data: st.DataObject, how: str) -> None:
    """Starts, finishes, latency and busy times equal a simulation, with segments, handoffs, dispatch and copies."""
    dag = data.draw(dags(requests=True))
    costs = data.draw(costs_for(dag))
    schedule = data.draw(schedules(dag, costs, staged=None))
    segments = {
        "one each": [(i,) for i in schedule.order],
        "cut": cut(dag, schedule.order, schedule.lanes, stages=schedule.stages),
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


@given(st.data())
def test_lanes_that_occupy_nothing_of_the_device_run_as_if_alone(data: st.DataObject) -> None:
    """Several accelerator lanes, with stages or without, follow the same simulation as long as they do not contend."""
    dag = data.draw(dags(requests=True))
    costs = replace(data.draw(costs_for(dag, accelerator=True)), accelerator_share=(0.0,) * len(dag))
    schedule = data.draw(schedules(dag, costs, most_streams=3, staged=None))
    segments = cut(dag, schedule.order, schedule.lanes, stages=schedule.stages)
    timeline = evaluate(dag, costs, schedule, segments)
    start, finish, busy, latency = simulate(dag, costs, schedule, segments)
    assert timeline.start_ms == pytest.approx([start[i] for i in range(len(dag))], abs=1e-9)
    assert timeline.finish_ms == pytest.approx([finish[i] for i in range(len(dag))], abs=1e-9)
    assert timeline.busy_ms == pytest.approx(busy, abs=1e-9)
    assert timeline.latency_ms == pytest.approx(latency, abs=1e-9)


@given(st.data())
def test_the_lower_bound_is_one(data: st.DataObject) -> None:
    """No schedule on its lanes is faster: staged or not, on any number of accelerator lanes of any shares."""
    dag = data.draw(dags(requests=True))
    shares = tuple(data.draw(st.integers(0, 4)) / 4 for _ in range(len(dag)))
    costs = replace(data.draw(costs_for(dag)), accelerator_share=shares)
    schedule = data.draw(schedules(dag, costs, most_streams=3, staged=None))
    assert lower_bound_ms(dag, costs, schedule) <= evaluate(dag, costs, schedule).latency_ms + 1e-9


@given(st.data())
def test_memory_is_equation_4(data: st.DataObject) -> None:
    """M sums outputs, ephemeral tensors and weights of accelerator operators, and what they take in from the CPU."""
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
    """0 on a core (7 ms), a 2 + 4 * 3 ms upload, 1 on the accelerator (5 ms), a 1 + 2 ms download, 2 on the core."""
    dag = Dag.from_edges(3, [(0, 1), (1, 2)], [4, 2])
    costs = Costs(
        (5.0,) * 3, ((7.0,) * 3,), (OperatorMemory(0.0, 1.0, 2.0, 4.0),) * 3, CopyCost(2.0, 3.0), CopyCost(1.0, 1.0)
    )
    timeline = evaluate(dag, costs, Schedule((0, 1, 2), (1, 0, 1), 1))
    assert timeline.start_ms == (0.0, 21.0, 29.0)
    assert timeline.finish_ms == (7.0, 26.0, 36.0)
    assert timeline.busy_ms == (5.0, 14.0)
    assert timeline.memory_mb == 8.0  # 1 + 2 + 4 of its own and 1 that it takes in


def test_results_of_a_segment_are_seen_when_it_ends() -> None:
    """An operator that waits for the first of a segment's two starts after the second, a handoff and a dispatch."""
    dag = Dag.from_edges(3, [(0, 2)])
    costs = uniform_costs(dag, cpu_ms=(10.0, 10.0), handoff_ms=2.0, dispatch_ms=1.0)
    schedule = Schedule((0, 1, 2), (1, 1, 2), 2)
    assert evaluate(dag, costs, schedule, [(0, 1), (2,)]).start_ms == (1.0, 11.0, 24.0)
    assert evaluate(dag, costs, schedule, [(0,), (1,), (2,)]).start_ms == (1.0, 12.0, 14.0)


def test_the_number_of_cores_decides_the_speed() -> None:
    """With k* = 2, W[i, 2] counts on every core, also where one of them has nothing to do."""
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
def test_broken_schedules_are_refused(schedule: Schedule, message: str) -> None:
    """Constraints 6 to 10, and operators that a lane cannot run."""
    with pytest.raises(ScheduleError, match=message):
        validate(PAIR, PAIR_COSTS, schedule)
    with pytest.raises(ScheduleError, match=message):
        evaluate(PAIR, PAIR_COSTS, schedule)


def test_no_accelerator_means_no_lane_0() -> None:
    """Lane 0 is refused where there is no accelerator."""
    with pytest.raises(ScheduleError, match="not supported on the accelerator"):
        evaluate(PAIR, PAIR_COSTS.without_accelerator(), Schedule((0, 1), (0, 1), 1))


def test_an_empty_graph_takes_no_time() -> None:
    """Nothing to do is done at once."""
    dag = Dag.from_edges(0, [])
    timeline = evaluate(dag, uniform_costs(dag), Schedule((), (), 0))
    assert (timeline.latency_ms, timeline.memory_mb) == (0.0, 0.0)
