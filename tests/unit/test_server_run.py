"""The server's process: its end, if it cannot begin."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from chrion.errors import OptionError
from chrion.serving.server.generation_service import GenerationService
from chrion.serving.server.options import ClusterOptions, DeviceOptions, ServerOptions
from chrion.serving.server.run import answer_until_stopped
from chrion.serving.server.served_models import ServedModels
from seams.serving import serve_from_lost_replicas


class IdleTarget:
    """A target that answers no request."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def events_of(options: ServerOptions, failure: Exception | None = None) -> list[str]:
    """Return what a server does that fails with an OptionError."""
    events = []
    target: Any = IdleTarget()

    async def begin() -> str:
        events.append("begin")
        if failure:
            raise failure
        return "nothing"

    async def end(grace: Any) -> None:
        assert not grace.is_over
        events.append("end")

    with pytest.raises(OptionError):
        asyncio.run(
            answer_until_stopped(options, ServedModels(target, GenerationService({}, 1), begin, end), events.append)
        )
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
    pytest.importorskip("ray.serve")
    options = ServerOptions(tmp_path, http=("127.0.0.1", 0), grpc=None, drain_s=0.0)
    with pytest.raises(OptionError, match="--ray auto: the replicas do not answer: health"):
        serve_from_lost_replicas(monkeypatch, options, ClusterOptions("auto", devices=DeviceOptions()))
