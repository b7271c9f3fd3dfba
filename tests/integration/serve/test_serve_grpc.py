"""The gRPC service: its messages against Triton's, wrong and random messages, cancellation."""

from __future__ import annotations

import importlib
import importlib.util
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import chrion
from property_tests import examples
from server_process import Server, product, put, serving, slow_model, wait_until

grpc = pytest.importorskip("grpc", reason="grpc: pip install 'chrion[serve]'")
FOLDER = Path(chrion.__file__).parent / "server"
PREFIX = "/inference.GRPCInferenceService/"


def message(name: str) -> Any:
    return importlib.import_module("chrion.server.grpc_messages").message(name)


@pytest.fixture
def channel(server: Server) -> Iterator[Any]:
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


def valid(**more: Any) -> Any:
    """Return a valid request, with changes to its input."""
    entry = {"name": "x", "datatype": "FP32", "shape": [1, 4]} | more
    return message("ModelInferRequest")(model_name="product", inputs=[entry])


def test_the_compiled_file_is_that_of_the_source(tmp_path: Path) -> None:
    """The committed descriptors are what protoc makes of the committed source.

    The compiler runs in a process of its own: its library of protocol buffers and those of others end a process that
    loads them together.
    """
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpc_tools: pip install grpcio-tools")
    made = tmp_path / "made.desc"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{FOLDER}", f"--descriptor_set_out={made}"]
    subprocess.run([*command, str(FOLDER / "open_inference.proto")], check=True, timeout=60)  # noqa: S603
    assert made.read_bytes() == (FOLDER / "open_inference.desc").read_bytes()


def test_messages_are_tritons() -> None:
    """Every field of every message has the number and the type of the field of that name in Triton's messages."""
    service = pytest.importorskip("tritonclient.grpc", reason="tritonclient: pip install 'tritonclient[all]'")
    theirs = service.service_pb2.DESCRIPTOR.pool
    ours = importlib.import_module("chrion.server.grpc_messages")
    checked = 0
    pending = [method.input_type for method in ours.methods().values()]
    pending += [method.output_type for method in ours.methods().values()]
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
    methods = theirs.FindServiceByName("inference.GRPCInferenceService").methods_by_name
    for name, method in ours.methods().items():
        assert method.input_type.full_name == methods[name].input_type.full_name
        assert method.output_type.full_name == methods[name].output_type.full_name


def test_typed_contents(channel: Any) -> None:
    """Elements in the field of the datatype give the same answer as raw contents."""
    raw = valid()
    raw.raw_input_contents.append(struct.pack("<4f", 1, 2, 3, 4))
    typed = valid(contents={"fp32_contents": [1, 2, 3, 4]})
    assert infer(channel, raw).raw_output_contents == infer(channel, typed).raw_output_contents


@pytest.mark.parametrize(
    ("request_", "about"),
    [
        (b"\xff\xff", "not a ModelInferRequest"),
        (valid, "expected 4 elements"),
        (lambda: valid(contents={"fp64_contents": [1]}), "expected fp32_contents"),
        (lambda: valid(contents={"fp32_contents": [1]}), "expected 4 elements"),
        (lambda: valid(shape=[-1, 4]), "whole numbers"),
        (lambda: valid(shape=[2**40, 2**40]), "elements"),
        (lambda: valid(datatype="FP16"), "raw_input_contents"),
        (lambda: valid(datatype="?"), "unknown datatype"),
        (lambda: valid(name="z", contents={"fp32_contents": [1] * 4}), "unknown input"),
    ],
)
def test_wrong_messages(channel: Any, request_: Any, about: str) -> None:
    """The status is INVALID_ARGUMENT, and the message says what is wrong."""
    with pytest.raises(grpc.RpcError) as refused:
        infer(channel, request_() if callable(request_) else request_)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
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


def test_a_call_that_is_cancelled_or_late_ends_its_request(tmp_path: Path) -> None:
    """A cancelled call and one whose deadline passes free the cores for others."""
    put(tmp_path, "slow", slow_model(rounds=200_000), toml="cores = 64\n")
    put(tmp_path, "product", product(), toml="cores = 64\n")
    request = message("ModelInferRequest")(
        model_name="slow",
        inputs=[{"name": "x", "datatype": "FP32", "shape": [1], "contents": {"fp32_contents": [1]}}],
    ).SerializeToString()
    with serving(tmp_path) as server, grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        call = channel.unary_unary(PREFIX + "ModelInfer")
        running = call.future(request)
        wait_until(lambda: server.metric("chrion_model_loads_total", model="slow") == 1)
        wait_until(server.computes)
        running.cancel()
        assert infer(channel, valid(contents={"fp32_contents": [1, 2, 3, 4]})).outputs
        with pytest.raises(grpc.RpcError) as late:
            call(request, timeout=0.5)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert infer(channel, valid(contents={"fp32_contents": [1, 2, 3, 4]})).outputs
        wait_until(lambda: server.metric("chrion_request_cancelled_total", model="slow") == 2)


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
