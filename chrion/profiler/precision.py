"""The precision of products: float32, or bfloat16 with sums in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from chrion.common.wrong_values import wrong_value
from chrion.errors import OptionError

#: With ``bf16``, native kernels round the weights, inputs and states of recurrent operators and matrix products to
#: bfloat16 for products.
Precision = Literal["float32", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


def check_precision(name: str) -> Precision:
    """Return the precision of a name.

    Raises:
        OptionError: There is no such precision.
    """
    for precision in PRECISIONS:
        if name == precision:
            return precision
    raise wrong_value("precision", " or ".join(PRECISIONS), name)


def check_max_error(max_error: float | None, precision: Precision) -> float | None:
    """Return a limit of the error.

    Args:
        max_error: The limit, or None.
        precision: The precision that it limits.

    Raises:
        OptionError: The limit is no share, or there is no error to limit.
    """
    if max_error is None:
        return None
    if precision == "float32":
        raise OptionError("max_error: not allowed without precision bf16")
    if not (isinstance(max_error, int | float) and 0 < max_error < 1):
        raise wrong_value("max_error", "a share of the largest output, such as 0.01", max_error)
    return float(max_error)


def missing_bfloat16() -> str:
    """Return why this machine does not multiply bfloat16; empty if it does. It is never emulated."""
    from chrion.native import bfloat16_available  # noqa: PLC0415 - imports onnxruntime, which planning does not need

    if bfloat16_available():
        return ""
    return "float32 instead of bf16: this processor has no AVX512-BF16, or native operators are not compiled"


def relative_error(actual: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest difference of an output, divided by the largest number of that output.

    Args:
        actual: Arrays, or anything that ``numpy.asarray`` accepts.
        expected: As many arrays. Those that are not of floating-point numbers do not count.

    Returns:
        The error of the output that has the largest one; infinite if shapes, NaN or infinities differ.
    """
    return max((_error(np.asarray(a), np.asarray(b)) for a, b in zip(actual, expected, strict=True)), default=0.0)


def _error(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    if expected.dtype.kind != "f":
        return 0.0
    finite = np.isfinite(expected)
    if actual.shape != expected.shape or not np.isfinite(actual[finite]).all():
        return math.inf
    if not np.array_equal(actual[~finite], expected[~finite], equal_nan=True):
        return math.inf
    right = expected[finite].astype(np.float64)
    difference, largest = np.abs(actual[finite] - right).max(initial=0.0), np.abs(right).max(initial=0.0)
    return float(difference / largest) if largest else math.inf if difference else 0.0
