"""Replicas on a Ray cluster of two nodes on this machine. The tests share the cluster, and their order matters."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from chrion.serving.ray_cluster import connected
from decoder_support import small_decoder
from grafana_queries import check_queries
from model_repository import counting, product, put, put_all
from ray_clusters import start_cluster
from server_client import wait_until
from server_process import Server, server_command, serving

CLIENT = Path(__file__).parents[2] / "triton_checks.py"
QUICKLY_SCALED = Path(__file__).parents[2] / "seams" / "quickly_scaled_server.py"
SIDE = 64
MODELS = [f"p{number}" for number in range(6)]
#: What each node of the cluster has.
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}

#: Limit of each wait for the cluster and its servers, in seconds; on an idle machine they need about ten.
LIMIT_S = 120

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # Ray's
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("ray", "fastapi")),
        reason="ray[serve]: pip install 'chrion[ray]'",
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with six products, a slow model, and what the checks with Triton's client need."""
    root = tmp_path_factory.mktemp("models")
    for number, name in enumerate(MODELS):
        put(root, name, product(SIDE, seed=number))
    put_all(root)
    put(root, "llama", small_decoder("llama-decoder"), toml="[generation]")
    put(root, "slow", counting(), toml=f"cores = {os.cpu_count()}")  # a replica runs one at a time
    return root


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start a cluster of two nodes, and end its processes after the tests."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("CHRION_CACHE", str(tmp_path_factory.mktemp("cache")))
        running = start_cluster(NODE, NODE)
        try:
            yield running
        finally:
            running.shutdown()


@pytest.fixture(scope="module")
def replicas(cluster: Any, models: Path) -> Iterator[Server]:
    """Serve the repository from the cluster."""
    with serving(models, "--ray", cluster.address, "--host-budget", "40MB") as running:
        yield running


def samples(server: Server, name: str) -> dict[str, float]:
    """Return the sums of a metric by replica."""
    found: dict[str, float] = {}
    for line in server.get("/metrics")[1].decode().splitlines():
        if line.startswith(f"{name}{{"):
            replica = line.partition('replica="')[2].partition('"')[0]
            found[replica] = found.get(replica, 0.0) + float(line.rpartition(" ")[2])
    return found


def expected(models: Path, name: str, feeds: dict[str, np.ndarray[Any, Any]]) -> Any:
    """Return the output of a plain session."""
    session = ort.InferenceSession(models / name / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def test_models_spread_over_the_replicas(replicas: Server, models: Path) -> None:
    """Models go where most memory is free, results equal a plain session's, and no model is loaded twice."""
    wait_until(lambda: replicas.get("/v2/health")[1]["replicas"] == 2)
    x = np.random.default_rng(0).standard_normal((2, SIDE)).astype(np.float32)
    for _ in range(3):
        for name in MODELS:
            status, answer, _ = replicas.infer(name, x)
            assert status == 200, answer
            found = np.array(answer["outputs"][0]["data"], np.float32).reshape(2, SIDE)
            assert np.array_equal(found, expected(models, name, {"x": x}))
    assert sorted(samples(replicas, "chrion_model_loads_total").values()) == [3, 3]
    assert sorted(samples(replicas, "nv_inference_request_success").values()) == [9, 9]


@pytest.mark.skipif(importlib.util.find_spec("tritonclient") is None, reason="pip install 'tritonclient[all]'")
def test_both_protocols(replicas: Server) -> None:
    """Triton's client finds what it finds at a server on one machine: all datatypes, streams and errors."""
    command = [sys.executable, str(CLIENT), str(replicas.http), str(replicas.grpc)]
    command += ["http", "grpc", "asyncio", "stream", "errors"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603
    assert ended.returncode == 0, ended.stderr[-4000:]


def test_the_cluster_is_described_as_one_server(replicas: Server) -> None:
    """Metadata, index and statistics are those of all replicas; model control is refused."""
    assert replicas.get("/v2/models/p0")[1]["inputs"][0]["shape"] == [-1, SIDE]
    wait_until(lambda: replicas.get("/v2/models/p0/ready")[0] == 200)
    index = replicas.get("/v2/repository/index", {})[1]
    assert {m["name"] for m in index if m["state"] != "READY"} == {"bad"}
    statistics = replicas.get("/v2/models/stats")[1]["model_stats"]
    assert {m["name"]: m["inference_count"] for m in statistics}["p0"] == 3
    assert replicas.get("/v2/repository/models/p0/unload", {})[0] == 503
    assert replicas.get("/v2/health")[1]["replicas"] == 2
    for about in ("", "replicas"):
        check_queries(replicas.get("/metrics")[1].decode(), about)


def test_requests_for_text_are_refused(replicas: Server) -> None:
    """Decoders answer with logits only: the log says so at the start, and each request for text gets the reason."""
    texts = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["w1"]}
    for path, body in (
        ("/v1/completions", {"model": "llama", "prompt": "w1"}),
        ("/v1/chat/completions", {"model": "llama", "messages": [{"role": "user", "content": "w1"}]}),
        ("/v2/models/llama/generate", {"text_input": "w1"}),
        ("/v2/models/llama/generate_stream", {"text_input": "w1", "stream": True}),
        ("/v2/models/llama/infer", {"inputs": [texts]}),
    ):
        status, answer, _ = replicas.get(path, body)
        assert status == 501, answer
        assert "decoders do not generate text with --ray" in str(answer["error"])
    assert replicas.get("/v1/models")[1]["data"] == []
    (line,) = [event for event in replicas.events() if "do not generate text" in event["event"]]
    assert (line["level"], line["models"]) == ("warning", ["llama"])


def test_a_killed_node_loses_no_request(replicas: Server, cluster: Any) -> None:
    """A node is killed while requests run and wait on all nodes: all are answered, and a new node gets a replica."""
    xs = [[200_000.0 + number] for number in range(12)]
    with ThreadPoolExecutor(len(xs)) as pool:
        futures = [pool.submit(replicas.infer, "slow", x) for x in xs]
        wait_until(lambda: min(samples(replicas, "nv_inference_pending_request_count").values()) > 0, LIMIT_S)
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        for x, future in zip(xs, futures, strict=True):
            status, answer, _ = future.result()
            assert status == 200, answer
            assert answer["outputs"][0]["data"] == x
    assert replicas.metric("chrion_requests_repeated_total") >= 1
    cluster.add_node(**NODE)
    wait_until(lambda: len(samples(replicas, "chrion_uptime_seconds")) == 2, LIMIT_S)


def test_requests_in_flight_are_answered_at_the_end(replicas: Server) -> None:
    """On SIGTERM the server refuses new requests and answers those that the replicas have, which take some seconds."""
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(replicas.infer, "slow", [1_000_000.0]) for _ in range(6)]
        wait_until(lambda: sum(samples(replicas, "chrion_replica_requests").values()) == 6)
        replicas.process.send_signal(signal.SIGTERM)
        assert [future.result()[0] for future in futures] == [200] * 6


@pytest.fixture
def unused_cluster(cluster: Any, replicas: Server) -> Any:
    """Return the cluster after the other server has removed its replicas."""
    if replicas.process.poll() is None:
        replicas.process.send_signal(signal.SIGTERM)
    replicas.process.wait(LIMIT_S)
    return cluster


def replica_actors() -> list[str]:
    """Return the replicas on the cluster that this process is connected to, also those that start."""
    from ray.util import list_named_actors  # noqa: PLC0415

    return [actor["name"] for actor in list_named_actors(all_namespaces=True) if "REPLICA" in actor["name"]]


def kill(replica: str) -> None:
    """End the process of a replica on the cluster that this process is connected to."""
    import ray  # noqa: PLC0415

    ray.kill(ray.get_actor(replica, namespace="serve"))


@pytest.mark.slow
def test_replicas_follow_the_load(unused_cluster: Any, models: Path) -> None:
    """No request fails while 15 at a time start a replica, one is killed and replaced, and 3 at a time end one."""
    busy, open_ = threading.Event(), threading.Event()
    busy.set()
    open_.set()

    def send(model: str, x: Any, while_: threading.Event) -> list[int]:
        found = []
        while while_.is_set():
            found.append(server.infer(model, x)[0])
        return found

    arguments = ["--ray", unused_cluster.address, "--host-budget", "40MB", "--replicas", "1..2"]
    with (
        connected(unused_cluster.address, "the test"),
        serving(models, *arguments, program=[str(QUICKLY_SCALED)]) as server,
        ThreadPoolExecutor(15) as pool,
    ):
        assert server.get("/v2/health")[1]["replicas"] == 1
        try:
            steady = [pool.submit(send, name, np.ones((2, SIDE), np.float32), open_) for name in MODELS[:3]]
            crowd = [pool.submit(send, "slow", [10_000.0], busy) for _ in range(12)]
            wait_until(lambda: server.get("/v2/health")[1]["replicas"] == 2, 240)
            wait_until(
                lambda: len([n for n in samples(server, "nv_inference_request_success").values() if n]) == 2, LIMIT_S
            )
            first = set(replica_actors())
            outstanding = samples(server, "chrion_replica_requests")
            kill(next(name for name in first if name.endswith(max(outstanding, key=outstanding.__getitem__))))
            wait_until(lambda: len(first & set(replica_actors())) == 1 and len(replica_actors()) == 2, LIMIT_S)
            wait_until(lambda: server.get("/v2/health")[1]["replicas"] == 2, LIMIT_S)
            busy.clear()
            wait_until(lambda: server.get("/v2/health")[1]["replicas"] == 1, LIMIT_S)
        finally:
            busy.clear()
            open_.clear()
        statuses = [status for future in (*steady, *crowd) for status in future.result()]
        assert set(statuses) == {200}
        assert server.metric("chrion_requests_repeated_total") > 0


def test_a_stopped_start_leaves_no_replica(unused_cluster: Any, models: Path) -> None:
    """On SIGTERM while replicas start, the server removes them and ends as it does later.

    The cluster has two nodes, so that the third replica waits for another one, which the log says.
    """
    with connected(unused_cluster.address, "the test"):
        wait_until(lambda: not replica_actors(), LIMIT_S)
        command = server_command(models, "--ray", unused_cluster.address, "--replicas", "3")
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603
            wait_until(replica_actors, LIMIT_S)
            process.send_signal(signal.SIGTERM)
            _, text = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, text
        assert "serving" not in text
        (line,) = [line for line in text.splitlines() if "too few nodes or GPUs: waiting for more" in line]
        assert (json.loads(line)["replicas"], json.loads(line)["nodes"]) == (3, 2)
        assert replica_actors() == []
