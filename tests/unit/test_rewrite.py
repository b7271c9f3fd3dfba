"""What rewrites share: the builder of a rewritten model, refusals, and the check of tests."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from chrion.graph.rewrite import RewriteError, Rewriter, nodes_before, refusals_of
from rewrite_checks import check_model


def model_of(*nodes: onnx.NodeProto, output: str = "y", opset: int = 20) -> onnx.ModelProto:
    """Return a model from ``x`` to an output, with a weight ``w`` that it may read."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [6]) for name in ("x", output))
    weight = numpy_helper.from_array(np.ones(6, np.float32), "w")
    graph = helper.make_graph(nodes, "g", [x], [y], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def node(kind: str, inputs: list[str], output: str, name: str = "") -> onnx.NodeProto:
    return helper.make_node(kind, inputs, [output], name=name)


def test_constants_are_shared_and_unread_weights_removed() -> None:
    """Equal constants are one weight, also over two rewrites."""
    model = model_of(node("Add", ["x", "w"], "y"))
    for output in ("first", "second"):
        rewriter = Rewriter(model)
        rewriter.nodes += [other for other in model.graph.node if other.output[0] != "y"]
        rewriter.add("Reshape", [rewriter.add("Mul", ["x", 2.0], f"{output}/scaled"), [2, 3]], output)
        rewriter.add("Reshape", [output, [-1]], "y")
        model = rewriter.finish()
    weights = {tensor.name: numpy_helper.to_array(tensor).tolist() for tensor in model.graph.initializer}
    assert list(weights.values()) == [2.0, [2, 3], [-1]]
    check_model(model)


@pytest.mark.parametrize(("opset", "inputs"), [(12, 1), (13, 2)])
def test_sizes_of_a_split(opset: int, inputs: int) -> None:
    """Before opset 13 they are an attribute."""
    rewriter = Rewriter(model_of(node("Relu", ["x"], "y"), opset=opset))
    rewriter.split("x", ["y", "z"], [2, 4], 0, "parts")
    (split,) = rewriter.finish().graph.node
    assert len(split.input) == inputs
    assert [[*a.ints] for a in split.attribute if a.name == "split"] == ([[2, 4]] if inputs == 1 else [])


def test_a_refusal_names_the_model_and_the_operator() -> None:
    """The message begins with the model, then names the operator."""
    with pytest.raises(RewriteError) as refused, refusals_of("model: not rewritten"):
        raise RewriteError("has an axis", node("Softmax", ["x"], "y", "scores"))
    assert str(refused.value) == "model: not rewritten: Softmax 'scores' has an axis"
    assert refused.value.operator == "Softmax 'scores'"


def test_nodes_before_a_value() -> None:
    """Values that no node computes end the way."""
    assert nodes_before(["d"], {"b": 0, "c": 1, "d": 2}, [["a"], ["a"], ["b", "e"]]) == {0, 2}


@pytest.mark.parametrize(
    ("nodes", "fault"),
    [
        ([node("Relu", ["z"], "y"), node("Relu", ["x"], "z")], "nothing before it computes"),
        ([node("Relu", ["x"], "y"), node("Abs", ["x"], "y")], "defined several times"),
        ([node("Relu", ["x"], "y"), node("Abs", ["x"], "w")], "defined several times"),
        ([node("Relu", ["x"], "z")], "nothing computes the outputs"),
        ([node("Relu", ["x"], "z", "n"), node("Abs", ["z"], "y", "n")], "share a name"),
    ],
)
def test_the_check_of_rewrites_finds_faults(nodes: list[onnx.NodeProto], fault: str) -> None:
    """An order that is not topological, repeated names, and an output that nothing computes."""
    with pytest.raises(AssertionError, match=fault):
        check_model(model_of(*nodes))
