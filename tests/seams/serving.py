"""Seams of the tests of the server: each function replaces one collaborator until the test ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from chrion.serving.replay import stand_ins, target
from chrion.serving.server import connections, grpc_service, rest, run, trials
from chrion.serving.server.options import ClusterOptions, ServerOptions


def limit_reading(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """End streams of gRPC whose clients read no answer for a time, however large it is."""
    monkeypatch.setattr(grpc_service, "READ_S", seconds)
    monkeypatch.setattr(grpc_service, "READ_BYTES_PER_S", float("inf"))


def limit_peers(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Give the peers of HTTP connections a time for headers and bodies, and for reading answers, however large."""
    monkeypatch.setattr(run, "HEADER_S", seconds)
    monkeypatch.setattr(rest, "_BODY_SILENCE_S", seconds)
    monkeypatch.setattr(connections, "READ_S", seconds)
    monkeypatch.setattr(connections, "READ_BYTES_PER_S", float("inf"))


def limit_trials(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """End the trials of models after a time."""
    monkeypatch.setattr(trials, "_MAX_S", seconds)


def limit_answers(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Give a server that requests are replayed on a time for its metadata and its metrics."""
    monkeypatch.setattr(target, "_ANSWER_S", seconds)


def assume_speed(monkeypatch: pytest.MonkeyPatch, round_ms: float) -> None:
    """Write stand-ins of models for a processor of a known speed, which takes seconds to measure."""
    monkeypatch.setattr(stand_ins, "measure_round_ms", lambda: round_ms)


def serve_from_lost_replicas(monkeypatch: pytest.MonkeyPatch, options: ServerOptions, cluster: ClusterOptions) -> None:
    """Serve from a cluster that loses the replicas, and their application, as soon as they run.

    It checks that the application is removed if serving ends with an exception.
    """
    from chrion.serving.server import ray_serve  # noqa: PLC0415 - needs the extra

    deleted: list[str] = []

    class LostReplicas:
        """A handle whose replicas are lost."""

        @property
        def answer(self) -> Any:
            return self

        async def remote(self, call: Any) -> None:
            raise ray_serve.RayError(call.method)

    def delete(name: str) -> None:
        deleted.append(name)
        raise ray_serve.RayServeException("no Serve instance")

    running = SimpleNamespace(status=ray_serve.ApplicationStatus.RUNNING)
    status = SimpleNamespace(applications={ray_serve.APPLICATION: running})
    monkeypatch.setattr(ray_serve, "_deploy", lambda *_: LostReplicas())
    monkeypatch.setattr(ray_serve, "serve", SimpleNamespace(delete=delete, status=lambda: status))
    try:
        asyncio.run(ray_serve._serve(options, cluster, deleted.append))
    finally:
        assert deleted == [ray_serve.APPLICATION]
