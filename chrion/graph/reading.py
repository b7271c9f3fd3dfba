"""Reading ONNX models from files, bytes and protobuf messages, without their external weights."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, EncodeError

from chrion.common.files import read_bytes
from chrion.errors import ModelError
from chrion.graph.embedded_weights import LARGE_BYTES, split
from chrion.graph.external import check_external, has_weights_beside, tensors_of
from chrion.graph.model_digest import MAX_BYTES
from chrion.graph.unsafe_trees import check_trees
from chrion.graph.weights_folder import FULL, WeightsFolder

#: The hint for a model that is larger than a protobuf file can be.
_TOO_LARGE = "save it with its weights as external data and give its path"


def read_model(source: str | Path | bytes | onnx.ModelProto) -> tuple[onnx.ModelProto, Path | None]:
    """Read a model without its external weights.

    Returns:
        A copy of the model, and its file if it has one. That is the link to it, if it is one, and not the file that the
        link leads to, unless external weights are only beside the latter.

    Raises:
        ModelError: The file does not exist or is too large, or it is not an ONNX model.
        UnsafeModelError: The model refers to files outside its own folder, or its trees would end the process.
    """
    proto, path = _read(source)
    check_external(proto, path)
    check_trees(proto, str(path or "model"))
    return proto, path


def read_without_weights(source: str | bytes, folder: WeightsFolder) -> tuple[onnx.ModelProto, Path | None, bool]:
    """Read a model as :func:`read_model` does, and move its large weights to a folder if it has no external ones.

    Returns:
        The model, its file if it has one, and whether weights were moved. They are then external ones in the folder.

    Raises:
        ChrionError: As :func:`read_model`.
        OSError: There is no space for the weights.
    """
    try:
        rest, moved = split(source, folder) if LARGE_BYTES <= file_size(source) <= MAX_BYTES else (b"", [])
    except OSError as error:
        if error.errno in FULL:
            raise
        moved = []  # the file cannot be read, which is reported below, or no other one be written
    if moved:
        where = "model" if isinstance(source, bytes) else source
        proto = _checked(parse(rest, where), where)
        names = [tensor.name for tensor in proto.graph.initializer]
        external = any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in tensors_of(proto))
        # onnxruntime reads external weights from one folder, and of two with the same name another one than inside.
        if not external and len(set(names)) == len(names):
            check_trees(proto, where)
            for weight in moved:
                folder.refer(proto.graph.initializer[weight.number], weight.file, weight.length)
            return proto, None if isinstance(source, bytes) else Path(source).absolute(), True
        folder.remove_unused(proto)
    return *read_model(source), False


def file_size(source: str | bytes) -> int:
    """Return the size of a model without external weights; 0 for a file that cannot be read, which reading reports."""
    if isinstance(source, bytes):
        return len(source)
    path = Path(source)
    try:
        return path.stat().st_size if path.is_file() and os.access(path, os.R_OK) else 0
    except (OSError, ValueError):
        return 0


def serialise(proto: onnx.ModelProto, where: str) -> bytes:
    """Return a model as bytes.

    Raises:
        ModelError: The model is larger than a protobuf message can be; the message begins with ``where``.
    """
    too_large = ModelError(f"{where}: more than 2 GB in memory", hint=_TOO_LARGE)
    try:
        content = bytes(proto.SerializeToString())
    except (ValueError, EncodeError) as error:
        raise too_large from error
    if len(content) > MAX_BYTES:  # some versions of protobuf write what none of them reads
        raise too_large
    return content


def _read(source: str | Path | bytes | onnx.ModelProto) -> tuple[onnx.ModelProto, Path | None]:
    if isinstance(source, onnx.ModelProto):
        copy = onnx.ModelProto()
        copy.CopyFrom(source)
        return _checked(copy, "model"), None
    if isinstance(source, bytes):
        return _checked(parse(source, "model"), "model"), None
    path = Path(source)
    try:
        content = read_bytes(path, MAX_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ModelError(f"{path}: more than 2 GB in one file", hint=_TOO_LARGE) from error
        models = sorted(one.name for one in path.glob("*.onnx")) if error.errno == errno.EISDIR else []
        hint = f"name a file in it, for example {path / models[0]}" if models else ""
        raise ModelError(f"{path}: cannot be read: {error.strerror}", hint=hint) from error
    proto = _checked(parse(content, str(path)), str(path))
    return proto, path.absolute() if has_weights_beside(proto, path) else path.resolve()


def parse(content: bytes, where: str) -> onnx.ModelProto:
    """Return the protobuf message in some bytes, which need not be a model.

    Raises:
        ModelError: There is none; the message begins with ``where``.
    """
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(content)
    except DecodeError as error:
        found = ", found JSON, as of a plan or a profile" if content.lstrip()[:1] == b"{" else ""
        hint = f"expected a .onnx protobuf file{found}"
        raise ModelError(f"{where}: not an ONNX model, or truncated", hint=hint) from error
    return proto


def _checked(proto: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """Return the model, or raise ModelError if a required field is missing: any bytes may parse as a message."""
    if not proto.ir_version or not proto.HasField("graph") or not proto.graph.output:
        missing = "has no graph output" if proto.ir_version else "has no ir_version" if proto.ByteSize() else "is empty"
        raise ModelError(f"{where}: not an ONNX model: it {missing}", hint="expected a .onnx protobuf file")
    return proto
