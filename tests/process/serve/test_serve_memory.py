"""The memory of the server's process: many requests, unread answers, and messages that do not arrive leave none."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from chrion.serving.server.grpc_codec import message
from command_line import run_chrion
from http2_frames import PREFACE, grpc_status, send_part, start_call
from server_client import infer_body, wait_until
from server_process import Server

INFER = "/v2/models/product/infer"
SERVICE = "/inference.GRPCInferenceService/"
ELEMENTS = 900_000  # more than a socket buffers
SIZE = 4 * ELEMENTS


def tensor(number: int) -> bytes:
    return np.full(ELEMENTS, number, np.float32).tobytes()


def infer_request(number: int) -> bytes:
    """Return a message of some megabytes, which is answered with as many."""
    found = message("ModelInferRequest")(model_name="identity-FP32", id=str(number))
    found.inputs.add(name="x", datatype="FP32", shape=[1, ELEMENTS])
    found.raw_input_contents.append(tensor(number))
    content: bytes = found.SerializeToString()
    return content


def test_memory_stays_flat_over_many_requests(server: Server) -> None:
    """Valid and wrong requests by hundreds leave no memory behind."""

    def send(count: int) -> None:
        body = infer_body(np.ones((2000, 4), np.float32))
        for _ in range(count):
            assert server.get(INFER, body)[0] == 200
            assert server.get(INFER, {"inputs": [body["inputs"][0] | {"data": [1]}]})[0] == 400

    send(30)
    before = server.rss_mb()
    send(150)
    assert server.rss_mb() < before + 15
    assert server.metric("chrion_request_bytes") == 0


def test_a_gigabyte_declared_with_one_byte_costs_nothing(server: Server) -> None:
    """Sizes that are declared are never allocated."""
    before = server.rss_mb()
    entry = {"name": "x", "datatype": "FP32", "shape": [67_108_864, 4], "parameters": {"binary_data_size": 1 << 30}}
    header = json.dumps({"inputs": [entry]}).encode()
    for _ in range(20):
        status, found, _ = server.get(INFER, header + b"x", Inference_Header_Content_Length=str(len(header)))
        assert status == 400
        assert "at most 1, the bytes" in found["error"]
    assert server.rss_mb() < before + 20


def test_the_memory_of_a_rest_answer_is_taken_until_it_is_read(server: Server) -> None:
    """The limit of the requests in flight includes answers that wait for their clients."""
    entry = {"name": "x", "datatype": "FP32", "shape": [1, ELEMENTS], "parameters": {"binary_data_size": SIZE}}
    header = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    head = (
        f"POST /v2/models/identity-FP32/infer HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Inference-Header-Content-Length: {len(header)}\r\nContent-Length: {len(header) + SIZE}\r\n\r\n"
    )
    before = server.metric("nv_inference_request_success", model="identity-FP32")
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(4)]
        for client in clients:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(60)
            client.connect(("127.0.0.1", server.http))
            client.sendall(head.encode() + header + tensor(3))
        wait_until(lambda: server.metric("nv_inference_request_success", model="identity-FP32") == before + 4)
        wait_until(lambda: server.metric("chrion_request_bytes") >= 4 * 2 * SIZE)
        time.sleep(0.5)
        assert server.metric("chrion_request_bytes") >= 4 * 2 * SIZE
        found = b"".join(iter(lambda: clients[0].recv(1 << 20), b""))
        assert found.endswith(tensor(3))
        wait_until(lambda: server.metric("chrion_request_bytes") < 4 * 2 * SIZE)
        assert server.metric("chrion_request_bytes") >= 3 * 2 * SIZE
    wait_until(lambda: server.metric("chrion_request_bytes") == 0)


def test_a_stream_whose_client_does_not_read_is_not_read_either(server: Server) -> None:
    """The server reads no more requests than it may answer, serves others, and answers all when the client reads."""
    count = 60

    def sent() -> Iterator[bytes]:
        for number in range(count):
            yield infer_request(number)

    before, memory = server.metric("nv_inference_request_success", model="identity-FP32"), server.rss_mb()
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        answers = channel.stream_stream(SERVICE + "ModelStreamInfer")(sent(), timeout=120)
        wait_until(lambda: server.metric("chrion_request_bytes") >= 16 * 2 * SIZE)
        time.sleep(1.0)
        assert server.metric("nv_inference_request_success", model="identity-FP32") - before < 45
        assert server.metric("chrion_request_bytes") <= 34 * 5.1 * SIZE
        assert server.rss_mb() < memory + 500
        assert server.infer("product", np.ones((1, 4), np.float32))[0] == 200
        for number in range(count):
            found = message("ModelStreamInferResponse").FromString(next(answers)).infer_response
            assert (found.id, found.raw_output_contents[0]) == (str(number), tensor(number))
        assert list(answers) == []
    wait_until(lambda: server.metric("chrion_request_bytes") == 0)


def test_a_gigabyte_declared_in_a_message_costs_nothing(server: Server) -> None:
    """Shapes, and lengths of fields, that claim more than the message has are refused and never allocated."""
    claims = message("ModelInferRequest")(model_name="product")
    claims.inputs.add(name="x", datatype="FP32", shape=[1 << 26, 4])
    claims.raw_input_contents.append(b"x")
    field = b"\x3a" + b"\x80\x80\x80\x80\x04" + b"x"  # raw_input_contents with a length of 1 << 30
    memory = server.rss_mb()
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        for _ in range(20):
            for content, about in (
                (claims.SerializeToString(), "expected 1073741824 bytes"),
                (field, "not a ModelInferRequest"),
            ):
                with pytest.raises(grpc.RpcError) as refused:
                    channel.unary_unary(SERVICE + "ModelInfer")(content, timeout=30)
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert about in refused.value.details()
    assert server.rss_mb() < memory + 20


@pytest.mark.skipif(sys.platform != "linux", reason="counts open files as Linux does")
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "RepositoryIndex"])
def test_messages_that_do_not_arrive_cost_nothing(server: Server, method: str) -> None:
    """A message over the limit is refused when its length is known; of shorter ones, what has arrived is kept."""
    process = psutil.Process(server.process.pid)
    files, memory = process.num_fds(), server.rss_mb()
    with ExitStack() as stack:

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", server.grpc), 30))

        for _ in range(10):
            large = connect()
            start_call(large, SERVICE + method)
            send_part(large, 1 << 30, b"x")
            assert grpc_status(large) == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        for number in range(60):
            half = connect()  # a third says nothing, and a third nothing after the connection has begun
            if number % 3 == 1:
                half.sendall(PREFACE)
            elif number % 3 == 2:
                start_call(half, SERVICE + method)
                send_part(half, 3_000_000, b"x")
        wait_until(lambda: process.num_fds() >= files + 60)
        assert server.infer("product", np.ones((1, 4), np.float32))[0] == 200
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
            assert channel.unary_unary(SERVICE + "ServerReady")(b"", timeout=30) == b"\x08\x01"
        assert server.rss_mb() < memory + 30
    wait_until(lambda: process.num_fds() < files + 5)


SCENARIO = """
[[models]]
name = "m"
[models.variants.large]
memory_mb = 400.0
latency_ms = 2.0
[[servers]]
gpu_memory_gb = 1
[workload]
kind = "uniform"
"""


def test_stand_ins_take_their_memory(tmp_path: Path) -> None:
    """The session of a stand-in of a replay holds the memory that its scenario states."""
    (tmp_path / "s.toml").write_text(SCENARIO, encoding="utf-8")
    written = run_chrion("replay", "s.toml", "--write-models", "models", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    code = (
        "import sys, onnxruntime as o, psutil\n"
        "before = psutil.Process().memory_info().rss\n"
        "s = o.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])\n"
        "print((psutil.Process().memory_info().rss - before) / 1e6)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "models" / "m" / "1" / "model.onnx")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    assert 380 < float(ended.stdout) < 600  # besides the weights, buffers of the load
