"""Bodies that grow: the memory of the server's process, and the time for which it answers nothing else."""

from __future__ import annotations

import gzip
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from model_repository import identity, product, put
from server_client import infer_body, wait_until
from server_process import Server, serving

REQUEST_MB = 400
MODEL_MB, BUDGET_MB, MODELS = 4 * 1024 * 1024 * 3 / 1e6, 80, 6
#: The memory of Python, its libraries and onnxruntime, as the documentation has it.
BASE_MB = 150


def reduction() -> bytes:
    """Build the sum over the first dimension, whose result is as long as the second one says."""
    infos = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "m"]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m"]),
    ]
    axes = numpy_helper.from_array(np.array([0], np.int64), "axes")
    node = helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)
    graph = helper.make_graph([node], "reduction", infos[:1], infos[1:], [axes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    content: bytes = model.SerializeToString()
    return content


def hidden_reduction() -> bytes:
    """Build the same with a scalar result, so that only a value inside of the model is large."""
    infos = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "m"]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, []),
    ]
    axes = numpy_helper.from_array(np.array([0], np.int64), "axes")
    nodes = [
        helper.make_node("ReduceSum", ["x", "axes"], ["sums"], keepdims=0),
        helper.make_node("Exp", ["sums"], ["powers"]),
        helper.make_node("ReduceMax", ["powers"], ["y"], keepdims=0),
    ]
    graph = helper.make_graph(nodes, "hidden", infos[:1], infos[1:], [axes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    content: bytes = model.SerializeToString()
    return content


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server with a limit of the memory of requests."""
    root = tmp_path_factory.mktemp("models")
    put(root, "product", product())
    put(root, "identity", identity("FP32"))
    put(root, "reduction", reduction())
    put(root, "hidden", hidden_reduction())
    limits = ["--request-budget", f"{REQUEST_MB}MB", "--host-budget", "100MB"]
    with serving(root, *limits) as server:
        for name in ("product", "identity", "reduction", "hidden"):
            assert server.infer(name, np.ones((1, 4), np.float32))[0] == 200
        yield server


@contextmanager
def highest_memory(server: Server) -> Iterator[Callable[[], float]]:
    """Return a function that returns the highest memory of a process during the block, in MB."""
    found, ended = [server.rss_mb()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            found.append(server.rss_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: max(found)
    finally:
        ended.set()
        watcher.join()


@pytest.mark.parametrize("count", [1, 8])
def test_compressed_bodies_take_what_they_become(running: Server, count: int) -> None:
    """Bodies of 250 MB in 250 kB are refused and leave nothing; all together they take the limit and half as much."""
    body = gzip.compress(b'{"inputs":[' + b"[]," * 80_000_000 + b"[]]}", 9)
    before, answers = running.rss_mb(), []

    def send() -> None:
        answers.append(running.send("POST", "/v2/models/product/infer", body, {"Content-Encoding": "gzip"})[0])

    clients = [threading.Thread(target=send) for _ in range(count)]
    with highest_memory(running) as highest:
        for client in clients:
            client.start()
        for client in clients:
            client.join()
    assert set(answers) <= {413, 429}
    assert highest() < before + 1.5 * REQUEST_MB  # the allocator keeps gaps
    wait_until(lambda: running.metric("chrion_request_bytes") == 0)
    wait_until(lambda: running.rss_mb() < before + 60)
    assert running.infer("product", np.ones((1, 4), np.float32))[0] == 200


@pytest.mark.parametrize("kind", ["lists", "numbers"])
def test_other_requests_do_not_wait_for_a_large_body(running: Server, kind: str) -> None:
    """While megabytes of JSON are refused or answered, others are answered many times."""
    numbers = np.random.default_rng(0).standard_normal((10_000, 40)).astype(np.float32)
    body = (
        json.dumps(infer_body(numbers)).encode()
        if kind == "numbers"
        else b'{"inputs":[' + b"[]," * 12_000_000 + b"[]]}"
    )
    statuses: list[int] = []
    client = threading.Thread(
        target=lambda: statuses.append(running.send("POST", "/v2/models/identity/infer", body, {})[0])
    )
    client.start()
    times = []
    while client.is_alive():
        began = time.perf_counter()
        assert running.live_status() == 200
        times.append(time.perf_counter() - began)
    assert statuses == [200 if kind == "numbers" else 413]
    assert max(times) < 2.0  # a parser that holds the event loop takes longer, on any machine


def test_large_json_comes_back(running: Server) -> None:
    """Megabytes of numbers in JSON are answered with the same numbers."""
    numbers = np.random.default_rng(1).standard_normal((3000, 100)).astype(np.float32)
    status, found, _ = running.infer("identity", numbers)
    assert status == 200
    assert np.array_equal(np.array(found["outputs"][0]["data"], np.float32).reshape(3000, 100), numbers)


@pytest.mark.parametrize("model", ["reduction", "hidden"])
@pytest.mark.parametrize("length", [1 << 28, 1 << 30, 1 << 40])
def test_a_value_of_a_declared_shape_is_refused(running: Server, model: str, length: int) -> None:
    """A request of 120 bytes, whose result or a value before it would take gigabytes, takes nothing."""
    entry = {"name": "x", "datatype": "FP32", "shape": [0, length], "data": []}
    before = running.rss_mb()
    with highest_memory(running) as highest:
        status, found, _ = running.get(f"/v2/models/{model}/infer", {"inputs": [entry]})
    assert status == 413
    assert "\n" not in found["error"]
    assert "bytes" in found["error"]
    assert highest() < before + 50
    assert running.infer(model, np.ones((1, 4), np.float32))[0] == 200


def test_the_memory_of_one_large_answer_returns_when_nothing_follows(running: Server) -> None:
    """An idle process keeps no output, although no further request starts a garbage collection."""
    before = running.rss_mb()
    entry = {"name": "x", "datatype": "FP32", "shape": [0, 25_000_000], "data": []}
    body = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    assert running.send("POST", "/v2/models/reduction/infer", body, {"Content-Type": "application/json"})[0] == 200
    wait_until(lambda: running.rss_mb() < before + 30, 30.0)


def test_the_memory_of_large_requests_returns_within_the_budget(tmp_path: Path) -> None:
    """After large requests to models that replace each other, the process has the budget and its base."""
    for at in range(MODELS):
        put(tmp_path, f"m{at}", product(1024, at, layers=3))
    with serving(tmp_path, "--host-budget", f"{BUDGET_MB}MB") as server:
        rows = np.zeros((4000, 1024), np.float32)
        entry = {"name": "x", "datatype": "FP32", "shape": rows.shape, "parameters": {"binary_data_size": rows.nbytes}}
        header = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
        for at in itertools.chain(range(MODELS), range(MODELS)):
            named = {"Inference-Header-Content-Length": str(len(header))}
            assert server.send("POST", f"/v2/models/m{at}/infer", header + rows.tobytes(), named)[0] == 200
        wait_until(lambda: server.rss_mb() < 1.2 * BUDGET_MB + BASE_MB, 30.0)
