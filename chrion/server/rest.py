"""The REST service: Open Inference Protocol v2, metrics, and the web page."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from chrion.files import parse_json
from chrion.server import documents, rest_codec
from chrion.server.catalogue import Catalogue
from chrion.server.core import Served, ServingCore
from chrion.server.failures import RequestFailure, Status
from chrion.server.metrics import render_metrics
from chrion.server.tensors import DTYPES

log = logging.getLogger("chrion.server")

#: Bodies above this size are parsed in a thread, so that the event loop is not blocked.
_LARGE_BODY = 1 << 16
#: Time without data after which a body is given up, in seconds.
_BODY_SILENCE_S = 20.0
#: Time for which a body that is too large is read, in all and without data, in seconds.
_DISCARD_S, _DISCARD_SILENCE_S = 10.0, 1.0
#: Interval of the events of the web page, and number of pages at the same time.
_EVENT_S, _MOST_PAGES = 1.0, 16

Handler = Callable[[Request], Awaitable[Response]]


class RestService:
    """The REST service.

    Args:
        core: The server.
        catalogue: Its repository.
        body_bytes: Limit of a body's size, also when decompressed.
        token: Bearer token that every request but those for health must have; empty for none.
    """

    def __init__(self, core: ServingCore, catalogue: Catalogue, *, body_bytes: int, token: str = "") -> None:
        self._core = core
        self._catalogue = catalogue
        self._body_bytes = body_bytes
        self._token = token
        self._pages = 0
        model, version = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
        routes = [
            _route("/", self._page, "GET", open_=True),
            _route("/events", self._events, "GET"),
            _route("/metrics", self._metrics, "GET"),
            _route("/v2", self._server, "GET"),
            _route("/v2/", self._server, "GET"),
            _route("/v2/health", self._health, "GET", open_=True),
            _route("/v2/health/live", self._live, "GET", open_=True),
            _route("/v2/health/ready", self._ready, "GET", open_=True),
            _route("/v2/models/stats", self._statistics, "GET"),
            _route("/v2/repository/index", self._index, "POST"),
            _route("/v2/repository/models/{name}/load", self._load, "POST"),
            _route("/v2/repository/models/{name}/unload", self._unload, "POST"),
        ]
        for base in (model, version):
            routes += [
                _route(base, self._model, "GET"),
                _route(f"{base}/ready", self._model_ready, "GET"),
                _route(f"{base}/config", self._config, "GET"),
                _route(f"{base}/stats", self._statistics, "GET"),
                _route(f"{base}/infer", self._infer, "POST"),
            ]
        self.app = Starlette(
            routes=[
                Route(path, self._answering(handler, open_=is_open), methods=[method])
                for path, handler, method, is_open in routes
            ],
            exception_handlers={404: _not_found, 405: _not_found},
        )

    def _answering(self, handler: Handler, *, open_: bool) -> Handler:
        """Return a handler that checks the token and answers failures as the protocol has them."""

        @functools.wraps(handler)
        async def answer(request: Request) -> Response:
            given = request.headers.get("x-request-id", "")
            request.state.id = given[:100] if given.isascii() and given.isprintable() and given else uuid.uuid4().hex
            began = time.monotonic()
            try:
                if not open_:
                    self._authorise(request)
                response = await handler(request)
            except RequestFailure as failure:
                response = _failure(failure)
            except ClientDisconnect:
                response = Response(status_code=Status.CANCELLED.http)
            except Exception:
                log.exception("request failed", extra={"fields": {"request_id": request.state.id}})
                response = _failure(RequestFailure(Status.INTERNAL, "internal error; see the server's log"))
            response.headers["X-Request-Id"] = request.state.id
            level = logging.DEBUG if response.status_code < 400 else logging.INFO
            fields = {"request_id": request.state.id, "path": request.url.path[:300], "status": response.status_code}
            fields["duration_ms"] = round((time.monotonic() - began) * 1000, 3)
            log.log(level, "request", extra={"fields": fields})
            return response

        return answer

    def _authorise(self, request: Request) -> None:
        expected = f"Bearer {self._token}".encode()
        given = request.headers.get("authorization", "").encode("latin-1", "replace")
        if self._token and not hmac.compare_digest(given, expected):
            raise RequestFailure(Status.UNAUTHENTICATED, "a valid bearer token is required")

    async def _page(self, request: Request) -> Response:
        del request
        return HTMLResponse(_page_text(), headers={"Content-Security-Policy": _PAGE_POLICY})

    async def _events(self, request: Request) -> Response:
        del request
        if self._pages >= _MOST_PAGES:
            raise RequestFailure(Status.OVERLOADED, "too many open pages", retry_s=60.0)
        return StreamingResponse(
            self._snapshots(), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    async def _snapshots(self) -> AsyncIterator[str]:
        self._pages += 1
        try:
            while not self._core.draining:
                yield f"data: {json.dumps(documents.snapshot(self._core))}\n\n"
                await asyncio.sleep(_EVENT_S)
        finally:
            self._pages -= 1

    async def _metrics(self, request: Request) -> Response:
        del request
        return Response(render_metrics(self._core), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _server(self, request: Request) -> Response:
        del request
        return JSONResponse(documents.server_metadata(model_control=self._catalogue.mode == "explicit"))

    async def _health(self, request: Request) -> Response:
        del request
        ready = not self._core.draining
        body = {"live": True, "ready": ready, "models": len(self._core.models), "pending": self._core.manager.pending}
        return JSONResponse(body, status_code=200 if ready else Status.UNAVAILABLE.http)

    async def _live(self, request: Request) -> Response:
        del request
        return JSONResponse({"live": True})

    async def _ready(self, request: Request) -> Response:
        del request
        ready = not self._core.draining
        return JSONResponse({"ready": ready}, status_code=200 if ready else Status.UNAVAILABLE.http)

    async def _model(self, request: Request) -> Response:
        return JSONResponse(documents.model_metadata(self._core, self._find(request)))

    async def _model_ready(self, request: Request) -> Response:
        served = self._find(request)
        if not self._core.is_ready(served):
            raise RequestFailure(Status.UNAVAILABLE, served.failure or f"model {served.version.name!r} is not ready")
        return JSONResponse({"name": served.version.name, "ready": True})

    async def _config(self, request: Request) -> Response:
        return JSONResponse(documents.model_config(self._find(request)))

    async def _statistics(self, request: Request) -> Response:
        name, version = request.path_params.get("name", ""), request.path_params.get("version", "")
        if name:
            self._core.find(name, version)
        found = [
            documents.model_statistics(self._core, served)
            for (own, number), served in sorted(self._core.models.items())
            if name in ("", own) and version in ("", number)
        ]
        return JSONResponse({"model_stats": found})

    async def _index(self, request: Request) -> Response:
        body = await self._json(request)
        ready = body.get("ready", False) is True
        return JSONResponse(documents.repository_index(self._core, self._catalogue.found, ready=ready))

    async def _load(self, request: Request) -> Response:
        body = await self._json(request)
        parameters = body.get("parameters", {})
        if isinstance(parameters, dict) and any(p == "config" or str(p).startswith("file:") for p in parameters):
            raise RequestFailure(Status.UNSUPPORTED, "loading with a configuration or files in the request")
        await self._catalogue.load(request.path_params["name"])
        return Response(status_code=200)

    async def _unload(self, request: Request) -> Response:
        await self._json(request)
        self._catalogue.unload(request.path_params["name"])
        return Response(status_code=200)

    async def _infer(self, request: Request) -> Response:
        served = self._find(request)
        taken = 0
        account = self._core.account

        def take(size: int) -> None:
            nonlocal taken
            account.take(size)
            taken += size

        try:
            body = await self._body(request, take)
            take(len(body))  # its arrays
            length = request.headers.get(rest_codec.HEADER_LENGTH)
            parse = functools.partial(rest_codec.parse_request, body, length)
            parsed = await asyncio.to_thread(parse) if len(body) > _LARGE_BODY else parse()
            result = await self._until_disconnect(request, served, parsed)
            size = sum(array.size * DTYPES[spec.datatype].itemsize for spec, array in result.outputs)
            build = functools.partial(rest_codec.build_response, parsed, result)
            content, json_size = await asyncio.to_thread(build) if size > _LARGE_BODY else build()
        except BaseException:
            account.give(taken)
            raise
        headers, kind = {"Server-Timing": result.timing.header()}, "application/json"
        if json_size is not None:
            headers[rest_codec.HEADER_LENGTH], kind = str(json_size), "application/octet-stream"
        return _AccountedResponse(content, headers, kind, functools.partial(account.give, taken))

    async def _until_disconnect(self, request: Request, served: Served, parsed: rest_codec.InferenceRequest) -> Any:
        """Run a request; cancel it if the client leaves."""
        work = asyncio.create_task(self._core.infer(served, parsed.feeds, tuple(parsed.outputs), parsed.timeout_ms))
        left = asyncio.create_task(request.receive())
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnect
            return work.result()
        finally:
            for task in (work, left):
                if not task.done():
                    task.cancel()
            await asyncio.gather(work, left, return_exceptions=True)

    def _find(self, request: Request) -> Served:
        return self._core.find(request.path_params["name"], request.path_params.get("version", ""))

    async def _json(self, request: Request) -> dict[str, Any]:
        body = await self._body(request, lambda _: None, most=1 << 20)
        try:
            content = parse_json(body) if body.strip() else {}
        except ValueError as error:
            raise RequestFailure(Status.INVALID, f"the body is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise RequestFailure(Status.INVALID, "the body: expected an object")
        return content

    async def _body(self, request: Request, take: Callable[[int], None], most: int = 0) -> bytes:
        """Return the body, decompressed.

        Raises:
            RequestFailure: It is too large, or the client sends nothing for too long.
        """
        most = most or self._body_bytes
        declared = request.headers.get("content-length", "0")
        parts: list[bytes] = []
        size = 0
        stream = request.stream().__aiter__()
        if declared.isdigit() and int(declared[:20]) > most:
            await _discard(stream)
            raise RequestFailure(Status.TOO_LARGE, f"the body has more than {most} bytes")
        while True:
            try:
                async with asyncio.timeout(_BODY_SILENCE_S):
                    part = await anext(stream, None)
            except TimeoutError:
                raise RequestFailure(Status.TIMED_OUT, "the body is incomplete") from None
            if part is None:
                break
            size += len(part)
            if size > most:
                parts.clear()
                await _discard(stream)
                raise RequestFailure(Status.TOO_LARGE, f"the body has more than {most} bytes")
            take(len(part))
            parts.append(part)
        body, encoding = b"".join(parts), request.headers.get("content-encoding", "").lower()
        if not encoding:
            return body
        take(min(len(body) * 10, most))
        return await asyncio.to_thread(rest_codec.decompress, body, encoding, most)


class _AccountedResponse:
    """A response whose memory is accounted for until the client has read it."""

    def __init__(self, content: bytes, headers: dict[str, str], kind: str, sent: Callable[[], None]) -> None:
        self._response = Response(content, headers=headers, media_type=kind)
        self._sent = sent
        self.headers = self._response.headers
        self.status_code = 200

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._response(scope, receive, send)
        finally:
            self._sent()


async def _discard(stream: AsyncIterator[bytes]) -> None:
    """Read a body without keeping it, for a limited time: clients read the answer only after they have sent it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            while True:
                async with asyncio.timeout(_DISCARD_SILENCE_S):
                    if await anext(stream, None) is None:
                        return


def _route(path: str, handler: Handler, method: str, *, open_: bool = False) -> tuple[str, Handler, str, bool]:
    return path, handler, method, open_


def _failure(failure: RequestFailure) -> Response:
    headers = {}
    if failure.retry_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(failure.retry_s)))
    if failure.status is Status.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": failure.message}, status_code=failure.status.http, headers=headers)


async def _not_found(request: Request, error: Any) -> Response:
    text = f"{request.method} {request.url.path[:200]}: " + ("not found" if error.status_code == 404 else "not allowed")
    return JSONResponse({"error": text}, status_code=error.status_code)


@functools.cache
def _page_text() -> str:
    return (resources.files("chrion.server") / "page.html").read_text(encoding="utf-8")


_PAGE_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
