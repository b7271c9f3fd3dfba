"""The pool of solutions: exact memory where it decides, and the same choice as if all memory were exact."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.profiler import Costs
from chrion.scheduler.evaluation.solution import Problem, VariantSolution
from chrion.scheduler.limits import Limits
from chrion.scheduler.priced_memory import MEMORIES, Memory
from chrion.scheduler.search.alpha import best_within
from chrion.scheduler.search.solution_pool import SolutionPool
from helpers import smallest_graph
from strategies import costs_for, dags, schedules

LIMITS = st.builds(Limits, st.none() | st.floats(0, 60), st.none() | st.floats(0, 40))


def draw_variants(data: st.DataObject, dag: Dag, costs: Costs) -> list[VariantSolution]:
    """Return evaluated random schedules of four variants, with the search's estimates of memory."""
    problem = Problem(dag, costs)
    return [
        VariantSolution(0.0, problem.evaluate(schedule), chunk, smallest_graph())
        for schedule in data.draw(st.lists(schedules(dag, costs, most_streams=2), min_size=1, max_size=6))
        for chunk in [data.draw(st.sampled_from([None, 2, 4, 8]))]
    ]


class Measures:
    """The measures of a pool's solutions, which count the exact ones."""

    def __init__(self, dag: Dag, costs: Costs) -> None:
        self.problem = dag, costs
        self.exact = 0

    def with_least_memory(self, variant: VariantSolution) -> VariantSolution:
        """Return a solution with a lower bound on its memory."""
        return replace(variant, solution=variant.solution.with_least_memory(*self.problem))

    def with_frame(self, variant: VariantSolution) -> VariantSolution:
        """Return a solution with exact memory."""
        self.exact += 1
        return replace(variant, solution=variant.solution.with_frame(*self.problem))


def draw_problem(data: st.DataObject) -> tuple[Dag, Costs]:
    """Return a graph whose values have megabytes and weights, and costs on an accelerator."""
    dag = data.draw(dags(6, requests=True))
    weights = tuple((i % 3,) if data.draw(st.booleans()) else () for i in range(len(dag)))
    sizes = tuple(1_000_000 * size for size in dag.value_bytes)
    dag = replace(dag, value_bytes=sizes, weights=weights, weight_bytes=(1_000_000, 3_000_000, 5_000_000))
    return dag, data.draw(costs_for(dag, accelerator=True))


@given(data=st.data(), memory=st.sampled_from(MEMORIES))
def test_the_choice_is_that_by_exact_memory(data: st.DataObject, memory: Memory) -> None:
    """For any limits and prices, one after another, the selection and its alpha are those of exact figures."""
    dag, costs = draw_problem(data)
    variants = draw_variants(data, dag, costs)
    measures = Measures(dag, costs)
    pool = SolutionPool(variants, memory, measures.with_least_memory, measures.with_frame)
    exact = [measures.with_frame(variant) for variant in variants]
    for _ in range(3):
        limits, alpha = data.draw(LIMITS), data.draw(st.none() | st.floats(0, 5))
        selected = pool.select(limits, alpha)
        assert selected == expected_selection(exact, limits, alpha, memory)
        assert pool.implied_alpha(selected[0]) == expected_alpha(selected[0], exact, memory)


def expected_selection(
    exact: list[VariantSolution], limits: Limits, alpha: float | None, memory: Memory
) -> list[VariantSolution]:
    """Return the best solution of each variant that keeps the limits, at most three; the best of all if none does."""
    ranked = best_within(exact, limits, alpha, memory)
    found: dict[tuple[int | None, bool], VariantSolution] = {}
    for variant in ranked:
        if variant.fits(limits.budget_mb) and variant.meets(limits.slo_ms):
            found.setdefault((variant.variant, variant.wide), variant)
    return list(found.values())[:3] or ranked[:1]


def expected_alpha(chosen: VariantSolution, exact: list[VariantSolution], memory: Memory) -> float:
    """Return the least price of memory at which no faster solution costs less than the chosen one."""
    latency_ms = chosen.solution.timeline.latency_ms
    prices = [
        (latency_ms - v.solution.timeline.latency_ms) / (v.memory_mb(memory) - chosen.memory_mb(memory))
        for v in exact
        if v.solution.timeline.latency_ms < latency_ms and v.memory_mb(memory) > chosen.memory_mb(memory)
    ]
    return max(prices, default=0.0)


@given(data=st.data())
def test_only_the_memory_that_decides_is_exact(data: st.DataObject) -> None:
    """Without limits and prices, only the fastest solution of each variant is measured, and others as fast as it."""
    dag, costs = draw_problem(data)
    variants = draw_variants(data, dag, costs)
    measures = Measures(dag, costs)
    SolutionPool(variants, "resident", measures.with_least_memory, measures.with_frame).select(Limits(), None)
    fastest: dict[int | None, float] = {}
    for variant in variants:
        latency_ms = variant.solution.timeline.latency_ms
        fastest[variant.variant] = min(latency_ms, fastest.get(variant.variant, latency_ms))
    assert measures.exact <= sum(v.solution.timeline.latency_ms == fastest[v.variant] for v in variants)


@given(st.data())
def test_the_bound_is_never_above_the_exact_memory(data: st.DataObject) -> None:
    """Whatever runs on the accelerator, the bound is at most what a request holds."""
    dag, costs = draw_problem(data)
    measures = Measures(dag, costs)
    for variant in draw_variants(data, dag, costs):
        least = measures.with_least_memory(variant).solution.timeline.resident_mb
        assert least <= measures.with_frame(variant).solution.timeline.resident_mb + 1e-9
