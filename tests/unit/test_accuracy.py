"""Comparison of outputs."""

from __future__ import annotations

import numpy as np
import pytest

from chrion.report.benchmark.accuracy import largest_difference

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("actual", "expected", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([NAN, 1.0], [NAN, 1.0], 0.0),
        ([NAN, 1.0], [1.0, 1.0], INFINITE),
        ([INFINITE], [INFINITE], 0.0),
        ([INFINITE], [-INFINITE], INFINITE),
        ([1.0], [1.0, 2.0], INFINITE),
        ([], [], 0.0),
        (["a"], ["a"], 0.0),
        (["a"], ["b"], INFINITE),
        ([True], [False], 1.0),
        ([2**40], [2**40 + 3], 3.0),
    ],
)
def test_the_largest_difference(actual: list[object], expected: list[object], difference: float) -> None:
    """The difference is absolute, and infinite if shapes, NaNs or text differ."""
    assert largest_difference([np.array(actual)], [np.array(expected)]) == difference


def test_the_largest_of_several_outputs_counts() -> None:
    """The largest difference among several outputs is returned, and zero for no outputs."""
    assert largest_difference([[1.0], [2.0]], [[1.5], [4.0]]) == 2.0
    assert largest_difference([], []) == 0.0
