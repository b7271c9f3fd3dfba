"""Replicas on a Ray cluster of three nodes on this machine. The tests share the cluster, and their order matters."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from grafana_queries import check_queries
from ray_clusters import start_cluster
from server_process import ELEMENTS, Server, identity, product, put, serving, slow_model, wait_until

CLIENT = Path(__file__).parents[2] / "triton_checks.py"
SIDE = 64
MODELS = [f"p{number}" for number in range(6)]
#: What each node of the cluster has.
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}

pytestmark = [
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
    for datatype in ELEMENTS:
        put(root, f"identity-{datatype}", identity(datatype))
    put(root, "product", product(seed=1))
    put(root, "product", product(seed=2), version=2)
    put(root, "slow", slow_model(512, 400), toml=f"cores = {os.cpu_count()}")  # a replica runs one at a time
    return root


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start a cluster of three nodes, and end its processes after the tests."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("CHRION_CACHE", str(tmp_path_factory.mktemp("cache")))
        running = start_cluster(NODE, NODE, NODE)
        try:
            yield running
        finally:
            running.shutdown()


@pytest.fixture(scope="module")
def replicas(cluster: Any, models: Path) -> Iterator[Server]:
    """Serve the repository from the cluster."""
    with serving(models, "--ray", cluster.address, "--memory-budget", "40MB") as running:
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
    x = np.random.default_rng(0).standard_normal((2, SIDE)).astype(np.float32)
    for _ in range(3):
        for name in MODELS:
            status, answer, _ = replicas.infer(name, x)
            assert status == 200, answer
            found = np.array(answer["outputs"][0]["data"], np.float32).reshape(2, SIDE)
            assert np.array_equal(found, expected(models, name, {"x": x}))
    assert sorted(samples(replicas, "chrion_model_loads_total").values()) == [2, 2, 2]
    assert sorted(samples(replicas, "nv_inference_request_success").values()) == [6, 6, 6]


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
    assert replicas.get("/v2/models/p0/ready")[0] == 200
    assert {m["state"] for m in replicas.get("/v2/repository/index", {})[1]} == {"READY"}
    statistics = replicas.get("/v2/models/stats")[1]["model_stats"]
    assert {m["name"]: m["inference_count"] for m in statistics}["p0"] == 3
    assert replicas.get("/v2/repository/models/p0/unload", {})[0] == 503
    assert replicas.get("/v2/health")[1]["replicas"] == 3
    for about_replicas in (False, True):
        check_queries(replicas.get("/metrics")[1].decode(), replicas=about_replicas)


def test_a_killed_node_loses_no_request(replicas: Server, models: Path, cluster: Any) -> None:
    """A node is killed while requests run and wait on all nodes: all are answered, and a new node gets a replica."""
    xs = [np.array([1.0 + number], np.float32) for number in range(12)]
    with ThreadPoolExecutor(len(xs)) as pool:
        futures = [pool.submit(replicas.infer, "slow", x) for x in xs]
        wait_until(lambda: min(samples(replicas, "nv_inference_pending_request_count").values()) > 0)
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        for x, future in zip(xs, futures, strict=True):
            status, answer, _ = future.result()
            assert status == 200, answer
            assert np.array_equal(answer["outputs"][0]["data"], [expected(models, "slow", {"x": x})])
    assert replicas.metric("chrion_requests_repeated_total") >= 1
    cluster.add_node(**NODE)
    wait_until(lambda: len(samples(replicas, "chrion_uptime_seconds")) == 3, 60)


def test_requests_in_flight_are_answered_at_the_end(replicas: Server) -> None:
    """On SIGTERM the server refuses new requests and answers those that the replicas have."""
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(replicas.infer, "slow", np.ones(1, np.float32)) for _ in range(6)]
        wait_until(lambda: sum(samples(replicas, "chrion_replica_requests").values()) == 6)
        replicas.process.send_signal(signal.SIGTERM)
        assert [future.result()[0] for future in futures] == [200] * 6
