"""The native operator for gates with SiLU: equal to its definition, also at the limits of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from chrion.generation.rewrites.joined_products import GATE
from chrion.generation.rewrites.pooled_attention import DOMAIN
from chrion.native import operators_available, register_operators

Array = np.ndarray[Any, Any]
pytestmark = pytest.mark.skipif(not operators_available(), reason="native operators are not compiled")


def open_gate(shape: list[int], threads: int = 1) -> ort.InferenceSession:
    """Return a session of the operator alone."""
    node = helper.make_node(GATE, ["x"], ["y"], domain=DOMAIN, shape=shape)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "y")]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    register_operators(options)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    content = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return ort.InferenceSession(content, options, ["CPUExecutionProvider"])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [1, 7, 8, 15, 16, 17, 33, 1376])
def test_the_operator_equals_its_definition(instructions: int, width: int, threads: int) -> None:
    """silu(x) = x / (1 + exp(-x)) in double precision; rows are enough for several threads, or few."""
    session = open_gate([0, 1, width], threads)
    random = np.random.default_rng([instructions, width])
    for rows in (0, 1, 2, 100):
        x = random.uniform(-30, 30, (rows, 1, 2 * width)).astype(np.float32)
        (found,) = session.run(None, {"x": x})
        gate, up = np.split(x.astype(np.float64), 2, axis=-1)
        assert found.shape == (rows, 1, width)
        np.testing.assert_allclose(found, gate / (1 + np.exp(-gate)) * up, rtol=1e-6, atol=1e-12)


def test_the_limits_of_numbers(instructions: int) -> None:
    """Nothing overflows on the way: SiLU is 0 far below 0, the number itself far above, and not defined at -inf."""
    del instructions
    gate = np.array([-np.inf, -3e38, -1e4, -100, -0.0, 0.0, 100, 1e4, 3e38, np.inf, np.nan, 1], np.float32)
    up = np.ones_like(gate)
    up[-1] = np.nan
    (found,) = open_gate([0, len(gate)]).run(None, {"x": np.concatenate([gate, up])[None]})
    np.testing.assert_allclose(found[0, 1:6], 0.0, atol=1e-33)
    np.testing.assert_array_equal(found[0, 6:10], gate[6:10])
    assert np.isnan(found[0, [0, 10, 11]]).all()


@pytest.mark.parametrize(
    ("shape", "x", "message"),
    [
        ([0, 1, 4], (1, 1, 7), "no whole number of rows"),
        ([0, 2, 4], (1, 1, 8), "the shape of the output has another size"),
        ([0, 1, 0], (1, 1, 8), "shape: expected fixed dimensions after the first"),
        ([0], (1, 8), "shape: expected fixed dimensions after the first"),
    ],
)
def test_shapes_that_do_not_fit_are_errors(shape: list[int], x: tuple[int, ...], message: str) -> None:
    """Nothing is read or written beyond the arrays."""
    with pytest.raises(Exception, match=message):
        open_gate(shape).run(None, {"x": np.zeros(x, np.float32)})
