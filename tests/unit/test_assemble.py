"""Values that nodes read, through the bodies of control-flow operators too, and sizes of weights."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from chrion.graph.assemble import node_reads, weight_size


def body(nodes: list[onnx.NodeProto], outputs: list[str], inputs: tuple[str, ...] = ()) -> onnx.GraphProto:
    """Return the body of a control-flow operator."""
    values = [
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names]
        for names in (inputs, outputs)
    ]
    return helper.make_graph(nodes, "body", *values)


def test_captures_of_bodies_follow_the_inputs_in_sorted_order() -> None:
    """A body's own inputs, weights and results are not captures; captures of a nested body belong to the outer node."""
    inner = body([helper.make_node("Add", ["deep", "local"], ["sum"])], ["sum"])
    then = body(
        [
            helper.make_node("Neg", ["z"], ["local"]),
            helper.make_node("Add", ["local", "own"], ["t"]),
            helper.make_node("If", ["go"], ["u"], then_branch=inner, else_branch=body([], ["aside"])),
        ],
        ["u"],
    )
    then.initializer.append(numpy_helper.from_array(np.ones(1, np.float32), "own"))
    loop = body([helper.make_node("Add", ["state", "a"], ["next"])], ["go", "next"], ("i", "go", "state"))
    nodes = [
        helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=body([], ["b"])),
        helper.make_node("Loop", ["n", "", "y"], ["r"], body=loop),
        helper.make_node("Clip", ["r", "", "c", "r"], ["s"]),
    ]
    model = helper.make_model(helper.make_graph(nodes, "graph", [], []))
    assert node_reads(model) == [("c", "aside", "b", "deep", "go", "z"), ("n", "y", "a"), ("r", "c")]


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("FLOAT", 60),
        ("DOUBLE", 120),
        ("BFLOAT16", 30),
        ("BOOL", 15),
        ("INT4", 8),
        ("UINT4", 8),
        ("STRING", 120),
        ("COMPLEX64", 120),
    ],
)
def test_packed_types_take_parts_of_a_byte(kind: str, size: int) -> None:
    """Fifteen elements of four bits take eight bytes; a string counts as a pointer of eight bytes."""
    tensor = onnx.TensorProto(data_type=onnx.TensorProto.DataType.Value(kind), dims=[3, 5])
    assert weight_size(tensor) == size
