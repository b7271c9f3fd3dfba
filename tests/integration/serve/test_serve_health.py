"""The service grpc.health.v1.Health: the states that the standard names, without a token."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from chrion.serving.server.grpc_codec import SERVICE
from chrion.serving.server.grpc_health import MAX_WATCHERS
from local_server import LocalServer, local_server
from model_repository import product, put
from server_client import infer_body, wait_until

SERVING, NOT_SERVING, UNKNOWN = (
    HealthCheckResponse.SERVING,
    HealthCheckResponse.NOT_SERVING,
    HealthCheckResponse.SERVICE_UNKNOWN,
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalServer]:
    """Return a server that requires a token."""
    put(tmp_path, "m", product())
    with local_server(tmp_path, token="secret") as running:  # noqa: S106
        yield running


@pytest.fixture
def health(server: LocalServer) -> Iterator[Any]:
    """Return the library's stub."""
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        yield HealthStub(channel)


@pytest.mark.parametrize("service", ["", SERVICE])
def test_a_ready_server_is_serving(health: Any, service: str) -> None:
    """The server as a whole and the inference service have a state."""
    request = HealthCheckRequest(service=service)
    assert health.Check(request, timeout=30).status == SERVING
    assert next(health.Watch(request, timeout=30)).status == SERVING


def test_unknown_services(health: Any) -> None:
    """As the standard says, Check fails with NOT_FOUND, and Watch goes on with SERVICE_UNKNOWN."""
    request = HealthCheckRequest(service="x" * 1000)
    with pytest.raises(grpc.RpcError) as unknown:
        health.Check(request, timeout=30)
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    assert len(unknown.value.details()) < 300
    assert next(health.Watch(request, timeout=30)).status == UNKNOWN


def test_clients_that_watch_are_few(health: Any) -> None:
    """Those beyond the limit are refused, and others take their places when they leave; Check is answered meanwhile."""
    request = HealthCheckRequest()
    watching = [health.Watch(request, timeout=60) for _ in range(MAX_WATCHERS)]
    assert {next(states).status for states in watching} == {SERVING}
    with pytest.raises(grpc.RpcError) as refused:
        next(health.Watch(request, timeout=30))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert health.Check(request, timeout=30).status == SERVING
    for states in watching:
        states.cancel()
    for _ in range(100):  # the server finds out soon
        try:
            assert next(health.Watch(request, timeout=30)).status == SERVING
            break
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # noqa: PT017
    else:
        pytest.fail("no place became free")


def test_clients_that_watch_see_the_end(busy_root: Path) -> None:
    """A server that serves its last requests is not serving any more to those who watch."""
    watching = threading.Event()

    def watch() -> list[int]:
        with (
            server.in_flight("/v2/models/slow/infer", infer_body([1e15])),
            grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel,
        ):
            wait_until(server.computes)
            states = HealthStub(channel).Watch(HealthCheckRequest(), timeout=60)
            first = next(states).status
            watching.set()
            return [first, *(state.status for state in states)]

    with ThreadPoolExecutor(1) as pool:
        with local_server(busy_root) as server:
            seen = pool.submit(watch)
            assert watching.wait(60)
        assert seen.result(60) == [SERVING, NOT_SERVING]
