"""Models of one operator, which measurements and probes of execution providers run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper


def smallest_model() -> bytes:
    """Return a model of one Relu on one number, from x to y."""
    return one_node_model(helper.make_node("Relu", ["x"], ["y"]), [1])


def smallest_session(provider: str, options: ort.SessionOptions | None = None) -> ort.InferenceSession:
    """Open :func:`smallest_model` on a provider. Without options, it runs on one thread."""
    return _session(provider, smallest_model(), options)


def product_session(
    provider: str, rows: int, side: int, options: ort.SessionOptions | None = None
) -> ort.InferenceSession:
    """Open a model of one MatMul: y = x w, with x of [rows, side] and weights w of [side, side].

    Without options, it runs on one thread.
    """
    weight = numpy_helper.from_array(np.ones((side, side), np.float32), "w")
    model = one_node_model(helper.make_node("MatMul", ["x", "w"], ["y"]), [rows, side], [weight])
    return _session(provider, model, options)


def one_node_model(
    node: onnx.NodeProto,
    shape: Sequence[int] | None,
    weights: Sequence[onnx.TensorProto] = (),
    types: Sequence[int] = (TensorProto.FLOAT, TensorProto.FLOAT),
) -> bytes:
    """Return a model of one node from x to y, of the given types and the same shape; None for any shape."""
    ends = [helper.make_tensor_value_info(name, kind, shape) for name, kind in zip(("x", "y"), types, strict=True)]
    graph = helper.make_graph([node], "probe", ends[:1], ends[1:], list(weights))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def _session(provider: str, model: bytes, options: ort.SessionOptions | None = None) -> ort.InferenceSession:
    if options is None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
    return ort.InferenceSession(model, options, providers=[provider], enable_fallback=0)
