"""The service ``grpc.health.v1.Health``, which probes of Kubernetes and clients that balance load ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from chrion.serving.server.grpc_codec import SERVICE, message
from chrion.serving.server.target import Target

#: The services that have a state, which is that of the server; the empty name is the server as a whole.
_SERVICES = ("", SERVICE)
#: Interval at which a change is looked for on behalf of clients that watch, in seconds: below the interval of probes,
#: which is a second or more.
_INTERVAL_S = 0.5
#: Clients that watch at the same time: more than a deployment has balancers. They need no token, and each takes one of
#: the calls that the server allows.
MAX_WATCHERS = 64

_PACKAGE = "grpc.health.v1"
_States = message("HealthCheckResponse", _PACKAGE)


class HealthService:
    """Answers whether the server is ready; like readiness in the other protocols it needs no token.

    Args:
        target: The models.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._watchers = 0

    def handlers(self) -> Any:
        """Return the handlers of both methods."""
        codec = {
            "request_deserializer": message("HealthCheckRequest", _PACKAGE).FromString,
            "response_serializer": _States.SerializeToString,
        }
        check = grpc.unary_unary_rpc_method_handler(self.check, **codec)
        watch = grpc.unary_stream_rpc_method_handler(self.watch, **codec)
        return grpc.method_handlers_generic_handler(f"{_PACKAGE}.Health", {"Check": check, "Watch": watch})

    async def check(self, request: Any, context: Any) -> Any:
        """Return the state now; NOT_FOUND for another service."""
        if request.service not in _SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service[:200]!r}")
        return _States(status=await self._state())

    async def watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Yield the state now, and again when it changes; the end of the server ends it."""
        if self._watchers >= MAX_WATCHERS:
            text = f"{MAX_WATCHERS} clients watch the health already: use Check"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._watchers += 1
        try:
            last = None
            while True:
                draining = self._target.draining  # read first: the last state has to be that of its end
                state = await self._state() if request.service in _SERVICES else _States.SERVICE_UNKNOWN
                if state != last:
                    yield _States(status=state)
                    last = state
                if draining:
                    return
                await asyncio.sleep(_INTERVAL_S)
        finally:
            self._watchers -= 1

    async def _state(self) -> int:
        ready = (await self._target.health())["ready"]
        return int(_States.SERVING if ready else _States.NOT_SERVING)
