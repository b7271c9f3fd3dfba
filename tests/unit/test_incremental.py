"""Incremental evaluation, compared with the full one."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.profiler import CopyCost, Costs, uniform_costs
from chrion.scheduler import Schedule
from chrion.scheduler.evaluation.incremental import GraphTables, Trace
from chrion.scheduler.evaluation.solution import Problem
from property_tests import examples
from strategies import costs_for, dags, schedules


def with_weights(data: st.DataObject, dag: Dag, costs: Costs) -> tuple[Dag, Costs]:
    """Return the graph with weights shared by some operators, and costs with small caches."""
    n = len(dag)
    readers = st.lists(st.integers(0, 2), unique=True, max_size=2).map(tuple)
    weights = tuple(data.draw(readers) for _ in range(n))
    size = data.draw(st.integers(1, 3))
    return (
        replace(dag, weights=weights, weight_bytes=(1, 2, 3)),
        replace(costs, cache_bytes=size, reload_ms_per_byte=0.25),
    )


def moved(data: st.DataObject, dag: Dag, costs: Costs, schedule: Schedule) -> tuple[Schedule, list[int]]:
    """Return a schedule in which some operators have another lane and one has another position, and all of these."""
    lanes = list(schedule.lanes)
    usable = st.integers(0 if costs.accelerator_ms is not None else 1, schedule.cores)
    changed = data.draw(st.lists(st.integers(0, len(dag) - 1), unique=True, max_size=3))
    for i in changed:
        lanes[i] = data.draw(usable)
    order = list(schedule.order)
    at = data.draw(st.integers(0, len(dag) - 1))
    target = data.draw(st.integers(0, len(dag) - 1))
    low, high = sorted((at, target))
    order.insert(target, order.pop(at))
    position = {i: p for p, i in enumerate(order)}
    if any(position[m] > position[i] for i in range(len(dag)) for m in dag.predecessors[i]):
        order = list(schedule.order)
    else:
        changed += schedule.order[low : high + 1]
    return replace(schedule, order=tuple(order), lanes=tuple(lanes)), list(dict.fromkeys(changed))


@examples(300)
@given(data=st.data())
def test_latencies_equal_those_of_the_full_evaluation(data: st.DataObject) -> None:
    """For any limit, a similar schedule has exactly its full latency, or no latency from the limit on."""
    dag = data.draw(dags(largest=40, requests=True))
    costs = data.draw(costs_for(dag))
    if data.draw(st.booleans()):
        dag, costs = with_weights(data, dag, costs)
    schedule = data.draw(schedules(dag, costs))
    labels = st.lists(st.integers(0, 3), min_size=len(dag), max_size=len(dag)).map(tuple)
    tiles = data.draw(st.none() | labels)
    problem = Problem(dag, costs)
    trace = Trace(GraphTables(dag, costs), schedule, tiles)
    assert trace.latency_ms == problem.evaluate(schedule, tiles).timeline.latency_ms
    for _ in range(3):
        trial, changed = moved(data, dag, costs, schedule)
        relabelled = tiles
        if tiles is not None:
            other = data.draw(st.sampled_from(range(len(dag))))
            relabelled = (*tiles[:other], data.draw(st.integers(0, 3)), *tiles[other + 1 :])
            changed.append(other)
        expected = problem.evaluate(trial, relabelled).timeline.latency_ms
        limit = data.draw(st.sampled_from([math.inf, expected, expected + 0.5, 0.5 * expected, trace.latency_ms]))
        found = trace.latency_below(limit, trial, changed, relabelled)
        assert found == (expected if expected < limit else None)


def test_copies_in_one_direction_follow_each_other() -> None:
    """Two values made at 1 ms are copied to the accelerator, or from it, one after the other: 1 + 10 + 10 + 1 ms."""
    dag = Dag.from_edges(3, [(0, 2), (1, 2)])
    copies = CopyCost(10.0)
    costs = uniform_costs(dag, accelerator_ms=1.0, cpu_ms=[1.0, 1.0], upload=copies, download=copies)
    for lanes in ((1, 2, 0), (0, -1, 1)):
        trace = Trace(GraphTables(dag, replace(costs, streams=2)), Schedule((0, 1, 2), lanes, 2), None)
        assert trace.latency_ms == 22.0
