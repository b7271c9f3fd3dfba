"""The server's process: its end by signals, its restart after crashes, TLS, and what its system does not give it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import psutil
import pytest

from chrion.serving.server.grpc_codec import SERVICE, message
from chrion.serving.server.supervisor import Supervisor, server_command
from code_blocks import ROOT, Command, blocks, commands, matches
from decoder_support import small_decoder
from helpers import FLOAT, make_model, node, value
from model_repository import counting, product, put
from served_decoders import put_decoder
from server_client import wait_until
from server_process import Server, serving

ROWS = np.ones((1, 4), np.float32)
linux = pytest.mark.skipif(sys.platform != "linux", reason="only on Linux")


def test_sigterm_serves_what_is_in_flight(tmp_path: Path) -> None:
    """After SIGTERM a running request is answered, and the process ends with exit code 0."""
    put(tmp_path, "slow", counting())
    with serving(tmp_path) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.infer, "slow", [200_000.0])
        wait_until(server.computes)
        assert not running.done()
        assert server.get("/v2/health")[1]["pending"] == 1
        server.process.send_signal(signal.SIGTERM)
        assert running.result()[1]["outputs"][0]["data"] == [200_000.0]


def test_requests_that_a_stop_interrupts_fail(tmp_path: Path) -> None:
    """At SIGTERM new requests are refused, and those that do not end in time fail, so that no text seems complete."""
    put_decoder(tmp_path, "llama")
    given = {"model": "llama", "prompt": [1], "max_tokens": 19_000}
    with serving(tmp_path, "--drain", "3s") as server, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(server.get, "/v1/completions", {**given, "stream": stream}) for stream in (False, True)]
        wait_until(lambda: both_have_begun(server))
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/v1/completions", {**given, "max_tokens": 1})[0] == 503)
        whole, streamed = (future.result(30) for future in asked)
    (draining,) = [event for event in server.events() if event["event"] == "draining"]
    assert draining["pending"] == 2
    assert (whole[0], whole[1]["error"]["message"]) == (503, "the server ended the request")
    last = json.loads(streamed[1].decode().strip().rpartition("data: ")[2])
    assert last["error"]["message"] == "the server ended the request"


def test_a_second_signal_ends_the_wait_for_requests(tmp_path: Path) -> None:
    """As uvicorn does, the server gives up what is in flight; signals at the same time are one wish to stop."""
    put_decoder(tmp_path, "llama", model=small_decoder("llama-decoder", context=100_000))
    given = {"model": "llama", "prompt": [1], "max_tokens": 90_000}

    def iterations() -> float:
        return server.metric("chrion_generation_iterations_total", model="llama")

    with serving(tmp_path, "--drain", "100s") as server, ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(server.get, "/v1/completions", given) for _ in range(2)]
        wait_until(lambda: both_have_begun(server))
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: server.get("/v1/completions", {**given, "max_tokens": 1})[0] == 503)
        before = iterations()
        wait_until(lambda: iterations() > before + 20)
        assert server.metric("chrion_generation_requests") == 2
        time.sleep(1.0)  # signals within half a second are one
        server.process.send_signal(signal.SIGINT)
        assert [future.result(60)[0] for future in asked] == [503, 503]


def both_have_begun(server: Server) -> bool:
    """Return whether some iterations have had two requests."""
    iterations = server.metric("chrion_generation_iterations_total", model="llama")
    return server.metric("chrion_generation_batched_requests_total", model="llama") > iterations + 20


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
    with serving(tmp_path / "models", "--tls-certificate", str(certificate), "--tls-key", str(key)) as server:
        context = ssl.create_default_context(cafile=str(certificate))
        with urllib.request.urlopen(f"https://127.0.0.1:{server.http}/v2", context=context, timeout=30) as answer:
            assert json.load(answer)["name"] == "chrion"
        with pytest.raises(OSError, match=r"(?i)closed|reset|remote"):
            server.get("/v2")
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        with grpc.secure_channel(f"127.0.0.1:{server.grpc}", credentials) as channel:
            assert channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=30) == b"\x08\x01"


@linux
def test_memory_full_at_a_load_tries_the_smaller_variant(tmp_path: Path) -> None:
    """If the process gets no memory for a model, its smaller file is loaded, and serves."""
    toml = "[variants.large]\nhost_mb = 200\n[variants.small]\nmodel = 'small.onnx'\nhost_mb = 10\n"
    file = put(tmp_path, "m", product(5000), toml=toml)
    infos = [value(name, FLOAT, ["n", 5000]) for name in ("x", "y")]
    onnx.save(make_model([node("Identity", ["x"], ["y"])], infos[:1], infos[1:]), file.parent / "small.onnx")
    put(tmp_path, "other", product())
    with serving(tmp_path, "--host-budget", "1GB") as server:
        assert server.infer("other", ROWS)[0] == 200  # all threads have been started
        used = int(Path(f"/proc/{server.process.pid}/statm").read_text(encoding="ascii").split()[0]) * 4096
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, (used + 90_000_000, resource.RLIM_INFINITY))
        x = np.ones((1, 5000), np.float32)
        status, found, _ = server.infer("m", x)
        assert status == 200, found
        assert found["outputs"][0]["data"] == x[0].tolist()
        assert server.metric("chrion_model_load_failures_total", model="m") == 1
        assert server.infer("other", ROWS)[0] == 200


@linux
def test_a_full_disk_under_the_log_does_not_stop_the_server(tmp_path: Path) -> None:
    """If the log cannot be written, requests are served all the same, and SIGTERM ends the server in order."""
    put(tmp_path, "m", product())
    (tmp_path / "bad").mkdir()  # is reported in the log
    port = free_port()
    command = [sys.executable, "-m", "chrion", "serve", str(tmp_path), "-vv", "--grpc", "none"]
    buffered = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        process = subprocess.Popen(  # noqa: S603
            [*command, "--http", f"127.0.0.1:{port}"], stderr=full, stdout=full, env=buffered
        )
    server = Server(process, port, 0)
    try:
        wait_until(lambda: server.live_status() == 200, 60)
        assert server.infer("m", ROWS)[0] == 200
        assert server.infer("nothing", ROWS)[0] == 404
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@linux
def test_a_crashed_server_is_started_again(tmp_path: Path) -> None:
    """With --restart, clients of a killed server see UNAVAILABLE and no readiness, and are served again soon."""
    put(tmp_path, "m", product())
    ports = [free_port(), free_port()]
    addresses = ["--http", f"127.0.0.1:{ports[0]}", "--grpc", f"127.0.0.1:{ports[1]}"]
    command = [sys.executable, "-m", "chrion", "serve", str(tmp_path), *addresses, "--restart"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: S603
    server = Server(process, *ports)
    try:
        wait_until(lambda: server.live_status() == 200, 60)
        with grpc.insecure_channel(f"127.0.0.1:{ports[1]}") as channel:
            ready = channel.unary_unary(
                f"/{SERVICE}/ServerReady",
                message("ServerReadyRequest").SerializeToString,
                message("ServerReadyResponse").FromString,
            )
            wait_until(lambda: ready(message("ServerReadyRequest")(), timeout=20).ready)
            (child,) = psutil.Process(process.pid).children()
            child.send_signal(signal.SIGKILL)
            child.wait(20)
            with pytest.raises(grpc.RpcError) as raised:
                ready(message("ServerReadyRequest")(), timeout=20)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
            assert server.live_status() == 0
            wait_until(lambda: server.live_status() == 200, 60)
            wait_until(lambda: ready(message("ServerReadyRequest")(), timeout=20, wait_for_ready=True).ready)
        assert server.infer("m", ROWS)[0] == 200
        process.send_signal(signal.SIGTERM)
        _, text = process.communicate(timeout=60)
        assert process.returncode == 0, text
        crashes = [json.loads(line) for line in text.splitlines() if "server crashed" in line]
        assert [crash["exit_code"] for crash in crashes] == [-signal.SIGKILL]
        assert not psutil.pid_exists(child.pid)
    finally:
        with contextlib.suppress(psutil.Error):
            for left in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                left.kill()
        process.communicate()


@linux
def test_a_server_ends_with_its_supervisor(tmp_path: Path) -> None:
    """If the supervisor is killed, the server answers what is in flight and ends, and its ports are free again."""
    put(tmp_path, "slow", counting())
    port = free_port()
    command = [sys.executable, "-m", "chrion", "serve", str(tmp_path), "--http", f"127.0.0.1:{port}", "--grpc", "none"]
    process = subprocess.Popen([*command, "--restart"], stderr=subprocess.DEVNULL)  # noqa: S603
    server, child = Server(process, port, 0), None
    try:
        wait_until(lambda: server.live_status() == 200, 60)
        (child,) = psutil.Process(process.pid).children()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.infer, "slow", [200_000.0])
            wait_until(server.computes)
            process.kill()
            process.wait()
            assert running.result(60)[1]["outputs"][0]["data"] == [200_000.0]
        wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 30)
        socket.create_server(("127.0.0.1", port)).close()
    finally:
        process.kill()
        process.wait()
        with contextlib.suppress(psutil.Error):
            if child:
                child.kill()


@contextlib.contextmanager
def own_signal_handlers() -> Iterator[None]:
    """Restore the handlers of signals that a supervisor replaces."""
    before: list[Any] = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        yield
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)


def test_the_supervisor_waits_longer_after_each_crash_and_not_after_an_error(tmp_path: Path) -> None:
    """Pauses double; exit codes 0 and 2 are final."""
    counter = tmp_path / "count"
    code = (
        "import pathlib, sys; p = pathlib.Path(sys.argv[1]); n = int(p.read_text() or 0) + 1; p.write_text(str(n));"
        "sys.exit(2 if n == 5 else 7)"
    )
    counter.write_text("", encoding="ascii")
    steps: list[tuple[str, float]] = []

    def sleep(seconds: float) -> None:
        steps.append((counter.read_text(encoding="ascii"), seconds))

    with own_signal_handlers():
        assert Supervisor([sys.executable, "-c", code, str(counter)], sleep).run() == 2
    pauses = [sum(step for crashes, step in steps if crashes == str(number)) for number in range(1, 5)]
    assert pauses == pytest.approx([0.5, 1.0, 2.0, 4.0])
    assert server_command(["serve", "x", "--restart"], "--restart")[1:] == ["-m", "chrion", "serve", "x"]


def test_a_signal_ends_a_server_that_starts() -> None:
    """A server that does not handle SIGTERM yet ends by it, which is no failure."""
    command = [sys.executable, "-c", "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"]
    with own_signal_handlers():
        assert Supervisor(command).run() == 0


def test_a_signal_ends_the_pause_of_the_supervisor() -> None:
    """SIGTERM between two starts ends the supervisor within a step of the pause."""
    command = [sys.executable, "-c", "import sys; sys.exit(7)"]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if sum(slept) > 1.0:  # in the second pause
            signal.raise_signal(signal.SIGTERM)

    with own_signal_handlers():
        assert Supervisor(command, sleep).run() == 0
    assert sum(slept) == pytest.approx(1.1)


def test_a_collector_that_is_down_disturbs_nobody(tmp_path: Path) -> None:
    """Without a collector requests are served, and the server ends in order."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    put(tmp_path, "m", product())
    with serving(tmp_path, "--otlp", "http://127.0.0.1:9") as server:
        assert server.infer("m", ROWS)[0] == 200
        assert json.loads(json.dumps(server.infer("m", ROWS)[1]))["outputs"]


@pytest.mark.skipif(not shutil.which("curl"), reason="no curl is installed")
def test_the_quick_start(tmp_path: Path) -> None:
    """The commands of the page on serving, typed in order, have the answers that it shows."""
    section = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8").split("\n## ")[1]
    first, *later = [
        [command for command in commands(block) if command.words[0] != "pip"]
        for block in blocks(ROOT / "docs" / "serve.md")
        if block.body in section
    ]
    *before, serve = first
    assert sum(map(len, later)) == 7
    for command in before:
        run_typed(command, tmp_path)
    (tmp_path / "token").write_text("secret\n")
    repository, *options = serve.words[2:]
    with serving(tmp_path / repository, *options) as server:
        for command in (command for block in later for command in block):
            assert command.words[0] == "curl"
            run_typed(command, tmp_path, f"127.0.0.1:{server.http}")


def run_typed(command: Command, folder: Path, address: str = "") -> None:
    """Run a command of the page in a folder; it succeeds with the output of the page, from a server at an address."""
    text = command.text.replace("curl", "curl --fail", 1).replace("localhost:8000", address)
    text = text.replace("chrion", f"{sys.executable} -m chrion", 1)
    found = subprocess.run(["bash", "-c", text], cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603, S607
    assert found.returncode == 0, (text, found.stderr)
    assert matches(command.expected, found.stdout) or not command.expected, (text, found.stdout)
