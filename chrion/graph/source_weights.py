"""Large external weights, which a loaded graph reads from the files of the original model.

onnxruntime's optimisation reads the weights of a model and writes a copy of them. For large ones this takes minutes,
and their size in memory and on disk. So weights whose values cannot change the result of the optimisation are hidden
from it as inputs of the model, and restored afterwards: embedding tables, and matrices of products with values of the
request.
"""

from __future__ import annotations

import math
from pathlib import Path

import onnx
from onnx.external_data_helper import load_external_data_for_tensor

from chrion.graph.assemble import captured_names
from chrion.graph.file_states import stat_state
from chrion.graph.weights_folder import SourceFile, WeightsFolder

#: Weights of at least so many bytes are not copied.
LARGE_BYTES = 1 << 24
#: The slot of the weight in the operators that the optimisation treats alike whether or not it is constant.
_SLOTS = {"Gather": 0, "MatMul": 1, "Gemm": 1}
#: With this operator in the model, onnxruntime computes new weights from those of products before it.
_FUSED_INTO_PRODUCTS = "BatchNormalization"


class SourceWeights:
    """The external weights of a model, of which the large ones are hidden from its optimisation.

    Args:
        proto: The model; these weights become inputs of it.
        root: The folder of the model's external weights.
        folder: The folder of the graph's other weights.
        hide: Whether to hide large ones.

    Attributes:
        root: As given.
        names: The names of the large weights.
    """

    def __init__(self, proto: onnx.ModelProto, root: Path, folder: WeightsFolder, *, hide: bool = True) -> None:
        self.root = root
        large = {t.name: t for t in proto.graph.initializer if hide and _is_large(t)}
        kept = _unaffected(proto, set(large)) if large else set()
        files = {name: _file(large[name], root) for name in sorted(kept)}
        self._files = {name: file for name, file in files.items() if file}
        if not self._files or not folder.refer_to(list(self._files.values())):
            self._files = {}
        self.names = self._files.keys()
        self._tensors = [onnx.TensorProto.FromString(large[name].SerializeToString()) for name in self.names]
        if self._tensors:
            remaining = [t for t in proto.graph.initializer if t.name not in self.names]
            del proto.graph.initializer[:]
            proto.graph.initializer.extend(remaining)
        for tensor in self._tensors:
            info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            proto.graph.input.append(info)

    def restore(self, model: onnx.ModelProto, folder: WeightsFolder) -> None:
        """Turn the inputs of the optimised model into weights in the original files, in place."""
        read = {name for node in model.graph.node for name in node.input}
        inputs = [i for i in model.graph.input if i.name not in self.names]
        del model.graph.input[:]
        model.graph.input.extend(inputs)
        for tensor in self._tensors:
            if tensor.name in read:
                set_location(tensor, folder.location(self._files[tensor.name].path))
                model.graph.initializer.append(tensor)


def set_location(tensor: onnx.TensorProto, location: str) -> None:
    """Set the file of an external weight, in place."""
    for entry in tensor.external_data:
        if entry.key == "location":
            entry.value = location


def _entry(tensor: onnx.TensorProto, key: str, default: str = "") -> str:
    return next((entry.value for entry in tensor.external_data if entry.key == key), default)


def _bytes(tensor: onnx.TensorProto) -> int:
    return math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def embed(tensor: onnx.TensorProto, folder: Path) -> None:
    """Move an external weight into the model, in place."""
    load_external_data_for_tensor(tensor, str(folder))
    del tensor.external_data[:]
    tensor.data_location = onnx.TensorProto.DEFAULT


def _is_large(tensor: onnx.TensorProto) -> bool:
    """Return whether a weight stays in its file wherever the model goes."""
    floats = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE}
    external = tensor.data_location == onnx.TensorProto.EXTERNAL and tensor.data_type in floats
    return external and _bytes(tensor) >= LARGE_BYTES


def _unaffected(proto: onnx.ModelProto, names: set[str]) -> set[str]:
    """Return those of the weights whose values cannot change the result of the optimisation."""
    nodes = proto.graph.node
    weights = {t.name for t in proto.graph.initializer}
    products = all(node.op_type != _FUSED_INTO_PRODUCTS for node in nodes)
    slots = {op: slot for op, slot in _SLOTS.items() if products or op == "Gather"}
    kept = names - {value.name for value in (*proto.graph.input, *proto.graph.output)}
    for node in nodes:
        if node.op_type in slots and node.domain in {"", "ai.onnx"}:
            own = slots[node.op_type]
            others = [name for slot, name in enumerate(node.input) if slot != own]
            kept -= set(others)
            if all(name in weights for name in others):  # the node is computed by the optimisation
                kept -= set(node.input)
        else:
            kept -= set(node.input)
        kept -= captured_names(node)
    for function in proto.functions:
        kept -= {name for node in function.node for name in node.input}
    return kept


def _file(tensor: onnx.TensorProto, folder: Path) -> SourceFile | None:
    """Return the file of a weight; None if onnxruntime should report what is wrong with it."""
    path = (folder / _entry(tensor, "location")).resolve()
    try:
        state = path.stat()
        end = int(_entry(tensor, "offset", "0")) + _bytes(tensor)
    except (OSError, ValueError):
        return None
    # The ONNX library refuses files with several names, which may be in other folders.
    if state.st_size < end or state.st_nlink != 1 or int(_entry(tensor, "length", "0") or 0) not in {0, _bytes(tensor)}:
        return None
    return SourceFile(path, stat_state(state))
