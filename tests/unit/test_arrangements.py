"""Chains of operators that arrange the elements of one token."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from chrion.graph.arrangements import join_arrangements
from chrion.graph.observation import Observation, Size

ONE, NEW, TOTAL = Size(0, 0, 1), Size(1, 0, 0), Size(1, 1, 0)


def fixed(number: int) -> Size:
    """Return a size that is the same for all requests."""
    return Size(0, 0, number)


def joined(nodes: list[onnx.NodeProto], shapes: dict[str, tuple[Size | None, ...]]) -> tuple[list[str], dict[str, str]]:
    """Return the operators, and the first input of each by its output."""
    targets = {"heads": [0, -1, 4, 8], "flat": [0, -1, 32], "axis": [1], "first": [0]}
    constants = {name: np.array(target) for name, target in targets.items()}
    seen = Observation(shapes, {}, constants, {})
    added: dict[str, onnx.TensorProto] = {}
    found = join_arrangements(nodes, seen, added)
    for node in found:
        if node.input[1:] and node.input[1].startswith("one-token"):
            assert numpy_helper.to_array(added[node.input[1]])[0] == 0
    return [node.op_type for node in found], {node.output[0]: node.input[0] for node in found}


def test_a_chain_becomes_reshapes_of_its_first_value() -> None:
    """With one token, heads before tokens and tokens before heads are the same order."""
    nodes = [
        helper.make_node("Reshape", ["x", "heads"], ["split"]),
        helper.make_node("Transpose", ["split"], ["arranged"], perm=[0, 2, 1, 3]),
        helper.make_node("Unsqueeze", ["arranged", "axis"], ["wide"]),
        helper.make_node("Relu", ["wide"], ["y"]),
    ]
    shapes: dict[str, tuple[Size | None, ...]] = {
        "x": (ONE, NEW, fixed(32)),
        "split": (ONE, NEW, fixed(4), fixed(8)),
        "arranged": (ONE, fixed(4), NEW, fixed(8)),
        "wide": (ONE, ONE, fixed(4), NEW, fixed(8)),
        "y": (ONE, ONE, fixed(4), NEW, fixed(8)),
    }
    kinds, sources = joined(nodes, shapes)
    assert kinds == ["Reshape", "Reshape", "Reshape", "Relu"]
    assert sources == {"split": "x", "arranged": "x", "wide": "x", "y": "wide"}


def test_what_changes_the_order_stays() -> None:
    """Two axes that change places, an axis of the past, and requests that are no longer the first axis."""
    nodes = [
        helper.make_node("Transpose", ["a"], ["swapped"], perm=[0, 1, 3, 2]),
        helper.make_node("Transpose", ["keys"], ["columns"], perm=[0, 1, 3, 2]),
        helper.make_node("Unsqueeze", ["x", "first"], ["later"]),
        helper.make_node("Transpose", ["x"], ["tokens"], perm=[1, 0, 2]),
    ]
    shapes: dict[str, tuple[Size | None, ...]] = {
        "a": (ONE, NEW, fixed(4), fixed(8)),
        "swapped": (ONE, NEW, fixed(8), fixed(4)),
        "keys": (ONE, fixed(4), TOTAL, fixed(8)),
        "columns": (ONE, fixed(4), fixed(8), TOTAL),
        "x": (ONE, NEW, fixed(32)),
        "later": (ONE, ONE, NEW, fixed(32)),
        "tokens": (NEW, ONE, fixed(32)),
    }
    kinds, sources = joined(nodes, shapes)
    assert kinds == [node.op_type for node in nodes]
    assert sources == {node.output[0]: node.input[0] for node in nodes}
