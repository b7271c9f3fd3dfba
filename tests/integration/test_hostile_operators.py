"""Attributes and inputs of the native operators that no decoder has: they are refused, and nothing outside is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from chrion.native import operators_available, register_operators
from helpers import FLOAT, INT64, value
from property_tests import examples

pytestmark = pytest.mark.skipif(not operators_available(), reason="native operators are not compiled")
Array = np.ndarray[Any, Any]
#: Numbers whose products overflow, or which are no sizes, beside usual ones.
SIZES = st.one_of(
    st.integers(1, 8),
    st.sampled_from([16, 32, 256, 257]),
    st.sampled_from([-(1 << 63), -4, -1, 0, 1 << 31, 1 << 32, (1 << 61) + 1, 1 << 61, (1 << 62) + 2, (1 << 63) - 1]),
)
SHAPES = st.lists(SIZES, min_size=1, max_size=8)


def run(kind: str, inputs: dict[str, Array], **attributes: Any) -> Array:
    """Return the output of a model of one operator."""
    infos = [value(name, FLOAT if array.dtype == np.float32 else INT64, None) for name, array in inputs.items()]
    node = helper.make_node(kind, list(inputs), ["y"], domain="chrion", **attributes)
    graph = helper.make_graph([node], "one", infos, [value("y", FLOAT, None)])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("chrion", 1)]
    options = ort.SessionOptions()
    options.log_severity_level = 4
    register_operators(options)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    output: Array = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, inputs)[0]
    return output


def attend(
    keys: Array,
    past: int,
    start: int,
    *,
    heads: int = 1,
    shared: int = 1,
    width: int = 4,
    shape: Any = None,
    **rest: Any,
) -> Array:
    """Return the attention of one token, of ones, to a pool of keys; the values are the numbers of their rows."""
    values = np.broadcast_to(np.arange(len(keys), dtype=np.float32)[:, None], keys.shape).copy()
    inputs = {name: np.ones((1, 4), np.float32) for name in ("q", "k", "v")}
    inputs |= {"keys": keys, "values": values, "past": np.array([past]), "start": np.array([start])}
    plain = {"scale": 1.0, "cap": 0.0, "rotated": 0, "interleaved": 0, "columns": 0}
    sizes = {"heads": heads, "shared": shared, "width": width, "shape": shape or [1, 4]}
    return run("PooledAttention", inputs, **{**plain, **sizes, **rest})


@pytest.mark.parametrize("width", [1 << 60, 1 << 61, (1 << 61) + 4, 1 << 62, 0, -4])
def test_widths_of_a_gate_that_overflow_are_refused(width: int) -> None:
    """The number of bytes of a row would be 0, or that of another width."""
    with pytest.raises(Exception, match="expected fixed dimensions"):
        run("SiluAndMul", {"x": np.ones((2, 8), np.float32)}, shape=[1, width])


@pytest.mark.parametrize("heads", [1 << 61, (1 << 62) + 2, 1 << 62, 0, -2])
def test_heads_that_overflow_are_refused(heads: int) -> None:
    """The number of elements of a token would be small, or negative."""
    with pytest.raises(Exception, match="expected heads"):
        attend(np.zeros((4, 4), np.float32), 0, 0, heads=heads, shared=2 if heads % 2 == 0 else 1)


@pytest.mark.parametrize(("past", "start"), [(-1, 0), (4, 0), (2, 2), (1 << 62, 0), (0, 1 << 62), ((1 << 63) - 1, 1)])
def test_rows_outside_the_pool_are_refused(past: int, start: int) -> None:
    """The pool has four rows."""
    with pytest.raises(Exception, match="outside the pool"):
        attend(np.zeros((4, 4), np.float32), past, start)


@examples(200)
@given(width=SIZES, shape=SHAPES, rows=st.integers(0, 5), columns=st.integers(0, 17))
def test_any_gate_is_computed_or_refused(width: int, shape: list[int], rows: int, columns: int) -> None:
    """What is computed has two values of the input for each of the output."""
    x = np.ones((rows, columns), np.float32)
    try:
        output = run("SiluAndMul", {"x": x}, shape=[*shape, width])
    except Exception:  # noqa: BLE001 - onnxruntime raises several
        return
    assert 2 * output.size == x.size
    np.testing.assert_allclose(output, 1 / (1 + np.exp(-1.0)), rtol=1e-6)


@examples(300)
@given(draw=st.data(), tokens=st.integers(0, 3), pool=st.integers(0, 6))
def test_any_attention_is_computed_or_refused(draw: st.DataObject, tokens: int, pool: int) -> None:
    """What is computed has the size of the queries; sizes of inputs fit the attributes, but for some of them."""
    heads, shared, width = (draw.draw(SIZES, label) for label in ("heads", "shared", "width"))
    shape = draw.draw(st.just([1, heads * width % (1 << 63)]) | SHAPES, "shape")
    rotated, columns = draw.draw(st.integers(-2, 6), "rotated"), draw.draw(st.integers(-2, 6), "columns")
    fitting = {"q": heads * width, "k": shared * width, "v": shared * width, "keys": shared * width}
    fitting |= {"values": shared * width} | ({"cosines": columns, "sines": columns} if rotated else {})
    rows = {
        name: draw.draw(st.sampled_from([size % 4096, size % 4096, size % 4096, 0, 4]), name)
        for name, size in fitting.items()
    }
    inputs = {name: np.ones((pool if name in {"keys", "values"} else tokens, rows[name]), np.float32) for name in rows}
    names = ["q", "k", "v", "keys", "values", "past", "start", *(["cosines", "sines"] if rotated else [])]
    for name in ("past", "start"):
        inputs[name] = np.array(
            draw.draw(st.lists(SIZES | st.just(0), min_size=tokens, max_size=tokens), name), np.int64
        )
    attributes = {
        "heads": heads,
        "shared": shared,
        "width": width,
        "rotated": rotated,
        "columns": columns,
        "shape": shape,
    }
    interleaved = draw.draw(st.integers(0, 1), "interleaved")
    try:
        ordered = {name: inputs[name] for name in names}
        output = run("PooledAttention", ordered, scale=1.0, cap=0.0, interleaved=interleaved, **attributes)
    except Exception:  # noqa: BLE001
        return
    assert output.size == tokens * heads * width


@pytest.mark.usefixtures("instructions")
def test_a_first_block_of_infinite_scores_does_not_spoil_the_next() -> None:
    """Keys whose scores are all -inf have no weight; with nothing else, the result is NaN as softmax has it."""
    keys = np.zeros((200, 4), np.float32)
    keys[:130] = -np.inf
    np.testing.assert_allclose(attend(keys, 199, 0)[0], expected_mean(keys), rtol=1e-5)
    keys[:] = -np.inf
    assert np.isfinite(attend(keys, 199, 0)).all()  # its own key is finite
    keys[5, 0] = np.nan
    assert np.isnan(attend(keys, 199, 0)).all()


def expected_mean(keys: Array) -> float:
    """Return the attention by its definition; the last key is the token's own, of ones, and its value is 1."""
    scores = keys.sum(axis=1).astype(np.float64)
    scores[-1] = keys.shape[1]
    weights = np.exp(scores - scores[np.isfinite(scores)].max())
    values = np.arange(len(keys), dtype=np.float64)
    values[-1] = 1
    return float(weights @ values / weights.sum())
