"""Memory budgets: kept, monotone, and as asked for beside an SLO."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chrion import load
from chrion.graph import Dag
from chrion.profiler import Costs, uniform_costs
from chrion.scheduler import Schedule
from chrion.scheduler.evaluation.solution import Problem, Solution, VariantSolution
from chrion.scheduler.evaluation.validation import check_solution
from chrion.scheduler.policies.chrion import ChrionPolicy, ChunkSearch
from chrion.scheduler.policies.registry import POLICIES
from chrion.scheduler.search.alpha import Limits, best_within, raise_to_fit
from chrion.scheduler.search.pareto import find_frontier, pareto_points, refine_point, sample_frontier
from chrion.zoo import build
from helpers import smallest_graph
from strategies import costs_for, dags

BUDGETS = st.floats(0.0, 40.0)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Dag, Costs]:
    """A random graph on an accelerator and one to three cores."""
    dag = draw(dags(largest=5))
    return dag, draw(costs_for(dag, accelerator=True).filter(lambda c: c.cores > 0))


def planned(dag: Dag, costs: Costs, limits: Limits, alpha: float | None = None) -> VariantSolution:
    """The default policy's choice within limits."""
    chunked = ChunkSearch({None: (smallest_graph(), ChrionPolicy(dag, costs))})
    return chunked.within(chunked.improve(alpha or 0.0), limits, alpha, 0.5)[0]


def latency_ms(candidate: VariantSolution) -> float:
    return candidate.solution.timeline.latency_ms


@settings(deadline=None, max_examples=60)
@given(problem=problems(), budget=BUDGETS, alpha=st.sampled_from([None, 0.0, 0.7]))
def test_the_default_policy_never_exceeds_the_budget(
    problem: tuple[Dag, Costs], budget: float, alpha: float | None
) -> None:
    """On any machine with a CPU core, whose memory is not counted; and the plan is a valid one."""
    chosen = planned(*problem, Limits(None, budget), alpha)
    check_solution(*problem, chosen.solution)
    assert chosen.solution.timeline.resident_mb <= budget
    assert chosen.fits(budget)


@settings(deadline=None, max_examples=60)
@given(problem=problems(), budgets=st.tuples(BUDGETS, BUDGETS), alpha=st.sampled_from([None, 0.0, 0.7]))
def test_a_larger_budget_never_predicts_slower(
    problem: tuple[Dag, Costs], budgets: tuple[float, float], alpha: float | None
) -> None:
    """Nor a higher L + alpha * M."""
    small, large = (planned(*problem, Limits(None, budget), alpha) for budget in sorted(budgets))
    assert latency_ms(large) <= latency_ms(small) + 1e-9
    assert large.solution.cost(alpha or 0.0) <= small.solution.cost(alpha or 0.0) + 1e-9


@settings(deadline=None, max_examples=60)
@given(problem=problems(), budgets=st.tuples(BUDGETS, BUDGETS), slo=st.floats(0.5, 30.0))
def test_beside_an_slo_the_budget_goes_first(
    problem: tuple[Dag, Costs], budgets: tuple[float, float], slo: float
) -> None:
    """It is kept to even where the SLO is missed then; a larger one never turns a met SLO into a missed one."""
    small, large = (planned(*problem, Limits(slo, budget)) for budget in sorted(budgets))
    assert small.fits(min(budgets))
    assert large.fits(max(budgets))
    assert large.meets(slo) or not small.meets(slo)


@settings(deadline=None, max_examples=60)
@given(problem=problems(), budget=BUDGETS, name=st.sampled_from(["chrion-paper", "bfs", "dfs", "heft", "cpu"]))
def test_raising_alpha_fits_or_says_what_comes_nearest(problem: tuple[Dag, Costs], budget: float, name: str) -> None:
    """What is returned fits if any of the alphas tried does; an alpha that fits already is left alone."""
    solve = POLICIES[name].make_solver(*problem)
    tried: list[VariantSolution] = []

    def attempt(alpha: float) -> VariantSolution:
        tried.append(VariantSolution(alpha, solve(alpha), None, smallest_graph()))
        return tried[-1]

    start = attempt(0.0)
    found = raise_to_fit(attempt, start, budget, 0.5)
    assert found.fits(budget) == any(c.fits(budget) for c in tried)
    assert (found is start) == start.fits(budget) or not found.fits(budget)
    least = min(c.solution.timeline.resident_mb for c in tried)
    assert found.fits(budget) or found.solution.timeline.resident_mb == least


@settings(deadline=None, max_examples=60)
@given(problem=problems())
def test_a_frontier_trades_latency_for_memory(problem: tuple[Dag, Costs]) -> None:
    """Memory rises and latency falls from point to point; the first takes none; refining moves no point outwards."""
    policy = ChrionPolicy(*problem)
    found = find_frontier(policy.initial, policy.search, 0.5)
    assert found[0].timeline.resident_mb == 0.0
    for smaller, larger in itertools.pairwise(found):
        assert smaller.timeline.resident_mb < larger.timeline.resident_mb
        assert smaller.timeline.latency_ms > larger.timeline.latency_ms
    for point in sample_frontier(found):
        better = refine_point(policy.search, point, len(found))
        assert better.timeline.resident_mb <= point.timeline.resident_mb
        assert better.timeline.latency_ms <= point.timeline.latency_ms + 1e-9


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_pareto_points_are_those_that_nothing_beats(figures: list[tuple[int, int]]) -> None:
    """Against the definition, over all pairs."""
    blank = Problem(Dag.from_edges(1, []), uniform_costs(Dag.from_edges(1, []))).evaluate(Schedule((0,), (1,), 1))
    made = [
        replace(blank, timeline=replace(blank.timeline, latency_ms=float(ms), resident_mb=float(mb)))
        for ms, mb in figures
    ]
    kept = {(s.timeline.latency_ms, s.timeline.resident_mb) for s in pareto_points(made, lambda s: s)}
    expected = {
        (ms, mb) for ms, mb in figures if not any((a <= ms and b <= mb) and (a, b) != (ms, mb) for a, b in figures)
    }
    assert kept == expected


def test_points_are_spread_over_the_whole_frontier() -> None:
    """All of a few; of many, some from the first to the last."""
    assert sample_frontier(range(5)) == range(5)
    some = sample_frontier(range(1000))
    assert (some[0], some[-1]) == (0, 999)
    assert len(some) == len(set(some)) < 50


def made(latency: float, memory: float) -> VariantSolution:
    """A candidate of these figures."""
    dag = Dag.from_edges(1, [])
    solution: Solution = Problem(dag, uniform_costs(dag)).evaluate(Schedule((0,), (1,), 1))
    timeline = replace(solution.timeline, latency_ms=latency, resident_mb=memory)
    return VariantSolution(0.0, replace(solution, timeline=timeline), None, smallest_graph())


FAST, MIDDLE, SMALL = made(10.0, 900.0), made(20.0, 500.0), made(40.0, 0.0)


@pytest.mark.parametrize(
    ("limits", "alpha", "expected"),
    [
        (Limits(None, 1000.0), None, FAST),
        (Limits(None, 600.0), None, MIDDLE),
        (Limits(None, 600.0), 1.0, SMALL),
        (Limits(25.0, 1000.0), None, MIDDLE),  # the least memory within the SLO
        (Limits(25.0, 1000.0), 0.0, FAST),  # alpha says that memory is worth nothing
        (Limits(15.0, 600.0), None, MIDDLE),  # misses the SLO: the fastest within the budget
        (Limits(None, 0.0), None, SMALL),
    ],
)
def test_the_best_within_limits(limits: Limits, alpha: float | None, expected: VariantSolution) -> None:
    """The budget first, then the SLO, then L + alpha * M; without alpha, an SLO asks for the least memory."""
    assert best_within([MIDDLE, SMALL, FAST], limits, alpha)[0] is expected


def test_where_nothing_fits_the_smallest_comes_first() -> None:
    """To be said to exceed the budget."""
    assert best_within([FAST, MIDDLE], Limits(None, 100.0), None)[0] is MIDDLE


def test_a_whole_stack_of_layers_is_kept_within_any_budget() -> None:
    """Steps of four layers: between nothing and all, each budget is used for the most part, and buys latency."""
    graph = load(build("lstm", {"layers": 4, "seq": 4, "batch": 1, "io": 64}))
    costs = uniform_costs(graph.dag, accelerator_ms=0.02, cpu_ms=[0.2, 0.2], handoff_ms=0.002)
    whole = ChrionPolicy(graph.dag, costs)(0.0).timeline
    assert whole.resident_mb > 0
    found = [planned(graph.dag, costs, Limits(None, whole.resident_mb * share)) for share in (0.0, 0.3, 0.55, 0.8, 1)]
    latencies = [latency_ms(c) for c in found]
    assert latencies == sorted(latencies, reverse=True)
    assert len(set(latencies)) == len(latencies)
    for share, candidate in zip((0.3, 0.55, 0.8), found[1:4], strict=True):
        assert candidate.solution.timeline.resident_mb >= (share - 0.3) * whole.resident_mb
