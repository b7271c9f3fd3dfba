"""Seams of the tests of the server: each function replaces one collaborator until the test ends."""

from __future__ import annotations

import pytest

from chrion.replay import stand_ins, target
from chrion.server import grpc_service


def limit_reading(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """End streams of gRPC whose clients read no answer for a time, however large it is."""
    monkeypatch.setattr(grpc_service, "_READ_S", seconds)
    monkeypatch.setattr(grpc_service, "_READ_BYTES_PER_S", float("inf"))


def limit_answers(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Give a server that requests are replayed on a time for its metadata and its metrics."""
    monkeypatch.setattr(target, "_ANSWER_S", seconds)


def assume_speed(monkeypatch: pytest.MonkeyPatch, round_ms: float) -> None:
    """Write stand-ins of models for a processor of a known speed, which takes seconds to measure."""
    monkeypatch.setattr(stand_ins, "measure_round_ms", lambda: round_ms)
