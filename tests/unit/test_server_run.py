"""The server's process: its end, if it cannot begin."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chrion.errors import OptionError
from chrion.server.options import ClusterOptions, DeviceOptions, ServerOptions

run = pytest.importorskip("chrion.server.run")


class IdleTarget:
    """A target that answers no request."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def events_of(options: ServerOptions, failure: Exception | None = None) -> list[str]:
    """Return what a server does that fails with an OptionError."""
    events = []

    async def begin() -> str:
        events.append("begin")
        if failure:
            raise failure
        return "nothing"

    async def end(grace: Any) -> None:
        assert not grace.is_over
        events.append("end")

    with pytest.raises(OptionError):
        asyncio.run(run.answer_until_stopped(options, IdleTarget(), begin, end, events.append))
    return events


@pytest.mark.parametrize("service", ["http", "grpc"])
def test_addresses_are_bound_before_the_models_are_made_ready(tmp_path: Path, service: str) -> None:
    """A port that another process has ends the server before replicas are deployed."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        addresses: dict[str, Any] = {"http": ("127.0.0.1", 0), "grpc": None, service: busy.getsockname()}
        assert events_of(ServerOptions(tmp_path, **addresses)) == []


def test_models_that_do_not_get_ready_are_released(tmp_path: Path) -> None:
    """What the start has made is removed if it fails."""
    options = ServerOptions(tmp_path, http=("127.0.0.1", 0), grpc=("127.0.0.1", 0))
    assert events_of(options, OptionError("not ready")) == ["begin", "end"]


def test_replicas_that_do_not_answer_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's exceptions are one line, also if the application cannot be removed."""
    ray_serve = pytest.importorskip("chrion.server.ray_serve")
    deleted = []

    class LostReplicas:
        """A handle whose replicas are lost; their application is gone, too."""

        @property
        def answer(self) -> Any:
            return self

        async def remote(self, call: Any) -> None:
            raise ray_serve.RayError(call.method)

    def delete(name: str) -> None:
        deleted.append(name)
        raise ray_serve.RayServeException("no Serve instance")

    monkeypatch.setattr(ray_serve, "_deploy", lambda *_: LostReplicas())
    monkeypatch.setattr(ray_serve.serve, "delete", delete)
    running = SimpleNamespace(status=ray_serve.ApplicationStatus.RUNNING)
    status = SimpleNamespace(applications={ray_serve.APPLICATION: running})
    monkeypatch.setattr(ray_serve.serve, "status", lambda: status)
    options = ServerOptions(tmp_path, http=("127.0.0.1", 0), grpc=None, drain_s=0.0)
    cluster = ClusterOptions("auto", devices=DeviceOptions())
    with pytest.raises(OptionError, match="--ray auto: the replicas do not answer: health"):
        asyncio.run(ray_serve._serve(options, cluster, deleted.append))
    assert deleted == [ray_serve.APPLICATION]
