"""A check that the external weights of a model are in the model's own folder.

A model may come from an untrusted source, and the files that it names are read with the rights of the user who loads
it. onnxruntime refuses some paths that lead outside the folder, depending on its version; this check refuses all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx

from chrion.errors import UnsafeModelError

#: onnxruntime's location for weights in the memory of the process, at an address that the model file would choose.
_MEMORY = "_ORT_MEM_ADDR_"


def check_external(proto: onnx.ModelProto, folder: Path, where: str) -> None:
    """Check that a model names no file outside its folder.

    Args:
        proto: The model.
        folder: The folder that its paths are relative to.
        where: The name of the model, for messages.

    Raises:
        UnsafeModelError: The model names an absolute path, a path that leads outside the folder through ``..`` or a
            link, or a memory address.
    """
    for tensor in tensors_of(proto):
        for entry in tensor.external_data:
            if entry.key == "location" and not _inside(entry.value, folder):
                raise UnsafeModelError(
                    f"{where}: weight {tensor.name!r} is outside the model's folder: {entry.value[:200]!r}",
                    hint="weights are read only from the folder of the model",
                )


def tensors_of(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor of a model: its weights, its attributes, and those of nested graphs and functions."""
    yield from _of_graph(proto.graph)
    yield from _of_nodes(node for function in proto.functions for node in function.node)


def _inside(location: str, folder: Path) -> bool:
    parts = PureWindowsPath(location)  # splits at both separators: the model may be from any system
    if PurePosixPath(location).is_absolute() or parts.anchor or ".." in parts.parts or _MEMORY in parts.parts:
        return False
    try:
        return (folder / location).resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # an impossible file name, or a cycle of links
        return False


def _of_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for graph in (attribute.g, *attribute.graphs):
                yield from _of_graph(graph)
