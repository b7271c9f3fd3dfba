"""Inference requests and responses of the gRPC protocol, and the classes of its messages and of those on health.

The classes are built from the compiled ``.proto`` files in a pool of their own: this works with every version of
protobuf, whichever Triton's client or another package needs, and a process can import that client too, whose messages
have the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from chrion.serving.server import tensors
from chrion.serving.server.failures import RequestFailure, Status, invalid
from chrion.serving.server.rest_codec import InferenceRequest, refuse_tensor_parameters
from chrion.serving.server.tensors import Array, TensorSpec

SERVICE = "inference.GRPCInferenceService"


def _build_pool() -> descriptor_pool.DescriptorPool:
    content = (resources.files("chrion.serving.server") / "messages.desc").read_bytes()
    files = descriptor_pb2.FileDescriptorSet.FromString(content)
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL = _build_pool()


def message(name: str, package: str = "inference") -> Any:
    """Return the class of a message, ``ModelInferRequest`` for example."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{package}.{name}"))


def methods() -> dict[str, Any]:
    """Return the descriptor of each method of the service by its name."""
    return dict(_POOL.FindServiceByName(SERVICE).methods_by_name)


_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}

#: Types of fields on the wire, and the bytes of those of one size; the others are groups, which no message here has.
_VARINT, _BYTES = 0, 2
_SIZES = [0, 8, 0, 1 << 64, 1 << 64, 4, 1 << 64, 1 << 64]
#: Keys of the fields with raw contents: 7 of requests, 6 of responses.
_RAW_INPUT, _RAW_OUTPUT = 7 << 3 | _BYTES, bytes([6 << 3 | _BYTES])
#: Bytes of a request that is parsed as a whole (a choice, not measured).
_SMALL = 1 << 12
#: Limits of what a request has beside raw contents, bytes and fields with raw contents: its parser holds the GIL.
_MAX_HEAD, _MAX_FIELDS = 1 << 22, 1 << 14
#: Bytes that a byte of it may become in the parser's objects: a bound for typed contents of the smallest numbers.
_HEAD_FACTOR = 24


@dataclass(frozen=True, slots=True)
class WireRequest:
    """A ``ModelInferRequest``.

    Attributes:
        head: The message without raw contents.
        raw: The raw contents; those of large requests are views of the bytes that have been received.
        parsed_bytes: A bound on the memory of the head.
    """

    head: Any
    raw: Sequence[bytes | memoryview]
    parsed_bytes: int


def parse_request(content: bytes) -> WireRequest:
    """Return the ``ModelInferRequest`` in a message.

    The parser holds the GIL and copies what it reads, and an entry of two bytes may become a hundred; so it gets only
    what is beside the raw contents, within a limit.

    Raises:
        RequestFailure: The bytes are another message, or it has too much beside raw contents.
    """
    try:
        if len(content) <= _SMALL:  # not worth the time of splitting it
            given = message("ModelInferRequest").FromString(content)
            return WireRequest(given, given.raw_input_contents, _HEAD_FACTOR * len(content))
        head, raw = _split(content)
        if len(head) > _MAX_HEAD:
            text = f"the request has {len(head)} bytes beside raw_input_contents, more than {_MAX_HEAD}"
            raise RequestFailure(Status.TOO_LARGE, f"{text}: send large tensors in raw_input_contents")
        return WireRequest(message("ModelInferRequest").FromString(head), raw, _HEAD_FACTOR * len(head))
    except (DecodeError, IndexError) as error:
        raise invalid("the request is not a ModelInferRequest") from error


def read_request(wire: WireRequest, take: Callable[[int], None] = lambda _: None) -> InferenceRequest:
    """Return the request of a ``ModelInferRequest``.

    Args:
        wire: The message.
        take: Takes the memory of what its tensors become, in bytes.

    Raises:
        RequestFailure: The message is not a valid request.
    """
    given, raw = wire.head, wire.raw
    request = InferenceRequest.of(given.id, _parameters(given.parameters))
    if raw and len(raw) != len(given.inputs):
        raise invalid(f"raw_input_contents: expected {len(given.inputs)} entries, found {len(raw)}")
    for at, entry in enumerate(given.inputs):
        if entry.name in request.feeds:
            raise invalid(f"input {entry.name[:200]!r} is given twice")
        refuse_tensor_parameters(entry.name, _parameters(entry.parameters))
        request.feeds[entry.name] = (entry.datatype, _array(entry, raw[at] if raw else None, take))
    for entry in given.outputs:
        refuse_tensor_parameters(entry.name, _parameters(entry.parameters))
        request.outputs[entry.name] = True
    return request


def encode_response(
    request: InferenceRequest, model: tuple[str, str], outputs: Sequence[tuple[TensorSpec, Array]]
) -> bytes:
    """Return the ``ModelInferResponse`` with some outputs as bytes, whose raw contents are copied once only.

    Args:
        request: The request.
        model: The name and the version of the model.
        outputs: The outputs.
    """
    head = message("ModelInferResponse")(model_name=model[0], model_version=model[1], id=request.id)
    for spec, array in outputs:
        head.outputs.add(name=spec.name, datatype=spec.datatype, shape=array.shape)
    parts = [head.SerializeToString()]
    for spec, array in outputs:
        raw = tensors.to_raw(spec.datatype, array)
        parts += [_RAW_OUTPUT, _varint(len(raw)), raw]
    return b"".join(parts)


def _split(content: bytes) -> tuple[bytes, list[memoryview]]:
    """Return a request without its raw contents, and these.

    Raises:
        IndexError: The bytes are no message.
        RequestFailure: They have too many fields.
    """
    view, head, raw = memoryview(content), [], []
    at = head_start = count = 0
    while at < len(content):
        start = at
        key, at = _read_varint(content, at)
        size, at = _read_varint(content, at) if key & 7 == _BYTES else (_SIZES[key & 7], at)
        if key & 7 == _VARINT:
            _, at = _read_varint(content, at)
        end = at + size
        count += 1
        if end > len(content):
            raise IndexError
        if count > _MAX_FIELDS:
            raise RequestFailure(Status.TOO_LARGE, f"the request has more than {_MAX_FIELDS} inputs and other fields")
        if key == _RAW_INPUT:
            head.append(view[head_start:start])
            raw.append(view[at:end])
            head_start = end
        at = end
    return b"".join([*head, view[head_start:]]), raw


def _read_varint(content: bytes, at: int) -> tuple[int, int]:
    """Return a number, and the position behind it."""
    value = 0
    for shift in range(0, 64, 7):
        byte = content[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise IndexError


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def _array(entry: Any, raw: bytes | memoryview | None, take: Callable[[int], None]) -> Array:
    shape = list(entry.shape)
    if raw is not None:
        if entry.HasField("contents"):
            raise invalid(f"input {entry.name[:200]!r}: both contents and raw_input_contents")
        return tensors.from_raw(entry.name, entry.datatype, shape, raw, take)
    tensors.element_count(entry.name, entry.datatype, shape)
    if entry.datatype not in _CONTENTS:
        raise invalid(f"input {entry.name[:200]!r}: {entry.datatype} must be sent in raw_input_contents")
    expected = _CONTENTS[entry.datatype]
    filled = [field.name for field, _ in entry.contents.ListFields()]
    if filled not in ([expected], []):
        raise invalid(f"input {entry.name[:200]!r}: expected {expected}, found {', '.join(filled)}")
    return tensors.from_contents(entry.name, entry.datatype, shape, getattr(entry.contents, expected))


def _parameters(given: Any) -> dict[str, Any]:
    parameters = {}
    for name, value in given.items():
        kind = value.WhichOneof("parameter_choice")
        parameters[name] = getattr(value, kind) if kind else None
    return parameters
