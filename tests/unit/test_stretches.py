"""Combination of solutions in stretches: the least sum of spans, valid results, and never a slower one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.profiler import Costs, OperatorMemory
from chrion.scheduler import Schedule
from chrion.scheduler.evaluation.solution import Problem, Solution
from chrion.scheduler.search.stretches import by_start, combine, find_stretches
from property_tests import examples
from solution_checks import check_solution
from strategies import costs_for, dags


def hourglasses(count: int) -> Dag:
    """Return a chain of ``count`` times an operator followed by two independent ones."""
    edges = []
    for at in range(0, 3 * count, 3):
        edges += [(at, at + 1), (at, at + 2)]
        if at:
            edges += [(at - 2, at), (at - 1, at)]
    return Dag.from_edges(3 * count, edges)


def costs_of(dag: Dag, wide_ms: Sequence[float], **machine: float) -> Costs:
    """Return costs of operators that take 1 ms on one core, and the given times on two."""
    n = len(dag)
    ones = ((1.0,) * n,) * 2
    return Costs(None, ones, (OperatorMemory(),) * n, widths=(2,), wide_ms=(tuple(wide_ms),), **machine)  # type: ignore[arg-type]


def narrow_and_wide(problem: Problem) -> list[Solution]:
    """Return a solution on one core each, branches side by side, and one with every operator on both cores."""
    n = len(problem.dag)
    order = problem.dag.topological_order
    lanes = tuple(2 if i % 3 == 2 else 1 for i in range(n))
    return [
        problem.evaluate(Schedule(order, lanes, 2), origin="narrow"),
        problem.evaluate(Schedule(order, (1,) * n, 2, widths=(2,) * n), origin="wide"),
    ]


@pytest.mark.parametrize("count", [1, 5, 20])
def test_operators_are_wide_between_branches_only(count: int) -> None:
    """The single operators take 0.5 ms on both cores, and the branches 1 ms side by side but 2 ms one after another."""
    dag = hourglasses(count)
    problem = Problem(dag, costs_of(dag, [0.5, 1.0, 1.0] * count))
    solution = combine(problem, narrow_and_wide(problem))
    assert solution.timeline.latency_ms == pytest.approx(1.5 * count)
    assert solution.schedule.widths == (2, 1, 1) * count
    assert solution.origin in {"narrow; in stretches wide", "wide; in stretches narrow"}
    check_solution(dag, problem.costs, solution)


def test_a_change_must_pay() -> None:
    """If waking threads takes longer than a single operator gains on two cores, the best solution stays as it is."""
    dag = hourglasses(5)
    problem = Problem(dag, costs_of(dag, [0.5, 1.0, 1.0] * 5, wake_ms=0.6))
    solutions = narrow_and_wide(problem)
    assert combine(problem, solutions) is solutions[0]


def test_many_stretches_are_found_with_few_cuts() -> None:
    """In 600 operators there are more possible stretches than cuts; long ones of each kind are found all the same."""
    dag = hourglasses(200)
    # The single operators scale in the first and the last quarter; in between, they are slower on two cores.
    wide_ms = [ms for at in range(200) for ms in ([0.3, 0.3, 0.3] if at // 50 in {0, 3} else [2.0] * 3)]
    problem = Problem(dag, costs_of(dag, wide_ms))
    solution = combine(problem, narrow_and_wide(problem))
    assert solution.timeline.latency_ms == pytest.approx(100 * 0.9 + 100 * 2, rel=0.02)
    assert problem.work <= 8 * len(dag)


@examples(40)
@given(st.data())
def test_no_alternation_has_a_smaller_sum_of_spans(data: st.DataObject) -> None:
    """With a cut after every operator, the sum of spans is the least of all alternations of two solutions."""
    dag = data.draw(dags(largest=6))
    costs = data.draw(costs_for(dag, accelerator=False, wide=True).filter(lambda c: c.cores > 1))
    problem = Problem(dag, costs)
    solutions = [_drawn(data, problem) for _ in range(2)]
    order = by_start(solutions[0])
    change_ms = costs.handoff_ms + costs.wake_ms

    def total(stretches: Sequence[tuple[Sequence[int], Solution]]) -> float:
        spans = (
            max(s.timeline.finish_ms[i] for i in own) - min(s.timeline.start_ms[i] for i in own) for own, s in stretches
        )
        return sum(spans) + change_ms * (len(stretches) - 1)

    found = find_stretches(problem, solutions)
    assert [i for stretch in found for i in stretch.operators] == list(order)
    assert all(a.solution is not b.solution for a, b in itertools.pairwise(found))
    n = len(dag)
    least = min(
        total([(order[a:b], s) for (a, b), s in zip(itertools.pairwise(ends), chosen, strict=True)])
        for count in range(n)
        for cuts in itertools.combinations(range(1, n), count)
        for ends in [(0, *cuts, n)]
        for chosen in ((solutions * n)[: count + 1], (solutions[::-1] * n)[: count + 1])
    )
    assert total([(stretch.operators, stretch.solution) for stretch in found]) == pytest.approx(least)


@examples(40)
@given(st.data())
def test_a_combination_is_valid_and_never_slower(data: st.DataObject) -> None:
    """Combinations of any solutions, with an accelerator or without, keep all rules."""
    dag = data.draw(dags(largest=9, requests=True))
    costs = data.draw(costs_for(dag, wide=True).filter(lambda c: c.cores > 1))
    problem = Problem(dag, costs)
    solutions = [_drawn(data, problem) for _ in range(data.draw(st.integers(1, 4)))]
    combined = combine(problem, solutions)
    check_solution(dag, costs, combined)
    assert combined.timeline.latency_ms <= min(s.timeline.latency_ms for s in solutions)


def _drawn(data: st.DataObject, problem: Problem) -> Solution:
    """Draw a solution with lanes of several cores, and of an accelerator if there is one."""
    dag, costs = problem.dag, problem.costs
    places = [(at, w) for w in (1, *costs.widths) for at in range(1, costs.cores - w + 2)]
    places += [(0, 1)] if costs.accelerator_ms is not None else []
    n = len(dag)
    placed = data.draw(st.lists(st.sampled_from(places), min_size=n, max_size=n))
    widths = tuple(width for _, width in placed)
    schedule = Schedule(
        dag.topological_order, tuple(lane for lane, _ in placed), costs.cores, widths=widths if max(widths) > 1 else ()
    )
    return problem.evaluate(schedule)
