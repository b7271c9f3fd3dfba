"""Types and shapes of all values of a model, as onnxruntime infers them.

This is onnxruntime's inference and not that of onnx, because it includes onnxruntime's own operators, and because it is
the one that takes effect when the model runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import onnx
import onnxruntime as ort

from chrion.graph.model import ELEMENT_BYTES, TensorInfo, element_code
from chrion.graph.ort_sessions import open_analysis
from chrion.graph.trees.operators import target_count
from chrion.graph.unsafe_trees import CLASSIFIER, is_tree_ensemble

#: Operators of ai.onnx.ml whose output has the shape of their input.
_ALIKE = frozenset({"Binarizer", "Imputer", "LabelEncoder", "Normalizer", "Scaler"})
#: Operators of com.microsoft whose second and third outputs are caches of shape (batch, heads, length, size).
_CACHING = frozenset(
    {"DecoderMaskedMultiHeadAttention", "GroupQueryAttention", "MultiHeadAttention", "SparseAttention"}
)


def infer_types(model: onnx.ModelProto, folder: Path) -> dict[str, TensorInfo]:
    """Return the types of all inputs and node outputs of a model, by name.

    The length of an attention cache depends on the values of a request (``total_sequence_length``), while onnxruntime
    infers the shape of the incoming cache. Therefore types are inferred a second time, with the caches as inputs of
    unknown length.

    Args:
        model: The model.
        folder: The folder of its external weights.

    Raises:
        ModelError: onnxruntime refuses the model.
    """
    model, types = _with_classical_shapes(model, _infer(model, folder), folder)
    caches = _caches(model, types)
    if not caches:
        return types
    fed = onnx.ModelProto()
    fed.CopyFrom(model)
    for node in fed.graph.node:
        for at, name in enumerate(node.output):
            node.output[at] = f"{name}/inferred" if name in caches else name
    kept = [o for o in fed.graph.output if o.name not in caches]
    del fed.graph.output[:]
    fed.graph.output.extend(kept)
    fed.graph.input.extend(
        onnx.helper.make_tensor_value_info(c.name, element_code(c.type), c.shape) for c in caches.values()
    )
    return types | _infer(fed, folder) | caches


def _with_classical_shapes(
    model: onnx.ModelProto, types: dict[str, TensorInfo], folder: Path
) -> tuple[onnx.ModelProto, dict[str, TensorInfo]]:
    """Return a model with shapes of operators of ``ai.onnx.ml`` that onnxruntime does not infer, and its types.

    They are those of the outputs of tree ensembles, of which the number of rows is known, and of operators that keep
    the shape of their input. These may follow each other.
    """
    stated: dict[str, tuple[int, ...]] = {}
    while found := {name: shape for name, shape in _classical_shapes(model, types) if name not in stated}:
        stated |= found
        shaped = onnx.ModelProto()
        shaped.CopyFrom(model)
        declared = {o.name: o for o in shaped.graph.output}
        for name, shape in found.items():
            info = declared.get(name) or shaped.graph.value_info.add()
            info.CopyFrom(onnx.helper.make_tensor_value_info(name, element_code(types[name].type), shape))
        model, types = shaped, _infer(shaped, folder)
    return model, types


def _classical_shapes(model: onnx.ModelProto, types: Mapping[str, TensorInfo]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield outputs of tree ensembles and of operators that keep a shape, and their shapes, if these are known."""
    for node in model.graph.node:
        if node.domain == "ai.onnx.ml" and node.op_type in _ALIKE:
            source = types[node.input[0]].shape
            if source is not None and types[node.output[0]].shape is None:
                known = tuple(size for size in source if isinstance(size, int))
                yield from [(node.output[0], known)] if len(known) == len(source) else ()
        elif is_tree_ensemble(node):
            source = types[node.input[0]].shape or ()
            scores: tuple[int, ...] = (target_count(node),)
            shapes = [(), scores] if node.op_type == CLASSIFIER else [scores]
            for name, rest in zip(node.output, shapes, strict=False):
                if name and len(source) == 2 and isinstance(source[0], int):
                    yield name, (source[0], *rest)


def _infer(model: onnx.ModelProto, folder: Path) -> dict[str, TensorInfo]:
    """Return the types that onnxruntime reports for a copy of the model in which every value is a graph output."""
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    declared = {o.name for o in probe.graph.output}
    for node in probe.graph.node:
        for name in node.output:
            if name and name not in declared:
                declared.add(name)
                probe.graph.output.add().name = name
    types = _argument_types(probe, folder)
    # onnxruntime reports an unknown rank like a scalar; the shape of the value's shape distinguishes the two.
    unclear = [info.name for info in types.values() if info.shape == () and info.type in ELEMENT_BYTES]
    for name in unclear:
        probe.graph.node.add(op_type="Shape", input=[name], output=[f"{name}/shape"])
        probe.graph.output.add().name = f"{name}/shape"
    ranks = _argument_types(probe, folder) if unclear else {}
    unknown = {name: replace(types[name], shape=None) for name in unclear if ranks[f"{name}/shape"].shape != (0,)}
    return types | unknown


def _caches(model: onnx.ModelProto, types: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the caches that attention operators output, with an unknown length."""
    caches = {}
    for node in model.graph.node:
        if node.domain == "com.microsoft" and node.op_type in _CACHING:
            for name in filter(None, node.output[1:3]):
                shape = types[name].shape
                caches[name] = replace(types[name], shape=shape and (*shape[:2], None, *shape[3:]))
    return caches


def _argument_types(model: onnx.ModelProto, folder: Path) -> dict[str, TensorInfo]:
    """Return the types of the inputs and outputs of a model."""
    session = open_analysis(model, folder, "optimised model", ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    arguments = [*session.get_inputs(), *session.get_outputs()]
    return {a.name: TensorInfo(a.name, a.type, tuple(a.shape)) for a in arguments}
