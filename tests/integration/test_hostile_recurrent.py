"""Attributes and inputs of the native recurrent operator that no model has: refused, and nothing outside is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.graph.native_operators import with_native_operators
from chrion.native import operators_available
from property_tests import examples
from recurrent_cells import GATES, Array, Cell, open_model, run_model

pytestmark = pytest.mark.skipif(not operators_available(), reason="native operators are not compiled")
#: Numbers whose products overflow, or which are no sizes, beside usual ones.
NUMBERS = st.integers(-1, 12) | st.sampled_from([-(1 << 63), 1 << 20, 1 << 31, 1 << 32, 1 << 61, (1 << 63) - 1])
ATTRIBUTES = ("kind", "hidden", "directions", "reverse", "layout", "linear_before_reset", "input_forget", "split")


def changed(model: onnx.ModelProto, attributes: dict[str, Any]) -> onnx.ModelProto:
    """Return a model whose native operator has other attributes."""
    model = with_native_operators(model)
    [native] = model.graph.node
    for name, given_value in attributes.items():
        native.attribute.remove(next(a for a in native.attribute if a.name == name))
        native.attribute.append(onnx.helper.make_attribute(name, given_value))
    return model


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"kind": 3}, "expected kind 0, 1 or 2"),
        ({"kind": 1 << 32}, "expected kind 0, 1 or 2"),
        ({"hidden": 0}, "hidden units"),
        ({"hidden": 1 << 61}, "hidden units"),
        ({"hidden": 3}, "sizes of weights do not match"),
        ({"hidden": 12}, "sizes of weights do not match"),
        ({"directions": 3}, "expected 1 or 2 directions"),
        ({"directions": 2}, "expected activations"),
        ({"activations": [0, 1]}, "expected activations"),
        ({"activations": [0] * 7}, "not large enough"),
        ({"activations": [0, 1, 11]}, "unknown activation"),
        ({"activations": [-1, 1, 1]}, "unknown activation"),
        ({"alpha": [1.0]}, "expected activations"),
        ({"split": 0}, "expected a split of 1 to 64"),
        ({"split": 65}, "expected a split of 1 to 64"),
        ({"clip": -1.0}, "expected a clip of 0 or more"),
        ({"clip": float("nan")}, "expected a clip of 0 or more"),
    ],
)
def test_attributes_that_do_not_fit_are_refused(attributes: dict[str, Any], message: str) -> None:
    """A session of such an operator is not opened."""
    with pytest.raises(Exception, match=message):
        open_model(changed(Cell("LSTM").model(), attributes))


@pytest.mark.parametrize("name", ["W", "R", "B", "P"])
def test_weights_that_are_not_constant_are_refused(name: str) -> None:
    """When the session is opened, or at the first run with such an input."""
    cell = Cell("LSTM", optional="B P")
    model = with_native_operators(cell.model())
    tensor = next(t for t in model.graph.initializer if t.name == name)
    model.graph.initializer.remove(tensor)
    model.graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    with pytest.raises(Exception, match=r"expected (a )?constant"):
        run_model(model, cell.feed(2, 1) | {name: onnx.numpy_helper.to_array(tensor)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"X": np.ones((2, 3, 4), np.float32)}, "another number of inputs"),
        ({"X": np.ones((2, 15), np.float32)}, "three dimensions"),
        ({"X": np.ones((2, 4, 5), np.float32)}, "initial state|length for each row"),
        ({"h": np.ones((1, 3, 5), np.float32)}, "initial state"),
        ({"c": np.ones((1, 4, 6), np.float32)}, "initial state"),
        ({"c": np.ones((0,), np.float32)}, "initial state"),
        ({"lens": np.array([1, 2], np.int32)}, "length for each row"),
        ({"lens": np.array([1, 2, 3], np.int32)}, "more than the number of steps"),
        ({"lens": np.array([1, -1, 2], np.int32)}, "length is negative"),
        ({"lens": np.array([1, -(1 << 31), 2], np.int32)}, "length is negative"),
    ],
)
def test_inputs_that_do_not_match_are_errors(change: dict[str, Array], message: str) -> None:
    """Nothing outside is read, and the session serves the next request."""
    cell = Cell("LSTM", optional="B lens h c")
    session, feed = open_model(with_native_operators(cell.model())), cell.feed(2, 3)
    expected = session.run(None, feed)[0]
    with pytest.raises(Exception, match=message):
        session.run(None, feed | change)
    np.testing.assert_array_equal(session.run(None, feed)[0], expected)


def test_only_an_lstm_has_cells() -> None:
    """Its initial state, peepholes and third output do not exist for others."""
    for kind in ("GRU", "RNN"):
        cell = Cell(kind, optional="B h c")
        with pytest.raises(Exception, match="only an LSTM"):
            run_model(with_native_operators(cell.model()), cell.feed(2, 1))
        cell = Cell(kind, optional="B P")
        with pytest.raises(Exception, match="sizes of weights do not match"):
            open_model(with_native_operators(cell.model()))


@examples(300)
@given(data=st.data(), kind=st.sampled_from([*GATES]), steps=st.integers(0, 4), batch=st.integers(0, 4))
def test_any_operator_is_computed_or_refused(data: st.DataObject, kind: str, steps: int, batch: int) -> None:
    """What is computed has the sizes that its inputs and attributes say, and is finite."""
    cell = Cell(kind, data.draw(st.integers(1, 5), "inputs"), data.draw(st.integers(1, 5), "hidden"))
    attributes = {name: data.draw(NUMBERS, name) for name in data.draw(st.sets(st.sampled_from(ATTRIBUTES)), "changed")}
    rows = data.draw(st.integers(0, 6), "columns")
    feed = {"X": np.ones((steps, batch, data.draw(st.sampled_from([cell.inputs, cell.inputs, rows]), "own")), "f")}
    try:
        outputs = run_model(changed(cell.model(), attributes), feed)
    except Exception:  # noqa: BLE001 - onnxruntime raises several
        return
    assert all(np.isfinite(array).all() for array in outputs)
    hidden, directions = attributes.get("hidden", cell.hidden), attributes.get("directions", 1)
    if attributes.get("layout", 0):
        steps, batch = batch, steps
    assert outputs[0].size == steps * batch * hidden * directions
    assert all(array.size == batch * hidden * directions for array in outputs[1:])
