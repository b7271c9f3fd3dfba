"""Choosing alpha."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.scheduler import Schedule, Timeline
from chrion.scheduler.evaluation.solution import Solution, VariantSolution
from chrion.scheduler.search.alpha import choose
from helpers import smallest_graph


def made(latency_ms: Callable[[float], float], tried: list[float] | None = None) -> Callable[[float], VariantSolution]:
    """Candidates whose latency is a function of alpha."""

    def attempt(alpha: float) -> VariantSolution:
        if tried is not None:
            tried.append(alpha)
        timeline = Timeline((), (), latency_ms(alpha), 0.0, 0.0, ())
        return VariantSolution(alpha, Solution(Schedule((), (), 0), None, (), timeline), None, smallest_graph())

    return attempt


@pytest.mark.parametrize(("alpha", "expected"), [(None, 0.0), (0.0, 0.0), (0.3, 0.3)])
def test_without_an_slo_alpha_is_used_as_it_is(alpha: float | None, expected: float) -> None:
    """Missing, it is 0: the least latency."""
    tried: list[float] = []
    assert choose(made(lambda _: 100.0, tried), None, alpha, 1.0).alpha == expected
    assert tried == [expected]


def test_an_alpha_that_meets_the_slo_is_kept() -> None:
    """Nothing else is tried."""
    tried: list[float] = []
    assert choose(made(lambda a: 10 + a, tried), 20.0, 5.0, 1.0).alpha == 5.0
    assert tried == [5.0]


@given(limit=st.floats(0.01, 0.99))
def test_an_alpha_that_misses_the_slo_is_lowered_no_further_than_needed(limit: float) -> None:
    """Where latency grows with alpha, the chosen one meets the SLO and is within a thousandth of the largest."""
    chosen = choose(made(lambda a: 10 + a), 10 + limit, 1.0, 1.0)
    assert chosen.alpha <= limit
    assert chosen.alpha >= limit - 1 / 16 / 2**6 - 1e-9


@given(limit=st.floats(0.3, 30), scale=st.floats(0.5, 2))
def test_an_slo_alone_gives_the_largest_alpha_that_meets_it(limit: float, scale: float) -> None:
    """Found to within a percent, or a small part of the scale, where latency grows with alpha."""
    chosen = choose(made(lambda a: 10 + a), 10 + limit, None, scale)
    assert chosen.meets(10 + limit)
    largest = min(limit, scale * 32)
    assert 0.99 * largest - scale / 4 / 2**6 <= chosen.alpha <= limit * (1 + 1e-12)


def test_an_slo_out_of_reach_gives_the_fastest() -> None:
    """Of all that were tried, also where latency falls with alpha."""
    assert choose(made(lambda a: 100 + a), 10.0, None, 1.0).alpha == 0.0
    tried: list[float] = []
    assert choose(made(lambda a: 100 - a, tried), 10.0, 1.0, 1.0).alpha == max(tried) == 1.0


def test_a_latency_equal_to_the_slo_meets_it() -> None:
    """Within means not above."""
    assert made(lambda _: 5.0)(0.0).meets(5.0)
    assert not made(lambda _: 5.0)(0.0).meets(4.999)
    assert made(lambda _: 5.0)(0.0).meets(None)
