"""Requests of gRPC: raw contents are views of the message, and what is beside them is limited."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.serving.server import grpc_codec
from chrion.serving.server.failures import RequestFailure, Status
from chrion.serving.server.grpc_codec import message
from chrion.serving.server.rest_codec import InferenceRequest
from chrion.serving.server.tensors import TensorSpec


def request(**fields: Any) -> Any:
    """Return a request that is too large to be parsed as a whole."""
    found = message("ModelInferRequest")(model_name="m" * 5000, **fields)
    found.inputs.add(name="x", datatype="FP32", shape=[2])
    return found


@given(raw=st.lists(st.binary(max_size=300), max_size=5), identity=st.text(max_size=200))
def test_heads_and_raw_contents_are_those_of_protobuf(raw: list[bytes], identity: str) -> None:
    """The message without raw contents, and these, are what protobuf reads, wherever they stand."""
    whole = request(id=identity, raw_input_contents=raw).SerializeToString()
    found = grpc_codec.parse_request(whole + request().SerializeToString())
    assert [bytes(view) for view in found.raw] == raw
    assert found.head == message("ModelInferRequest").FromString(
        request(id=identity).SerializeToString() + request().SerializeToString()
    )


@pytest.mark.parametrize("content", [b"\x3a\x80", b"\x3a\x05abc", b"\xff" * 20, b"\x0b\x0c", b"\x3d\x00", b"\x38\xff"])
def test_damaged_messages_are_refused(content: bytes) -> None:
    """Lengths beyond the end, endless numbers and groups are no requests."""
    with pytest.raises(RequestFailure, match="not a ModelInferRequest") as refused:
        grpc_codec.parse_request(request().SerializeToString() + content)
    assert refused.value.status is Status.INVALID


@pytest.mark.parametrize(
    ("content", "about"),
    [
        (b"\x2a\x00" * 20_000, "more than 16384 inputs"),
        (b"\x1a\x80\x80\x80\x04" + b"a" * (1 << 23), "raw_input_contents"),
    ],
)
def test_requests_over_a_limit_name_it(content: bytes, about: str) -> None:
    """Entries of two bytes, and megabytes beside raw contents, are refused before they are parsed."""
    with pytest.raises(RequestFailure, match=about) as refused:
        grpc_codec.parse_request(content)
    assert refused.value.status is Status.TOO_LARGE


@pytest.mark.parametrize("size", [0, 1, 100, 5000])
def test_responses_are_those_of_protobuf(size: int) -> None:
    """A response that is written by hand has the same content as the message."""
    outputs = [(TensorSpec("y", "FP32", (-1,)), np.arange(size, dtype=np.float32))] * 2
    given = InferenceRequest(id="7")
    found = message("ModelInferResponse").FromString(grpc_codec.encode_response(given, ("m", "1"), outputs))
    entry = {"name": "y", "datatype": "FP32", "shape": [size]}
    expected = {"model_name": "m", "model_version": "1", "id": "7", "outputs": [entry] * 2}
    raw = [array.tobytes() for _, array in outputs]
    assert found == message("ModelInferResponse")(**expected, raw_output_contents=raw)
