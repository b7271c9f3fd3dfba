"""Stage schedules on the lanes of one device."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.profiler import Costs, OperatorMemory, uniform_costs
from chrion.scheduler import evaluate
from chrion.scheduler.evaluation.solution import Problem
from chrion.scheduler.policies.ios_search import search_stages
from chrion.scheduler.policies.stages import (
    DeviceLanes,
    Stage,
    generations,
    greedy_stages,
    round_robin,
    schedule_stages,
)
from policy_solutions import solve_policy
from strategies import costs_for, dags


@given(data=st.data())
def test_the_timeline_is_the_sum_of_the_stages(data: st.DataObject) -> None:
    """The latency equals the sum of the stages without overheads, and does not exceed it with overheads."""
    dag = data.draw(dags())
    costs = replace(data.draw(costs_for(dag)), streams=data.draw(st.integers(1, 3)))
    shares = tuple(data.draw(st.integers(0, 4)) / 4 for _ in range(len(dag)))
    costs = replace(costs, accelerator_share=shares)
    free = replace(costs, handoff_ms=0.0, dispatch_ms=0.0)
    stages = search_stages(dag, DeviceLanes(dag, costs).stage_ms)
    for machine in (free, costs):
        device = DeviceLanes(dag, machine)
        latency = Problem(dag, machine).evaluate(schedule_stages(dag, device, stages)).timeline.latency_ms
        predicted = sum(device.stage_ms(stage.groups) for stage in stages)
        assert latency == pytest.approx(predicted, abs=1e-6) if machine is free else latency <= predicted + 1e-6


@given(dag=dags(12))
def test_greedy_stages_are_the_topological_generations(dag: Dag) -> None:
    """The stages equal networkx's topological generations, and every operator is a group of its own."""
    expected = [sorted(members) for members in nx.topological_generations(dag.to_networkx())]
    assert [sorted(members) for members in generations(dag)] == expected
    assert [sorted(i for (i,) in stage.groups) for stage in greedy_stages(dag)] == expected


def test_the_longest_groups_are_packed_first() -> None:
    """Of groups of 3, 1 and 2 ms on two lanes, that of 3 ms runs alone, and those of 2 and 1 ms share a lane."""
    dag = Dag.from_edges(3, [])
    costs = Costs(None, ((3.0, 1.0, 2.0), (3.0, 1.0, 2.0)), (OperatorMemory(),) * 3)
    device = DeviceLanes(dag, costs)
    assert device.pack([(0,), (1,), (2,)]) == [[0], [1, 2]]
    assert device.stage_ms([(0,), (1,), (2,)]) == 3.0
    assert round_robin(2)([(0,), (1,), (2,)]) == [[0, 2], [1]]


def test_a_stage_includes_its_dispatch_and_barriers() -> None:
    """A stage has one dispatch and, with two lanes, a handoff before and after the second lane."""
    dag = Dag.from_edges(2, [])
    costs = uniform_costs(dag, cpu_ms=[2.0, 3.0], dispatch_ms=0.5, handoff_ms=0.25)
    device = DeviceLanes(dag, costs)
    assert device.stage_ms([(0, 1)]) == 0.5 + 4.0
    assert device.stage_ms([(0,), (1,)]) == 0.5 + 3.0 + 2 * 0.25


def test_stages_of_one_lane_are_joined() -> None:
    """Consecutive stages of one lane become one stage, since no lane waits between them."""
    dag = Dag.from_edges(4, [(0, 1), (1, 2), (1, 3)])
    device = DeviceLanes(dag, uniform_costs(dag, cpu_ms=[1.0, 1.0]))
    schedule = schedule_stages(dag, device, [Stage(((0,),)), Stage(((1,),)), Stage(((2,), (3,)))])
    assert schedule.stages == (0, 0, 1, 1)
    assert schedule.lanes == (1, 1, 1, 2)


def test_the_lanes_in_use_determine_the_speed_of_a_stage() -> None:
    """A stage with one busy core uses the times of one core, and a stage with two those of two."""
    dag = Dag.from_edges(3, [(0, 1), (0, 2)])
    costs = uniform_costs(dag, cpu_ms=[1.0, 10.0])
    schedule = schedule_stages(dag, DeviceLanes(dag, costs), [Stage(((0,),)), Stage(((1,), (2,)))])
    assert evaluate(dag, costs, schedule).finish_ms == (1.0, 11.0, 11.0)


@pytest.mark.parametrize("policy", ["ios", "nimble", "opara", "wavefront", "greedy"])
def test_unsupported_operators_run_on_a_core(policy: str) -> None:
    """An unsupported operator runs on a core, and all others on the accelerator's lanes."""
    dag = Dag.from_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    costs = replace(uniform_costs(dag, accelerator_ms=1.0), accelerator_ms=(1.0, float("inf"), 1.0, 1.0))
    lanes = solve_policy(policy, dag, costs).schedule.lanes
    assert lanes[1] == 1
    assert all(lane <= 0 for i, lane in enumerate(lanes) if i != 1)
