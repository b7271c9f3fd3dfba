"""Frames of HTTP/2 for gRPC calls that no client library sends: messages that are announced and never arrive."""

from __future__ import annotations

import socket
from collections.abc import Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING = 0, 1, 4, 6
_ACKNOWLEDGED = 1
_END_STREAM, _END_HEADERS = 1, 4
_HEADERS_OF_CALLS = {"content-type": "application/grpc", "te": "trailers"}


def start_connection(connection: socket.socket) -> None:
    """Begin an HTTP/2 connection."""
    connection.sendall(PREFACE + _frame(_SETTINGS, 0, 0, b""))


def start_call(connection: socket.socket, path: str, headers: Mapping[str, str] = _HEADERS_OF_CALLS) -> None:
    """Begin an HTTP/2 connection, and a gRPC call as its first stream."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "a",
        **headers,
    }
    block = b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields.items())
    start_connection(connection)
    connection.sendall(_frame(_HEADERS, _END_HEADERS, 1, block))


def send_part(connection: socket.socket, declared: int, content: bytes, *, last: bool = False) -> None:
    """Send the beginning of a message of a declared length, or all of it as the last one of a call."""
    connection.sendall(_frame(_DATA, _END_STREAM if last else 0, 1, b"\x00" + declared.to_bytes(4, "big") + content))


def acknowledge(connection: socket.socket, received: bytes) -> bytes:
    """Acknowledge settings and pings as clients do; return the bytes of the frame that is not complete."""
    while len(received) >= 9 and len(received) >= (end := 9 + int.from_bytes(received[:3], "big")):
        kind, flags, payload = received[3], received[4], received[9:end]
        if kind in (_SETTINGS, _PING) and not flags & _ACKNOWLEDGED:
            connection.sendall(_frame(kind, _ACKNOWLEDGED, 0, payload if kind == _PING else b""))
        received = received[end:]
    return received


def grpc_status(connection: socket.socket) -> int:
    """Return the status that the server sends; -1 if the connection ends without one."""
    found = b""
    while True:
        at = found.find(b"grpc-status")
        if at >= 0 and len(found) >= at + 13:
            return int(found[at + 12 : at + 12 + found[at + 11]])
        part = connection.recv(65536)
        if not part:
            return -1
        found += part


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _text(value: str) -> bytes:
    """Return a string literal of HPACK, shorter than 127 bytes."""
    return bytes([len(value)]) + value.encode()
