"""Limits of HTTP connections: their number, in all and by client, and the time that their peers may take."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

#: Time within which the header of a request must have arrived after the connection was opened or the answer before, in
#: seconds: that of a slow client, and a limit for those that send nothing.
HEADER_S = 20
#: Bytes of a header after which no more of it is read: twice the default limit of one field in Apache's server.
HEADER_BYTES = 1 << 14
#: Time that a client may take to read an answer, in seconds, and the minimum speed of a client that takes longer
#: (choices, not measured).
READ_S, READ_BYTES_PER_S = 60.0, 100_000
#: Leading bits of an IPv6 address that count as one client: providers give each of theirs so many addresses.
_CLIENT_BITS = 64
_REFUSAL = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close"


class LimitedProtocol(H11Protocol):  # type: ignore[misc]
    """uvicorn's protocol with limits.

    uvicorn's own limit refuses the requests of all connections, also of those below the limit, and its timer for the
    next request ends with the first byte.

    Attributes:
        max_connections: The limit of connections.
        max_client_connections: That of connections from one address.
        clients: Open connections by client.
    """

    max_connections: int
    max_client_connections: int
    clients: Counter[str]

    _client_key = ""
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Count the connection or refuse it, and start the timer of the first header."""
        super().connection_made(transport)
        client = client_key(self.client[0] if self.client else "")
        if len(self.connections) > self.max_connections:
            self._refuse("too many connections")
        elif self.clients[client] >= self.max_client_connections:
            self._refuse("too many connections from this address")
        else:
            self._client_key = client
            self.clients[client] += 1
            self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_reading_timer()
        if self._client_key in self.clients:
            self.clients[self._client_key] -= 1
            if not self.clients[self._client_key]:
                del self.clients[self._client_key]

    def data_received(self, data: bytes) -> None:
        """Handle bytes as uvicorn does, but let the timer of the header run until the header is complete."""
        self.conn.receive_data(data)
        self.handle_events()

    def pause_writing(self) -> None:
        """Start the timer of a client that reads an answer slowly."""
        super().pause_writing()
        limit_s = READ_S + self.transport.get_write_buffer_size() / READ_BYTES_PER_S
        self._reading = self.loop.call_later(limit_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop that timer."""
        super().resume_writing()
        self._stop_reading_timer()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, and give its client a last time to read what has been sent."""
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self._reading = self._reading or self.loop.call_later(READ_S, self.transport.abort)

    def _start_header_timer(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _stop_reading_timer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _refuse(self, reason: str) -> None:
        self.connections.discard(self)  # also if its client keeps it open
        text = f'{{"error": "{reason}"}}'
        self.transport.write(f"{_REFUSAL}\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
        self.transport.close()


def limited_protocol(max_connections: int, max_client_connections: int) -> type[LimitedProtocol]:
    """Return the protocol of one server.

    Args:
        max_connections: The maximum number of connections.
        max_client_connections: The maximum number of connections from one address.
    """
    members = {
        "max_connections": max_connections,
        "max_client_connections": max_client_connections,
        "clients": Counter(),
    }
    return type("ServerProtocol", (LimitedProtocol,), members)


def client_key(address: str) -> str:
    """Return what the connections from an address are counted by: the address, or the network of an IPv6 address."""
    if ":" not in address:
        return address
    given = ipaddress.IPv6Address(address.partition("%")[0])
    return str(given.ipv4_mapped or ipaddress.IPv6Network((given, _CLIENT_BITS), strict=False))
