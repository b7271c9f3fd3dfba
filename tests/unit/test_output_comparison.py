"""Tests of the comparison of outputs, and of settling differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers import FLOAT, INT64, branches, make_model, node, value
from output_comparison import Reference, Tolerance, difference

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


@pytest.mark.parametrize(
    ("ours", "theirs", "wrong"),
    [
        ([{1: 0.5}], [{1: 0.5}], False),
        ([{1: 0.5}], [{1: 0.6}], True),
        ([{1: 0.5}], [{2: 0.5}], True),
        ([{"a": 0.5}], [[0.5]], True),
        ([None], [None], False),
        ([None], [X], True),
        ([[X, X]], [[X, X]], False),
        ([[X]], [[X, X]], True),
        ([np.array(["a"], object)], [np.array(["a"], object)], False),
        ([np.array(["a"], object)], [np.array(["b"], object)], True),
        ([X.astype(np.float64)], [X], True),
        ([X.astype(np.float16) + np.float16(0.001)], [X.astype(np.float16)], False),
        ([float("nan")], [float("nan")], False),
        ([1], [1.0], True),
    ],
)
def test_values_of_every_kind_are_compared(ours: list[Any], theirs: list[Any], wrong: bool) -> None:  # noqa: FBT001
    """Tensors, text, sequences, maps and missing values are compared by structure, type and value."""
    assert bool(difference(ours, theirs)) == wrong


def test_tolerances_are_relative_and_absolute() -> None:
    """Either tolerance admits a difference, and tolerances are wider for half precision."""
    x = np.full(3, 100.0, np.float32)
    assert not difference([x * np.float32(1.0009)], [x], Tolerance(1e-3, 0.0))
    assert difference([x * np.float32(1.002)], [x], Tolerance(1e-3, 0.0))
    assert not difference([x + np.float32(0.9)], [x], Tolerance(0.0, 1.0))
    assert not difference([x.astype(np.float16) * np.float16(1.005)], [x.astype(np.float16)], Tolerance(1e-6, 1e-6))
    assert difference([x.astype(np.float16) * np.float16(1.05)], [x.astype(np.float16)], Tolerance(1e-6, 1e-6))


def test_differences_are_settled_if_plain_onnxruntime_agrees_with_itself() -> None:
    """A last bit of the input changes a rounded number, which is unsettled, but not a sum, which is settled."""
    shape = [2, 4]
    rounding = make_model(
        [node("Cast", ["x"], ["y"], to=INT64)], [value("x", FLOAT, shape)], [value("y", INT64, shape)]
    )
    feed = {"x": np.full(shape, 3.0, np.float32)}
    plain = Reference(rounding.SerializeToString())
    assert not plain.settles(feed, plain.run(feed))
    plain = Reference(branches().SerializeToString())
    assert plain.settles({"x": X}, plain.run({"x": X}))
