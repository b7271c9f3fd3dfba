"""Damaged, hostile and unlucky requests: a clear error each, other requests are served, and memory stays flat."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from property_tests import examples
from server_process import Server, product, put, serving, slow_model, wait_until

ROWS = np.ones((1, 4), np.float32)
INPUT = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
INFER = "/v2/models/product/infer"


def changed(**more: Any) -> dict[str, Any]:
    """Return a request whose input differs from a valid one."""
    return {"inputs": [{key: value for key, value in (INPUT | more).items() if value is not None}]}


@pytest.mark.parametrize(
    ("body", "about"),
    [
        (b"", "not JSON"),
        (b"[1", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"inputs":' * 20_000, "not JSON"),
        ([], "expected an object"),
        ({}, "inputs: expected a list"),
        ({"inputs": {}}, "inputs: expected a list"),
        ({"inputs": [1]}, "input: expected an object"),
        ({"inputs": []}, "missing input 'x'"),
        ({"inputs": [INPUT, INPUT]}, "given twice"),
        (changed(name=None), "input name: expected text"),
        (changed(name="../../etc/passwd"), "unknown input"),
        (changed(datatype="FP33"), "unknown datatype"),
        (changed(datatype=["FP32"]), "expected text"),
        (changed(datatype="INT32"), "expected datatype FP32"),
        (changed(datatype="BF16"), "must be sent as binary"),
        (changed(shape=None), "shape: expected a list"),
        (changed(shape=[4]), "expected shape"),
        (changed(shape=[-1, 4]), "whole numbers"),
        (changed(shape=[1.0, 4]), "whole numbers"),
        (changed(shape=[True, 4]), "whole numbers"),
        (changed(shape=[1] * 65), "at most 64"),
        (changed(shape=[250_000_000, 4]), "expected 1000000000 elements"),
        (changed(shape=[2**62, 2**62]), "elements"),
        (changed(data=None), "data: expected a list"),
        (changed(data=[1, 2, 3]), "expected 4 elements"),
        (changed(data=[[1, 2], [3]]), "different lengths"),
        (changed(data=[[1, 2], 3, 4]), "same depth"),
        (changed(data=["1", 2, 3, 4]), "cannot be str"),
        (changed(data=[None, 2, 3, 4]), "cannot be NoneType"),
        (changed(data=[{}, 2, 3, 4]), "cannot be dict"),
        (changed(parameters=[]), "expected an object"),
        (changed(parameters={"binary_data_size": 16}, data=None), "0 more bytes"),
        (changed(parameters={"binary_data_size": -1}, data=None), "0 more bytes"),
        (changed(parameters={"binary_data_size": 1}), "both data and"),
        (changed() | {"outputs": [{"name": "z"}]}, "unknown output"),
        (changed() | {"outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, "true or false"),
        (changed() | {"id": 7}, "id: expected text"),
        (changed() | {"parameters": {"timeout": -1}}, "microseconds"),
        (changed() | {"parameters": {"timeout": "1s"}}, "microseconds"),
    ],
    ids=str,
)
def test_a_wrong_request_is_refused_with_its_reason(server: Server, body: Any, about: str) -> None:
    """The status is 400, and the message says what is wrong."""
    status, found, _ = server.get(INFER, body)
    assert status == 400, found
    assert about in found["error"]


@pytest.mark.parametrize(
    "parameters",
    [{"sequence_id": 1}, {"sequence_start": True}],
)
def test_unsupported_parameters_are_named(server: Server, parameters: dict[str, Any]) -> None:
    """A part of the protocol that is missing is 501, not ignored."""
    assert server.get(INFER, changed() | {"parameters": parameters})[0] == 501
    assert server.get(INFER, changed(parameters={"shared_memory_region": "r"}))[0] == 501


@pytest.mark.parametrize("length", ["-1", "99999999", "x", "", "9" * 5000])
def test_a_wrong_header_length_is_refused(server: Server, length: str) -> None:
    """The length of the JSON part must be within the body."""
    status, found, _ = server.get(INFER, changed(), Inference_Header_Content_Length=length)
    assert status == 400, found


@pytest.mark.parametrize(
    "path", ["..%2f..%2fetc/infer", "../../etc/passwd", "product/versions/..%2f1/infer", "%00/infer"]
)
def test_names_do_not_lead_out_of_the_repository(server: Server, path: str) -> None:
    """Names are looked up among the models, so that a path is an unknown name."""
    assert server.get(f"/v2/models/{path}", changed())[0] in (404, 405)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
def test_a_damaged_encoding_is_refused(server: Server, encoding: str) -> None:
    """Bytes that are not of their encoding, and unknown encodings, are 400."""
    assert server.get(INFER, b"not compressed", Content_Encoding=encoding)[0] == 400


def test_a_body_over_the_limit_is_refused(server: Server) -> None:
    """Bodies above the limit are 413: declared, sent in chunks, or compressed."""
    large = b" " * 5_000_000
    assert server.get(INFER, large)[0] == 413
    assert server.get(INFER, gzip.compress(large), Content_Encoding="gzip")[0] == 413
    with socket.create_connection(("127.0.0.1", server.http)) as client:
        client.sendall(f"POST {INFER} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        try:
            for _ in range(100):
                client.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        except OSError:
            return  # the server has answered and closed the connection
        assert b" 413 " in client.recv(1000)


def test_a_gigabyte_declared_with_one_byte_costs_nothing(server: Server) -> None:
    """Sizes that are declared are never allocated."""
    before = server.rss_mb()
    entry = {"name": "x", "datatype": "FP32", "shape": [67_108_864, 4], "parameters": {"binary_data_size": 1 << 30}}
    header = json.dumps({"inputs": [entry]}).encode()
    for _ in range(20):
        status, found, _ = server.get(INFER, header + b"x", Inference_Header_Content_Length=str(len(header)))
        assert status == 400
        assert "1 more bytes" in found["error"]
    with socket.create_connection(("127.0.0.1", server.http)) as client:
        client.sendall(f"POST {INFER} HTTP/1.1\r\nHost: a\r\nContent-Length: 1073741824\r\n\r\nx".encode())
        assert b" 413 " in client.recv(1000)
    assert server.rss_mb() < before + 20


def test_memory_stays_flat_over_many_requests(server: Server) -> None:
    """Valid and wrong requests by hundreds leave no memory behind."""

    def send(count: int) -> None:
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2000, 4], "data": [1] * 8000}]}
        for _ in range(count):
            assert server.get(INFER, body)[0] == 200
            assert server.get(INFER, changed(data=[1]))[0] == 400

    send(30)
    before = server.rss_mb()
    send(150)
    assert server.rss_mb() < before + 15
    assert server.metric("chrion_request_bytes") == 0


def test_silent_and_slow_connections_disturb_nobody(server: Server) -> None:
    """Hundreds of idle connections, half requests and readers that do not read leave other clients alone."""
    clients = [socket.create_connection(("127.0.0.1", server.http)) for _ in range(200)]
    try:
        for number, client in enumerate(clients):
            if number % 3 == 1:
                client.sendall(b"POST /v2/models/product/infer HTTP/1.1\r\nHost: a\r\nContent-Le")
            elif number % 3 == 2:
                client.sendall(f"POST {INFER} HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{{".encode())
        assert server.infer("product", ROWS)[0] == 200
    finally:
        for client in clients:
            client.close()
    wait_until(lambda: server.metric("chrion_request_bytes") == 0)


def test_a_client_that_does_not_read_its_answer_disturbs_nobody(server: Server) -> None:
    """Answers of megabytes that are never read wait for their client only."""
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [40_000, 4], "data": [1] * 160_000}]})
    clients = [socket.create_connection(("127.0.0.1", server.http)) for _ in range(5)]
    try:
        for client in clients:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            head = f"POST {INFER} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body.encode())
        assert server.infer("product", ROWS)[0] == 200
    finally:
        for client in clients:
            client.close()
    wait_until(lambda: server.metric("chrion_request_bytes") == 0)


def test_bytes_that_are_not_http_are_refused(server: Server) -> None:
    """Garbage ends its own connection."""
    for garbage in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"A" * 200_000):
        with socket.create_connection(("127.0.0.1", server.http)) as client:
            client.settimeout(30)
            try:
                client.sendall(garbage + b"\r\n\r\n")
                client.recv(1000)
            except OSError:
                pass  # the connection was reset
    assert server.infer("product", ROWS)[0] == 200


def test_a_model_that_raises_fails_its_own_requests(tmp_path: Path) -> None:
    """A shape that the model cannot compute is an error of that request, and the model is served on."""
    from onnx import TensorProto, helper, numpy_helper  # noqa: PLC0415

    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("x", "y")]
    shape = numpy_helper.from_array(np.array([2, 2], np.int64), "shape")
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["s"]),
        helper.make_node("ReduceSum", ["s"], ["t"], keepdims=0),
    ]
    nodes.append(helper.make_node("Expand", ["t", "one"], ["y"]))
    one = numpy_helper.from_array(np.array([1], np.int64), "one")
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], [shape, one])
    put(tmp_path, "m", helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))
    with serving(tmp_path) as server:
        for _ in range(3):
            status, found, _ = server.infer("m", np.ones(3, np.float32))
            assert status == 500
            assert "Reshape" in found["error"]
            assert server.infer("m", np.ones(4, np.float32))[1]["outputs"][0]["data"] == [4.0]


def test_a_model_without_kernels_is_reported_at_its_first_request(tmp_path: Path) -> None:
    """A model that parses but cannot be opened is 503 with the reason and a time to retry; others are served."""
    from onnx import TensorProto, helper  # noqa: PLC0415

    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("NoSuchOperator", ["x"], ["y"])], "g", infos[:1], infos[1:])
    put(tmp_path, "m", helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))
    put(tmp_path, "good", product())
    with serving(tmp_path) as server:
        status, found, headers = server.infer("m", np.ones(3, np.float32))
        assert status == 503
        assert "NoSuchOperator" in found["error"]
        assert int(headers["retry-after"]) >= 1
        assert server.infer("good", ROWS)[0] == 200
        assert server.metric("chrion_model_load_failures_total", model="m") == 1
        (entry,) = [e for e in server.get("/v2/repository/index", b"")[1] if e["name"] == "m"]
        assert entry["state"] == "UNAVAILABLE"


def test_a_file_replaced_while_it_is_polled_and_requested(tmp_path: Path) -> None:
    """While the file changes all the time, each answer is an error or that of a whole file; at the end it is served."""
    put(tmp_path, "m", product(seed=0))
    valid = {}
    for seed in range(3):
        import onnxruntime as ort  # noqa: PLC0415

        session = ort.InferenceSession(product(seed=seed).SerializeToString())
        valid[seed] = session.run(None, {"x": ROWS})[0].ravel().tolist()
    stop = threading.Event()

    def replace() -> None:
        number = 0
        while not stop.is_set():
            content = product(seed=number % 3).SerializeToString()
            put(tmp_path, "m", content[: len(content) // (1 + number % 2)])
            number += 1
            time.sleep(0.02)

    with serving(tmp_path, "--model-control", "poll", "--poll", "50ms") as server:
        writer = threading.Thread(target=replace)
        writer.start()
        try:
            end = time.monotonic() + 4
            while time.monotonic() < end:
                status, found, _ = server.infer("m", ROWS)
                assert status in (200, 404, 503), found
                if status == 200:
                    assert any(np.allclose(found["outputs"][0]["data"], v) for v in valid.values())
        finally:
            stop.set()
            writer.join()
        put(tmp_path, "m", product(seed=1))
        wait_until(lambda: server.infer("m", ROWS)[0] == 200)


def test_request_memory_is_bounded(tmp_path: Path) -> None:
    """Requests beyond the memory for requests are refused, and those in flight are served."""
    put(tmp_path, "slow", slow_model(rounds=300), toml="cores = 64\n")
    put(tmp_path, "p", product())
    with serving(tmp_path, "--request-memory", "1MB") as server:
        assert server.infer("slow", [1.0])[0] == 200
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [50_000, 4], "data": [1] * 200_000}]}
        status, found, headers = server.get("/v2/models/p/infer", body)
        assert status == 429
        assert "memory" in found["error"]
        assert int(headers["retry-after"]) >= 1
        assert server.infer("p", ROWS)[0] == 200
        assert server.metric("chrion_request_bytes") == 0


NAMES = st.sampled_from(
    ["x", "y", "inputs", "name", "shape", "datatype", "data", "parameters", "binary_data_size", "id"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["x", "y", "FP32", "INT64", "BYTES", 4, -1]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.just("x") | VALUES,
        "datatype": st.sampled_from(["FP32", "BYTES", "BF16", "INT64"]) | VALUES,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | VALUES,
        "data": st.lists(st.floats(width=32) | st.integers(), max_size=8) | VALUES,
        "parameters": st.dictionaries(NAMES, VALUES, max_size=2) | VALUES,
    },
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "inputs": st.lists(TENSORS, max_size=2) | VALUES,
        "outputs": st.lists(TENSORS, max_size=2) | VALUES,
        "parameters": st.dictionaries(NAMES, VALUES, max_size=2) | VALUES,
        "id": VALUES,
    },
)


@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=BODIES, tail=st.binary(max_size=20), split=st.none() | st.integers(-2, 200))
def test_random_bodies_are_answered(server: Server, body: Any, tail: bytes, split: int | None) -> None:
    """Whatever JSON and bytes a body has, the answer is a result or an error of the client."""
    text = json.dumps(body).encode()
    headers = {} if split is None else {"Inference_Header_Content_Length": str(len(text) + split)}
    status, found, _ = server.get("/v2/models/identity-FP32/infer", text + tail, **headers)
    assert status in (200, 400, 501), found
    assert status == 200 or set(found) == {"error"}


@examples(100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=60))
def test_random_bytes_are_answered(server: Server, body: bytes) -> None:
    """Bytes that are no request are an error of the client."""
    status, found, _ = server.get(INFER, body)
    assert status == 400
    assert set(found) == {"error"}
