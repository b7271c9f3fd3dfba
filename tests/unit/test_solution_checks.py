"""Validation: it refuses solutions that break a rule, and those of every policy pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from chrion.errors import ScheduleError
from chrion.graph import Dag
from chrion.profiler import uniform_costs
from chrion.scheduler import POLICIES, Schedule
from chrion.scheduler.evaluation.solution import Problem, Solution
from chrion.scheduler.policies.stages import DeviceLanes
from policy_solutions import solve_policy
from property_tests import examples
from solution_checks import check_solution
from strategies import costs_for, dags, schedules

#: A diamond, and one operator beside it.
DAG = Dag.from_edges(5, [(0, 1), (0, 2), (1, 3), (2, 3)])
COSTS = uniform_costs(DAG, cpu_ms=[1.0, 1.0])
GOOD = Problem(DAG, COSTS).evaluate(Schedule((0, 4, 1, 2, 3), (1, 1, 2, 1, 2), 2, stages=(0, 1, 1, 2, 1)))


def test_a_valid_solution_passes() -> None:
    """A valid solution of two lanes and three stages passes."""
    check_solution(DAG, COSTS, GOOD)


def moved(name: str, i: int, ms: float) -> Solution:
    """Return the valid solution with one time changed."""
    times = list(getattr(GOOD.timeline, name))
    times[i] = ms
    return replace(GOOD, timeline=replace(GOOD.timeline, **{name: tuple(times)}))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            replace(GOOD, schedule=replace(GOOD.schedule, order=(0, 4, 3, 1, 2))),
            "stages must be given|precedes its predecessor",
        ),
        (replace(GOOD, schedule=replace(GOOD.schedule, lanes=(1, 1, 3, 1, 2))), "on lane 3"),
        (replace(GOOD, segments=((0,), (1,), (2,), (3,))), "in one segment"),
        (replace(GOOD, segments=((1,), (0,), (2,), (4,), (3,))), "precedes one that it depends on"),
        (replace(GOOD, segments=((0,), (1,), (2, 4), (3,)), schedule=replace(GOOD.schedule, stages=())), "the order"),
        (replace(GOOD, segments=((0,), (1, 2), (4,), (3,))), "on two lanes"),
        (replace(GOOD, segments=((0, 1), (4,), (2,), (3,))), "in two stages"),
        (moved("start_ms", 3, 0.0), "overlap, although one depends|lane runs two"),
        (moved("finish_ms", 4, 9.0), "lane runs two|starts before"),
        (moved("finish_ms", 1, 3.5), "overlap, although one depends|lane runs two"),
        (moved("start_ms", 4, 0.5), "starts before"),
        (replace(GOOD, schedule=replace(GOOD.schedule, stages=(0, 0, 0, 0, 0))), "stage on two lanes depend"),
    ],
)
def test_an_invalid_solution_is_refused(bad: Solution, message: str) -> None:
    """A solution that breaks any one of the rules is refused."""
    with pytest.raises(ScheduleError, match=message):
        check_solution(DAG, COSTS, bad)


@pytest.mark.parametrize("policy", POLICIES)
@examples(20)
@given(data=st.data())
def test_solutions_of_every_policy_pass(policy: str, data: st.DataObject) -> None:
    """Solutions are valid on any graph and machine that the policy supports.

    The exact policy is tested with alpha 0 only.
    """
    dag = data.draw(dags(5))
    costs = data.draw(costs_for(dag, accelerator=True if policy == "accelerator" else None))
    assume(costs.cores or policy != "cpu")
    alpha = 0.0 if policy == "exact" else data.draw(st.sampled_from([0.0, 0.5, 3.0]))
    check_solution(dag, costs, solve_policy(policy, dag, costs, alpha))


@pytest.mark.parametrize("policy", ["ios", "nimble", "opara", "wavefront", "greedy"])
@given(data=st.data())
def test_policies_of_one_device_pass_with_several_streams(policy: str, data: st.DataObject) -> None:
    """Solutions are valid on cores, and on an accelerator with any number of lanes and any shares.

    They use no lane of another device.
    """
    dag = data.draw(dags(8))
    costs = data.draw(costs_for(dag))
    shares = tuple(data.draw(st.integers(0, 4)) / 4 for _ in range(len(dag)))
    costs = replace(costs, accelerator_share=shares, streams=data.draw(st.integers(1, 4)))
    solution = solve_policy(policy, dag, costs)
    check_solution(dag, costs, solution)
    assert set(solution.schedule.lanes) <= set(DeviceLanes(dag, costs).lanes)


@given(st.data())
def test_random_wide_schedules_are_valid(data: st.DataObject) -> None:
    """What the evaluator makes of a schedule with widths keeps all rules, with any cut into segments."""
    dag = data.draw(dags())
    costs = data.draw(costs_for(dag, wide=True))
    schedule = data.draw(schedules(dag, costs, most_streams=2, staged=False))
    tiles = data.draw(st.none() | st.lists(st.integers(0, 2), min_size=len(dag), max_size=len(dag)))
    check_solution(dag, costs, Problem(dag, costs).evaluate(schedule, tiles))


def test_wide_operators_that_share_a_core_are_refused() -> None:
    """Two operators of two cores each on lanes 1 and 2 share the second core, so that they cannot overlap."""
    dag = Dag.from_edges(2, [])
    costs = replace(uniform_costs(dag, cpu_ms=[1.0] * 3), widths=(2,), wide_ms=((1.0, 1.0),))
    solution = Problem(dag, costs).evaluate(Schedule((0, 1), (1, 2), 3, widths=(2, 2)))
    assert solution.timeline.start_ms == (0.0, 1.0)
    check_solution(dag, costs, solution)
    overlapping = replace(solution.timeline, start_ms=(0.0, 0.0), finish_ms=(1.0, 1.0))
    with pytest.raises(ScheduleError, match="a lane runs two operators at once"):
        check_solution(dag, costs, replace(solution, timeline=overlapping))
    with pytest.raises(ScheduleError, match="a segment has two widths"):
        check_solution(
            dag, costs, replace(solution, schedule=Schedule((0, 1), (1, 1), 3, widths=(2, 1)), segments=((0, 1),))
        )
