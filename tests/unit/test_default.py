"""The default policy: groups, tiles, beginnings and local search."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.profiler import Costs, uniform_costs
from chrion.scheduler import Schedule, evaluate
from chrion.scheduler.evaluation.solution import Problem
from chrion.scheduler.evaluation.validation import check_solution
from chrion.scheduler.policies.chrion import ChrionPolicy
from chrion.scheduler.search.grouping import group_operators, tile_order, unit_order
from chrion.scheduler.search.local_search import merge_segments, move_units
from strategies import costs_for, dags


def stack(layers: int, steps: int) -> Dag:
    """An unfolded recurrent stack: operator ``layer * steps + step``, one weight of 64 kB a layer."""
    edges = [(la * steps + t, la * steps + t + 1) for la in range(layers) for t in range(steps - 1)]
    edges += [(la * steps + t, (la + 1) * steps + t) for la in range(layers - 1) for t in range(steps)]
    weights = tuple((i // steps,) for i in range(layers * steps))
    signatures = ("cell",) * (layers * steps)
    dag = Dag.from_edges(layers * steps, edges)
    return replace(dag, weights=weights, weight_bytes=(1 << 16,) * layers, signatures=signatures)


def lanes_of(dag: Dag, **machine: float) -> Costs:
    """Two cores with operators of 10 us, handoffs of 2 us and dispatches of 5 us."""
    given = {"handoff_ms": 0.002, "dispatch_ms": 0.005, **machine}
    return uniform_costs(dag, cpu_ms=[0.01, 0.01], **given)


def test_a_layer_is_a_group_and_its_steps_are_counted() -> None:
    """Operators that read one weight, in order of time."""
    dag = stack(3, 5)
    groups = group_operators(dag, lanes_of(dag))
    assert groups.members == tuple(tuple(range(la * 5, la * 5 + 5)) for la in range(3))
    assert groups.step == tuple(i % 5 for i in range(15))
    assert groups.steps == 5


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
def test_a_tile_order_is_topological_and_labels_do_not_fall(steps: int) -> None:
    """Tiles may be run one after another."""
    dag = stack(4, 8)
    order, labels = tile_order(dag, group_operators(dag, lanes_of(dag)), steps)
    position = {i: at for at, i in enumerate(order)}
    for i in range(len(dag)):
        for m in dag.predecessors[i]:
            assert position[m] < position[i]
            assert labels[m] <= labels[i]


def test_an_unfolded_stack_becomes_tiles_of_layers_and_steps() -> None:
    """Segments hold several layers and several steps, and nearly halve the serial time of 12 x 96 cells."""
    dag = stack(12, 96)
    costs = lanes_of(dag)
    solution = ChrionPolicy(dag, costs)(0.0)
    serial_ms = len(dag) * 0.01
    assert serial_ms / 2 <= solution.timeline.latency_ms < 0.6 * serial_ms
    typical = sorted(solution.segments, key=len)[len(solution.segments) // 2]
    layers, steps = {i // 96 for i in typical}, {i % 96 for i in typical}
    assert len(layers) > 1
    assert len(steps) > 1
    assert len(typical) == len(layers) * len(steps)


@pytest.mark.parametrize(("layers", "steps", "cores"), [(4, 5, 2), (6, 4, 3), (12, 96, 2), (8, 8, 4)])
def test_layers_dealt_out_in_turn_follow_a_step_behind(layers: int, steps: int, cores: int) -> None:
    """Without overheads a lane is busy all the time, and the last one ends as many steps later as lanes precede it."""
    dag = stack(layers, steps)
    costs = uniform_costs(dag, cpu_ms=[1.0] * cores)
    dealt = [
        s
        for s in ChrionPolicy(dag, costs).initial(0.0)
        if s.origin.startswith("alternating") and s.schedule.cores == cores
    ]
    assert [s.timeline.latency_ms for s in dealt] == [layers // cores * steps + cores - 1]
    (solution,) = dealt
    check_solution(dag, costs, solution)
    for lane in range(1, cores + 1):
        layers_run = [i // steps for i in solution.schedule.order if solution.schedule.lanes[i] == lane]
        assert layers_run == sorted(layers_run)


def test_a_layer_stays_on_one_core() -> None:
    """Its weights are read by one lane."""
    dag = stack(12, 96)
    lanes = ChrionPolicy(dag, lanes_of(dag))(0.0).schedule.lanes
    readers = defaultdict(set)
    for i, lane in enumerate(lanes):
        readers[i // 96].add(lane)
    assert all(len(found) == 1 for found in readers.values())


def test_scattering_does_not_look_free() -> None:
    """Where a handoff costs more than the operators it would part, everything stays on one lane."""
    dag = stack(4, 8)
    solution = ChrionPolicy(dag, lanes_of(dag, handoff_ms=10.0))(0.0)
    assert len(set(solution.schedule.lanes)) == 1


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_solutions_are_valid_and_no_worse_than_their_beginnings(data: st.DataObject) -> None:
    """On any graph and machine; and the figures are the evaluator's."""
    dag = data.draw(dags())
    costs = data.draw(costs_for(dag).filter(lambda c: c.cores or c.accelerator_ms))
    alpha = data.draw(st.sampled_from([0.0, 0.5, 3.0]))
    policy = ChrionPolicy(dag, costs)
    seeds = policy.initial(alpha)
    solution = policy.improve(seeds, alpha)
    check_solution(dag, costs, solution)
    assert solution.timeline == evaluate(dag, costs, solution.schedule, solution.segments)
    assert solution.cost(alpha) <= seeds[0].cost(alpha) + 1e-9


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_equal_inputs_give_equal_solutions(data: st.DataObject) -> None:
    """Nothing depends on time or on the order of sets."""
    dag = data.draw(dags())
    costs = data.draw(costs_for(dag).filter(lambda c: c.cores or c.accelerator_ms))
    assert ChrionPolicy(dag, costs)(0.5) == ChrionPolicy(dag, costs)(0.5)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_local_search_is_monotone_and_keeps_its_budget(data: st.DataObject) -> None:
    """Neither moves nor merges make a solution worse, whatever the budget."""
    dag = data.draw(dags())
    costs = data.draw(costs_for(dag).filter(lambda c: c.cores > 0))
    budget = data.draw(st.integers(0, 2000))
    problem = Problem(dag, costs)
    start = problem.evaluate(Schedule(dag.topological_order, (1,) * len(dag), costs.cores))
    before = problem.work
    better = move_units(problem, start, [(i,) for i in range(len(dag))], 0.5, budget=budget)
    assert problem.work <= before + budget + len(dag)
    assert better.cost(0.5) <= start.cost(0.5)
    merged = merge_segments(problem, better, 0.5)
    assert merged.cost(0.5) <= better.cost(0.5) + 1e-9
    assert len(merged.segments) <= len(better.segments)


def test_units_follow_each_other() -> None:
    """The order keeps the operators of a unit together, and is None where two units wait for each other."""
    dag = Dag.from_edges(4, [(0, 1), (2, 3)])
    assert unit_order(dag, [(0, 1), (2, 3)], [0, 2, 1, 3]) == [0, 1, 2, 3]
    crossed = Dag.from_edges(4, [(0, 3), (2, 1)])
    assert unit_order(crossed, [(0, 1), (2, 3)], [0, 2, 1, 3]) is None
