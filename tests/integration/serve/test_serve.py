"""The server as its clients and operators see it: memory, batching, back-pressure, deadlines, metrics, control, end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from chrion import load
from chrion.manager.policies import ADMISSION, EVICTION, LOAD_ORDER, ROUTING
from chrion.scheduler import fixed_plan
from chrion.simulator.cluster_state import ServerPolicies
from chrion.simulator.engine import Engine, EngineConfig
from chrion.simulator.settings import ServerSpec
from chrion.simulator.variants import Variant
from command_line import run_chrion
from helpers import alternating_lanes, branches
from server_process import Server, identity, product, put, serving, slow_model, wait_until

ROWS = np.ones((1, 4), np.float32)


def test_answers_equal_onnxruntimes(server: Server, repository: Path) -> None:
    """The outputs are those of a plain session, for every version."""
    x = np.random.default_rng(0).standard_normal((3, 4), np.float32)
    for version in (1, 2):
        session = ort.InferenceSession(repository / "product" / str(version) / "model.onnx")
        (expected,) = session.run(None, {"x": x})
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3, 4], "data": x.tolist()}]}
        status, found, _ = server.get(f"/v2/models/product/versions/{version}/infer", body)
        assert status == 200
        assert np.array_equal(np.array(found["outputs"][0]["data"], np.float32).reshape(3, 4), expected)
        assert found["model_version"] == str(version)


def test_a_bad_model_is_reported_and_does_not_stop_the_others(server: Server) -> None:
    """The index has the reason, and the model is unknown to requests."""
    _, index, _ = server.get("/v2/repository/index", b"{}")
    states = {entry["name"]: entry for entry in index}
    assert states["bad"]["state"] == "UNAVAILABLE"
    assert "not an ONNX model" in states["bad"]["reason"]
    assert states["product"]["state"] == "READY"
    assert server.infer("bad", ROWS)[0] == 404


def test_many_models_share_little_memory(tmp_path: Path) -> None:
    """Thirty models of 4 MB are served in memory for eight; memory stays in the budget, and those in use stay."""
    for number in range(30):
        put(tmp_path, f"m{number}", product(1000, number))
    size_mb = 4.0 * 1.1 + 4.0
    with serving(tmp_path, "--memory-budget", f"{8.5 * size_mb}MB") as server:
        rng = np.random.default_rng(0)
        for number in rng.permutation(np.repeat(np.arange(30), 4)):
            status, found, _ = server.infer(f"m{number}", np.ones((1, 1000), np.float32))
            assert status == 200, found
            used, budget = (server.metric(f"chrion_memory_{what}_bytes", device="host") for what in ("used", "budget"))
            assert used <= budget
        assert server.metric("chrion_model_evictions_total") > 20
        assert server.metric("nv_inference_request_success") == 120
        resident = server.metric("chrion_model_resident_bytes", device="host")
        assert resident == used
        assert 7 * size_mb * 1e6 < resident


def test_a_model_shrinks_to_its_smaller_file_before_another_is_evicted(tmp_path: Path) -> None:
    """Under pressure an idle model is replaced by its smaller file, which serves it from then on; none is evicted."""
    two = "[variants.large]\nhost_mb = 60\n[variants.small]\nmodel = 'small.onnx'\nhost_mb = 30\n"
    for name, toml in (("a", two), ("b", two), ("c", "[variants.only]\nhost_mb = 30\n")):
        file = put(tmp_path, name, product(), toml=toml)
        (file.parent / "small.onnx").write_bytes(product().SerializeToString())

    def variants(server: Server) -> dict[str, str]:
        return {
            name: variant
            for name in "abc"
            for variant in ("large", "small", "only")
            if server.metric("chrion_model_resident_bytes", model=name, variant=variant, device="host", missing_ok=True)
        }

    with serving(tmp_path, "--memory-budget", "90MB") as server:
        assert server.infer("a", ROWS)[0] == 200
        assert variants(server) == {"a": "large"}
        assert server.infer("b", ROWS)[0] == 200
        wait_until(lambda: variants(server) == {"a": "small", "b": "large"})
        assert server.infer("c", ROWS)[0] == 200
        wait_until(lambda: variants(server) == {"a": "small", "b": "small", "c": "only"})
        assert [server.metric("chrion_model_shrinks_total", model=name) for name in "abc"] == [1, 1, 0]
        assert server.metric("chrion_model_evictions_total") == 0
        assert server.infer("a", ROWS)[0] == 200
        assert server.metric("chrion_model_loads_total") == 5


def test_batches_have_the_results_of_single_requests(tmp_path: Path) -> None:
    """Requests that arrive together share batches, and each has the outputs that it would have alone."""
    put(tmp_path, "m", product(16), toml="[batching]\nmax_size = 8\nmax_delay = '200ms'\n")
    session = ort.InferenceSession(tmp_path / "m" / "1" / "model.onnx")
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((1 + i % 3, 16), np.float32) for i in range(24)]
    with serving(tmp_path) as server, ThreadPoolExecutor(24) as pool:
        assert server.infer("m", inputs[0])[0] == 200
        for x, (status, found, _) in zip(inputs, pool.map(lambda x: server.infer("m", x), inputs), strict=True):
            assert status == 200
            (expected,) = session.run(None, {"x": x})
            assert np.allclose(np.array(found["outputs"][0]["data"]).reshape(x.shape), expected, rtol=1e-5)
        (statistics,) = server.get("/v2/models/m/stats")[1]["model_stats"]
    assert statistics["inference_count"] == inputs[0].shape[0] + sum(len(x) for x in inputs)
    assert statistics["execution_count"] < 20
    assert max(batch["batch_size"] for batch in statistics["batch_stats"]) in range(4, 9)


def test_too_many_requests_are_refused_with_a_time_to_retry(tmp_path: Path) -> None:
    """Beyond the queue there is 429 with Retry-After, and requests in the queue are served."""
    put(tmp_path, "slow", slow_model(rounds=300), toml="max_queue = 2\n")
    with serving(tmp_path) as server, ThreadPoolExecutor(12) as pool:
        assert server.infer("slow", [1.0])[0] == 200
        answers = list(pool.map(lambda _: server.infer("slow", [1.0]), range(12)))
        statuses = [status for status, _, _ in answers]
        assert set(statuses) == {200, 429}
        for status, body, headers in answers:
            if status == 429:
                assert int(headers["retry-after"]) >= 1
                assert "too many requests" in body["error"]
        assert server.metric("chrion_requests_refused_total", reason="queue_full") == statuses.count(429)


def test_a_timeout_ends_the_wait_of_a_request(tmp_path: Path) -> None:
    """A request that cannot start within its timeout is answered with 504 then, not when its turn comes."""
    put(tmp_path, "slow", slow_model(rounds=2000), toml="cores = 64\n")  # all cores: one at a time
    with serving(tmp_path) as server, ThreadPoolExecutor(1) as pool:
        assert server.infer("slow", [1.0])[0] == 200
        first = pool.submit(server.infer, "slow", [1.0])
        wait_until(server.computes)
        began = time.monotonic()
        status, body, _ = server.infer("slow", [1.0], parameters={"timeout": 100_000})
        waited = time.monotonic() - began
        assert status == 504, body
        assert "deadline" in body["error"]
        assert not first.done()
        assert waited >= 0.1
        assert first.result()[0] == 200


def test_a_client_that_leaves_ends_its_request(tmp_path: Path) -> None:
    """The run of a client that closes its connection ends early, and its core serves others."""
    put(tmp_path, "slow", slow_model(rounds=200_000), toml="cores = 64\n")
    put(tmp_path, "quick", product(), toml="cores = 64\n")
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}).encode()
    with serving(tmp_path) as server:
        with socket.create_connection(("127.0.0.1", server.http)) as client:
            head = f"POST /v2/models/slow/infer HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            wait_until(lambda: server.metric("chrion_model_loads_total", model="slow") == 1)
            wait_until(server.computes)
        assert server.infer("quick", ROWS)[0] == 200
        assert server.metric("chrion_request_cancelled_total", model="slow") == 1


def test_sigterm_serves_what_is_in_flight(tmp_path: Path) -> None:
    """After SIGTERM a running request is answered, and the process ends with exit code 0."""
    put(tmp_path, "slow", slow_model(rounds=1500))
    with serving(tmp_path) as server, ThreadPoolExecutor(1) as pool:
        assert server.infer("slow", [1.0])[0] == 200
        running = pool.submit(server.infer, "slow", [1.0])
        wait_until(server.computes)
        assert not running.done()
        server.process.send_signal(signal.SIGTERM)
        assert running.result()[0] == 200


def test_polling_adds_replaces_and_removes(tmp_path: Path) -> None:
    """Models follow the repository while the server runs; a bad file is reported until it is mended."""
    put(tmp_path, "a", product(seed=1))
    with serving(tmp_path, "--model-control", "poll", "--poll", "100ms") as server:
        assert any(line.startswith("chrion: serving 1 model at http://") for line in server.lines)
        first = server.infer("a", ROWS)[1]["outputs"][0]["data"]
        put(tmp_path, "b", product(seed=2))
        wait_until(lambda: server.infer("b", ROWS)[0] == 200)
        put(tmp_path, "a", product(seed=3))
        wait_until(
            lambda: server.infer("a", ROWS)[0] == 200 and server.infer("a", ROWS)[1]["outputs"][0]["data"] != first
        )
        put(tmp_path, "b", b"broken")
        wait_until(lambda: server.infer("b", ROWS)[0] == 404)
        put(tmp_path, "b", product(seed=2))
        wait_until(lambda: server.infer("b", ROWS)[0] == 200)
        (tmp_path / "b" / "1" / "model.onnx").unlink()
        (tmp_path / "b" / "1").rmdir()
        (tmp_path / "b").rmdir()
        wait_until(lambda: server.infer("b", ROWS)[0] == 404)
        assert server.get("/v2/repository/models/a/unload", b"")[0] == 503  # control is not explicit


def test_a_version_that_is_removed_is_no_longer_served(tmp_path: Path) -> None:
    """While requests run: those without a version go to the highest one that is left, and none of them fails."""
    files = [put(tmp_path, "a", product(seed=seed), version=seed) for seed in (1, 2)]
    with serving(tmp_path, "--model-control", "poll", "--poll", "100ms") as server:
        by_version = [server.infer(f"a/versions/{version}", ROWS)[1]["outputs"][0]["data"] for version in (1, 2)]
        assert server.infer("a", ROWS)[1]["outputs"][0]["data"] == by_version[1]
        stop = threading.Event()
        with ThreadPoolExecutor(2) as clients:
            running = [clients.submit(infer_until, server, stop) for _ in range(2)]
            files[1].unlink()
            files[1].parent.rmdir()
            wait_until(lambda: server.infer("a/versions/2", ROWS)[0] == 404)
            wait_until(lambda: server.infer("a", ROWS)[1]["outputs"][0]["data"] == by_version[0])
            stop.set()
            for answers in running:
                assert all(status == 200 and data in by_version for status, data in answers.result())
        assert server.infer("a/versions/1", ROWS)[1]["outputs"][0]["data"] == by_version[0]


def infer_until(server: Server, stop: threading.Event) -> list[tuple[int, Any]]:
    """Send requests for the model a until an event; return their statuses and outputs."""
    answers = []
    while not stop.is_set():
        status, body, _ = server.infer("a", ROWS)
        answers.append((status, body["outputs"][0]["data"] if status == 200 else body))
    return answers


def test_a_file_replaced_after_the_start_is_not_loaded(tmp_path: Path) -> None:
    """Without polling, a changed file is an error that says what to do; the server and other models go on."""
    put(tmp_path, "a", product(seed=1))
    put(tmp_path, "b", product(seed=1))
    with serving(tmp_path) as server:
        put(tmp_path, "a", product(8, seed=9))
        status, body, headers = server.infer("a", ROWS)
        assert status == 503
        assert "changed since" in body["error"]
        assert int(headers["retry-after"]) >= 1
        assert server.infer("b", ROWS)[0] == 200
        assert server.get("/v2/models/a/ready")[0] == 503


def test_a_token_is_required_by_all_but_health(tmp_path: Path) -> None:
    """Requests without the token are refused in both protocols."""
    put(tmp_path, "a", product())
    token = tmp_path / "token"
    token.write_text("secret\n", encoding="ascii")
    with serving(tmp_path, "--token-file", str(token)) as server:
        assert server.get("/v2/health/ready")[0] == 200
        for path in ("/v2", "/metrics", "/events", "/v2/models/a"):
            assert server.get(path)[0] == 401
            assert server.get(path, Authorization="Bearer wrong")[0] == 401
        assert server.infer("a", ROWS)[0] == 401
        assert server.get("/v2/models/a", Authorization="Bearer secret")[0] == 200
        grpc = pytest.importorskip("grpc")
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")
            with pytest.raises(grpc.RpcError) as refused:
                call(b"")
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert call(b"", metadata=(("authorization", "Bearer secret"),))


def test_the_page_and_its_events(server: Server) -> None:
    """The page is one document that loads nothing else, and the events have every model."""
    status, page, headers = server.get("/")
    assert status == 200
    assert b"<script src" not in page
    assert b"http-equiv" not in page
    assert headers["content-security-policy"].startswith("default-src 'none'")
    with urllib.request.urlopen(f"{server.url}/events", timeout=10) as events:  # noqa: S310
        line = events.readline()
    state = json.loads(line.removeprefix(b"data: "))
    assert {"product", "slow"} <= {model["name"] for model in state["models"]}
    assert state["devices"]["host"]["budget"] > 0


def test_logs_are_json_with_the_request_id(server: Server) -> None:
    """A refused request is in the log under the id that the client gave, and in its answer."""
    _, _, headers = server.get("/v2/models/missing", X_Request_Id="my-id-1")
    assert headers["x-request-id"] == "my-id-1"
    wait_until(lambda: any(event.get("request_id") == "my-id-1" for event in server.events()))


def test_metrics_can_be_parsed(server: Server) -> None:
    """Prometheus's own parser reads the metrics, and Triton's names are among them."""
    parser = pytest.importorskip("prometheus_client.parser")
    families = {f.name for f in parser.text_string_to_metric_families(server.get("/metrics")[1].decode())}
    assert {"nv_inference_request_success", "nv_inference_queue_duration_us", "chrion_memory_used_bytes"} <= families


def test_health(server: Server) -> None:
    """Health has its three pages, and unknown paths are JSON errors."""
    for path in ("/v2/health", "/v2/health/live", "/v2/health/ready", "/v2/models/product/ready"):
        assert server.get(path)[0] == 200
    assert server.get("/v2/nothing")[:2] == (404, {"error": "GET /v2/nothing: not found"})
    status, found, headers = server.get("/v2/models/product/infer", X_Request_Id="my-id-2")
    assert (status, found) == (405, {"error": "GET /v2/models/product/infer: not allowed"})
    assert (headers["allow"], headers["x-request-id"]) == ("POST", "my-id-2")
    for path in ("/v1", "/v1/models", "/v1/embeddings"):  # clients of the OpenAI API find the message where it has it
        kind = {"type": "invalid_request_error", "param": None, "code": None}
        assert server.get(path)[:2] == (404, {"error": {"message": f"GET {path}: not found", **kind}})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "not a folder"),
        ([".", "--http", "nowhere"], "expected HOST:PORT"),
        ([".", "--policy", "fastest"], "unknown policy"),
        ([".", "--policy", "lru,lfu"], "two policies"),
        ([".", "--model-control", "auto"], "expected one of none, poll, explicit"),
        ([".", "--load-model", "a"], "only with --model-control explicit"),
        ([".", "--tls-key", "k"], "expected both or none"),
        ([".", "--scenario", "missing"], "not found"),
    ],
)
def test_wrong_options_are_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    """A wrong option ends the command with exit code 2 and one line."""
    ended = run_chrion("serve", *arguments, cwd=tmp_path)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_port_in_use_is_one_line(server: Server, tmp_path: Path) -> None:
    """An address that is in use is named."""
    ended = run_chrion("serve", str(tmp_path), "--http", f"127.0.0.1:{server.http}")
    assert ended.returncode == 2
    assert "in use" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_requests_at_the_same_time_are_all_answered(server: Server) -> None:
    """Many threads with several models get their own answers."""
    failures = []

    def call(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(10):
            x = rng.standard_normal((2, 3), np.float32)
            status, found, _ = server.infer("identity-FP32", x)
            if status != 200 or not np.array_equal(np.array(found["outputs"][0]["data"], np.float32), x.ravel()):
                failures.append((status, found))

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_external_data_is_served(tmp_path: Path) -> None:
    """A model whose weights are in another file of its folder is served; one that leaves its folder is refused."""
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    onnx.save(product(64), folder / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "out" / "1").mkdir(parents=True)
    escaped = onnx.load(folder / "model.onnx", load_external_data=False)
    escaped.graph.initializer[0].external_data[0].value = "../../m/1/weights"
    (tmp_path / "out" / "1" / "model.onnx").write_bytes(escaped.SerializeToString())
    put(tmp_path, "text", identity("BYTES"))
    with serving(tmp_path) as server:
        assert server.infer("m", np.ones((1, 64), np.float32))[0] == 200
        reasons = {e["name"]: e["reason"] for e in server.get("/v2/repository/index", b"")[1]}
        assert "outside the model's folder" in reasons["out"]
        assert server.infer("text", [["é"]], "BYTES")[1]["outputs"][0]["data"] == ["é"]


def test_tls_of_both_protocols(tmp_path: Path) -> None:
    """With a certificate and its key both protocols are encrypted, and plain connections are refused."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl: not installed")
    put(tmp_path / "models", "a", product())
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)  # noqa: S603
    grpc = pytest.importorskip("grpc")
    with serving(tmp_path / "models", "--tls-certificate", str(certificate), "--tls-key", str(key)) as server:
        context = ssl.create_default_context(cafile=str(certificate))
        with urllib.request.urlopen(f"https://127.0.0.1:{server.http}/v2", context=context, timeout=30) as answer:
            assert json.load(answer)["name"] == "chrion"
        with pytest.raises(OSError, match=r"(?i)closed|reset|remote"):
            server.get("/v2")
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        with grpc.secure_channel(f"127.0.0.1:{server.grpc}", credentials) as channel:
            assert channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=30) == b"\x08\x01"
    ended = run_chrion("serve", str(tmp_path / "models"), "--tls-certificate", str(key), "--tls-key", str(key))
    assert ended.returncode == 2
    assert "TLS certificate" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_plan_of_the_folder_serves(tmp_path: Path) -> None:
    """A plan beside the model is its first variant, and has the answers of a plain session under many clients."""
    file = put(tmp_path, "m", branches())
    graph = load(str(file))
    fixed_plan(graph, alternating_lanes(graph)).save(file.parent / "lanes.plan.json")
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    expected = ort.InferenceSession(file).run(None, {"x": x})
    with serving(tmp_path) as server, ThreadPoolExecutor(8) as pool:
        for status, found, _ in pool.map(lambda _: server.infer("m", x), range(60)):
            assert status == 200
            for output, array in zip(found["outputs"], expected, strict=True):
                assert np.allclose(np.array(output["data"]).reshape(2, 4), array, rtol=1e-5)
        assert server.metric("chrion_model_resident_bytes", model="m", variant="lanes", device="host") > 0


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_the_server_loads_and_evicts_as_the_simulation_predicts(tmp_path: Path, eviction: str) -> None:
    """For the same requests, one after another, every model is loaded and evicted as often as in the simulator."""
    count, fitting = 9, 4
    for number in range(count):
        put(tmp_path, f"m{number}", product(seed=number), toml="[variants.cpu]\nhost_mb = 10\n")
    rng = np.random.default_rng(5)
    share = 1 / np.arange(1, count + 1)
    order = rng.choice(count, 120, p=share / share.sum())
    journal: list[tuple[str, int]] = []
    config = EngineConfig(
        [ServerSpec(1, fitting * 0.01 + 0.005, 0.0, 1, 1, 12.0, 1.0)],
        [Variant("gpu", 10.0, 1.0, 1.0, (), 10.0)] * count,
        ServerPolicies(
            EVICTION[eviction], LOAD_ORDER["demand"], ADMISSION["none"], deadlines=False,
            slo_ms=[math.inf] * count, weights=[1.0] * count, pinned=[False] * count,
        ),
        ROUTING["random"],
        1,
    )  # fmt: skip
    engine = Engine(config, lambda _, event, __, model: journal.append((event, model)))
    engine.run([(np.arange(120.0) * 1000, order)])  # each ends long before the next
    with serving(tmp_path, "--memory-budget", f"{fitting * 10 + 5}MB", "--policy", eviction) as server:
        for number in order:
            assert server.infer(f"m{number}", ROWS)[0] == 200
        for number in range(count):
            for event, metric in (("load", "loads"), ("evict", "evictions")):
                found = server.metric(f"chrion_model_{metric}_total", model=f"m{number}")
                assert found == journal.count((event, number)), (number, event)
        assert server.metric("chrion_model_evictions_total") > 20


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit: only on Linux")
def test_memory_full_at_a_load_tries_the_smaller_variant(tmp_path: Path) -> None:
    """If the process gets no memory for a model, its smaller file is loaded, and serves."""
    toml = "[variants.large]\nhost_mb = 200\n[variants.small]\nmodel = 'small.onnx'\nhost_mb = 10\n"
    file = put(tmp_path, "m", product(5000), toml=toml)
    infos = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["n", 5000]) for n in ("x", "y")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "g", infos[:1], infos[1:])
    small = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(small, file.parent / "small.onnx")
    put(tmp_path, "other", product())
    with serving(tmp_path, "--memory-budget", "1GB") as server:
        assert server.infer("other", ROWS)[0] == 200  # all threads have been started
        used = int(Path(f"/proc/{server.process.pid}/statm").read_text(encoding="ascii").split()[0]) * 4096
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, (used + 90_000_000, resource.RLIM_INFINITY))
        x = np.ones((1, 5000), np.float32)
        status, found, _ = server.infer("m", x)
        assert status == 200, found
        assert found["outputs"][0]["data"] == x[0].tolist()
        assert server.metric("chrion_model_load_failures_total", model="m") == 1
        assert server.infer("other", ROWS)[0] == 200


@pytest.mark.slow
def test_silent_connections_are_closed(server: Server) -> None:
    """A connection that sends no request is closed, and a body that stops is answered with 408."""
    with (
        socket.create_connection(("127.0.0.1", server.http), 60) as idle,
        socket.create_connection(("127.0.0.1", server.http), 60) as stopped,
    ):
        idle.sendall(b"GET /v2 HTT")
        stopped.sendall(b"POST /v2/models/product/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        assert b" 408 " in stopped.recv(1000)
        with contextlib.suppress(ConnectionResetError):
            assert idle.recv(1000) == b""


def test_answers_are_sent_at_once() -> None:
    """Connections do not delay small packets, which would add 40 ms to every request of a connection but the first."""
    from chrion.server.run import _listen  # noqa: PLC0415 - needs the extra

    async def delays() -> bool:
        accepted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            option = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
            accepted.set_result(not option)

        listener = _listen("127.0.0.1", 0)
        async with await asyncio.start_server(accept, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            found = await accepted
            writer.close()
            await writer.wait_closed()
        return found

    assert not asyncio.run(delays())
