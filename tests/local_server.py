"""Servers in this process: the REST application without a socket, gRPC on a free port, and no signals."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import threading
import urllib.parse
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import openai

from chrion.serving.manager.records import HOST
from chrion.serving.server.grace import Grace
from chrion.serving.server.grpc_service import bind_grpc
from chrion.serving.server.options import ServerOptions
from chrion.serving.server.rest import RestService
from chrion.serving.server.run import listen, web_server
from chrion.serving.server.served_models import local_models
from chrion.serving.server.tracing import RequestTracer
from server_client import Answer, Body, ServerClient

Result = TypeVar("Result")

#: Bytes of an answer that an application may send before its client reads, as with uvicorn.
_BUFFER = 1 << 16
_LIMIT_S = 120.0


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all servers, which runs in a thread: gRPC wants one loop in a process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="servers", daemon=True).start()
    return loop


def run_in_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in the event loop of the servers."""
    return asyncio.run_coroutine_threadsafe(work, event_loop()).result(_LIMIT_S)


class Exchange(httpx2.SyncByteStream):
    """A request to an application and its answer, which is sent as fast as the client reads, as uvicorn does.

    Args:
        app: The application.
        request: The request.
    """

    def __init__(self, app: Any, request: httpx2.Request) -> None:
        path, _, query = request.url.raw_path.partition(b"?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "scheme": "http",
            "path": urllib.parse.unquote(path.decode()),
            "raw_path": path,
            "query_string": query,
        }
        self._parts = [*request.stream] or [b""]
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._unread = 0
        self._taken, self._ended = asyncio.Event(), asyncio.Event()
        self._run = asyncio.run_coroutine_threadsafe(self._serve(app, scope), event_loop())

    def response(self) -> httpx2.Response:
        """Wait for the beginning of the answer."""
        start = self._next()
        return httpx2.Response(start["status"], headers=start["headers"], stream=self)

    def __iter__(self) -> Iterator[bytes]:
        message = {"more_body": True}
        while message.get("more_body"):
            message = self._next()
            part = message.get("body", b"")
            event_loop().call_soon_threadsafe(self._take, len(part))
            yield part
        self._run.result(_LIMIT_S)

    def close(self) -> None:
        """Leave; the application finds out."""
        event_loop().call_soon_threadsafe(self._leave)

    def _next(self) -> dict[str, Any]:
        message = self._messages.get(timeout=_LIMIT_S)
        if message is None:
            raise AssertionError("the application ended without an answer") from self._run.exception()
        return message

    def _take(self, size: int) -> None:
        self._unread -= size
        self._taken.set()

    def _leave(self) -> None:
        self._ended.set()
        self._taken.set()

    async def _serve(self, app: Any, scope: Mapping[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            self._messages.put(None)

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self._ended.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        while self._unread > _BUFFER and not self._ended.is_set():
            self._taken.clear()
            await self._taken.wait()
        if self._ended.is_set():
            return
        self._unread += len(message.get("body", b""))
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._ended.set()
        self._messages.put(message)


class _Transport(httpx2.BaseTransport):
    """Lets clients of httpx send requests to an application."""

    def __init__(self, app: Any) -> None:
        self._app = app

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request."""
        return Exchange(self._app, request).response()


class LocalServer(ServerClient):
    """A server in this process.

    Args:
        app: Its REST application.
        grpc: Its port of gRPC.
        http: Its port of HTTP; 0 if it is not asked for.
        begun: What it serves, in the words of the line that the command prints at the start.
    """

    def __init__(self, app: Any, grpc: int, http: int, begun: str) -> None:
        self.grpc = grpc
        self.begun = begun
        self.url = f"http://127.0.0.1:{http}"
        self._app = app
        self._client = httpx2.Client(transport=_Transport(app), base_url="http://localhost", timeout=None)

    def send(self, method: str, path: str, body: Body, headers: Mapping[str, str]) -> Answer:
        """Send a request; return status, content, and headers."""
        found = self._client.request(method, path, content=body, headers=headers)
        return found.status_code, found.content, found.headers

    @contextlib.contextmanager
    def in_flight(self, path: str, body: Any = None) -> Iterator[Exchange]:
        """Send a request with a body of JSON, or without a body, and leave at the end of the block."""
        method = "GET" if body is None else "POST"
        exchange = Exchange(self._app, self._client.build_request(method, path, json=body))
        try:
            yield exchange
        finally:
            exchange.close()

    def openai(self, key: str = "none") -> openai.OpenAI:
        """Return OpenAI's client of this server."""
        http = httpx2.Client(transport=_Transport(self._app))
        return openai.OpenAI(base_url="http://localhost/v1", api_key=key, max_retries=0, http_client=http)


class _Errors(logging.Handler):
    """Keeps what is logged as an error: a failed task, or a traceback of the server."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(logging.Formatter().format(record))


@contextlib.contextmanager
def no_error_logged() -> Iterator[None]:
    """Check that nothing is logged as an error."""
    errors = _Errors()
    logging.getLogger().addHandler(errors)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(errors)
    assert not errors.found, "\n".join(errors.found)


@contextlib.contextmanager
def local_server(
    repository: Path, *, memory_mb: float = 2000.0, http: bool = False, wait: bool = True, **more: Any
) -> Iterator[LocalServer]:
    """Run a server in this process.

    Args:
        repository: Its repository.
        memory_mb: Host memory for models.
        http: Whether it also has a port of HTTP.
        wait: Whether all models have been tried before the first request.
        more: Other options of the server.
    """
    budgets = {HOST: round(memory_mb * 1e6)}
    options = ServerOptions(repository, grpc=("127.0.0.1", 0), budgets=budgets, **more)
    running = _running(options, http=http, wait=wait)
    yield run_in_loop(running.__aenter__())
    run_in_loop(running.__aexit__(None, None, None))


@contextlib.asynccontextmanager
async def _running(options: ServerOptions, *, http: bool, wait: bool) -> AsyncIterator[LocalServer]:
    tracer = RequestTracer(options.otlp) if options.otlp else None
    models = local_models(options)
    app = RestService(options, models.target, models.generation, tracer).app
    grpc_server, port = bind_grpc(options, models.target, models.generation, tracer)
    begun = await models.begin()
    while wait and not (await models.target.health())["ready"]:  # noqa: ASYNC110 - the server has no event for it
        await asyncio.sleep(0.01)
    await grpc_server.start()
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(listen("127.0.0.1", 0)) if http else None
        web = web_server(options, app)
        serving = asyncio.create_task(web.serve(sockets=[listener])) if http else None
        yield LocalServer(app, port, listener.getsockname()[1] if listener else 0, begun)
        await models.end(Grace(options.drain_s))
        web.should_exit = True
        if serving:
            await serving
        await grpc_server.stop(None)
    if tracer:
        await asyncio.to_thread(tracer.close)
