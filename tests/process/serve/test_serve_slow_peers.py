"""Connections whose peers send or read a byte now and then: each ends in time, and honest clients lose nothing."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from http2_frames import PREFACE, acknowledge, send_part, start_call, start_connection
from local_server import local_server
from model_repository import identity, product, put
from seams.serving import limit_peers
from server_client import ServerClient, wait_until
from server_process import serving

ROWS = np.ones((1, 4), np.float32)
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{"
CHUNKS = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
UNREAD = b"POST /missing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
SERVICE = "/inference.GRPCInferenceService/"
#: What peers send at once, and what they send again and again, by their names.
DRIPS = {
    "first header": (b"GET /", b"a"),
    "second header": (LIVE, b"G"),
    "body": (BODY, b" "),
    "chunks": (CHUNKS, b"1\r\n \r\n"),
    "chunk extension": (CHUNKS + b"1;", b"a"),
    "trailer": (CHUNKS + b"1\r\n{\r\n0\r\nA: ", b"a"),
    "body that is not read": (UNREAD, b" "),
    "silence": (b"", b""),
}


def lifetime_s(connection: socket.socket, drip: bytes, interval_s: float, limit_s: float) -> float:
    """Send bytes at an interval until the server closes a connection; return the time until then."""
    began = time.monotonic()
    connection.settimeout(interval_s)
    while time.monotonic() < began + limit_s:
        try:
            if drip:
                connection.sendall(drip)
            if not connection.recv(65536):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - began


def grpc_lifetime_s(connection: socket.socket, limit_s: float, *, speaks: bool = True) -> float:
    """Acknowledge what the server sends, or not, until it closes a connection; return the time until then."""
    began = time.monotonic()
    connection.settimeout(1.0)
    received = b""
    while time.monotonic() < began + limit_s:
        try:
            part = connection.recv(65536)
            if not part:
                break
            received = acknowledge(connection, received + part) if speaks else b""
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - began


@contextlib.contextmanager
def honest_client(server: ServerClient) -> Iterator[list[int]]:
    """Send requests all the time; all of them have to be answered."""
    ended, statuses = threading.Event(), []

    def ask() -> None:
        while not ended.wait(0.05):
            statuses.append(server.infer("m", ROWS)[0])

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield statuses
    finally:
        ended.set()
        thread.join()
    assert statuses
    assert {*statuses} == {200}


def drip_all(port: int, names: list[str], interval_s: float, limit_s: float) -> dict[str, float]:
    """Open a connection for each of some names; return their lifetimes."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(names)) as pool:
        found = {}
        for name in names:
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            connection.sendall(DRIPS[name.rstrip("0123456789")][0])
            drip = DRIPS[name.rstrip("0123456789")][1]
            found[name] = pool.submit(lifetime_s, connection, drip, interval_s, limit_s)
        return {name: future.result() for name, future in found.items()}


def test_dripping_peers_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then keeps no connection open: neither of a header, the first or a later one, nor of a body."""
    put(tmp_path, "m", product())
    limit_peers(monkeypatch, 1.0)
    with local_server(tmp_path, http=True) as server:
        process = psutil.Process()
        threads = process.num_threads()
        port = int(server.url.rpartition(":")[2])
        with honest_client(server):
            lived = drip_all(port, [f"{name}{number}" for name in DRIPS for number in range(5)], 0.1, 30)
        assert {name: seconds for name, seconds in lived.items() if not 0.5 < seconds < 20} == {}
        wait_until(lambda: process.num_threads() <= threads + 5)
        wait_until(lambda: server.metric("chrion_request_bytes") == 0)


def test_peers_that_read_a_byte_now_and_then_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of an answer that is read too slowly is given back in time, and a patient client gets all of it."""
    put(tmp_path, "m", product())
    put(tmp_path, "identity", identity("FP32"))
    size = 16_000_000
    entry = {"name": "x", "datatype": "FP32", "shape": [1, size // 4], "parameters": {"binary_data_size": size}}
    header = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    head = (
        "POST /v2/models/identity/infer HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Inference-Header-Content-Length: {len(header)}\r\nContent-Length: {len(header) + size}\r\n\r\n"
    )
    limit_peers(monkeypatch, 2.0)
    with local_server(tmp_path, http=True) as server, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.socket()) for _ in range(3)]
        for connection in slow:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
            connection.sendall(head.encode() + header + bytes(size))
        with honest_client(server):
            wait_until(lambda: server.metric("chrion_request_bytes") >= 3 * size)
            end = time.monotonic() + 60
            while server.metric("chrion_request_bytes") >= size and time.monotonic() < end:
                for connection in slow:
                    with contextlib.suppress(OSError):
                        connection.recv(1, socket.MSG_DONTWAIT)
                time.sleep(0.1)
        assert server.metric("chrion_request_bytes") == 0


def read_live(connection: socket.socket) -> None:
    found = b""
    while not found.endswith(b'{"live":true}'):
        part = connection.recv(1000)
        assert part, found
        found += part


def test_steady_clients_keep_their_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests on one connection, with pauses within the limit, go on for longer than the limit."""
    put(tmp_path, "m", product())
    limit_peers(monkeypatch, 3.0)
    with (
        local_server(tmp_path, http=True) as server,
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 30) as connection,
    ):
        for _ in range(10):
            connection.sendall(LIVE[:20])
            time.sleep(0.25)
            connection.sendall(LIVE[20:])
            read_live(connection)
            time.sleep(0.25)


def start_half(connection: socket.socket) -> None:
    """Begin a call whose message does not arrive."""
    start_call(connection, SERVICE + "ModelInfer")
    send_part(connection, 1000, b"x")


def start_nothing(connection: socket.socket) -> None:
    """Begin a call without any of its message."""
    start_call(connection, SERVICE + "RepositoryIndex")


GRPC_PEERS: dict[str, Callable[[socket.socket], None]] = {
    "half a preface": lambda connection: connection.sendall(PREFACE[:9]),
    "silence": lambda _: None,
    "idle": start_connection,
    "half a message": start_half,
    "no message": start_nothing,
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts open files as Linux does")
def test_dripping_peers_of_a_process_end_within_the_documented_times(tmp_path: Path) -> None:
    """With the limits of the documentation, peers of both protocols leave nothing behind."""
    put(tmp_path, "m", product())
    with serving(tmp_path, "--max-connections", "64", "--max-request", "1MB") as server:
        assert server.infer("m", ROWS)[0] == 200
        process = psutil.Process(server.process.pid)
        files, threads = process.num_fds(), process.num_threads()
        with ThreadPoolExecutor(64) as pool, contextlib.ExitStack() as stack:
            lived = {}
            for name, start in GRPC_PEERS.items():
                for number in range(10):
                    connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.grpc), 30))
                    start(connection)
                    speaks = name not in ("half a preface", "silence")
                    lived[f"{name}{number}"] = pool.submit(grpc_lifetime_s, connection, 120, speaks=speaks)
            with honest_client(server):
                http = drip_all(server.http, [f"{name}{number}" for name in DRIPS for number in range(5)], 1.0, 60)
                grpc_s = {name: future.result() for name, future in lived.items()}
        assert {name: seconds for name, seconds in http.items() if not 10 < seconds < 45} == {}
        # After a call has ended for its late message, its connection has none, and ends like others without one.
        assert {name: seconds for name, seconds in grpc_s.items() if not 10 < seconds < 120} == {}
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
            assert channel.unary_unary(SERVICE + "ServerReady")(b"", timeout=30) == b"\x08\x01"
        wait_until(lambda: process.num_fds() < files + 5)
        wait_until(lambda: process.num_threads() <= threads + 5)
        assert server.metric("chrion_request_bytes") == 0
