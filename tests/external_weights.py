"""A model with large external weights that take no room on the disk."""

from __future__ import annotations

from pathlib import Path

from onnx import TensorProto, helper


def embedding(folder: Path, rows: int, columns: int = 1 << 16) -> Path:
    """Write a model with a table of ``rows`` x 64 and a matrix of 64 x ``columns``, in a file without content."""
    sizes = {"table": [rows, 64], "matrix": [64, columns]}
    tensors, end = [], 0
    for name, dims in sizes.items():
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
        for key, value in {"location": "w.bin", "offset": end, "length": 4 * dims[0] * dims[1]}.items():
            tensor.external_data.add(key=key, value=str(value))
        end += 4 * dims[0] * dims[1]
        tensors.append(tensor)
    nodes = [helper.make_node("Gather", ["table", "ids"], ["x"]), helper.make_node("MatMul", ["x", "matrix"], ["y"])]
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, [1])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, columns])]
    graph = helper.make_graph(nodes, "embedding", inputs, outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    with (folder / "w.bin").open("wb") as file:
        file.truncate(end)
    return folder / "m.onnx"
