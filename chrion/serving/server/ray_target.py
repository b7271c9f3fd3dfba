"""The models of a cluster: requests go to replicas of Ray Serve, and are repeated if a replica is lost.

A model's answer depends on the request alone, so that a request whose replica was lost can be sent to another one. It
is sent to three replicas at most: a request that ends every process that runs it must not end all of them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException

from chrion.serving.manager.records import MAX_ATTEMPTS
from chrion.serving.server import grpc_codec, merging
from chrion.serving.server.failures import RequestFailure, Status
from chrion.serving.server.grace import Grace
from chrion.serving.server.options import ServerOptions
from chrion.serving.server.ray_replica import Call, Reply
from chrion.serving.server.request_memory import ByteAccount
from chrion.serving.server.shared_view import SUSPENDED_S, SharedView
from chrion.serving.server.target import Answer

log = logging.getLogger("chrion.server")

#: Time within which a replica must answer questions about its state, in seconds (a choice, not measured).
_QUESTION_S = 10.0


class ClusterTarget:
    """The models of a cluster.

    Args:
        view: What is known of its replicas.
        options: The server's options.

    Attributes:
        account: The memory of requests in flight.
        draining: Whether new requests are refused.
        control: False; clients cannot load and unload models.
    """

    def __init__(self, view: SharedView, options: ServerOptions) -> None:
        self.account = ByteAccount(options.request_bytes)
        self.draining = False
        self.control = False
        self._handle: Any = None
        self._view = view
        self._polls = options.control == "poll"
        self._numbers = itertools.count()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def connect(self, handle: Any) -> None:
        """Take Serve's handle of the deployment, and wait until a replica answers; called before the first request."""
        self._handle = handle
        number = next(self._numbers)
        reply = await self._call(Call(number, "", "health"))
        self._ended(number, reply)

    async def close(self, grace: Grace) -> None:
        """Refuse new requests, and wait for those in flight as long as the grace lasts."""
        self.draining = True
        if not await grace.wait_for(self._idle):
            log.warning("requests in flight are given up", extra={"fields": {"pending": self._in_flight}})

    async def health(self) -> dict[str, Any]:
        """Return the state of the cluster: ready if there is a replica."""
        with self._view as view:
            replicas = len(view.available(time.monotonic()))
        ready = replicas > 0 and not self.draining
        return {"live": True, "ready": ready, "replicas": replicas, "pending": self._in_flight}

    async def snapshot(self) -> dict[str, Any]:
        """Return the state of all replicas for the web page."""
        snapshots = await self._ask_all("snapshot")
        return merging.merge_snapshots(self._named(snapshots), draining=self.draining)

    async def metrics(self) -> bytes:
        """Return the metrics of all replicas, and those of the router."""
        answers = await self._ask_all("metrics")
        with self._view as view:
            outstanding = {replica: view.outstanding(replica) for replica in view.replicas}
            labels = {replica: {"replica": replica, "node": view.node(replica)} for replica in [*answers, *outstanding]}
            repeated = view.repeated
        texts = [(labels[replica], text.decode()) for replica, text in answers.items()]
        texts += [(labels[r], merging.gauge("chrion_replica_requests", _REQUESTS, n)) for r, n in outstanding.items()]
        texts.append(({}, merging.counter("chrion_requests_repeated", _REPEATED, repeated)))
        texts.append(({}, merging.gauge("chrion_replicas", "Replicas that requests are sent to", len(outstanding))))
        return merging.merge_metrics(texts).encode()

    async def model_metadata(self, name: str, version: str) -> dict[str, Any]:
        """Return a model's metadata."""
        metadata: dict[str, Any] = await self._send("", "model_metadata", name, version)
        return metadata

    async def model_config(self, name: str, version: str) -> dict[str, Any]:
        """Return a model's configuration."""
        config: dict[str, Any] = await self._send("", "model_config", name, version)
        return config

    async def model_obstacle(self, name: str, version: str) -> str:
        """Return why no replica can serve requests for a model; empty if one can."""
        obstacles = await self._ask_all("model_obstacle", name, version)
        return "" if "" in obstacles.values() else next(iter(obstacles.values()))

    async def statistics(self, name: str, version: str) -> list[dict[str, Any]]:
        """Return the statistics of a model's versions, summed over all replicas."""
        return merging.sum_statistics((await self._ask_all("statistics", name, version)).values())

    async def index(self, state: str) -> list[dict[str, str]]:
        """Return the versions of the repository with a state, or all of them; the state is that of the best replica."""
        entries = merging.merge_indices((await self._ask_all("index", "")).values())
        return [entry for entry in entries if state in ("", entry["state"])]

    async def load(self, name: str, _: Iterable[str] = ()) -> None:
        """Refuse: the replicas follow the repository."""
        raise RequestFailure(Status.UNAVAILABLE, f"model {name[:200]!r}: model control is not supported with --ray")

    async def unload(self, name: str) -> None:
        """Refuse: the replicas follow the repository."""
        await self.load(name)

    async def infer_rest(self, name: str, version: str, body: bytes | bytearray, header_length: str | None) -> Answer:
        """Answer an inference request of the REST protocol."""
        answer: Answer = await self._send(f"{name}/{version}", "infer_rest", name, version, body, header_length)
        return answer

    async def infer_grpc(self, content: bytes, remaining_ms: float) -> Answer:
        """Answer a ``ModelInferRequest``."""
        given = grpc_codec.parse_request(content).head
        end = time.monotonic() * 1000 + remaining_ms

        def arguments() -> tuple[Any, ...]:
            return content, end - time.monotonic() * 1000 if math.isfinite(end) else end

        key = f"{given.model_name}/{given.model_version}"
        answer: Answer = await self._send_until_answered(key, "infer_grpc", arguments)
        return answer

    async def _send(self, model: str, method: str, *arguments: Any) -> Any:
        return await self._send_until_answered(model, method, lambda: arguments)

    async def _send_until_answered(self, model: str, method: str, arguments: Callable[[], tuple[Any, ...]]) -> Any:
        """Send a request to replicas until one answers it.

        Raises:
            RequestFailure: A replica refuses it, there is none, or too many were lost with it.
        """
        if self.draining:
            raise RequestFailure(Status.UNAVAILABLE, "the server is shutting down", retry_s=1.0)
        self._in_flight += 1
        self._idle.clear()
        number = next(self._numbers)
        tried: set[str] = set()
        try:
            for _ in range(MAX_ATTEMPTS):
                self._require_replica()
                try:
                    reply = await self._call(Call(number, model, method, arguments(), tried=frozenset(tried)))
                except (RayError, RayServeException) as error:
                    tried.add(self._lost(number, error))
                    continue
                replica = self._ended(number, reply)
                unserved = reply.failure is not None and reply.failure[0] in {Status.NOT_FOUND, Status.UNAVAILABLE}
                if unserved and self._polls and self._has_others(tried | {replica}):
                    tried.add(replica)  # the others may have read the repository since
                    continue
                return _value(reply)
            raise RequestFailure(Status.UNAVAILABLE, f"{len(tried)} replicas were lost with this request", retry_s=1.0)
        finally:
            with self._view as view:
                view.end(number)
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def _call(self, call: Call) -> Reply:
        """Send a call to a replica; cancel it there if the caller is cancelled."""
        response = self._handle.answer.remote(call)
        try:
            reply: Reply = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except (RayTaskError, TaskCancelledError) as error:
            log.exception("a replica raised")
            raise RequestFailure(Status.INTERNAL, "internal error; see the log of the replica") from error
        return reply

    async def _ask_all(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Return the answers of all replicas that answer in time.

        Raises:
            RequestFailure: There is none, or none answers; what one of them raised.
        """
        self._require_replica()
        with self._view as view:
            replicas = view.available(time.monotonic())
        calls = [Call(next(self._numbers), "", method, arguments, replica) for replica in replicas]
        replies = await asyncio.gather(*(self._ask(call) for call in calls), return_exceptions=True)
        answered = {r: reply for r, reply in zip(replicas, replies, strict=True) if isinstance(reply, Reply)}
        with self._view as view:
            for replica, reply in answered.items():
                view.report(replica, reply.state)
        values = {replica: reply.value for replica, reply in answered.items() if reply.failure is None}
        if not values:
            for reply in answered.values():
                _value(reply)
            raise RequestFailure(Status.UNAVAILABLE, _NO_REPLICA, retry_s=1.0)
        return values

    async def _ask(self, call: Call) -> Reply:
        async with asyncio.timeout(_QUESTION_S):
            return await self._call(call)

    def _require_replica(self) -> None:
        with self._view as view:
            if not view.replicas:
                raise RequestFailure(Status.UNAVAILABLE, _NO_REPLICA, retry_s=1.0)

    def _has_others(self, tried: set[str]) -> bool:
        with self._view as view:
            return bool(set(view.replicas) - tried)

    def _ended(self, number: int, reply: Reply) -> str:
        with self._view as view:
            replica = view.end(number)
            view.report(replica, reply.state)
            return replica

    def _lost(self, number: int, error: Exception) -> str:
        with self._view as view:
            replica = view.end(number)
            view.suspend(replica, time.monotonic() + SUSPENDED_S)
            view.repeated += 1
        log.warning("replica lost", extra={"fields": {"replica": replica, "reason": type(error).__name__}})
        return replica

    def _named(self, answers: dict[str, Any]) -> dict[str, Any]:
        """Return answers by names of replicas for people: the node and the replica."""
        with self._view as view:
            return {f"{view.node(replica)}/{replica}".lstrip("/"): answer for replica, answer in answers.items()}


def _value(reply: Reply) -> Any:
    if reply.failure is None:
        return reply.value
    status, text, retry_s = reply.failure
    raise RequestFailure(status, text, retry_s=retry_s)


_NO_REPLICA = "no replica is running"
_REQUESTS = "Requests that a replica has"
_REPEATED = "Requests that were sent again after a replica was lost"
