"""Choice of alpha: for an SLO, for a memory budget, and among solutions within limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.profiler import Costs, uniform_costs
from chrion.scheduler import Schedule, Timeline
from chrion.scheduler.evaluation.solution import Problem, Solution, VariantSolution
from chrion.scheduler.limits import Limits
from chrion.scheduler.search.alpha import best_within, choose, raise_to_fit
from helpers import smallest_graph
from policy_solutions import solve_policy
from property_tests import examples
from strategies import problems

BUDGETS = st.floats(0.0, 40.0)
Solve = Callable[[float], VariantSolution]


def solver(latency_ms: Callable[[float], float], tried: list[float] | None = None) -> Solve:
    """Return a solver with a latency that depends on alpha; it appends each alpha to ``tried``."""

    def solve(alpha: float) -> VariantSolution:
        if tried is not None:
            tried.append(alpha)
        timeline = Timeline((), (), latency_ms(alpha), 0.0, 0.0, ())
        return VariantSolution(alpha, Solution(Schedule((), (), 0), None, (), timeline), None, smallest_graph())

    return solve


@pytest.mark.parametrize(("alpha", "expected"), [(None, 0.0), (0.0, 0.0), (0.3, 0.3)])
def test_without_an_slo_alpha_is_used_as_it_is(alpha: float | None, expected: float) -> None:
    """A given alpha is used; a missing one is 0, which gives the least latency."""
    tried: list[float] = []
    assert choose(solver(lambda _: 100.0, tried), None, alpha, 1.0).alpha == expected
    assert tried == [expected]


def test_an_alpha_that_meets_the_slo_is_kept() -> None:
    """If the given alpha meets the SLO, no other alpha is tried."""
    tried: list[float] = []
    assert choose(solver(lambda a: 10 + a, tried), 20.0, 5.0, 1.0).alpha == 5.0
    assert tried == [5.0]


@given(limit=st.floats(0.01, 0.99))
def test_an_alpha_that_misses_the_slo_is_lowered_as_little_as_possible(limit: float) -> None:
    """If latency increases with alpha, the choice meets the SLO and is within a thousandth of the largest."""
    chosen = choose(solver(lambda a: 10 + a), 10 + limit, 1.0, 1.0)
    assert chosen.alpha <= limit
    assert chosen.alpha >= limit - 1 / 16 / 2**6 - 1e-9


@given(limit=st.floats(0.3, 30), scale=st.floats(0.5, 2))
def test_an_slo_alone_gives_the_largest_alpha_that_meets_it(limit: float, scale: float) -> None:
    """If latency increases with alpha, the choice is the largest within one percent or a small part of the scale."""
    chosen = choose(solver(lambda a: 10 + a), 10 + limit, None, scale)
    assert chosen.meets(10 + limit)
    largest = min(limit, scale * 32)
    assert 0.99 * largest - scale / 4 / 2**6 <= chosen.alpha <= limit * (1 + 1e-12)


def test_an_slo_out_of_reach_gives_the_fastest() -> None:
    """The fastest solution of all alphas tried is chosen, even if latency decreases with alpha."""
    assert choose(solver(lambda a: 100 + a), 10.0, None, 1.0).alpha == 0.0
    tried: list[float] = []
    assert choose(solver(lambda a: 100 - a, tried), 10.0, 1.0, 1.0).alpha == max(tried) == 1.0


def test_a_latency_equal_to_the_slo_meets_it() -> None:
    """Only a latency above the SLO misses it."""
    assert solver(lambda _: 5.0)(0.0).meets(5.0)
    assert not solver(lambda _: 5.0)(0.0).meets(4.999)
    assert solver(lambda _: 5.0)(0.0).meets(None)


@examples(60)
@given(problem=problems(), budget=BUDGETS, name=st.sampled_from(["chrion-paper", "bfs", "dfs", "heft", "cpu"]))
def test_alpha_is_raised_until_the_budget_fits(problem: tuple[Dag, Costs], budget: float, name: str) -> None:
    """The result fits if any alpha tried does, else it is the smallest; an alpha that fits already is kept."""
    tried: list[VariantSolution] = []

    def solve_variant(alpha: float) -> VariantSolution:
        tried.append(VariantSolution(alpha, solve_policy(name, *problem, alpha), None, smallest_graph()))
        return tried[-1]

    start = solve_variant(0.0)
    found = raise_to_fit(solve_variant, start, budget, 0.5)
    assert found.fits(budget) == any(v.fits(budget) for v in tried)
    assert (found is start) == start.fits(budget) or not found.fits(budget)
    least = min(v.solution.timeline.resident_mb for v in tried)
    assert found.fits(budget) or found.solution.timeline.resident_mb == least


def with_figures(latency_ms: float, resident_mb: float) -> VariantSolution:
    """Return a solution with these figures."""
    dag = Dag.from_edges(1, [])
    solution = Problem(dag, uniform_costs(dag)).evaluate(Schedule((0,), (1,), 1))
    timeline = replace(solution.timeline, latency_ms=latency_ms, resident_mb=resident_mb)
    return VariantSolution(0.0, replace(solution, timeline=timeline), None, smallest_graph())


FAST, MIDDLE, SMALL = with_figures(10.0, 900.0), with_figures(20.0, 500.0), with_figures(40.0, 0.0)


@pytest.mark.parametrize(
    ("limits", "alpha", "expected"),
    [
        (Limits(None, 1000.0), None, FAST),
        (Limits(None, 600.0), None, MIDDLE),
        (Limits(None, 600.0), 1.0, SMALL),
        (Limits(25.0, 1000.0), None, MIDDLE),  # the least memory within the SLO
        (Limits(25.0, 1000.0), 0.0, FAST),  # memory has no price
        (Limits(15.0, 600.0), None, MIDDLE),  # misses the SLO: the fastest within the budget
        (Limits(None, 0.0), None, SMALL),
    ],
)
def test_limits_have_an_order_of_precedence(limits: Limits, alpha: float | None, expected: VariantSolution) -> None:
    """The budget precedes the SLO, and the SLO precedes L + alpha * M; with an SLO and no alpha, M is minimised."""
    assert best_within([MIDDLE, SMALL, FAST], limits, alpha)[0] is expected


def test_without_a_fit_the_smallest_excess_is_first() -> None:
    """If no solution fits the budget, the one with the smallest excess is chosen."""
    assert best_within([FAST, MIDDLE], Limits(None, 100.0), None)[0] is MIDDLE
