"""Shares of a device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chrion.graph import Dag
from chrion.profiler.roofline import Roofline

#: A product with the best arithmetic rate, a copy with the best memory rate, a small operator, and an unknown one.
DAG = replace(
    Dag.from_edges(4, []), flops=(1000.0, 0.0, 10.0, 0.0), input_bytes=(50, 400, 2, 0), output_bytes=(50, 400, 2, 0)
)
TIMES = (10.0, 4.0, 1.0, 2.0)


def test_shares_are_relative_to_the_best_rates() -> None:
    """The best rates are 100 flops and 200 bytes per ms; the small operator reaches 10 and 4."""
    assert Roofline.of(DAG, TIMES).shares == pytest.approx((1.0, 1.0, 0.1, 1.0))


def test_operators_are_limited_by_arithmetic_or_memory() -> None:
    """The product and the small operator are limited by arithmetic (0.1 ms against 0.02 ms), the copy by memory."""
    roofline = Roofline.of(DAG, TIMES)
    assert [roofline.memory_bound(i) for i in range(4)] == [False, True, False, False]


def test_infinite_times_are_ignored() -> None:
    """Infinite times do not affect the best rates, and their shares are 1."""
    assert Roofline.of(DAG, (float("inf"), 4.0, 1.0, 2.0)).shares == pytest.approx((1.0, 1.0, 1.0, 1.0))
    assert Roofline.of(Dag.from_edges(2, []), (0.0, 1.0)).shares == (1.0, 1.0)
