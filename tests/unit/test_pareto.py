"""The frontier of latency and accelerator memory."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.profiler import Costs, uniform_costs
from chrion.scheduler import Schedule
from chrion.scheduler.evaluation.solution import Problem
from chrion.scheduler.policies.chrion import ChrionPolicy
from chrion.scheduler.search.pareto import find_frontier, pareto_points, refine_point, sample_frontier
from strategies import problems


@settings(deadline=None, max_examples=60)
@given(problem=problems())
def test_a_frontier_trades_latency_for_memory(problem: tuple[Dag, Costs]) -> None:
    """From point to point memory increases and latency decreases; the first point needs no memory.

    Refinement worsens neither.
    """
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
def test_pareto_points_are_not_dominated(figures: list[tuple[int, int]]) -> None:
    """The points equal those of the definition over all pairs."""
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


def test_a_sample_covers_the_whole_frontier() -> None:
    """A short frontier is kept; a long one is sampled from its first to its last point."""
    assert sample_frontier(range(5)) == range(5)
    some = sample_frontier(range(1000))
    assert (some[0], some[-1]) == (0, 999)
    assert len(some) == len(set(some)) < 50
