"""Weights in other files: only files of the model's own folder are read.

A model is often somebody else's, and the files it names are read with the rights of whoever loads it. onnxruntime
refuses some of what leads outside; here everything is, in the same words for every release of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx

from chrion.errors import UnsafeModelError

#: What onnxruntime writes for weights that lie in its own memory, at an address of the model's choice.
_MEMORY = "_ORT_MEM_ADDR_"


def check_external(proto: onnx.ModelProto, folder: Path, where: str) -> None:
    """Make sure that a model names no file outside of its folder.

    Args:
        proto: The model.
        folder: The folder its paths are relative to.
        where: The model, for messages.

    Raises:
        UnsafeModelError: It names an absolute path, one that leads out by ``..`` or by a link, or an address.
    """
    for tensor in tensors_of(proto):
        for entry in tensor.external_data:
            if entry.key == "location" and not _inside(entry.value, folder):
                raise UnsafeModelError(
                    f"{where}: weight {tensor.name!r} lies outside of the model's folder: {entry.value[:200]!r}",
                    hint="weights are only read from beside the model",
                )


def tensors_of(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor that a model holds: weights, attributes, and those of graphs and functions within it."""
    yield from _of_graph(proto.graph)
    yield from _of_nodes(node for function in proto.functions for node in function.node)


def _inside(location: str, folder: Path) -> bool:
    parts = PureWindowsPath(location)  # takes both separators, whatever system wrote the model
    if PurePosixPath(location).is_absolute() or parts.anchor or ".." in parts.parts or _MEMORY in parts.parts:
        return False
    try:
        return (folder / location).resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # a name that no file can have, or links in a circle
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
