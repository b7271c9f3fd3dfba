"""Operators to which inputs without elements are fatal: which of a model are found, and which shapes they refuse."""

from __future__ import annotations

import pytest
from onnx import ModelProto, helper

from chrion.serving.server.tensors import fatal_operator, fragile_operators


def model(kind: str, domain: str = "") -> ModelProto:
    """Return a model of one operator, which reads ``x`` and ``y``, beside one that reads ``z``."""
    nodes = [helper.make_node(kind, ["x", "y"], ["a"], domain=domain), helper.make_node("Neg", ["z"], ["b"])]
    return helper.make_model(helper.make_graph(nodes, "g", [], []))


def test_operators_of_all_variants_are_found() -> None:
    """An operator in one of the files is enough; others of the same name in other domains are not meant."""
    assert fragile_operators([model("Add"), model("LSTM")], "z") == {"LSTM"}
    assert fragile_operators([model("Attention", "com.microsoft")], "x") == set()


def test_a_second_dimension_counts_where_the_operator_reads_it() -> None:
    """An empty cache of another layout, which is transposed first, is served."""
    attention = [model("Attention")]
    assert fragile_operators(attention, "x") == {"Attention"}
    assert fragile_operators(attention, "z") == set()


@pytest.mark.parametrize(
    ("operator", "shape", "fatal"),
    [
        ("LSTM", (0, 2, 4), True),
        ("LSTM", (1, 2, 4), False),
        ("STFT", (0,), True),
        ("Attention", (1, 0, 2, 4), True),
        ("Attention", (1, 2, 0, 4), False),
        ("Attention", (1, 0, 4), False),
        ("Conv", (1, 0, 4), True),
        ("Conv", (0, 3, 4), False),
    ],
)
def test_shapes_are_fatal(operator: str, shape: tuple[int, ...], fatal: bool) -> None:  # noqa: FBT001
    """As onnxruntime 1.31 does with the test cases of ONNX."""
    assert fatal_operator(shape, [operator]) == (operator if fatal else "")
