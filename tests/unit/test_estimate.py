"""Times that are estimated from flops and bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.profiler.estimate import Estimator, OperatorWork, fit
from chrion.profiler.transfer import fit_copy

COEFFICIENT = st.sampled_from([0.0, 0.01, 0.5, 2.0])


@given(COEFFICIENT, COEFFICIENT, COEFFICIENT, st.integers(0, 99))
def test_exact_data_are_predicted_exactly(a: float, f: float, b: float, seed: int) -> None:
    """Times without noise determine the times of other operators."""
    if a + f + b == 0:
        return
    pick = np.random.default_rng(seed)
    works = [OperatorWork("T", flops, size, a + f * flops + b * size) for flops, size in pick.uniform(1, 100, (8, 2))]
    estimate = Estimator(works)
    for flops, size in pick.uniform(1, 100, (5, 2)):
        assert estimate.time_ms(OperatorWork("T", flops, size)) == pytest.approx(a + f * flops + b * size, rel=1e-3)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9), st.floats(1e-6, 1e3)), max_size=8))
def test_no_coefficient_is_negative(rows: list[tuple[int, int, float]]) -> None:
    """Coefficients are finite and not negative for any measurements."""
    coefficients = fit([OperatorWork("T", *row) for row in rows])
    assert (coefficients >= 0).all()
    assert np.isfinite(coefficients).all()


def test_an_unknown_type_is_estimated_from_all_operators() -> None:
    """The estimate is zero if no operator is known."""
    assert Estimator([OperatorWork("T", 10, 10, 3.0)]).time_ms(OperatorWork("U", 20, 10)) == pytest.approx(6.0)
    assert Estimator([]).time_ms(OperatorWork("U", 20, 10)) == 0.0


def test_operators_without_time_are_ignored_for_other_types() -> None:
    """An operator of zero time does not affect the estimates of other types."""
    known = [OperatorWork("T", 10, 10, 3.0), OperatorWork("Identity", 10, 10, 0.0)]
    assert Estimator(known).time_ms(OperatorWork("U", 20, 10)) == pytest.approx(6.0)
    assert Estimator(known).time_ms(OperatorWork("Identity", 20, 10)) == pytest.approx(0.0, abs=1e-6)


def test_types_are_fitted_separately() -> None:
    """Each type has its own coefficients."""
    estimate = Estimator([OperatorWork("T", 10, 0, 1.0), OperatorWork("U", 10, 0, 5.0)])
    assert estimate.time_ms(OperatorWork("T", 20, 0)) == pytest.approx(2.0)
    assert estimate.time_ms(OperatorWork("U", 20, 0)) == pytest.approx(10.0)


@given(st.floats(0, 1), st.floats(1e-9, 1e-5))
def test_copies_fit_latency_and_bandwidth(latency: float, slope: float) -> None:
    """Exact times determine latency and bandwidth."""
    sizes = [1 << 12, 1 << 16, 1 << 20, 1 << 25]
    cost = fit_copy(sizes, [latency + slope * size for size in sizes])
    for size in sizes:
        assert cost.ms(size) == pytest.approx(latency + slope * size, rel=1e-3, abs=1e-9)


def test_copy_costs_are_never_negative() -> None:
    """Latency and slope are zero or positive, even for data that would fit a negative one."""
    for times in ([3.0, 2.0, 1.0], [0.001, 1.0, 9.0]):
        cost = fit_copy([1000, 2000, 3000], times)
        assert cost.latency_ms >= 0
        assert cost.ms_per_byte >= 0
