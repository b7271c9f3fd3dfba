"""Connections of the server's process: thousands, silent ones, and those whose peer sends garbage or is gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from chrion.serving.server.run import listen
from model_repository import counting, product, put
from server_client import infer_body, wait_until
from server_process import Server, serving

ROWS = np.ones((1, 4), np.float32)
INFER = "/v2/models/product/infer"
_REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
_HALF = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
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


def accepted(server: Server) -> int:
    """Return the number of connections that the server has accepted."""
    found = psutil.Process(server.process.pid).net_connections("tcp")
    return sum(c.laddr.port == server.http and c.status == psutil.CONN_ESTABLISHED for c in found)


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


@linux
def test_one_client_cannot_take_all_connections(tmp_path: Path) -> None:
    """Connections of an address beyond its limit get 503; other addresses are served, and so is it when some end."""
    put(tmp_path, "m", product())
    with serving(tmp_path, "--max-connections", "60", "--max-client-connections", "20") as server:
        fds = files(server)
        crowd = connect(server.http, 60)
        try:
            for refused in crowd[20:]:
                found = refused.recv(1000)
                assert found.startswith(b"HTTP/1.1 503 ")
                assert json.loads(found.split(b"\r\n\r\n")[1]) == {"error": "too many connections from this address"}
            with socket.create_connection(("127.0.0.1", server.http), 20, ("127.0.0.2", 0)) as other:
                other.sendall(_REQUEST)
                assert answer(other).startswith(b"HTTP/1.1 200 OK")
            crowd[0].sendall(_REQUEST)
            assert answer(crowd[0]).startswith(b"HTTP/1.1 200 OK")
        finally:
            for connection in crowd:
                connection.close()
        wait_until(lambda: server.live_status() == 200)
        wait_until(lambda: files(server) < fds + 3)


@linux
def test_one_client_cannot_take_all_pages(server: Server) -> None:
    """Of 300 streams of events from one address half of the places are accepted; another address has a page."""
    fds = files(server)
    request = b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"
    crowd = connect(server.http, 300, request)
    try:
        statuses = [connection.recv(15) for connection in crowd]
        assert statuses.count(b"HTTP/1.1 200 OK") == 8
        assert statuses.count(b"HTTP/1.1 429 To") == 292
        with socket.create_connection(("127.0.0.1", server.http), 20, ("127.0.0.2", 0)) as other:
            other.sendall(request)
            assert other.recv(15) == b"HTTP/1.1 200 OK"
    finally:
        for connection in crowd:
            connection.close()
    wait_until(lambda: files(server) < fds + 5)
    (page,) = connect(server.http, 1, request)
    assert page.recv(15) == b"HTTP/1.1 200 OK"
    page.close()


def test_large_headers_are_refused(server: Server) -> None:
    """Headers of 16 kB are read; of larger ones no more is read than what has arrived with it."""
    head = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nA: "
    (small,) = connect(server.http, 1, head + b"a" * 16_000 + b"\r\n\r\n")
    assert answer(small).startswith(b"HTTP/1.1 200 OK")
    (parts,) = connect(server.http, 1, head + b"a" * 16_400)
    assert parts.recv(100).startswith(b"HTTP/1.1 400 ")
    (whole,) = connect(server.http, 1, head + b"a" * 300_000 + b"\r\n\r\n")
    with contextlib.suppress(ConnectionResetError):
        assert not whole.recv(100).startswith(b"HTTP/1.1 200 ")
    for connection in (small, parts, whole):
        connection.close()


def test_idle_connections_at_the_limit_do_not_refuse_the_others(tmp_path: Path) -> None:
    """With as many connections as are allowed, each of them is served."""
    put(tmp_path, "m", product())
    with serving(tmp_path, "--max-connections", "4") as server:
        wait_until(lambda: accepted(server) == 0)
        open_ = connect(server.http, 4)
        wait_until(lambda: accepted(server) == 4)
        for connection in open_:
            connection.sendall(_REQUEST)
            assert answer(connection).startswith(b"HTTP/1.1 200 OK")
            connection.close()
        wait_until(lambda: server.live_status() == 200)


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


def test_a_client_that_leaves_ends_its_request(tmp_path: Path) -> None:
    """The run of a client that closes its connection ends early, and its core serves others."""
    put(tmp_path, "slow", counting(), toml="cores = 64\n")
    put(tmp_path, "quick", product(), toml="cores = 64\n")
    body = json.dumps(infer_body([1e15])).encode()
    with serving(tmp_path) as server:
        with socket.create_connection(("127.0.0.1", server.http)) as client:
            head = f"POST /v2/models/slow/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            wait_until(server.computes)
        assert server.infer("quick", ROWS)[0] == 200
        assert server.metric("chrion_request_cancelled_total", model="slow") == 1


def test_chunks_over_the_limit_are_refused(server: Server) -> None:
    """A body of chunks is refused as soon as it is too large."""
    with socket.create_connection(("127.0.0.1", server.http)) as client:
        client.sendall(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        try:
            for _ in range(100):
                client.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        except OSError:
            return  # the server has answered and closed the connection
        assert b" 413 " in client.recv(1000)


def test_a_length_over_the_limit_is_refused(server: Server) -> None:
    """A body of a gigabyte is refused before it is sent."""
    with socket.create_connection(("127.0.0.1", server.http)) as client:
        client.sendall(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1073741824\r\n\r\nx".encode())
        assert b" 413 " in client.recv(1000)


def test_silent_and_slow_connections_disturb_nobody(server: Server) -> None:
    """Hundreds of idle connections, half requests and readers that do not read leave other clients alone."""
    clients = [socket.create_connection(("127.0.0.1", server.http)) for _ in range(200)]
    try:
        for number, client in enumerate(clients):
            if number % 3 == 1:
                client.sendall(b"POST /v2/models/product/infer HTTP/1.1\r\nHost: localhost\r\nContent-Le")
            elif number % 3 == 2:
                client.sendall(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode())
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
            head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
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


@pytest.mark.slow
def test_silent_connections_are_closed(server: Server) -> None:
    """A connection that sends no request is closed, and a body that stops is answered with 408."""
    with (
        socket.create_connection(("127.0.0.1", server.http), 60) as idle,
        socket.create_connection(("127.0.0.1", server.http), 60) as stopped,
    ):
        idle.sendall(b"GET /v2 HTT")
        stopped.sendall(b"POST /v2/models/product/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert b" 408 " in stopped.recv(1000)
        with contextlib.suppress(ConnectionResetError):
            assert idle.recv(1000) == b""


def test_answers_are_sent_at_once() -> None:
    """Connections do not delay small packets, which would add 40 ms to every request of a connection but the first."""

    async def delays() -> bool:
        accepted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            option = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
            accepted.set_result(not option)

        listener = listen("127.0.0.1", 0)
        async with await asyncio.start_server(accept, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            found = await accepted
            writer.close()
            await writer.wait_closed()
        return found

    assert not asyncio.run(delays())
