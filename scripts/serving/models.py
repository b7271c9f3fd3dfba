"""The models that ``bench_serving.py`` measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from bench_cpu import Case, light_models, recurrent_case
from onnx import TensorProto, helper, numpy_helper

from chrion import load, zoo
from chrion.profiler.synthetic_inputs import synthetic_inputs

#: Name of the free dimension of the models that have one, and its sizes.
FREE_DIMENSION, SIZES = "free", range(33, 97)

Feed = Mapping[str, np.ndarray[Any, Any]]


def perceptron(layers: int = 6, width: int = 2048, batch: int | str = 1) -> onnx.ModelProto:
    """Build a stack of dense layers; the default has 100 MB of weights."""
    rng = np.random.default_rng(0)
    nodes, weights, name = [], [], "x"
    for layer in range(layers):
        matrix = (rng.standard_normal((width, width)) / width**0.5).astype(np.float32)
        weights.append(numpy_helper.from_array(matrix, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [name, f"w{layer}"], [f"m{layer}"], name=f"product{layer}"))
        name = "y" if layer == layers - 1 else f"r{layer}"
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [name], name=f"relu{layer}"))
    values = [helper.make_tensor_value_info(value, TensorProto.FLOAT, [batch, width]) for value in ("x", "y")]
    graph = helper.make_graph(nodes, "perceptron", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def free_length_lstm() -> onnx.ModelProto:
    """Build a stack of folded LSTMs for sequences of any length."""
    model = zoo.build("lstm", {"batch": 1, "chunk": 96, "io": 64})
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.shape.dim[0].dim_param = FREE_DIMENSION
    return model


MODELS = [
    recurrent_case("lstm", "LSTM 64", io=64),
    recurrent_case("lstm", "LSTM 128", io=128),
    recurrent_case("lstm", "LSTM 256", io=256),
    recurrent_case("gru", "GRU 128", io=128),
    recurrent_case("lstm", "LSTM 64, batch 8, unfolded", io=64, batch=8, chunk=1),
    *(case for case in light_models() if case.name == "squeezenet"),
    Case("perceptron, 100 MB", perceptron),
]
#: Models of the scenarios that do not measure all of them: one of each kind.
BRIEF = ("LSTM 64", "LSTM 256", "squeezenet", "perceptron, 100 MB")
#: Models with a free dimension.
FREE = [
    Case("LSTM 64, free length", free_length_lstm),
    Case("perceptron, 4 MB, free batch", lambda: perceptron(4, 512, FREE_DIMENSION)),
]


def feeds_of(source: bytes) -> Sequence[Feed]:
    """Return the requests of a model: one, or one of each shape if it has a free dimension."""
    graph = load(source)
    if not graph.free_dimensions:
        return [synthetic_inputs(graph)]
    rng = np.random.default_rng(0)
    return [
        {
            info.name: rng.standard_normal([size if isinstance(d, str) else d or 1 for d in info.shape or ()]).astype(
                np.float32
            )
            for info in graph.inputs
        }
        for size in SIZES
    ]
