"""The frontier of latency and accelerator memory."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.profiler import Costs
from chrion.scheduler.policies.chrion import PortfolioSearch
from chrion.scheduler.search.initial_solutions import GraphFacts, InitialSolutions
from chrion.scheduler.search.local_search import LocalSearch
from chrion.scheduler.search.pareto import descend, pareto_points, resident_figures, sample_evenly
from property_tests import examples
from solution_checks import check_solution
from strategies import problems


@examples(60)
@given(problem=problems())
def test_a_frontier_trades_latency_for_memory(problem: tuple[Dag, Costs]) -> None:
    """From point to point memory increases and latency decreases; the first point needs no memory."""
    found = pareto_points(PortfolioSearch({None: problem}).solutions[None], resident_figures)
    assert found[0].timeline.resident_mb == 0.0
    for smaller, larger in itertools.pairwise(found):
        assert smaller.timeline.resident_mb < larger.timeline.resident_mb
        assert smaller.timeline.latency_ms > larger.timeline.latency_ms


@examples(60)
@given(problem=problems(), work=st.integers(0, 2000))
def test_the_solutions_of_a_descent_are_valid(problem: tuple[Dag, Costs], work: int) -> None:
    """On any graph and machine, for any amount of work."""
    dag, costs = problem
    facts = GraphFacts(dag, costs)
    initial = InitialSolutions(facts, costs)
    search = LocalSearch(initial.problem, facts.groups.members, facts.units)

    for start in itertools.islice(initial.make([0.0]), 3):
        if start.schedule.stages:
            continue
        for solution in descend(search, start, facts.groups.members, work):
            check_solution(dag, costs, solution)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_pareto_points_are_not_dominated(figures: list[tuple[int, int]]) -> None:
    """The points equal those of the definition over all pairs."""
    kept = set(pareto_points(figures, lambda row: row))
    expected = {
        (mb, ms) for mb, ms in figures if not any((a <= mb and b <= ms) and (a, b) != (mb, ms) for a, b in figures)
    }
    assert kept == expected


def test_a_sample_covers_the_whole_frontier() -> None:
    """A short frontier is kept; a long one is sampled from its first to its last point."""
    assert sample_evenly(range(5), 8) == range(5)
    some = sample_evenly(range(1000), 8)
    assert (some[0], some[-1]) == (0, 999)
    assert len(some) == len(set(some)) == 8
