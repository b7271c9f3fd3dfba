"""A model whose weights exceed the two gigabytes that one file of a model may have."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from cases import Feed, case, main
from onnx import TensorProto, helper

#: Installed by pip for this family.
REQUIREMENTS = ["onnx==1.23.2"]

_WIDTH = 8192
_LAYERS = 9
_BYTES = _WIDTH * _WIDTH * 4


@case("matrices", exporter="onnx.helper", package="onnx")
def _matrices(path: Path) -> Sequence[Feed]:
    """Write a chain of matrix products, nine times a quarter of a gigabyte, with weights in one file beside it."""
    data = path.with_name("weights.bin")
    with data.open("wb") as file:
        for layer in range(_LAYERS):
            _weight(layer).tofile(file)
    nodes = []
    for layer in range(_LAYERS):
        nodes.append(helper.make_node("Gemm", [f"x{layer}", f"w{layer}"], [f"y{layer}"], f"gemm{layer}"))
        nodes.append(helper.make_node("Tanh", [f"y{layer}"], [f"x{layer + 1}"], f"tanh{layer}"))
    graph = helper.make_graph(
        nodes,
        "matrices",
        [helper.make_tensor_value_info("x0", TensorProto.FLOAT, ["batch", _WIDTH])],
        [helper.make_tensor_value_info(f"x{_LAYERS}", TensorProto.FLOAT, ["batch", _WIDTH])],
        [_external(layer, data.name) for layer in range(_LAYERS)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    generator = np.random.default_rng(0)
    return [{"x0": generator.standard_normal((batch, _WIDTH), np.float32)} for batch in (1, 2)]


def _weight(layer: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Return a matrix whose rows are shifts of one random row, which costs little to make."""
    row = np.random.default_rng(layer + 1).standard_normal(2 * _WIDTH, np.float32) / np.float32(np.sqrt(_WIDTH))
    return np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(row, _WIDTH)[:_WIDTH])


def _external(layer: int, location: str) -> onnx.TensorProto:
    tensor = TensorProto(name=f"w{layer}", data_type=TensorProto.FLOAT, dims=[_WIDTH, _WIDTH])
    tensor.data_location = TensorProto.EXTERNAL
    place = {"location": location, "offset": str(layer * _BYTES), "length": str(_BYTES)}
    for key, value in place.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


if __name__ == "__main__":
    sys.exit(main("large"))
