"""``chrion replay``: a scenario's requests on a running server, beside the prediction."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from chrion.errors import OptionError, ServerError
from chrion.serving.manager import PolicySpec
from chrion.serving.replay import run
from chrion.serving.replay.http_client import HttpAnswer, HttpClient
from chrion.serving.replay.open_loop import OpenLoop, Outcome
from chrion.serving.replay.target import HttpCall, wait_until_ready
from chrion.serving.simulator.metrics import RequestMetrics
from chrion.serving.simulator.scenario import find_scenario
from command_line import Chrion, assert_refused
from helpers import FLOAT, make_model, node, value
from local_server import local_server
from model_repository import product, put
from seams.serving import assume_speed, limit_answers
from server_client import wait_until

SCENARIO = """
name = "small"
seed = 3
shrink = ["large", "small"]
patterns = ["large", "shrink"]
[[models]]
name = "m"
copies = 4
slo_ms = 500.0
[models.variants.large]
memory_mb = 24.0
latency_ms = 2.0
gpu_busy_ms = 0.0
cpu_busy_ms = 2.0
[models.variants.small]
memory_mb = 8.0
latency_ms = 3.0
gpu_busy_ms = 0.0
cpu_busy_ms = 3.0
[[servers]]
gpu_memory_gb = 0.055
cpu_cores = 2
pcie_gb_per_s = 1.0
[workload]
kind = "uniform"
rate_per_s = 100.0
requests = 60
"""
NAMES = ["m-1", "m-2", "m-3", "m-4"]


@pytest.fixture
def scenario(tmp_path: Path, cli: Chrion, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a scenario's file; its stand-ins are in the folder models beside it."""
    assume_speed(monkeypatch, 0.7)
    file = tmp_path / "small.toml"
    file.write_text(SCENARIO, encoding="utf-8")
    code, _, err = cli("replay", str(file), "--write-models", str(tmp_path / "models"), "--pattern", "large")
    assert code == 0, err
    assert err.endswith(f"--scenario {file} --accelerator none --host-budget 55MB\n")
    return file


def test_the_printed_command_has_policies_that_a_server_knows(scenario: Path, tmp_path: Path, cli: Chrion) -> None:
    """Those that options change, and a scenario that a server refuses, are not named by the scenario."""
    words = ("--write-models", str(tmp_path / "a b"), "--set", "policies.eviction=lfu")
    err = cli("replay", str(scenario), *words)[2]
    assert err.endswith(f"chrion serve '{tmp_path / 'a b'}' --serving-policy lfu,demand,none --host-budget 55MB\n")
    scenario.write_text(f"{SCENARIO}[policies]\nby_speed = true\n", encoding="utf-8")
    err = cli("replay", str(scenario), "--write-models", str(tmp_path / "kept"))[2]
    assert "--serving-policy lru,demand,none --host-budget 55MB" in err


def test_measured_beside_predicted(scenario: Path, cli: Chrion) -> None:
    """All requests are sent and answered, and what the replay reports is what the server has counted."""
    policies = PolicySpec()
    with local_server(scenario.parent / "models", memory_mb=55.0, policies=policies, http=True) as server:
        code, out, err = cli("replay", str(scenario), "--url", server.url, "--json")
        assert code == 0, err
        found = json.loads(out)
        loads = {name: server.metric("chrion_model_loads_total", model=name) for name in NAMES}
        answered = {name: server.metric("nv_inference_request_success", model=name) for name in NAMES}
    *predicted, measured = found["patterns"]
    assert [p["pattern"] for p in found["patterns"]] == ["large", "shrink", "measured"]
    assert [m["arrivals"] for m in measured["per_model"]] == [m["arrivals"] for m in predicted[0]["per_model"]]
    assert [m["arrivals"] for m in measured["per_model"]] == [answered[name] for name in NAMES]
    assert [m["loads"] for m in measured["per_model"]] == [loads[name] for name in NAMES]
    assert measured["completed"] == 60
    assert measured["cold"] >= 4  # the first request of each model at least waits for a load
    assert 0 < measured["execution"]["p50_ms"] <= measured["response"]["p50_ms"]
    assert measured["response"]["p99_ms"] <= measured["duration_ms"]
    assert measured["duration_ms"] >= 590  # the last request is sent after 59 gaps of 10 ms
    assert measured["per_server"][0]["memory_peak_mb"] <= 55
    assert 0 < measured["per_server"][0]["cpu_busy"] < 1
    assert found["replay"]["refused"] == found["replay"]["failed"] == {}
    assert found["replay"]["differences"] == []


def test_tables_and_limits(scenario: Path, cli: Chrion) -> None:
    """The tables have a row for the measurement, limits shorten it, and differences from the scenario are named."""
    policies = PolicySpec(eviction="lfu", prefetch=False)
    with local_server(scenario.parent / "models", memory_mb=44.0, policies=policies, http=True) as server:
        code, out, err = cli("replay", str(scenario), "--url", server.url, "--limit", "9", "--pattern", "large")
        assert code == 0, err
        assert err.startswith(f"chrion: waiting until {server.url} is ready ...\n")
        assert [line.split()[:2] for line in out.splitlines() if line.startswith("measured  ")][:1] == [
            ["measured", "9"]
        ]
        assert "shrink" not in out
        assert "differs: memory for models: scenario 55 MB, server 44 MB" in out
        assert "differs: eviction: scenario lru, server lfu" in out
        assert "differs: prefetch: scenario true, server false" in out
        _, out, err = cli("replay", str(scenario), "--url", server.url, "--duration", "40ms", "--json")
        assert json.loads(out)["patterns"][-1]["arrivals"] == 3  # at 10, 20 and 30 ms
        assert "simulating small, 3 requests in each of 2 patterns" in err
        assert f"sending 3 requests to {server.url}" in err


def test_refused_and_failed_requests_are_violations(tmp_path: Path, cli: Chrion) -> None:
    """What a server refuses, and what fails, counts as a violation and is reported with the reason."""
    root = tmp_path / "models"
    put(root, "a", product())
    infos = [value("x", FLOAT, ["n"])], [value("y", FLOAT, ["n", "m"])]
    put(root, "b", make_model([node("Reshape", ["x", "s"], ["y"])], *infos, {"s": np.array([7, 7], np.int64)}))
    put(root, "c", product(), toml="[variants.cpu]\nhost_mb = 500\n")
    file = tmp_path / "s.toml"
    variant = "[models.variants.cpu]\nmemory_mb = 1.0\nlatency_ms = 1.0\n"
    models = "".join(f'[[models]]\nname = "{name}"\nslo_ms = 60000.0\n{variant}' for name in "abc")
    file.write_text(f"{models}[workload]\nkind = 'uniform'\nrate_per_s = 100.0\nrequests = 30\n", encoding="utf-8")
    with local_server(root, memory_mb=100.0, http=True) as server:
        found = json.loads(cli("replay", str(file), "--url", server.url, "--json")[1])
    by_name = {m["name"]: m for m in found["patterns"][-1]["per_model"]}
    assert by_name["a"]["dropped"] == by_name["a"]["late"] == 0
    assert by_name["b"]["dropped"] == by_name["b"]["arrivals"] > 0
    assert by_name["c"]["dropped"] == by_name["c"]["arrivals"] > 0
    ((refused, count),) = found["replay"]["refused"].items()
    assert refused.startswith("503 model 'c': the model does not fit")
    assert count == by_name["c"]["arrivals"]
    assert sum(found["replay"]["failed"].values()) == by_name["b"]["arrivals"]


def test_stand_ins_take_their_time_and_no_space(scenario: Path) -> None:
    """A stand-in computes for as long as the scenario states, and its file of weights is sparse."""
    version = scenario.parent / "models" / "m-1" / "1"
    assert (version / "weights.bin").stat().st_blocks * 512 < 100_000
    session = ort.InferenceSession(version / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": np.array([512.0], np.float32)})
    assert found == pytest.approx(2.0)  # the mean of 512 x the unit matrix of side 256


def test_wrong_targets_are_one_line(scenario: Path, tmp_path: Path, cli: Chrion) -> None:
    """No server, another server, missing models, a missing token and a wrong URL end with one line and exit code 2."""

    def refuse(about: str, url: str, *more: str) -> None:
        assert_refused(cli("replay", str(scenario), "--url", url, *more), about)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    refuse("--url: no answer", f"http://127.0.0.1:{port}")
    refuse("expected http://HOST:PORT", "127.0.0.1:8000")
    refuse("expected one of large, shrink", "http://127.0.0.1:1", "--pattern", "other")
    refuse("small has no request to send (give a longer --duration", "http://127.0.0.1:1", "--duration", "5ms")
    token = tmp_path / "token"
    token.write_text("secret\n", encoding="ascii")
    for folder, about in (
        (scenario.parent / "models", "the folder is not empty"),
        (token, f"--write-models {token}: cannot be written: Not a directory"),
        (token / "models", f"--write-models {token / 'models'}: cannot be written: Not a directory"),
    ):
        assert_refused(cli("replay", str(scenario), "--write-models", str(folder)), about)
    put(tmp_path / "other", "m-1", product())
    with local_server(tmp_path / "other", token="secret", http=True) as server:  # noqa: S106 - a test's
        refuse("requires a token", server.url)
        named = "lacks 3 of the scenario's 4 models: m-2, m-3, m-4"
        refuse(named, server.url, "--token-file", str(token))
        token.write_text("another", encoding="ascii")
        refuse("--token-file: the server refuses the token", server.url, "--token-file", str(token))


class Answering(BaseHTTPRequestHandler):
    """Metadata and metrics as ``chrion serve`` has them; subclasses answer requests for inference."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.answer(200, b"chrion_model_loads_total 0\n")
        else:
            self.answer(200, b'{"inputs": []}')

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.infer()

    def infer(self) -> None:
        raise NotImplementedError

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def answering(handler: type[Answering]) -> Iterator[str]:
    """Run a server of these answers; yield its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # clients leave
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_readiness_is_asked_for_rarely() -> None:
    """A server that is not ready for half a second is asked at most five times."""
    asked: list[float] = []

    class Handler(Answering):
        def do_GET(self) -> None:
            asked.append(time.monotonic())
            self.answer(503 if asked[-1] < asked[0] + 0.5 else 200, b"{}")

    async def wait(url: str) -> None:
        client = HttpClient(url, {})
        await wait_until_ready(client)
        await client.close()

    with answering(Handler) as url:
        asyncio.run(wait(url))
    assert 1 < len(asked) <= 5


def test_a_server_that_is_gone_ends_the_replay(tmp_path: Path) -> None:
    """If no connection has an answer for a while, the replay ends with an error that says how far it came."""
    answered: list[bool] = []
    gone = threading.Event()

    class Handler(Answering):
        def infer(self) -> None:
            self.close_connection = gone.is_set()
            if not gone.is_set():
                answered.append(True)
                self.answer(200, b"{}")

    built = traced(tmp_path / "s.toml", "time_s,model\n" + "".join(f"{at / 50},m#1\n" for at in range(2000)))
    with answering(Handler) as url, ThreadPoolExecutor(1) as pool:
        replayed = pool.submit(run.replay, built, run.ReplayOptions(url=url, gone_s=0.3))
        wait_until(lambda: len(answered) > 5)
        gone.set()
        with pytest.raises(ServerError, match=r"connection to the server was lost: no answer for 0\.3 s: .* had end"):
            replayed.result(60)


def failing_replay(url: str, file: Path, **sets: Any) -> str:
    """Return the message with which a replay fails."""
    file.write_text(SCENARIO, encoding="utf-8")
    built = find_scenario(str(file)).changed(sets).build()
    with pytest.raises(OptionError) as found:
        run.replay(built, run.ReplayOptions(url=url, timeout_s=0.5))
    return str(found.value)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (503, "model 'm#1' could not be loaded within 0.5 s before the replay: 503 it does not fit"),
        (0, "--url: model 'm#1': no answer: the server closed the connection"),
        (-1, "model 'm#1' could not be loaded within 0.5 s before the replay: no answer"),
    ],
)
def test_a_model_that_cannot_be_preloaded_is_an_error(tmp_path: Path, status: int, message: str) -> None:
    """A replay does not continue without a model that the simulation loads before the first request."""
    hung = threading.Event()

    class Handler(Answering):
        def infer(self) -> None:
            if status > 0:
                self.answer(status, b'{"error": "it does not fit"}')
            elif status < 0:
                hung.wait(10)
            self.close_connection = True

    with answering(Handler) as url:
        try:
            assert failing_replay(url, tmp_path / "s.toml", preload=True).startswith(message)
        finally:
            hung.set()


def test_a_server_that_does_not_answer_for_its_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listening socket that accepts and never answers ends the replay with an error."""
    limit_answers(monkeypatch, 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert failing_replay(url, tmp_path / "s.toml") == "--url: /v2/health/ready: no answer within 0.2 s"


class Slow(Answering):
    """Answers after 50 ms."""

    def infer(self) -> None:
        time.sleep(0.05)
        self.answer(200, b"{}")


def traced(file: Path, rows: str, **sets: Any) -> Any:
    """Return the scenario with a trace of these rows."""
    file.write_text(SCENARIO, encoding="utf-8")
    trace = file.with_suffix(".csv")
    trace.write_text(rows, encoding="utf-8")
    return find_scenario(str(file)).changed({"workload.kind": "csv", "path": str(trace), **sets}).build()


@pytest.mark.parametrize("most", [None, 7])
@pytest.mark.parametrize("until_ms", [math.inf, 4.5])
def test_the_number_of_requests_is_that_of_those_sent(tmp_path: Path, most: int | None, until_ms: float) -> None:
    """A scaled trace has about so many requests; a replay counts those before its limits."""
    rows = "time_s,model\n" + "".join(f"0.00{i},m#1\n" for i in range(10))
    built = traced(tmp_path / "s.toml", rows, **{"workload.rate_scale": 1.6})
    whole = np.concatenate([chunk.times_ms for chunk in built.workload.chunks()])
    limited = run.limited(built, run.ReplayOptions(max_requests=most, until_ms=until_ms)).workload
    sent = np.concatenate([chunk.times_ms for chunk in limited.chunks()])
    assert limited.requests == len(sent)
    assert np.array_equal(sent, whole[whole < until_ms][:most])


def test_requests_are_judged_by_their_own_deadlines(tmp_path: Path) -> None:
    """Requests with a deadline of 1 ms are late, others are in time; what is not sent is named."""
    deadlines = ["1", "", "60000", "1", "", ""]
    rows = "".join(f"0.0{i},m#1,{deadline},20,{i}\n" for i, deadline in enumerate(deadlines))
    header = "time_s,model,deadline_ms,duration_ms,priority\n"
    built = traced(tmp_path / "s.toml", header + rows, admission="deadline", **{"models.m.slo_ms": 60_000.0})
    with answering(Slow) as url:
        found = run.replay(run.limited(built, run.ReplayOptions(max_requests=4)), run.ReplayOptions(url=url))
    assert (found.measured.total.completed, found.measured.total.late) == (4, 2)
    assert set(found.differences) >= {
        "the scenario has durations of requests, the server has those of its models",
        "the scenario has priorities of requests, which are not sent",
        "the scenario has deadlines of requests, the server admits by its models' objectives",
    }


@pytest.mark.parametrize(
    ("sets", "difference"),
    [
        ({"servers.gpus": 2}, "servers with several GPUs, one memory is measured"),
        ({"servers.mtbf_h": 1e6}, "servers that fail, the server does not"),
        ({"host_memory_gb": 9.0, "store.gb_per_s": 1.0}, "a network store, the server reads its own files"),
        ({"autoscaling.min_servers": 1}, "autoscaling, the server has none"),
        ({"models.m.max_batch": 4}, "batches, which are not compared with the server's"),
        ({}, ""),
    ],
)
def test_what_a_server_does_not_have_is_named(tmp_path: Path, sets: dict[str, Any], difference: str) -> None:
    """A part of the scenario that the measured server lacks is listed, and nothing else."""
    built = traced(tmp_path / "s.toml", "time_s,model\n0.0,m#1\n", **sets)
    with answering(Slow) as url:
        found = run.replay(built, run.ReplayOptions(url=url))
    listed = [text for text in found.differences if text.startswith("the scenario has")]
    assert listed == ([f"the scenario has {difference}"] if difference else [])


def test_waiting_for_a_connection_is_lag(tmp_path: Path) -> None:
    """With one connection, the tenth of ten requests is sent after nine answers of 50 ms; two more are given up."""
    built = traced(tmp_path / "s.toml", "time_s,model\n" + "0.0,m#1\n" * 10)
    with answering(Slow) as url:
        found = run.replay(built, run.ReplayOptions(url=url, connections=1))
        hurried = run.replay(built, run.ReplayOptions(url=url, connections=1, timeout_s=0.2))
    assert found.measured.total.completed == 10
    assert found.lag_ms[1] > 400
    assert found.lag_ms[0] > 150
    assert sum(hurried.failed.values()) >= 6
    assert hurried.lag_ms[1] > 150  # also of those that were never sent


def test_one_lost_connection_after_a_pause_does_not_end_a_replay(tmp_path: Path) -> None:
    """The time after which a server is given up counts from the first failure, not from the last answer."""
    numbers = iter(range(9))

    class Handler(Answering):
        def infer(self) -> None:
            if next(numbers) in {1, 2}:  # the second request, and the client's second attempt
                self.close_connection = True
            else:
                self.answer(200, b"{}")

    built = traced(tmp_path / "s.toml", "time_s,model\n" + "".join(f"{at},m#1\n" for at in (0.0, 0.6, 0.7, 1.3)))
    with answering(Handler) as url:
        found = run.replay(built, run.ReplayOptions(url=url, gone_s=0.3))
    assert found.measured.total.completed == 3
    assert found.failed == {"the server closed the connection": 1}


def test_a_slow_server_is_not_flattered() -> None:
    """Every request is sent at its time although none is answered, and response times count from that time."""

    class Times:
        requests = 20

        def chunks(self) -> Any:
            yield np.arange(20) * 10.0, np.zeros(20, np.int64), None

    class Slow:
        """Answers nothing until all requests have been sent."""

        def __init__(self) -> None:
            self.sent = 0
            self.all = asyncio.Event()

        async def request(self, *_: Any) -> Any:

            self.sent += 1
            if self.sent == 20:
                self.all.set()
            await self.all.wait()
            return HttpAnswer(200, {"server-timing": "queue;dur=1.0, compute;dur=2.5"}, b"")

    async def send_all() -> RequestMetrics:
        metrics = RequestMetrics(1, 1, [100.0], from_arrival=True)
        await OpenLoop(Slow(), [HttpCall("/", b"", {})], Outcome(metrics), 30.0, 10.0).run(Times(), lambda _: None)  # type: ignore[arg-type]
        return metrics

    metrics = asyncio.run(send_all())
    assert metrics.arrivals.sum() == 20
    assert metrics.late.sum() >= 9  # the first was due 190 ms before the answers, the tenth 100 ms
    assert 45 < metrics.execution_ms.sum() <= 50.001  # less for the last, which was due less than 2.5 ms before


def test_urls() -> None:
    """A URL has a scheme, a host and no path; the port is that of the scheme by default."""
    for url in ("http://a:1/", "https://[::1]:9", "http://a"):
        HttpClient(url, {})
    for url in ("a:1", "ftp://a", "http://", "http://a/b", "http://a:b", "http://u@a", "http://a?x=1"):
        with pytest.raises(OptionError):
            HttpClient(url, {})
