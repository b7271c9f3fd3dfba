"""Shares of a device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chrion.graph import Dag
from chrion.profiler.roofline import Roofline

#: A product at the best arithmetic, a copy at the best bandwidth, a small operator, and one of which nothing is known.
DAG = replace(
    Dag.from_edges(4, []), flops=(1000.0, 0.0, 10.0, 0.0), input_bytes=(50, 400, 2, 0), output_bytes=(50, 400, 2, 0)
)
TIMES = (10.0, 4.0, 1.0, 2.0)


def test_shares_are_the_nearer_of_two_roofs() -> None:
    """100 flops and 200 bytes a ms are the roofs; the small operator does 10 and 4 a ms."""
    assert Roofline.of(DAG, TIMES).shares == pytest.approx((1.0, 1.0, 0.1, 1.0))


def test_what_limits_an_operator() -> None:
    """The product computes, the copy moves bytes; the small one computes 0.1 ms and moves for 0.02."""
    roofline = Roofline.of(DAG, TIMES)
    assert [roofline.memory_bound(i) for i in range(4)] == [False, True, False, False]


def test_what_cannot_run_there_has_no_say() -> None:
    """An infinite time is left out of the roofs, and counts as a share of one."""
    assert Roofline.of(DAG, (float("inf"), 4.0, 1.0, 2.0)).shares == pytest.approx((1.0, 1.0, 1.0, 1.0))
    assert Roofline.of(Dag.from_edges(2, []), (0.0, 1.0)).shares == (1.0, 1.0)
