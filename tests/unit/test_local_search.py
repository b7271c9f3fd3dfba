"""Local search."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.profiler import uniform_costs
from chrion.scheduler import Schedule
from chrion.scheduler.evaluation.solution import Problem
from chrion.scheduler.search.initial_solutions import GraphFacts, InitialSolutions
from chrion.scheduler.search.local_search import LocalSearch, iterate, merge_segments, move_units
from property_tests import examples
from solution_checks import check_solution
from strategies import costs_for, dags


@examples(60)
@given(data=st.data())
def test_local_search_is_monotone_and_keeps_its_budget(data: st.DataObject) -> None:
    """Neither moves nor merges make a solution worse or exceed the budget."""
    dag = data.draw(dags())
    costs = data.draw(costs_for(dag).filter(lambda c: c.cores > 0))
    budget = data.draw(st.integers(0, 2000))
    problem = Problem(dag, costs)
    start = problem.evaluate(Schedule(dag.topological_order, (1,) * len(dag), costs.cores))
    before = problem.work
    better = move_units(problem, start, [(i,) for i in range(len(dag))], budget=budget)
    assert problem.work <= before + budget + 3 * len(dag)
    assert better.cost(0.0) <= start.cost(0.0)
    merged = merge_segments(problem, better, budget=2000)
    assert merged.cost(0.0) <= better.cost(0.0) + 1e-9
    assert len(merged.segments) <= len(better.segments)


@examples(40)
@given(data=st.data())
def test_local_optima_are_left_for_valid_and_better_solutions_only(data: st.DataObject) -> None:
    """Iterated local search returns a valid solution that is no slower, within its budget and one evaluation more."""
    dag = data.draw(dags())
    costs = data.draw(costs_for(dag).filter(lambda c: c.cores > 0))
    problem = Problem(dag, costs)
    start = problem.evaluate(Schedule(dag.topological_order, (1,) * len(dag), costs.cores))
    before = problem.work
    found = iterate(problem, start, budget=500)
    assert problem.work <= before + 500 + 4 * len(dag)
    check_solution(dag, costs, found)
    assert found.timeline.latency_ms <= start.timeline.latency_ms


@examples(40)
@given(data=st.data())
def test_an_improved_solution_is_valid_and_within_its_cap(data: st.DataObject) -> None:
    """The solution is no slower than the initial one, and uses no more accelerator memory than the cap."""
    dag = data.draw(dags())
    costs = data.draw(costs_for(dag, accelerator=True).filter(lambda c: c.cores > 0))
    facts = GraphFacts(dag, costs)
    initial = InitialSolutions(facts, costs)
    search = LocalSearch(initial.problem, facts.groups.members, facts.units)
    start = data.draw(st.sampled_from(list(initial.make([0.0, 0.5]))))
    cap_mb = data.draw(st.sampled_from([math.inf, start.timeline.resident_mb]))
    improved = search.improve(start, cap_mb=cap_mb, budget=5000)
    check_solution(dag, costs, improved)
    assert improved.timeline.resident_mb <= cap_mb
    assert improved.timeline.latency_ms <= start.timeline.latency_ms + 1e-9


def test_the_cost_prices_memory_up_to_the_cap() -> None:
    """5 ms and 3 MB cost 11 ms at 2 ms per MB, and more than any other solution if they exceed the cap."""
    dag = Dag.from_edges(1, [])
    solution = Problem(dag, uniform_costs(dag, accelerator_ms=1.0)).evaluate(Schedule((0,), (0,), 0))
    large = replace(solution, timeline=replace(solution.timeline, latency_ms=5.0, resident_mb=3.0))
    assert [replace(large, cap_mb=cap_mb).cost(2.0) for cap_mb in (math.inf, 3.0, 2.9)] == [11.0, 11.0, math.inf]
