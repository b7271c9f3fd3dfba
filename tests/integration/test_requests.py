"""Requests that the fast path takes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from chrion.graph.model import TensorInfo
from chrion.runtime.requests import FastPathMatcher

X, N = np.zeros((2, 3), np.float32), np.zeros((), np.int64)


@pytest.mark.parametrize(
    ("feed", "matches"),
    [
        ({"x": X, "n": N}, True),
        ({"n": N, "x": X}, True),
        ({"x": X}, False),
        ({"x": X, "n": N, "m": N}, False),
        ({"x": X, "m": N}, False),
        ({"x": X.astype(np.float64), "n": N}, False),
        ({"x": X.astype(">f4"), "n": N}, False),
        ({"x": X.reshape(3, 2), "n": N}, False),
        ({"x": np.zeros((3, 2), np.float32).T, "n": N}, False),
        ({"x": X.tolist(), "n": N}, False),
        ({"x": X, "n": 0}, False),
        ({"x": X, "n": np.int64(0)}, False),
        ({"x": None, "n": N}, False),
        ({"x": np.ma.masked_array(X), "n": N}, False),
        ([], False),
        (None, False),
    ],
)
def test_only_contiguous_arrays_of_the_declared_type_match(feed: Any, *, matches: bool) -> None:
    """All other requests are checked input by input, and may still be valid."""
    inputs = [TensorInfo("x", "tensor(float)", (2, 3)), TensorInfo("n", "tensor(int64)", ())]
    assert FastPathMatcher(inputs).matches(feed) is matches


@pytest.mark.parametrize(
    ("kind", "array"),
    [
        ("tensor(string)", np.array(["a"], object)),
        ("tensor(bfloat16)", np.zeros(1, ml_dtypes.bfloat16)),
        ("tensor(double)", np.array([None], object)),
    ],
)
def test_types_that_numpy_lacks_never_match(kind: str, array: Any) -> None:
    """Texts are checked input by input, and onnxruntime makes no tensor of an array of the smaller floats."""
    assert not FastPathMatcher([TensorInfo("x", kind, (1,))]).matches({"x": array})
