"""The gRPC service: its messages against Triton's, wrong and random messages, cancellation."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from chrion.serving.server.grpc_codec import message, methods
from http2_frames import grpc_status, send_part, start_call
from local_server import LocalServer, local_server
from property_tests import examples
from server_client import wait_until

PREFIX = "/inference.GRPCInferenceService/"


@pytest.fixture(scope="module")
def channel(server: LocalServer) -> Iterator[Any]:
    """Return a channel to the server."""
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as found:
        yield found


def infer(channel: Any, request: Any) -> Any:
    """Call ModelInfer with a message or with bytes."""
    call = channel.unary_unary(PREFIX + "ModelInfer")
    content = request if isinstance(request, bytes) else request.SerializeToString()
    return message("ModelInferResponse").FromString(call(content, timeout=30))


def status(channel: Any, request: Any) -> str:
    """Call ModelInfer and return the name of the status."""
    try:
        infer(channel, request)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def test_a_model_that_cannot_be_served(channel: Any) -> None:
    """Requests are answered with UNAVAILABLE and the reason, and unknown names are NOT_FOUND."""
    with pytest.raises(grpc.RpcError) as refused:
        infer(channel, message("ModelInferRequest")(model_name="bad"))
    assert (refused.value.code(), "not an ONNX model" in refused.value.details()) == (grpc.StatusCode.UNAVAILABLE, True)
    ready = channel.unary_unary(PREFIX + "ModelReady")
    answer = ready(message("ModelReadyRequest")(name="bad").SerializeToString(), timeout=30)
    assert not message("ModelReadyResponse").FromString(answer).ready
    assert status(channel, message("ModelInferRequest")(model_name="none")) == "NOT_FOUND"


def test_pages_cannot_call_methods(server: LocalServer) -> None:
    """A request as browsers could send it, without the header te, reaches no method, whatever its type."""
    for kind in ("application/grpc", "text/plain"):
        with socket.create_connection(("127.0.0.1", server.grpc), 2) as connection:
            content = message("RepositoryModelUnloadRequest")(model_name="product").SerializeToString()
            start_call(connection, PREFIX + "RepositoryModelUnload", {"content-type": kind})
            with contextlib.suppress(OSError):
                send_part(connection, len(content), content, last=True)
                grpc_status(connection)
    assert server.get("/v2/models/product/ready")[0] == 200


def valid(**more: Any) -> Any:
    """Return a valid request, with changes to its input."""
    entry = {"name": "x", "datatype": "FP32", "shape": [1, 4]} | more
    return message("ModelInferRequest")(model_name="product", inputs=[entry])


def test_messages_are_tritons() -> None:
    """Every field of every message has the number and the type of the field of that name in Triton's messages."""
    service = pytest.importorskip("tritonclient.grpc", reason="tritonclient: pip install 'tritonclient[all]'")
    theirs = service.service_pb2.DESCRIPTOR.pool
    checked = 0
    pending = [method.input_type for method in methods().values()]
    pending += [method.output_type for method in methods().values()]
    seen = set()
    while pending:
        found = pending.pop()
        if found.full_name in seen:
            continue
        seen.add(found.full_name)
        expected = theirs.FindMessageTypeByName(found.full_name).fields_by_name
        for field in found.fields:
            assert (field.number, field.type) == (expected[field.name].number, expected[field.name].type)
            checked += 1
            if field.message_type:
                pending.append(field.message_type)
    assert checked > 90
    expected_methods = theirs.FindServiceByName("inference.GRPCInferenceService").methods_by_name
    for name, method in methods().items():
        assert method.input_type.full_name == expected_methods[name].input_type.full_name
        assert method.output_type.full_name == expected_methods[name].output_type.full_name


def test_typed_contents(channel: Any) -> None:
    """Elements in the field of the datatype give the same answer as raw contents."""
    raw = valid()
    raw.raw_input_contents.append(struct.pack("<4f", 1, 2, 3, 4))
    typed = valid(contents={"fp32_contents": [1, 2, 3, 4]})
    assert infer(channel, raw).raw_output_contents == infer(channel, typed).raw_output_contents


def test_wrong_messages(channel: Any) -> None:
    """The status is INVALID_ARGUMENT, and the message says what is wrong."""
    for request, about in (
        (b"\xff\xff", "not a ModelInferRequest"),
        (valid(), "expected 4 elements"),
        (valid(contents={"fp64_contents": [1]}), "expected fp32_contents"),
        (valid(contents={"fp32_contents": [1]}), "expected 4 elements"),
        (valid(shape=[-1, 4]), "whole numbers"),
        (valid(shape=[2**40, 2**40]), "elements"),
        (valid(datatype="FP16"), "raw_input_contents"),
        (valid(datatype="?"), "unknown datatype"),
        (valid(name="z", contents={"fp32_contents": [1] * 4}), "unknown input"),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            infer(channel, request)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, about
        assert about in refused.value.details()


def test_a_message_over_the_limit_is_refused(channel: Any) -> None:
    """A message above the limit is RESOURCE_EXHAUSTED, and the channel goes on."""
    request = valid()
    request.raw_input_contents.append(bytes(5_000_000))
    with pytest.raises(grpc.RpcError) as refused:
        infer(channel, request)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert infer(channel, valid(contents={"fp32_contents": [1, 2, 3, 4]})).outputs


def test_unsupported_methods_are_unimplemented(channel: Any) -> None:
    """A method of Triton's that does not exist is UNIMPLEMENTED."""
    with pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(PREFIX + "SystemSharedMemoryStatus")(b"")
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_call_that_is_cancelled_or_late_ends_its_request(busy_root: Path) -> None:
    """A cancelled call and one whose deadline passes free the cores for others."""
    entry = {"name": "x", "datatype": "FP32", "shape": [1], "contents": {"fp32_contents": [1e15]}}
    request = message("ModelInferRequest")(model_name="slow", inputs=[entry]).SerializeToString()
    with local_server(busy_root) as server, grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        call = channel.unary_unary(PREFIX + "ModelInfer")
        running = call.future(request)
        wait_until(server.computes)
        running.cancel()
        assert server.infer("quick", [[1.0] * 4])[0] == 200
        with pytest.raises(grpc.RpcError) as late:
            call(request, timeout=0.2)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert server.infer("quick", [[1.0] * 4])[0] == 200
        wait_until(lambda: server.metric("chrion_request_cancelled_total", model="slow") == 2)


def test_lengths_of_elements_that_are_not_there(server: LocalServer, channel: Any) -> None:
    """Elements of BYTES that claim a gigabyte are refused in both protocols."""
    for content in (b"\x00\x00\x00\x00", struct.pack("<I", 1 << 30) + b"x", b"\xff" * 4):
        request = message("ModelInferRequest")(model_name="identity-BYTES", raw_input_contents=[content])
        request.inputs.add(name="x", datatype="BYTES", shape=[1, 2])
        assert status(channel, request) == "INVALID_ARGUMENT", content
        entry = {"name": "x", "datatype": "BYTES", "shape": [1, 2], "parameters": {"binary_data_size": len(content)}}
        header = json.dumps({"inputs": [entry]}).encode()
        named = {"Inference_Header_Content_Length": str(len(header))}
        refused, found, _ = server.get("/v2/models/identity-BYTES/infer", header + content, **named)
        assert (refused, "BYTES elements" in found["error"]) == (400, True), content


@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=40),
    shape=st.lists(st.integers(-3, 2**63 - 1) | st.integers(0, 5), max_size=4),
    datatype=st.sampled_from(["FP32", "BYTES", "BOOL", "BF16", ""]),
    raw=st.lists(st.binary(max_size=40), max_size=2),
    values=st.lists(st.floats(width=32), max_size=6),
)
def test_random_messages(
    channel: Any, content: bytes, shape: list[int], datatype: str, raw: list[bytes], values: list[float]
) -> None:
    """Random bytes and random fields are answered with a result or INVALID_ARGUMENT."""
    request = message("ModelInferRequest")(model_name="identity-FP32", raw_input_contents=raw)
    request.inputs.add(name="x", datatype=datatype, shape=shape, contents={"fp32_contents": values})
    for given_ in (request, content):
        assert status(channel, given_) in {"OK", "INVALID_ARGUMENT", "NOT_FOUND"}
