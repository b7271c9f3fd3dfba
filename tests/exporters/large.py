"""Models with external data: one beyond the two gigabytes that a file may have, and the layouts exporters write."""

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
    """Write a chain of matrix products, nine times a quarter of a gigabyte, with its weights in a separate file."""
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


@case("file-per-tensor", exporter="onnx.save", package="onnx")
def _file_per_tensor(path: Path) -> Sequence[Feed]:
    """Write every weight to a file of its own, as the TorchScript exporter does with large models."""
    options = {"save_as_external_data": True, "all_tensors_to_one_file": False, "size_threshold": 0}
    onnx.save(_small(), path, **options)
    return _small_feeds()


@case("constants-outside", exporter="onnx.save", package="onnx")
def _constants_outside(path: Path) -> Sequence[Feed]:
    """Write weights and constants of nodes to one file."""
    options = {"save_as_external_data": True, "location": "all.data", "size_threshold": 0, "convert_attribute": True}
    onnx.save(_small(), path, **options)
    return _small_feeds()


@case("some-outside", exporter="onnx.save", package="onnx")
def _some_outside(path: Path) -> Sequence[Feed]:
    """Write the larger weights to a file and keep the others in the model."""
    onnx.save(_small(), path, save_as_external_data=True, location="large.data", size_threshold=1024)
    return _small_feeds()


def _small() -> onnx.ModelProto:
    generator = np.random.default_rng(7)
    shapes = {"w0": (16, 32), "b0": (32,), "w1": (32, 4), "b1": (4,)}
    weights = [
        onnx.numpy_helper.from_array(generator.standard_normal(shape, np.float32), name)
        for name, shape in shapes.items()
    ]
    scale = onnx.numpy_helper.from_array(generator.standard_normal(32, np.float32), "scale")
    nodes = [
        helper.make_node("Gemm", ["x", "w0", "b0"], ["h"], "first"),
        helper.make_node("Constant", [], ["scale"], "constant", value=scale),
        helper.make_node("Mul", ["h", "scale"], ["scaled"], "scale"),
        helper.make_node("Relu", ["scaled"], ["positive"], "relu"),
        helper.make_node("Gemm", ["positive", "w1", "b1"], ["y"], "second"),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _small_feeds() -> list[Feed]:
    generator = np.random.default_rng(8)
    return [{"x": generator.standard_normal((batch, 16), np.float32)} for batch in (2, 1, 5)]


if __name__ == "__main__":
    sys.exit(main("large"))
