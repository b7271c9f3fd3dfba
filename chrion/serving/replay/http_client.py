"""A small HTTP/1.1 client for many requests at the same time: a pool of connections, on h11 and asyncio."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11

from chrion.common.wrong_values import wrong_value

#: Idle connections older than this are not used again; servers close theirs after 20 s or later.
_IDLE_S = 10.0
#: Bytes of one read, more than most answers have.
_READ_BYTES = 1 << 16
_PORTS = {"http": 80, "https": 443}


class ConnectionLost(OSError):  # noqa: N818 - a condition, like those of the base class
    """A connection that ended before the answer."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer: status, headers with lower-case names, and body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    protocol: Any
    used_s: float = 0.0


class HttpClient:
    """A client of one server.

    Args:
        url: The server: ``http://HOST:PORT`` or ``https://HOST:PORT``.
        headers: Headers of every request.
        tls: For https: which certificates are trusted.
        connections: Connections at the same time; further requests wait.

    Attributes:
        has_token: Whether requests have a bearer token.

    Raises:
        OptionError: The URL has another form.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str], *, tls: ssl.SSLContext | None = None, connections: int = 512
    ) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port or _PORTS[parts.scheme]
        except (KeyError, ValueError):
            port = 0
        if not (parts.hostname and port) or parts.path.strip("/") or parts.query or parts.username:
            raise wrong_value("--url", "http://HOST:PORT or https://HOST:PORT", url)
        self._address = parts.hostname, port
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self.has_token = "Authorization" in headers
        self._headers = {"Host": parts.netloc, **headers}
        self._idle: list[_Connection] = []
        self._slots = asyncio.Semaphore(connections)

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        on_start: Callable[[], None] = lambda: None,
    ) -> HttpAnswer:
        """Send a request and return its answer.

        Args:
            method: The method.
            path: The path.
            body: The body.
            headers: Headers besides those of every request.
            on_start: Called when the request no longer waits for other ones.

        Raises:
            OSError: The server cannot be reached, or the connection ended before the answer.
        """
        message = self._message(method, path, body, headers or {})
        async with self._slots:
            on_start()
            connection = self._take_idle()
            if connection is not None:
                try:
                    return await self._exchange(connection, message)
                except ConnectionLost:  # the server had closed the idle connection
                    pass
            reader, writer = await asyncio.open_connection(*self._address, ssl=self._tls)
            return await self._exchange(_Connection(reader, writer, h11.Connection(h11.CLIENT)), message)

    async def close(self) -> None:
        """Close all idle connections."""
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()

    def _message(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> list[Any]:
        fields = {**self._headers, **headers}
        if method != "GET":
            fields["Content-Length"] = str(len(body))
        events = [h11.Request(method=method, target=path, headers=list(fields.items()))]
        return [*events, *([h11.Data(data=body)] if body else []), h11.EndOfMessage()]

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if time.monotonic() - connection.used_s < _IDLE_S and not connection.reader.at_eof():
                return connection
            connection.writer.close()
        return None

    async def _exchange(self, connection: _Connection, message: list[Any]) -> HttpAnswer:
        """Send a message and read its answer; the connection is idle afterwards, or closed."""
        keep = False
        try:
            content = b"".join(connection.protocol.send(event) or b"" for event in message)
            connection.writer.write(content)
            await connection.writer.drain()
            answer = await self._read(connection)
            if connection.protocol.states == {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}:
                connection.protocol.start_next_cycle()
                connection.used_s = time.monotonic()
                keep = True
        except h11.ProtocolError as error:
            raise ConnectionLost(f"the answer is not HTTP: {error}") from error
        except (BrokenPipeError, ConnectionError) as error:
            raise ConnectionLost(error.strerror or "the connection was lost") from error
        finally:
            if keep:
                self._idle.append(connection)
            else:
                connection.writer.close()
        return answer

    async def _read(self, connection: _Connection) -> HttpAnswer:
        status, headers, parts = 0, {}, []
        while True:
            event = connection.protocol.next_event()
            if event is h11.NEED_DATA:
                data = await connection.reader.read(_READ_BYTES)
                if not data:
                    raise ConnectionLost("the server closed the connection")
                connection.protocol.receive_data(data)
            elif isinstance(event, h11.Response):
                status = event.status_code
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                return HttpAnswer(status, headers, b"".join(parts))
