"""Wide lanes in the default policy: when they are used, and what stays as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.profiler import Costs, OperatorMemory
from chrion.scheduler import Schedule
from chrion.scheduler.evaluation.solution import Problem, Solution
from chrion.scheduler.search.critical_chain import critical_operators
from chrion.scheduler.search.initial_solutions import GraphFacts
from chrion.scheduler.search.wide_lanes import widen
from policy_solutions import solve_policy
from property_tests import examples
from solution_checks import check_solution
from strategies import costs_for, dags


def costs(times: list[float], serial: list[float], cores: int = 2, **machine: float) -> Costs:
    """Return costs by Amdahl's law for the times on one core and the serial shares."""
    widths = tuple(range(2, cores + 1))
    wide = tuple(tuple(ms * (s + (1 - s) / w) for ms, s in zip(times, serial, strict=True)) for w in widths)
    rows = (tuple(times),) * cores
    return Costs(None, rows, (OperatorMemory(),) * len(times), widths=widths, wide_ms=wide, **machine)  # type: ignore[arg-type]


#: A chain of three operators, two chains of three beside each other, and a chain of three.
EDGES = [(0, 1), (1, 2), (2, 3), (2, 6), (3, 4), (4, 5), (6, 7), (7, 8), (5, 9), (8, 9), (9, 10), (10, 11)]
HOURGLASS = Dag.from_edges(12, EDGES)
#: The chains scale well over cores, the branches not at all.
SERIAL = [0.0] * 3 + [1.0] * 6 + [0.0] * 3


def test_a_plan_is_wide_where_there_are_no_branches() -> None:
    """The chains run on both cores and the branches on one each: 3 + 6 + 3 operators take 1.5, 3 and 1.5 ms."""
    solution = solve_policy("chrion", HOURGLASS, costs([1.0] * 12, SERIAL))
    assert solution.timeline.latency_ms == pytest.approx(6.0)
    assert solution.schedule.widths == (2,) * 3 + (1,) * 6 + (2,) * 3
    check_solution(HOURGLASS, costs([1.0] * 12, SERIAL), solution)


def test_handoffs_and_waking_are_weighed() -> None:
    """If waking a thread takes longer than a chain gains, all lanes have one core."""
    solution = solve_policy("chrion", HOURGLASS, costs([1.0] * 12, SERIAL, wake_ms=2.0))
    assert solution.timeline.latency_ms == pytest.approx(9.0)
    assert not solution.schedule.widths


def test_a_wide_segment_waits_for_all_of_its_cores() -> None:
    """An operator on one of the cores of a wide one that follows is on the critical chain, without an edge between."""
    dag = Dag.from_edges(2, [])
    times = costs([10.0, 4.0], [1.0, 0.0])
    solution = Problem(dag, times).evaluate(Schedule((0, 1), (2, 1), 2, widths=(1, 2)))
    assert solution.timeline.latency_ms == pytest.approx(12.0)
    assert critical_operators(dag, times, solution) == {0, 1}


@pytest.mark.parametrize(("width", "wide"), [(257, True), (258, False)])
def test_wide_plans_have_a_limited_number_of_threads(width: int, *, wide: bool) -> None:
    """Each wide segment has a session with threads of its own; a plan with more than 256 of them is not found."""
    dag = Dag.from_edges(1, [])
    machine = Costs(None, ((1.0,),) * width, (OperatorMemory(),), widths=(width,), wide_ms=((0.01,),))
    assert solve_policy("chrion", dag, machine).schedule.widths == ((width,) if wide else ())


def test_half_of_the_cores_for_each_branch() -> None:
    """Two chains that scale perfectly take half of four cores each: as fast as any division of the work."""
    dag = Dag.from_edges(8, [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7)])
    wide = costs([2.0] * 8, [0.0] * 8, cores=4, dispatch_ms=0.01)
    solution = solve_policy("chrion", dag, wide)
    assert solution.timeline.latency_ms == pytest.approx(4.0, rel=0.02)
    assert set(solution.schedule.widths) <= {2, 4}


@examples(25)
@given(st.data())
def test_wide_lanes_never_make_a_plan_slower(data: st.DataObject) -> None:
    """With times for widths, a plan is valid, and faster than without, or as fast with less memory, or the same."""
    dag = data.draw(dags(6))
    given_costs = data.draw(costs_for(dag, wide=True).filter(lambda c: c.cores > 1))
    narrow = solve_policy("chrion", dag, given_costs.without_widths())
    wide = solve_policy("chrion", dag, given_costs)
    check_solution(dag, given_costs, wide)
    if wide.schedule.widths:
        assert wide.timeline.latency_ms <= narrow.timeline.latency_ms
        assert any(ours < theirs for ours, theirs in zip(_figures(wide), _figures(narrow), strict=True))
    else:
        assert wide == replace(narrow, cap_mb=wide.cap_mb)


def _figures(solution: Solution) -> tuple[float, float, float]:
    """Return the latency and both counts of the accelerator's memory."""
    timeline = solution.timeline
    return timeline.latency_ms, timeline.resident_mb, timeline.memory_mb


@examples(20)
@given(st.data())
def test_more_cores_or_widths_never_predict_a_slower_plan(data: st.DataObject) -> None:
    """A plan for two cores is also one for three."""
    dag = data.draw(dags(7))
    all_cores = data.draw(costs_for(dag, wide=True).filter(lambda c: c.cores > 1))
    latencies = [
        solve_policy("chrion", dag, all_cores.limited_to(cores, all_cores.streams)).timeline.latency_ms
        for cores in range(1, all_cores.cores + 1)
    ]
    assert latencies == sorted(latencies, reverse=True)


class Untried(dict[int, list[Solution]]):
    """Solutions of smaller machines that no search may use."""

    def get(self, *_: object) -> Any:
        """Fail."""
        pytest.fail("a solution of a smaller machine was tried")


def test_nothing_is_tried_where_it_cannot_pay() -> None:
    """Two equal chains fill both cores, and operators that do not scale gain nothing: no solution is spread."""
    dag = Dag.from_edges(4, [(0, 1), (2, 3)])
    limited = costs([1.0] * 4, [0.9] * 4)
    best = Problem(dag, limited).evaluate(Schedule((0, 2, 1, 3), (1, 1, 2, 2), 2))
    assert widen(GraphFacts(dag, limited), limited, [best], Untried()) == []
