"""The server as its clients see it: answers, back-pressure, deadlines, tokens, metrics and pages."""

from __future__ import annotations

import functools
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import onnxruntime as ort
import pytest
from prometheus_client import parser

from chrion.serving.server.failures import Status
from chrion.serving.server.logs import FailureSampler, JsonFormatter
from local_server import LocalServer, local_server
from model_repository import counting, product, put
from served_decoders import put_decoder
from server_client import infer_body, wait_until

ROWS = np.ones((1, 4), np.float32)
FOREVER = infer_body([1e15])


def test_answers_equal_onnxruntimes(server: LocalServer, repository: Path) -> None:
    """The outputs are those of a plain session, for every version."""
    x = np.random.default_rng(0).standard_normal((3, 4), np.float32)
    for version in (1, 2):
        session = ort.InferenceSession(repository / "product" / str(version) / "model.onnx")
        (expected,) = session.run(None, {"x": x})
        status, found, _ = server.infer(f"product/versions/{version}", x)
        assert status == 200
        assert np.array_equal(np.array(found["outputs"][0]["data"], np.float32).reshape(3, 4), expected)
        assert found["model_version"] == str(version)


def test_a_bad_model_is_reported_and_does_not_stop_the_others(server: LocalServer) -> None:
    """The index has the reason, and so have the answers to requests: 503, unlike those for names that do not exist."""
    _, index, _ = server.get("/v2/repository/index", b"{}")
    states = {entry["name"]: entry for entry in index}
    assert states["bad"]["state"] == "UNAVAILABLE"
    assert "not an ONNX model" in states["bad"]["reason"]
    assert states["product"]["state"] == "READY"
    for path in ("bad", "bad/versions/1"):
        for answer in (server.infer(path, ROWS), *(server.get(f"/v2/models/{path}{what}") for what in ("", "/ready"))):
            assert answer[0] == 503
            assert answer[1]["error"].startswith("model 'bad': version 1 cannot be served: model.onnx: not an ONNX")
    for path in ("none", "bad/versions/2", "product/versions/3"):
        assert server.infer(path, ROWS)[0] == server.get(f"/v2/models/{path}/ready")[0] == 404
    health = server.get("/v2/health")[1]
    names = {name for name, entry in states.items() if entry["state"] == "READY"}
    assert (health["models"], health["versions"], health["unserved"]) == (len(names), len(index) - 1, 1)


def test_versions_that_do_not_fit_are_logged_and_not_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A budget that is too small for some versions is a warning for each, and in the line at the start."""
    put(tmp_path, "small", product())
    put(tmp_path, "small", product(), version=2)
    put(tmp_path, "large", product(1300))
    put(tmp_path, "bad", b"not a model")
    with caplog.at_level(logging.WARNING, "chrion.server"), local_server(tmp_path, memory_mb=10.0) as server:
        assert server.begun == "1 model in 2 versions (not served, see the log: bad version 1, large version 1)"
        assert server.get("/v2/health")[1] == {
            "live": True, "ready": True, "models": 1, "versions": 2, "unserved": 2, "pending": 0
        }  # fmt: skip
        status, answer, _ = server.infer("large", np.ones((1, 1300), np.float32))
        needs = "the model does not fit into the memory budget: it needs 11.4 MB of 10.0 MB of host memory"
        assert (status, answer["error"]) == (503, f"model 'large': {needs}")
    events = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    refused = {event["model"]: event for event in events if event["event"] == "model cannot be served"}
    assert set(refused) == {"large", "bad"}
    assert refused["large"]["reason"] == needs
    assert refused["large"]["bytes"]["host"] > refused["large"]["budget_bytes"]["host"] == 10_000_000


def test_batches_have_the_results_of_single_requests(tmp_path: Path) -> None:
    """Requests that arrive together share batches, and each has the outputs that it would have alone."""
    put(tmp_path, "m", product(16), toml="[batching]\nmax_size = 8\nmax_delay = '200ms'\n")
    session = ort.InferenceSession(tmp_path / "m" / "1" / "model.onnx")
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((1 + i % 3, 16), np.float32) for i in range(24)]
    with local_server(tmp_path) as server, ThreadPoolExecutor(24) as pool:
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
    put(tmp_path, "slow", counting(), toml="max_queue = 2\ncores = 64\n")
    with local_server(tmp_path) as server, ThreadPoolExecutor(2) as pool:
        with server.in_flight("/v2/models/slow/infer", FOREVER):
            wait_until(server.computes)
            queued = [pool.submit(server.infer, "slow", [3.0]) for _ in range(2)]
            wait_until(lambda: server.metric("nv_inference_pending_request_count") == 2)
            status, body, headers = server.infer("slow", [3.0])
            assert status == 429
            assert int(headers["retry-after"]) >= 1
            assert "too many requests" in body["error"]
        assert [one.result()[1]["outputs"][0]["data"] for one in queued] == [[3.0]] * 2
        assert server.metric("chrion_requests_refused_total", reason="queue_full") == 1


def test_a_timeout_ends_the_wait_of_a_request(busy_root: Path) -> None:
    """A request that cannot start within its timeout is answered with 504 then, not when its turn comes."""
    with local_server(busy_root) as server, server.in_flight("/v2/models/slow/infer", FOREVER):
        wait_until(server.computes)
        status, body, _ = server.infer("quick", ROWS, parameters={"timeout": 100_000})
        assert status == 504, body
        assert "deadline" in body["error"]
        assert server.computes()


def test_a_client_that_leaves_ends_its_request(busy_root: Path) -> None:
    """The run of a client that leaves ends early, and its core serves others."""
    with local_server(busy_root) as server:
        with server.in_flight("/v2/models/slow/infer", FOREVER):
            wait_until(server.computes)
        assert server.infer("quick", ROWS)[0] == 200
        assert server.metric("chrion_request_cancelled_total", model="slow") == 1


def test_a_token_is_required_by_all_but_health(tmp_path: Path) -> None:
    """Requests without the token are refused in both protocols."""
    put(tmp_path, "a", product())
    with local_server(tmp_path, token="secret") as server:  # noqa: S106 - a test's
        assert server.get("/v2/health/ready")[0] == 200
        for path in ("/v2", "/metrics", "/events", "/v2/models/a"):
            assert server.get(path)[0] == 401
            assert server.get(path, Authorization="Bearer wrong")[0] == 401
        assert server.infer("a", ROWS)[0] == 401
        assert server.get("/v2/models/a", Authorization="Bearer secret")[0] == 200
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")
            with pytest.raises(grpc.RpcError) as refused:
                call(b"")
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert call(b"", metadata=(("authorization", "Bearer secret"),))


def test_the_page_and_its_events(server: LocalServer) -> None:
    """The page is one document that loads nothing else, and the events have every model."""
    status, page, headers = server.get("/")
    assert status == 200
    assert b"<script src" not in page
    assert b"http-equiv" not in page
    assert headers["content-security-policy"].startswith("default-src 'none'")
    with server.in_flight("/events") as events:
        assert events.response().status_code == 200
        state = json.loads(next(iter(events)).removeprefix(b"data: "))
    assert "product" in {model["name"] for model in state["models"]}
    assert all((model["p50_ms"] is None) == (model["requests"] == 0) for model in state["models"])
    assert state["cores"]["count"] > 0
    (bad,) = state["unserved"]
    assert bad["name"] == "bad"
    assert bad["reason"].startswith("model.onnx: not an ONNX model")
    assert state["devices"]["host"]["budget"] > 0


def test_logs_are_json_with_the_request_id(server: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    """A refused request is in the log under the id that the client gave, and in its answer."""
    with caplog.at_level(logging.DEBUG, "chrion.server"):
        _, _, headers = server.get("/v2/models/missing", X_Request_Id="my-id-1")
    assert headers["x-request-id"] == "my-id-1"
    events = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    (event,) = [event for event in events if event.get("request_id") == "my-id-1"]
    assert (event["status"], event["method"]) == (404, "GET")
    assert event["error"] == "unknown model 'missing'"


def test_failures_of_the_server_are_warnings_and_probes_are_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Failures have their text, bounded; readiness polls are below info, unless they fail for another reason."""
    put(tmp_path, "bad", b"not a model")
    with (
        local_server(tmp_path) as server,
        caplog.at_level(logging.INFO, "chrion.server"),
        grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel,
    ):
        assert server.infer("bad", ROWS)[0] == 503
        assert server.get("/v2/models/bad/ready")[0] == 503
        assert server.get("/v2/health/ready")[0] == 200
        assert server.get("/v2/health/" + "x" * 1000)[0] == 404
        with pytest.raises(grpc.RpcError):
            channel.unary_unary("/inference.GRPCInferenceService/ModelMetadata")(b"\n\x03bad")
    events = [json.loads(JsonFormatter().format(record)) for record in caplog.records if record.msg == "request"]
    assert [(event["status"], event["level"]) for event in events] == [
        (503, "warning"),
        (404, "info"),
        ("UNAVAILABLE", "warning"),
    ]
    assert all("not an ONNX model" in events[at]["error"] for at in (0, 2))
    assert events[2]["client"].startswith("ipv4:127.0.0.1:")
    assert max(map(len, (events[1]["error"], events[1]["path"]))) <= 300


def test_a_flood_of_wrong_requests_does_not_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By default one failure a minute is logged for each status but 500, with the number of those in between."""
    put(tmp_path, "product", product())
    failures = FailureSampler()
    with local_server(tmp_path) as server, caplog.at_level(logging.INFO, "chrion.server"):
        for _ in range(20):
            assert server.get("/v2/models/missing")[0] == 404
        assert server.get("/v2/models/product/infer")[0] == 405
    statuses = [record.__dict__["fields"]["status"] for record in caplog.records if record.msg == "request"]
    assert statuses == [404, 405]
    with pytest.MonkeyPatch.context() as patch:
        now_s = [100.0]
        patch.setattr(time, "monotonic", lambda: now_s[0])
        levels = [failures.choose_level(Status.NOT_FOUND.http) for _ in range(5)]
        now_s[0] += 61.0
        assert levels == [(logging.INFO, {}), *[(logging.DEBUG, {})] * 4]
        assert failures.choose_level(Status.NOT_FOUND.http) == (logging.INFO, {"omitted": 4})
        assert [failures.choose_level(Status.INTERNAL.http) for _ in range(3)] == [(logging.WARNING, {})] * 3


@pytest.mark.parametrize("control", ["none", "poll", "explicit"])
def test_model_files_in_a_wrong_place_are_named(tmp_path: Path, control: str, caplog: pytest.LogCaptureFixture) -> None:
    """The log names model files in the root of the repository, and those in the folder of a model."""
    (tmp_path / "mine.onnx").write_bytes(product().SerializeToString())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.onnx").write_bytes(product().SerializeToString())
    with caplog.at_level(logging.WARNING, "chrion.server"), local_server(tmp_path, control=control) as server:
        assert server.begun == "0 models (not served, see the log: other)"
    fields = [record.__dict__["fields"] for record in caplog.records]
    assert ["mine.onnx"] in [entry.get("files") for entry in fields]
    assert any("model.onnx has to be moved" in entry.get("reason", "") for entry in fields)


def test_explicit_control_says_how_to_load(tmp_path: Path) -> None:
    """A model that waits for its load is counted at the start, and a request for it has the way to load it."""
    put(tmp_path, "product", product())
    with local_server(tmp_path, control="explicit") as server:
        assert server.begun == "0 models (1 more on request, see --load-model)"
        status, answer, _ = server.infer("product", ROWS)
        path = "/v2/repository/models/product/load"
        assert (status, f"POST {path} loads it" in answer["error"]) == (503, True)
        assert server.get(path, b"{}")[0] == 200
        assert server.infer("product", ROWS)[0] == 200


def test_metrics_can_be_parsed(server: LocalServer) -> None:
    """Prometheus's own parser reads the metrics, and Triton's names are among them."""
    families = {f.name for f in parser.text_string_to_metric_families(server.get("/metrics")[1].decode())}
    assert {"nv_inference_request_success", "nv_inference_queue_duration_us", "chrion_memory_used_bytes"} <= families


def test_health(server: LocalServer) -> None:
    """Health has its three pages, and unknown paths are JSON errors."""
    for path in ("/v2/health", "/v2/health/live", "/v2/health/ready", "/v2/models/product/ready"):
        assert server.get(path)[0] == 200
    assert server.get("/v2/nothing")[:2] == (404, {"error": "GET /v2/nothing: not found"})
    status, found, headers = server.get("/v2/models/product/infer", X_Request_Id="my-id-2")
    assert (status, found) == (405, {"error": "GET /v2/models/product/infer: not allowed, expected POST"})
    assert (headers["allow"], headers["x-request-id"]) == ("POST", "my-id-2")
    for path in ("/v1", "/v1/embeddings"):  # clients of the OpenAI API find the message where it has it
        kind = {"type": "invalid_request_error", "param": None, "code": None}
        assert server.get(path)[:2] == (404, {"error": {"message": f"GET {path}: not found", **kind}})


def test_requests_at_the_same_time_are_all_answered(server: LocalServer) -> None:
    """Many threads get their own answers."""

    def call(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        for _ in range(5):
            x = rng.standard_normal((2, 3), np.float32)
            status, found, _ = server.infer("identity-FP32", x)
            if status != 200 or not np.array_equal(np.array(found["outputs"][0]["data"], np.float32), x.ravel()):
                return False
        return True

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(call, range(16)))


def test_requests_in_flight_have_a_grace_at_the_end(tmp_path: Path) -> None:
    """Those that end in time are answered; others fail, so that no text seems complete, and new ones are refused."""
    put(tmp_path, "slow", counting())
    put_decoder(tmp_path, "llama")

    def both_run(server: LocalServer) -> bool:
        loaded = server.metric("chrion_model_loads_total", model="slow") == 1
        return loaded and server.computes() and server.metric("chrion_generation_requests", model="llama") == 1

    for grace_s, tokens, expected in ((0.0, 19_000, 503), (60.0, 500, 200)):
        text = {"model": "llama", "prompt": [1], "max_tokens": tokens}
        with ThreadPoolExecutor(2) as pool:
            with local_server(tmp_path, drain_s=grace_s) as server:
                asked = [pool.submit(server.infer, "slow", [3e5]), pool.submit(server.get, "/v1/completions", text)]
                wait_until(functools.partial(both_run, server))
            assert [one.result()[0] for one in asked] == [expected] * 2
        assert [server.infer("slow", [1.0])[0], server.get("/v2/health/ready")[0]] == [503, 503]
