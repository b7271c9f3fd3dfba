"""A check that the external weights of a model are in the model's own folder.

A model may come from an untrusted source, and the files that it names are read with the rights of the user who loads
it. onnxruntime refuses some paths that lead outside the folder, depending on its version; this check refuses all.

In a cache of Hugging Face the files of a model are links to files in one other folder. So the folder of the file that
a link to the model leads to counts as the model's own, too.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

from chrion.errors import UnsafeModelError

if TYPE_CHECKING:
    import onnx

#: onnxruntime's location for weights in the memory of the process, at an address that the model file would choose.
_MEMORY = "_ORT_MEM_ADDR_"


def check_external(proto: onnx.ModelProto, path: Path | None) -> None:
    """Check that a model names no file outside its folder.

    Args:
        proto: The model.
        path: Its file, which may be a link; None for a model in memory, whose paths are relative to the working folder.

    Raises:
        UnsafeModelError: The model names an absolute path, a path that leads outside the folder through ``..`` or a
            link, or a memory address.
    """
    folder = path.parent if path else Path.cwd()
    own = {folder.resolve(), *([path.resolve().parent] if path else [])}
    for tensor in tensors_of(proto):
        for entry in _locations([tensor]):
            if not _inside(_location(entry), folder, own):
                raise UnsafeModelError(
                    f"{path or 'model'}: weight {tensor.name!r} is outside the model's folder: {entry.value[:200]!r}",
                    hint="weights are read only from the folder of the model",
                )


def has_weights_beside(proto: onnx.ModelProto, path: Path) -> bool:
    """Return whether all files that a model names are beside a path to it."""
    # os.path.exists, unlike Path.exists, returns False for a name that no file can have: the names are not checked yet.
    return all(os.path.exists(path.parent / _location(entry)) for entry in _locations(tensors_of(proto)))  # noqa: PTH110


def external_files(proto: onnx.ModelProto, path: Path) -> list[Path]:
    """Return the files of a model's external weights, without links, each of them once.

    Args:
        proto: A model that :func:`check_external` accepts.
        path: Its file, beside which the weights are.
    """
    return sorted({(path.parent / _location(entry)).resolve() for entry in _locations(tensors_of(proto))})


def follow_links(proto: onnx.ModelProto, path: Path) -> Path:
    """Return the folder of a model's external weights, and name the files as they are called there, in place.

    onnxruntime reads the weights of a model that is not a file from one folder, and refuses links that lead out of it.
    So it is the folder of the model, unless a file of weights is only a link there.

    Args:
        proto: A model that :func:`check_external` accepts.
        path: Its file, beside which the weights are.
    """
    own = path.parent.resolve()
    if all(file.is_relative_to(own) for file in external_files(proto, path)):
        return own
    folder = path.resolve().parent
    for entry in _locations(tensors_of(proto)):
        entry.value = os.path.relpath((path.parent / _location(entry)).resolve(), folder)
    return folder


def tensors_of(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor of a model: its weights, its attributes, and those of nested graphs and functions."""
    for graph in (proto.graph, *(body for node in nodes_of(proto) for body in _bodies(node))):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for node in nodes_of(proto):
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)


def nodes_of(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield every node of a model, and those of nested graphs and functions."""
    nodes = [*proto.graph.node, *(node for function in proto.functions for node in function.node)]
    for node in nodes:  # the list grows during the iteration
        yield node
        nodes += (inner for body in _bodies(node) for inner in body.node)


def _bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    return (graph for attribute in node.attribute for graph in (attribute.g, *attribute.graphs))


def _locations(tensors: Iterable[onnx.TensorProto]) -> Iterator[onnx.StringStringEntryProto]:
    return (entry for tensor in tensors for entry in tensor.external_data if entry.key == "location")


def _location(entry: onnx.StringStringEntryProto) -> str:
    """Return the name of a file, which protobuf returns as bytes if it is not UTF-8."""
    return os.fsdecode(entry.value)


def _inside(location: str, folder: Path, own: Collection[Path]) -> bool:
    parts = PureWindowsPath(location)  # splits at both separators: the model may be from any system
    if PurePosixPath(location).is_absolute() or parts.anchor or ".." in parts.parts or _MEMORY in parts.parts:
        return False
    try:
        file = (folder / location).resolve()
    except (OSError, ValueError, RuntimeError):  # an impossible file name, or a cycle of links
        return False
    return any(file.is_relative_to(one) for one in own)
