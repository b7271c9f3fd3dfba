"""Chains of operators that arrange the elements of one token."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from chrion.generation.rewrites.arrangements import join_arrangements
from chrion.generation.rewrites.observation import Observation, Size
from chrion.graph.rewrite import needed_nodes

ONE, NEW, TOTAL = Size(0, 0, 1), Size(1, 0, 0), Size(1, 1, 0)


def fixed(number: int) -> Size:
    """Return a size that is the same for all requests."""
    return Size(0, 0, number)


def joined(nodes: list[onnx.NodeProto], shapes: dict[str, tuple[Size | None, ...]]) -> tuple[list[str], dict[str, str]]:
    """Return the operators, and the first input of each by its output."""
    targets = {"heads": [0, -1, 4, 8], "flat": [0, -1, 32], "axis": [1], "last": [-2], "first": [0], "rows": [-1, 8]}
    constants = {name: np.array(target) for name, target in targets.items()}
    seen = Observation(shapes, {}, constants, {})
    added = {"given": numpy_helper.from_array(np.array([-1, 0, 8]), "given")}
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


def test_a_reshape_to_rows_reads_the_first_value() -> None:
    """Its target says nothing of other axes, so that the order of the elements is enough; 0 copies an axis."""
    nodes = [
        helper.make_node("Reshape", ["x", "heads"], ["split"]),
        helper.make_node("Reshape", ["split", "rows"], ["all"]),
        helper.make_node("Reshape", ["split", "given"], ["copied"]),
        helper.make_node("Reshape", ["split", "rows"], ["none"], allowzero=1),
    ]
    shapes: dict[str, tuple[Size | None, ...]] = {
        "x": (ONE, NEW, fixed(32)),
        "split": (ONE, NEW, fixed(4), fixed(8)),
        "all": (Size(4, 0, 0), fixed(8)),
        "none": (Size(4, 0, 0), fixed(8)),
        "copied": (Size(4, 0, 0), Size(1, 0, 0), fixed(8)),
    }
    sources = joined(nodes, shapes)[1]
    assert sources == {"split": "x", "all": "x", "copied": "split", "none": "split"}


def test_axes_of_one_are_added_and_removed() -> None:
    """Also if they are counted from the last one; a negative axis that may be the first one stays."""
    nodes = [
        helper.make_node("Unsqueeze", ["x", "axis"], ["wide"]),
        helper.make_node("Squeeze", ["wide", "axis"], ["back"]),
        helper.make_node("Unsqueeze", ["x", "last"], ["late"]),
    ]
    shapes: dict[str, tuple[Size | None, ...]] = {
        "x": (ONE, NEW, fixed(32)),
        "wide": (ONE, ONE, NEW, fixed(32)),
        "back": (ONE, NEW, fixed(32)),
        "late": (ONE, NEW, ONE, fixed(32)),
    }
    kinds, sources = joined(nodes, shapes)
    assert kinds == ["Reshape"] * 3
    assert sources == {"wide": "x", "back": "x", "late": "x"}


def test_needed_nodes_are_those_that_an_output_depends_on() -> None:
    """Optional inputs and outputs without a name are no dependencies."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="first"),
        helper.make_node("Dropout", ["x"], ["unread", ""], name="unread"),
        helper.make_node("Clip", ["a", "", "most"], ["b"], name="second"),
        helper.make_node("Neg", ["b"], ["other"], name="other"),
    ]
    assert [node.name for node in needed_nodes(nodes, ["b"])] == ["first", "second"]
    assert [node.name for node in needed_nodes(nodes, ["b", "other"])] == ["first", "second", "other"]
    assert needed_nodes(nodes, ["x"]) == []
