"""Thousands of connections, connections without a peer, a full disk, and a server that crashes."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from chrion.server.supervisor import Supervisor, server_command
from server_process import Server, product, put, serving, wait_until

ROWS = [[1.0, 2.0, 3.0, 4.0]]
_REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"
_HALF = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{"
linux = pytest.mark.skipif(sys.platform != "linux", reason="only on Linux")


@contextlib.contextmanager
def open_files(number: int) -> Iterator[None]:
    """Allow this process so many open files, or skip the test."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < number:
        pytest.skip(f"the system allows {before[1]} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def connect(port: int, count: int, sent: bytes = b"") -> list[socket.socket]:
    """Open connections, and send the same bytes on each."""
    found = []
    for _ in range(count):
        found.append(socket.create_connection(("127.0.0.1", port), 20))
        with contextlib.suppress(OSError):  # the server may have closed it
            found[-1].sendall(sent)
    return found


def answer(connection: socket.socket) -> bytes:
    """Return the whole answer to a request for liveness."""
    found = b""
    while not found.endswith(b'{"live":true}'):
        part = connection.recv(1000)
        assert part, found
        found += part
    return found


def files(server: Server) -> int:
    return psutil.Process(server.process.pid).num_fds()


@linux
def test_ten_thousand_connections(tmp_path: Path) -> None:
    """Connections beyond the limit are answered with 503, older ones are served on, and nothing is left of them."""
    put(tmp_path, "m", product())
    with open_files(12_000), serving(tmp_path, "--max-connections", "200") as server:
        assert server.infer("m", ROWS)[0] == 200
        (old,) = connect(server.http, 1, _REQUEST)
        assert answer(old).startswith(b"HTTP/1.1 200 OK")
        fds, memory = files(server), server.rss_mb()
        crowd = connect(server.http, 5000) + connect(server.grpc, 5000)
        try:
            old.sendall(_REQUEST)
            assert answer(old).startswith(b"HTTP/1.1 200 OK")
            refused = crowd[4999].recv(1000)
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert json.loads(refused.split(b"\r\n\r\n")[1]) == {"error": "too many connections"}
            with contextlib.suppress(ConnectionResetError):
                assert crowd[-1].recv(1000) == b""  # gRPC has no answer for it
            assert server.rss_mb() < memory + 300
        finally:
            for connection in crowd:
                connection.close()
        wait_until(lambda: files(server) < fds + 20, 60)
        assert server.infer("m", ROWS)[0] == 200
        old.close()


def test_idle_connections_at_the_limit_do_not_refuse_the_others(tmp_path: Path) -> None:
    """With as many connections as are allowed, each of them is served."""
    put(tmp_path, "m", product())
    with serving(tmp_path, "--max-connections", "4") as server:
        fds = files(server)
        open_ = connect(server.http, 4)
        wait_until(lambda: files(server) >= fds + 4)
        for connection in open_:
            connection.sendall(_REQUEST)
            assert answer(connection).startswith(b"HTTP/1.1 200 OK")
            connection.close()
        wait_until(lambda: _status(server) == 200)


def _status(server: Server) -> int:
    try:
        return server.get("/v2/health/live")[0]
    except OSError:
        return 0


@linux
@pytest.mark.slow
def test_connections_whose_peer_is_gone_end(tmp_path: Path) -> None:
    """Peers that vanish without a word, in the middle of a request or between two, leave no connection behind."""
    put(tmp_path, "m", product())
    with serving(tmp_path) as server:
        assert server.infer("m", ROWS)[0] == 200
        fds = files(server)
        gone = connect(server.http, 20, _HALF) + connect(server.http, 20, _REQUEST) + connect(server.http, 20)
        try:
            # The connection of the first request may have been counted, too.
            wait_until(lambda: files(server) >= fds + 59, 60)
            for connection in gone:
                connection.setsockopt(socket.IPPROTO_TCP, 19, 1)  # TCP_REPAIR: closed without a packet
        except PermissionError:
            pytest.skip("TCP_REPAIR: not allowed")
        finally:
            for connection in gone:
                connection.close()
        assert server.infer("m", ROWS)[0] == 200
        wait_until(lambda: files(server) < fds + 5, 90)


@linux
def test_a_full_disk_under_the_log_does_not_stop_the_server(tmp_path: Path) -> None:
    """If the log cannot be written, requests are served all the same, and SIGTERM ends the server in order."""
    put(tmp_path, "m", product())
    (tmp_path / "bad").mkdir()  # is reported in the log
    port = free_port()
    command = [sys.executable, "-m", "chrion", "serve", str(tmp_path), "-vv", "--grpc", "none"]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        process = subprocess.Popen([*command, "--http", f"127.0.0.1:{port}"], stderr=full, stdout=full)  # noqa: S603
    server = Server(process, port, 0)
    try:
        wait_until(lambda: _status(server) == 200, 60)
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
    grpc = pytest.importorskip("grpc")
    from chrion.server.grpc_messages import SERVICE, message  # noqa: PLC0415 - needs the extra

    put(tmp_path, "m", product())
    ports = [free_port(), free_port()]
    addresses = ["--http", f"127.0.0.1:{ports[0]}", "--grpc", f"127.0.0.1:{ports[1]}"]
    command = [sys.executable, "-m", "chrion", "serve", str(tmp_path), *addresses, "--restart"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: S603
    server = Server(process, *ports)
    try:
        wait_until(lambda: _status(server) == 200, 60)
        with grpc.insecure_channel(f"127.0.0.1:{ports[1]}") as channel:
            ready = channel.unary_unary(
                f"/{SERVICE}/ServerReady",
                message("ServerReadyRequest").SerializeToString,
                message("ServerReadyResponse").FromString,
            )
            assert ready(message("ServerReadyRequest")(), timeout=20).ready
            (child,) = psutil.Process(process.pid).children()
            child.send_signal(signal.SIGKILL)
            child.wait(20)
            with pytest.raises(grpc.RpcError) as raised:
                ready(message("ServerReadyRequest")(), timeout=20)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
            assert _status(server) == 0
            wait_until(lambda: _status(server) == 200, 60)
            assert ready(message("ServerReadyRequest")(), timeout=20, wait_for_ready=True).ready
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

    before: list[Any] = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        supervisor = Supervisor([sys.executable, "-c", code, str(counter)], sleep)
        assert supervisor.run() == 2
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)
    pauses = [sum(step for crashes, step in steps if crashes == str(number)) for number in range(1, 5)]
    assert pauses == pytest.approx([0.5, 1.0, 2.0, 4.0])
    assert server_command(["serve", "x", "--restart"], "--restart")[1:] == ["-m", "chrion", "serve", "x"]


def test_a_signal_ends_the_pause_of_the_supervisor() -> None:
    """SIGTERM between two starts ends the supervisor within a step of the pause."""
    command = [sys.executable, "-c", "import sys; sys.exit(7)"]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if sum(slept) > 1.0:  # in the second pause
            signal.raise_signal(signal.SIGTERM)

    before: list[Any] = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert Supervisor(command, sleep).run() == 0
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)
    assert sum(slept) == pytest.approx(1.1)


def test_restart_needs_fixed_ports(tmp_path: Path) -> None:
    """With a port that the system chooses, --restart is refused."""
    command = [sys.executable, "-m", "chrion", "serve", str(tmp_path), "--http", "127.0.0.1:0", "--restart"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    assert done.returncode == 2
    assert "--restart: expected ports other than 0" in done.stderr
