"""Inference requests and responses of the REST protocol, with the binary tensor extension.

With binary data the body is a JSON object, whose length the header ``Inference-Header-Content-Length`` gives, and after
it the data of the binary tensors in their order.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chrion.serving.server import tensors
from chrion.serving.server.failures import RequestFailure, Status, invalid
from chrion.serving.server.json_bodies import parse_tensors, typed
from chrion.serving.server.tensors import Array, TensorSpec

#: The header with the length of the JSON part of a body with binary data.
HEADER_LENGTH = "Inference-Header-Content-Length"
_SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")
_NUMBERS = {
    "timeout": "a whole number of microseconds",
    "priority": "a whole number, 1 for the highest priority or 0 for none",
}
_REFUSED_TENSOR_PARAMETERS = {
    "shared_memory_region": "shared memory is not supported",
    "classification": "classification is not supported",
}
#: Limit of the JSON of outputs, in bytes, as for the numbers of a body: joining its pieces copies it while the GIL is
#: held.
_MAX_TEXT = 1 << 26
_TOO_MUCH_TEXT = f"the outputs have more than {_MAX_TEXT} bytes of JSON: ask for binary data with binary_data_output"
#: Bytes that are decompressed in one call, and bytes that it returns: a small body may become a thousand times larger,
#: and the limit is checked after each call.
_COMPRESSED, _DECOMPRESSED = 1 << 14, 1 << 20
#: The largest integer of a parameter in gRPC.
_MAX_INTEGER = (1 << 63) - 1


@dataclass(slots=True)
class InferenceRequest:
    """An inference request."""

    id: str = ""
    feeds: dict[str, tuple[str, Array]] = field(default_factory=dict)
    #: Outputs to return, and whether each is returned as binary data; empty for all.
    outputs: dict[str, bool] = field(default_factory=dict)
    #: Whether outputs that are not named are returned as binary data.
    binary: bool = False
    timeout_ms: float = math.inf
    #: 1 is the highest; 0 for none.
    priority: int = 0
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, identity: str, parameters: Mapping[str, Any]) -> InferenceRequest:
        """Return a request without inputs.

        Raises:
            RequestFailure: A parameter has a wrong value, or is not supported.
        """
        for name in _SEQUENCES:
            if parameters.get(name):
                raise RequestFailure(Status.UNSUPPORTED, f"parameter {name!r}: sequences are not supported")
        for name, expected in _NUMBERS.items():
            value = parameters.get(name, 0)
            if type(value) is not int or not 0 <= value <= _MAX_INTEGER:
                raise invalid(f"parameter {name!r}: expected {expected}")
        timeout = parameters.get("timeout", 0)
        timeout_ms = timeout / 1000 if timeout else math.inf
        return cls(identity, timeout_ms=timeout_ms, priority=parameters.get("priority", 0), parameters=parameters)


def decompress(body: bytearray, encoding: str) -> Iterator[bytes]:
    """Yield the parts of a body without its content encoding.

    Raises:
        RequestFailure: The encoding is unknown, or the body is damaged.
    """
    if encoding not in ("gzip", "deflate"):
        raise RequestFailure(Status.INVALID, f"Content-Encoding {encoding[:50]!r}: expected gzip or deflate")
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)  # either header
    at = 0
    while not decoder.eof:
        given = decoder.unconsumed_tail or body[at : at + _COMPRESSED]
        at += 0 if decoder.unconsumed_tail else len(given)
        try:
            part = decoder.decompress(given, _DECOMPRESSED)
        except zlib.error as error:
            raise invalid(f"the body is not {encoding} data: {error}") from error
        if not (given or part):
            raise invalid(f"the {encoding} body is truncated")
        yield part


def parse_request(
    body: bytes | bytearray, header_length: str | None, take: Callable[[int], None] = lambda _: None
) -> InferenceRequest:
    """Return the request of a body.

    Args:
        body: The body; binary tensors are views of it.
        header_length: The length of its JSON part, if binary data follows.
        take: Takes the memory of what the body becomes, in bytes.

    Raises:
        RequestFailure: The body is not a valid request.
    """
    size, name = len(body), "the body"
    if header_length is not None:
        if not (header_length.isascii() and header_length.isdigit()) or int(header_length[:20]) > len(body):
            raise invalid(f"{HEADER_LENGTH}: expected a number of at most {len(body)}")
        size = int(header_length)
        name = f"the JSON part of the body ({size} bytes by {HEADER_LENGTH})"
    content = memoryview(body)
    document, binary = typed(dict, parse_tensors(content[:size], take, name), name), content[size:]
    identity = typed(str, document.get("id", ""), "id")
    request = InferenceRequest.of(identity, typed(dict, document.get("parameters", {}), "parameters"))
    request.binary = typed(bool, request.parameters.get("binary_data_output", False), "binary_data_output")
    at = 0
    for entry in typed(list, document.get("inputs"), "inputs"):
        at = _read_input(request, typed(dict, entry, "input"), binary, at, take)
    if at != len(binary):
        raise invalid(f"the body has {len(binary)} bytes of binary data, and its inputs have {at}")
    for entry in typed(list, document.get("outputs", []), "outputs"):
        _read_output(request, typed(dict, entry, "output"))
    return request


def build_response(
    request: InferenceRequest, model: tuple[str, str], outputs: Sequence[tuple[TensorSpec, Array]]
) -> tuple[bytes, int | None]:
    """Return the body of a response, and the length of its JSON part if binary data follows.

    Args:
        request: The request.
        model: The name and the version of the model.
        outputs: The outputs.

    Raises:
        RequestFailure: Their numbers take too much JSON, whose pieces are joined in one call.
    """
    # Put together from texts: the encoder of an object costs as much as 64 numbers.
    quoted = tensors.compact_json
    number = f',"id":{quoted(request.id)}' if request.id else ""
    head = f'{{"model_name":{quoted(model[0])},"model_version":{quoted(model[1])}{number},"outputs":['
    text, parts = [head.encode()], []
    size = 0
    for at, (spec, array) in enumerate(outputs):
        shape = ",".join(map(str, array.shape))
        entry = f'{{"name":{quoted(spec.name)},"datatype":{quoted(spec.datatype)},"shape":[{shape}],'
        text += [b"," if at else b"", entry.encode()]
        if request.outputs.get(spec.name, request.binary):
            parts.append(tensors.to_raw(spec.datatype, array))
            text.append(b'"parameters":{"binary_data_size":%d}}' % len(parts[-1]))
        else:
            text.append(b'"data":[')
            for piece in tensors.json_text(spec.datatype, array):
                size += len(piece)
                if size > _MAX_TEXT:
                    raise RequestFailure(Status.TOO_LARGE, _TOO_MUCH_TEXT)
                text.append(piece)
            text.append(b"]}")
    header = b"".join([*text, b"]}"])
    return b"".join([header, *parts]) if parts else header, len(header) if parts else None


def refuse_tensor_parameters(name: str, parameters: Mapping[str, Any]) -> None:
    """Refuse parameters of tensors that are not supported.

    Raises:
        RequestFailure: There is one.
    """
    for key, reason in _REFUSED_TENSOR_PARAMETERS.items():
        if parameters.get(key):
            raise RequestFailure(Status.UNSUPPORTED, f"tensor {name!r}: {reason}")


def _read_input(
    request: InferenceRequest, entry: Mapping[str, Any], binary: memoryview, at: int, take: Callable[[int], None]
) -> int:
    """Add an input to the request; return the end of its binary data."""
    name = typed(str, entry.get("name"), "input name")
    if name in request.feeds:
        raise invalid(f"input {name[:200]!r} is given twice")
    datatype = typed(str, entry.get("datatype"), f"input {name[:200]!r}: datatype")
    shape = typed(list, entry.get("shape"), f"input {name[:200]!r}: shape")
    parameters = typed(dict, entry.get("parameters", {}), f"input {name[:200]!r}: parameters")
    refuse_tensor_parameters(name, parameters)
    size = parameters.get("binary_data_size")
    if size is None:
        array = tensors.from_json(name, datatype, shape, entry.get("data"))
    else:
        if "data" in entry:
            raise invalid(f"input {name[:200]!r}: both data and binary_data_size")
        if type(size) is not int or not 0 <= size <= len(binary) - at:
            left = f"at most {len(binary) - at}, the bytes that are left of the body"
            raise invalid(f"input {name[:200]!r}: binary_data_size: expected {left}, found {str(size)[:40]}")
        array = tensors.from_raw(name, datatype, shape, binary[at : at + size], take)
        at += size
    request.feeds[name] = (datatype, array)
    return at


def _read_output(request: InferenceRequest, entry: Mapping[str, Any]) -> None:
    name = typed(str, entry.get("name"), "output name")
    parameters = typed(dict, entry.get("parameters", {}), f"output {name[:200]!r}: parameters")
    refuse_tensor_parameters(name, parameters)
    request.outputs[name] = typed(bool, parameters.get("binary_data", request.binary), "binary_data")
