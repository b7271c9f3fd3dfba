"""The server's process: sockets, signals and the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn

from chrion.errors import OptionError
from chrion.machine.allocator import return_large_blocks
from chrion.serving.server.connections import HEADER_BYTES, HEADER_S, READ_S, limited_protocol
from chrion.serving.server.grace import StopSignals
from chrion.serving.server.grpc_service import bind_grpc
from chrion.serving.server.options import ServerOptions
from chrion.serving.server.origins import is_loopback
from chrion.serving.server.rest import RestService
from chrion.serving.server.served_models import ServedModels, local_models
from chrion.serving.server.supervisor import call_when_gone
from chrion.serving.server.tracing import RequestTracer

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

log = logging.getLogger("chrion.server")

#: Connections that wait to be accepted: half of the default limit of connections, so that a burst is not refused.
_BACKLOG = 512


def run(options: ServerOptions, announce: Callable[[str], None]) -> None:
    """Run :func:`serve` in an event loop of its own."""
    asyncio.run(serve(options, announce))


async def serve(options: ServerOptions, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then end gracefully.

    Args:
        options: The options.
        announce: Called with the addresses once requests can be served.

    Raises:
        OptionError: An address cannot be bound, the repository cannot be read, or a TLS file is invalid.
    """
    await answer_until_stopped(options, local_models(options), announce)


async def answer_until_stopped(options: ServerOptions, models: ServedModels, announce: Callable[[str], None]) -> None:
    """Answer requests of both protocols until SIGTERM or SIGINT; a second signal ends the grace of those in flight.

    Args:
        options: The options.
        models: The models.
        announce: Called with the addresses once requests can be served.

    Raises:
        OptionError: An address cannot be bound, or a TLS file is invalid.
    """
    _allow_open_files()
    _warn_if_open(options)
    return_large_blocks()
    tracer = RequestTracer(options.otlp) if options.otlp else None
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(listen(*options.http))
        addresses = [f"http{'s' if options.tls else ''}://{_text(listener.getsockname())}"]
        web = web_server(options, RestService(options, models.target, models.generation, tracer).app)
        if options.grpc:
            grpc_server, port = bind_grpc(options, models.target, models.generation, tracer)
            stack.push_async_callback(grpc_server.stop, 1.0)
            addresses.append(f"grpc://{_text((options.grpc[0], port))}")
        signals = StopSignals()
        try:
            summary = await models.begin()
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, signals.receive)
            call_when_gone(signals.stop)
            if options.grpc:
                await grpc_server.start()
            running = asyncio.create_task(web.serve(sockets=[listener]))
            waiting = asyncio.create_task(signals.stopped.wait())
            while not web.started and not running.done():  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.01)
            with contextlib.suppress(OSError):  # a full disk under the log
                announce(f"serving {summary} at {' and '.join(addresses)}")
            await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
            log.info("draining", extra={"fields": {"pending": (await models.target.health())["pending"]}})
            waiting.cancel()
        finally:
            await models.end(signals.grant(options.drain_s))
        web.should_exit = True
        await running
    if tracer:
        await asyncio.to_thread(tracer.close)
    log.info("stopped")


def _allow_open_files() -> None:
    """Raise the limit of open files as far as the system allows; connections are files, and 1024 is a usual limit."""
    if resource is not None:
        _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))


def _warn_if_open(options: ServerOptions) -> None:
    """Log a warning if other machines reach the server and need no token."""
    addresses = [address for address in (options.http, options.grpc) if address and not is_loopback(address[0])]
    if addresses and not options.token:
        text = "every client that reaches the server is served; --token-file requires a token"
        log.warning(text, extra={"fields": {"addresses": [_text(address) for address in addresses]}})


def web_server(options: ServerOptions, app: Any) -> Any:
    """Return uvicorn's server of an application, which has to be started with a listening socket.

    Raises:
        OptionError: A TLS file is invalid.
    """
    certificate, key = options.tls or (None, None)
    config = uvicorn.Config(
        app,
        http=limited_protocol(options.max_connections, options.max_client_connections),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=HEADER_S,
        h11_max_incomplete_event_size=HEADER_BYTES,
        proxy_headers=False,  # clients of this machine could choose the address by which they are counted
        timeout_graceful_shutdown=2,
        ssl_certfile=str(certificate) if certificate else None,
        ssl_keyfile=str(key) if key else None,
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise OptionError(f"--tls-certificate {certificate}, --tls-key {key}: {error.strerror or error}") from error
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # this module handles them
    return server


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, whose connections end if their peer is gone or stops reading.

    Raises:
        OptionError: The address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only for sockets with a protocol; answers would wait 40 ms for it.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(READ_S))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(READ_S * 1000))
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OptionError(f"--http {host}:{port}: {error.strerror or error}") from error
    listener.setblocking(False)  # noqa: FBT003
    return listener


def _text(address: tuple[Any, ...]) -> str:
    host = f"[{address[0]}]" if ":" in str(address[0]) else address[0]
    return f"{host}:{address[1]}"
