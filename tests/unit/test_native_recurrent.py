"""The rewrite of recurrent operators to native ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from chrion.graph.native_operators import with_native_operators
from chrion.graph.native_recurrent import OPERATOR, is_recurrent
from chrion.graph.rewrite import NATIVE, RewriteError
from helpers import FLOAT, branches, make_model, node, value
from recurrent_cells import Cell
from rewrite_checks import check_model


def attributes_of(cell: Cell) -> dict[str, Any]:
    """Return the attributes of the native operator for a cell."""
    [native] = with_native_operators(cell.model()).graph.node
    return {a.name: onnx.helper.get_attribute_value(a) for a in native.attribute}


def test_a_model_without_recurrent_operators_is_returned_itself() -> None:
    """Nothing is copied."""
    model = branches()
    assert with_native_operators(model) is model


def test_the_rewritten_model_keeps_names() -> None:
    """Inputs, outputs, weights and the name of the operator stay, and the domain is imported once."""
    model = Cell("LSTM", direction="bidirectional", optional="B lens h c P").model()
    native = with_native_operators(with_native_operators(model))
    check_model(native)
    [before], [after] = model.graph.node, native.graph.node
    assert (after.op_type, after.domain, after.name) == (OPERATOR, NATIVE, before.name)
    assert list(after.input) == list(before.input)
    assert list(after.output) == list(before.output)
    assert [t.name for t in native.graph.initializer] == [t.name for t in model.graph.initializer]
    assert sum(opset.domain == NATIVE for opset in native.opset_import) == 1


def test_only_the_named_operators_are_replaced() -> None:
    """Others keep their kernel."""
    first, second = Cell("GRU", 5, 5).model(), Cell("GRU", 5, 5).model()
    chain = make_model(
        [
            node("GRU", ["X", "W", "R", "B"], ["a"], "first", hidden_size=5),
            node("Squeeze", ["a", "axes"], ["b"], "between"),
            node("GRU", ["b", "W", "R", "B"], ["y"], "second", hidden_size=5),
        ],
        [value("X", FLOAT, None)],
        [value("y", FLOAT, None)],
        {t.name: onnx.numpy_helper.to_array(t) for t in first.graph.initializer} | {"axes": np.array([1])},
    )
    native = with_native_operators(chain, {"second", "between"})
    assert [n.op_type for n in native.graph.node] == ["GRU", "Squeeze", OPERATOR]
    assert with_native_operators(second, {"other"}) is second
    assert not any(is_recurrent(n) for n in with_native_operators(chain).graph.node)


def test_parameters_of_functions() -> None:
    """Each function takes the next entry of the lists of its parameters, then onnxruntime's default."""
    names = ["HardSigmoid", "Tanh", "LeakyRelu", "Sigmoid", "ScaledTanh", "Elu"]
    given = {"activations": names, "activation_alpha": [0.5, 0.25, 2.0], "activation_beta": [0.75]}
    attributes = attributes_of(Cell("LSTM", direction="bidirectional", attributes=given))
    assert attributes["activations"] == [7, 1, 4, 0, 6, 8]
    assert attributes["alpha"] == [0.5, 0.0, 0.25, 0.0, 2.0, 1.0]
    assert attributes["beta"] == [0.75, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_defaults() -> None:
    """An LSTM or a GRU limits the values of its functions to finite ones, an RNN does not."""
    assert attributes_of(Cell("GRU"))["activations"] == [0, 1]
    assert attributes_of(Cell("RNN", attributes={"activations": ["Relu", "Tanh"]}))["activations"] == [2]
    assert attributes_of(Cell("LSTM"))["clip"] == np.finfo(np.float32).max
    assert attributes_of(Cell("RNN"))["clip"] == 0
    assert attributes_of(Cell("RNN", attributes={"clip": 2.0}))["clip"] == 2


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"clip": -1.0}, "has clip -1.0: expected a positive number"),
        ({"activations": ["Sigmoid", "Tanh"]}, "expected 3 of"),
        ({"activations": ["Sigmoid", "Tanh", "Mish"]}, "expected 3 of"),
        ({"hidden_size": 7}, "does not fit 7 hidden units"),
        ({"direction": "bidirectional"}, "has direction 'bidirectional', and weights of 1 directions"),
        ({"direction": "sideways"}, "has direction 'sideways'"),
    ],
)
def test_attributes_that_are_refused(attributes: dict[str, Any], message: str) -> None:
    """The error names the operator."""
    cell = Cell("LSTM")
    model = cell.model()
    for name, given in attributes.items():
        for old in [a for a in model.graph.node[0].attribute if a.name == name]:
            model.graph.node[0].attribute.remove(old)
        model.graph.node[0].attribute.append(onnx.helper.make_attribute(name, given))
    with pytest.raises(RewriteError, match=f"^LSTM 'cell' .*{message}") as refusal:
        with_native_operators(model)
    assert refusal.value.operator == "LSTM 'cell'"


@pytest.mark.parametrize("name", ["W", "R", "B", "P"])
def test_weights_that_are_refused(name: str) -> None:
    """They have to be constants of float32 with the shapes of ONNX."""
    cell = Cell("LSTM", optional="B P")
    weights = cell.weights()
    rest = {other: array for other, array in weights.items() if other != name}
    model = cell.model(weights)
    for tensor in [t for t in model.graph.initializer if t.name == name]:
        model.graph.initializer.remove(tensor)
    with pytest.raises(RewriteError, match=f"has no constant {name}"):
        with_native_operators(model)
    for wrong in (weights[name].astype(np.float64), weights[name][:, :-1]):
        with pytest.raises(RewriteError, match=f"has {name} of|does not fit"):
            with_native_operators(cell.model(rest | {name: wrong}))


def test_an_old_opset_is_refused() -> None:
    """Recurrent operators had other attributes then."""
    model = Cell("RNN").model()
    model.opset_import[0].version = 6
    with pytest.raises(RewriteError, match="is of opset 6"):
        with_native_operators(model)
