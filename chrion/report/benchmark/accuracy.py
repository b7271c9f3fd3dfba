"""Comparison of a session's outputs with those of plain onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

#: Outputs that differ from those of plain onnxruntime by more than this absolute difference are wrong: other orders of
#: summation in float32 change outputs of the order of 1 by less.
TOLERANCE = 1e-3


def largest_difference(actual: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest absolute difference between two lists of outputs.

    Args:
        actual: Arrays, or anything that ``numpy.asarray`` accepts.
        expected: As many arrays.

    Returns:
        The difference; infinite if shapes, the positions of NaN, or texts differ. Equal infinities do not differ.

    Raises:
        ValueError: The lists have different lengths.
    """
    return max((_difference(np.asarray(a), np.asarray(b)) for a, b in zip(actual, expected, strict=True)), default=0.0)


def _difference(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
    if left.shape != right.shape:
        return float("inf")
    if left.dtype.kind not in "fiub":
        return 0.0 if np.array_equal(left, right) else float("inf")
    left, right = left.astype(np.float64), right.astype(np.float64)
    if not np.array_equal(np.isnan(left), np.isnan(right)):
        return float("inf")
    equal = (left == right) | np.isnan(left)  # the difference of equal infinities would be NaN
    return float(np.abs(left[~equal] - right[~equal]).max(initial=0.0))
