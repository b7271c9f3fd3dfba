"""The REST service: Open Inference Protocol v2, metrics, and the web page."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from chrion.serving.server import documents, rest_codec
from chrion.serving.server.disconnects import EventResponse, Handler, event, until_disconnect
from chrion.serving.server.failures import RequestFailure, Status, require_token
from chrion.serving.server.generate_routes import GenerateRoutes
from chrion.serving.server.generation_service import GenerationService
from chrion.serving.server.json_bodies import parse_body, typed
from chrion.serving.server.logs import FailureSampler, log_request
from chrion.serving.server.openai_service import OpenAiService, failure_document
from chrion.serving.server.options import ServerOptions
from chrion.serving.server.origins import SenderRules
from chrion.serving.server.request_memory import RequestMemory
from chrion.serving.server.statistics import SERVER_TIMING, RequestTiming
from chrion.serving.server.target import Target
from chrion.serving.server.tracing import RequestTracer

log = logging.getLogger("chrion.server")

#: Time without data after which a body is given up, in seconds, as for headers, and the minimum speed after as much
#: time (a choice, not measured).
_BODY_SILENCE_S, _BODY_BYTES_PER_S = 20.0, 10_000
#: Time for which a body that is too large is read, in all and without data, in seconds: enough for most clients to end
#: it and read the answer.
_DISCARD_S, _DISCARD_SILENCE_S = 10.0, 1.0
#: Bytes of a body that only has options: it has a few names.
_MAX_OPTIONS = 1 << 20
#: Bytes that a connection buffers before it waits for its client.
_CONNECTION_BUFFER = 1 << 16
#: Interval of the events of the web page, and number of pages at the same time: in all, and for clients that have one.
#: Each event renders the state of all models.
_EVENT_S, _MAX_PAGES, _MAX_FURTHER_PAGES = 1.0, 16, 8

_INTERNAL = "internal error; see the server's log"


class RestService:
    """The REST service.

    Args:
        options: The limits, the token and the origins of pages that may read answers.
        target: The models.
        generation: The decoders, which also have the OpenAI API.
        tracer: Receives the spans of requests; None for no traces.
    """

    def __init__(
        self, options: ServerOptions, target: Target, generation: GenerationService, tracer: RequestTracer | None = None
    ) -> None:
        self._target = target
        self._generation = generation
        self._body_bytes = options.body_bytes
        self._token = options.token
        self._tracer = tracer
        self._senders = SenderRules.of(options)
        self._failures = FailureSampler()
        #: Open pages by the addresses of their clients.
        self._pages: Counter[str] = Counter()
        model, version = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
        route = self._route
        routes = [  # searched in this order
            *(route(f"{base}/infer", self._infer, "POST") for base in (model, version)),
            route("/", self._page, is_open=True),
            route("/events", self._events),
            route("/metrics", self._metrics),
            route("/v2", self._server),
            route("/v2/", self._server),
            route("/v2/health", self._health, is_open=True, probe=True),
            route("/v2/health/live", self._live, is_open=True, probe=True),
            route("/v2/health/ready", self._ready, is_open=True, probe=True),
            route("/v2/models/stats", self._statistics),
            route("/v2/repository/index", self._index, "POST"),
            route("/v2/repository/models/{name}/load", self._load, "POST"),
            route("/v2/repository/models/{name}/unload", self._unload, "POST"),
        ]
        for base in (model, version):
            routes += [
                route(base, self._model),
                route(f"{base}/ready", self._model_ready, probe=True),
                route(f"{base}/config", self._config),
                route(f"{base}/stats", self._statistics),
            ]
        for api in (OpenAiService(generation, self._text_options), GenerateRoutes(generation, self._text_options)):
            routes += [route(path, handler, method) for path, handler, method in api.routes()]
        self.app = Starlette(
            routes=routes,
            middleware=[_cross_origin(options.cors)] if options.cors else [],
            exception_handlers={404: self._unrouted, 405: self._unrouted},
        )

    def _route(
        self, path: str, handler: Handler, method: str = "GET", *, is_open: bool = False, probe: bool = False
    ) -> Route:
        handler = self._answering(self._accounting(handler), is_open=is_open, probe=probe)
        return Route(path, handler, methods=[method])

    def _answering(self, handler: Handler, *, is_open: bool, probe: bool = False) -> Handler:
        """Return a handler that checks the sender and the token, and answers failures as the protocol has them.

        Args:
            handler: Answers the request.
            is_open: Whether requests need no token.
            probe: Whether requests ask if something is ready: that it is not ready is none of their failures.
        """

        async def answer(request: Request) -> Response:
            name = request.headers.get("x-request-id", "")
            request.state.id = name[:100] if name.isascii() and name.isprintable() and name else uuid.uuid4().hex
            began_s, error = time.monotonic(), ""
            try:
                self._senders.check(request.method, dict(request.scope["headers"]))
                if not is_open:
                    given = request.headers.get("authorization", "").encode("latin-1", "replace")
                    require_token(self._token, given)
                response = await handler(request)
            except RequestFailure as failure:
                response, error = _failure(request, failure), failure.message
            except ClientDisconnect:
                response, error = Response(status_code=Status.CANCELLED.http), "the client left"
            except Exception:
                log.exception("request failed", extra={"fields": {"request_id": request.state.id}})
                response, error = _failure(request, RequestFailure(Status.INTERNAL, _INTERNAL)), _INTERNAL
            response.raw_headers += [(b"x-request-id", request.state.id.encode()), *_SECURITY_HEADERS]
            status = response.status_code
            is_expected = status < 400 or (probe and status == Status.UNAVAILABLE.http)
            level, more = (logging.DEBUG, {}) if is_expected else self._failures.choose_level(status)
            if log.isEnabledFor(level):
                client = request.client.host if request.client else ""
                attributes = {"request_id": request.state.id, "method": request.method, "path": request.url.path}
                log_request(level, attributes | {"client": client, "status": status} | more, began_s, error)
            return response

        return answer

    def _accounting(self, handler: Handler) -> Handler:
        """Return a handler whose requests take memory until their answers have been read."""

        async def answer(request: Request) -> Response:
            request.state.memory = memory = RequestMemory(self._target.account)
            try:
                return _AccountedResponse(await handler(request), memory)
            except BaseException:
                memory.release()
                raise

        return answer

    async def _unrouted(self, request: Request, error: Any) -> Response:
        """Answer a request whose path or method does not exist."""
        headers = error.headers or {}
        status, text = Status.NOT_FOUND, "not found"
        if error.status_code == Status.NOT_ALLOWED.http:
            status, text = Status.NOT_ALLOWED, f"not allowed, expected {headers['Allow']}"

        async def refuse(request: Request) -> Response:
            raise RequestFailure(status, f"{request.method} {request.url.path[:200]}: {text}")

        response = await self._answering(refuse, is_open=True)(request)
        response.headers.update(headers)
        return response

    async def _page(self, _: Request) -> Response:
        return HTMLResponse(_page_text(), headers={"Content-Security-Policy": _PAGE_POLICY})

    async def _events(self, request: Request) -> Response:
        client = request.client.host if request.client else ""
        if self._pages.total() >= (_MAX_FURTHER_PAGES if self._pages[client] else _MAX_PAGES):
            raise RequestFailure(Status.OVERLOADED, "too many open pages", retry_s=60.0)
        self._pages[client] += 1
        return EventResponse(self._snapshots(), functools.partial(self._close_page, client))

    def _close_page(self, client: str) -> None:
        self._pages[client] -= 1
        self._pages = +self._pages  # without the clients that have none

    async def _snapshots(self) -> AsyncIterator[str]:
        while not self._target.draining:
            yield event(await self._target.snapshot())
            await asyncio.sleep(_EVENT_S)

    async def _metrics(self, _: Request) -> Response:
        metrics = await self._target.metrics() + self._generation.metrics()
        return Response(metrics, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _server(self, _: Request) -> Response:
        return JSONResponse(documents.server_metadata(model_control=self._target.control))

    async def _health(self, _: Request) -> Response:
        health = await self._target.health()
        return JSONResponse(health, status_code=200 if health["ready"] else Status.UNAVAILABLE.http)

    async def _live(self, _: Request) -> Response:
        return JSONResponse({"live": True})

    async def _ready(self, _: Request) -> Response:
        ready = (await self._target.health())["ready"]
        return JSONResponse({"ready": ready}, status_code=200 if ready else Status.UNAVAILABLE.http)

    async def _model(self, request: Request) -> Response:
        return JSONResponse(await self._target.model_metadata(*_model_of(request)))

    async def _model_ready(self, request: Request) -> Response:
        name, version = _model_of(request)
        obstacle = await self._target.model_obstacle(name, version)
        if obstacle:
            raise RequestFailure(Status.UNAVAILABLE, obstacle)
        return JSONResponse({"name": name, "ready": True})

    async def _config(self, request: Request) -> Response:
        return JSONResponse(await self._target.model_config(*_model_of(request)))

    async def _statistics(self, request: Request) -> Response:
        return JSONResponse({"model_stats": await self._target.statistics(*_model_of(request))})

    async def _index(self, request: Request) -> Response:
        body = await self._json(request)
        return JSONResponse(await self._target.index(documents.READY if body.get("ready", False) is True else ""))

    async def _load(self, request: Request) -> Response:
        parameters = (await self._json(request)).get("parameters")
        await self._target.load(request.path_params["name"], parameters if isinstance(parameters, dict) else ())
        return Response(status_code=200)

    async def _unload(self, request: Request) -> Response:
        await self._json(request)
        await self._target.unload(request.path_params["name"])
        return Response(status_code=200)

    async def _infer(self, request: Request) -> Response:
        if self._tracer is None:
            return await self._run(request)
        name, version = _model_of(request)
        attributes = {"model": name[:200], "version": version, "request_id": request.state.id}
        add = functools.partial(self._tracer.add, request.headers, attributes, time.time_ns())
        try:
            response = await self._run(request)
        except RequestFailure as failure:
            add(failure=failure.message)
            raise
        except ClientDisconnect:
            add(failure="the client left")
            raise
        add(RequestTiming.of_header(response.headers.get(SERVER_TIMING, "")))
        return response

    async def _run(self, request: Request) -> Response:
        """Serve an inference request."""
        body = await self._body(request, self._body_bytes)
        length = request.headers.get(rest_codec.HEADER_LENGTH)
        answer = await until_disconnect(request, self._target.infer_rest(*_model_of(request), body, length))
        request.state.memory.take(len(answer.content))
        return Response(answer.content, headers=dict(answer.headers))

    async def _text_options(self, request: Request) -> dict[str, Any]:
        """Return the object in the body of a request for text."""
        return await self._json(request, self._body_bytes)

    async def _json(self, request: Request, max_bytes: int = _MAX_OPTIONS) -> dict[str, Any]:
        """Return the object in the body of a request; store the time of its arrival."""
        body = await self._body(request, max_bytes)
        request.state.arrival_s = time.perf_counter()
        return typed(dict, parse_body(memoryview(body), request.state.memory.take) if body.strip() else {}, "the body")

    async def _body(self, request: Request, max_bytes: int) -> bytearray:
        """Return the body, decompressed.

        Raises:
            RequestFailure: It is too large, or the client sends it too slowly, or nothing for too long.
        """
        take: Callable[[int], None] = request.state.memory.take
        declared = request.headers.get("content-length", "0")
        body = bytearray()  # it grows without being copied, unlike parts that are joined in the end
        stream = request.stream().__aiter__()
        loop = asyncio.get_running_loop()
        latest_s = loop.time() + _BODY_SILENCE_S
        try:
            async with asyncio.timeout_at(latest_s) as limit:
                _check_size(int(declared[:20]) if declared.isdigit() else 0, max_bytes)
                while part := await anext(stream, b""):
                    _append(body, part, max_bytes, take)
                    limit.reschedule(min(loop.time() + _BODY_SILENCE_S, latest_s + len(body) / _BODY_BYTES_PER_S))
        except TimeoutError:
            raise RequestFailure(Status.TIMED_OUT, "the body is incomplete") from None
        except RequestFailure as failure:
            if failure.status is Status.TOO_LARGE:
                await _discard(stream)
            raise
        encoding = request.headers.get("content-encoding", "").lower()
        if encoding in ("", "identity"):
            return body
        return await asyncio.to_thread(_join, rest_codec.decompress(body, encoding), max_bytes, take)


class _AccountedResponse:
    """A response whose request gives its memory back when the client has read it, or has left.

    Args:
        response: The response.
        memory: The memory of the request.
    """

    def __init__(self, response: Response, memory: RequestMemory) -> None:
        self._response = response
        self._memory = memory
        self.headers, self.raw_headers = response.headers, response.raw_headers
        self.status_code = response.status_code

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_and_wait(message: Any) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if last and len(message.get("body", b"")) > _CONNECTION_BUFFER:
                await send({**message, "more_body": True})
                message = {"type": "http.response.body"}  # uvicorn sends it when the client has read what is before it
            await send(message)

        try:
            await self._response(scope, receive, send_and_wait)
        finally:
            self._memory.release()


def _check_size(size: int, max_bytes: int, detail: str = "") -> None:
    if size > max_bytes:
        raise RequestFailure(Status.TOO_LARGE, f"the body has more than {max_bytes} bytes{detail}")


def _append(body: bytearray, part: bytes, max_bytes: int, take: Callable[[int], None], detail: str = "") -> None:
    try:
        _check_size(len(body) + len(part), max_bytes, detail)
        take(len(part))
    except RequestFailure:
        body.clear()  # before other requests may take its memory
        raise
    body += part


def _join(parts: Iterable[bytes], max_bytes: int, take: Callable[[int], None]) -> bytearray:
    body = bytearray()
    for part in parts:
        _append(body, part, max_bytes, take, " when decompressed")
    return body


async def _discard(stream: AsyncIterator[bytes]) -> None:
    """Read a body without keeping it, for a limited time: clients read the answer only after they have sent it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            while True:
                async with asyncio.timeout(_DISCARD_SILENCE_S):
                    if await anext(stream, None) is None:
                        return


def _cross_origin(origins: Sequence[str]) -> Middleware:
    """Return what answers browsers that ask whether a page of another origin may send a request and read the answer."""
    return Middleware(
        CORSMiddleware,
        allow_origins=[*origins],
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["Retry-After", SERVER_TIMING, "X-Request-Id"],
    )


def _model_of(request: Request) -> tuple[str, str]:
    """Return the name and the version in the path of a request, empty without one."""
    return request.path_params.get("name", ""), request.path_params.get("version", "")


def _failure(request: Request, failure: RequestFailure) -> Response:
    """Return the answer to a request that failed, as its API has it."""
    headers = {}
    if failure.retry_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(failure.retry_s)))
    if failure.status is Status.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    own = f"{request.url.path}/".startswith("/v1/")
    document = failure_document(failure) if own else {"error": failure.message}
    return JSONResponse(document, status_code=failure.status.http, headers=headers)


@functools.cache
def _page_text() -> str:
    return (resources.files("chrion.serving.server") / "page.html").read_text(encoding="utf-8")


#: Headers of all answers: they are not shown inside other pages, and are what their media type says.
_SECURITY_HEADERS = ((b"content-security-policy", b"frame-ancestors 'none'"), (b"x-content-type-options", b"nosniff"))
_PAGE_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
