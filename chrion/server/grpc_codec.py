"""Inference requests and responses of the gRPC protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError

from chrion.server import tensors
from chrion.server.failures import invalid
from chrion.server.grpc_messages import message
from chrion.server.rest_codec import InferenceRequest, read_priority, read_timeout_ms, refuse_tensor_parameters
from chrion.server.tensors import Array, TensorSpec

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


def parse_request(content: bytes) -> Any:
    """Return the ``ModelInferRequest`` in a message.

    Raises:
        RequestFailure: The bytes are another message.
    """
    try:
        return message("ModelInferRequest").FromString(content)
    except DecodeError as error:
        raise invalid("the request is not a ModelInferRequest") from error


def read_request(given: Any) -> InferenceRequest:
    """Return the request of a ``ModelInferRequest``.

    Raises:
        RequestFailure: The message is not a valid request.
    """
    parameters = _parameters(given.parameters)
    request = InferenceRequest(
        id=given.id,
        timeout_ms=read_timeout_ms(parameters),
        priority=read_priority(parameters),
        parameters=parameters,
    )
    raw = given.raw_input_contents
    if raw and len(raw) != len(given.inputs):
        raise invalid(f"raw_input_contents: expected {len(given.inputs)} entries, found {len(raw)}")
    for at, entry in enumerate(given.inputs):
        if entry.name in request.feeds:
            raise invalid(f"input {entry.name[:200]!r} is given twice")
        refuse_tensor_parameters(entry.name, _parameters(entry.parameters))
        request.feeds[entry.name] = (entry.datatype, _array(entry, raw[at] if raw else None))
    for entry in given.outputs:
        refuse_tensor_parameters(entry.name, _parameters(entry.parameters))
        request.outputs[entry.name] = True
    return request


def build_response(request: InferenceRequest, model: tuple[str, str], found: Sequence[tuple[TensorSpec, Array]]) -> Any:
    """Return the ``ModelInferResponse`` with some outputs.

    Args:
        request: The request.
        model: The name and the version of the model.
        found: The outputs.
    """
    response = message("ModelInferResponse")(model_name=model[0], model_version=model[1], id=request.id)
    for spec, array in found:
        response.outputs.add(name=spec.name, datatype=spec.datatype, shape=array.shape)
        response.raw_output_contents.append(tensors.to_raw(spec.datatype, array))
    return response


def _array(entry: Any, raw: bytes | None) -> Array:
    shape = list(entry.shape)
    if raw is not None:
        if entry.HasField("contents"):
            raise invalid(f"input {entry.name[:200]!r}: both contents and raw_input_contents")
        return tensors.from_raw(entry.name, entry.datatype, shape, raw)
    tensors.element_count(entry.name, entry.datatype, shape)
    if entry.datatype not in _CONTENTS:
        raise invalid(f"input {entry.name[:200]!r}: {entry.datatype} must be sent in raw_input_contents")
    expected = _CONTENTS[entry.datatype]
    filled = [field.name for field, _ in entry.contents.ListFields()]
    if filled not in ([expected], []):
        raise invalid(f"input {entry.name[:200]!r}: expected {expected}, found {', '.join(filled)}")
    return tensors.from_contents(entry.name, entry.datatype, shape, getattr(entry.contents, expected))


def _parameters(given: Any) -> dict[str, Any]:
    found = {}
    for name, value in given.items():
        kind = value.WhichOneof("parameter_choice")
        found[name] = getattr(value, kind) if kind else None
    return found
