"""Streams of gRPC in this process: what they hold, and when they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from chrion.serving.server.generation_service import GenerationService
from chrion.serving.server.grpc_codec import message
from chrion.serving.server.grpc_service import GrpcService, bind_grpc
from chrion.serving.server.grpc_stream import StreamedRequests
from chrion.serving.server.options import ServerOptions
from chrion.serving.server.request_memory import ByteAccount
from chrion.serving.server.target import Answer
from local_server import run_in_loop
from seams.serving import limit_reading

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
ANSWER, COUNT = 1_000_000, 100


class LargeAnswers:
    """A target whose answers have a megabyte.

    Attributes:
        asked: Number of requests so far.
    """

    def __init__(self) -> None:

        self.account = ByteAccount(1 << 30)
        self.asked = 0
        self._content = message("ModelInferResponse")(raw_output_contents=[bytes(ANSWER)]).SerializeToString()

    async def infer_grpc(self, content: bytes, remaining_ms: float) -> Any:
        del content, remaining_ms
        self.asked += 1
        return Answer(self._content)


async def empty_requests() -> AsyncIterator[bytes]:
    for _ in range(COUNT):
        yield b""


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - conditions of a server
            await asyncio.sleep(0.01)


def run(folder: Path, use: Any) -> None:
    """Serve large answers, and run a function of the target and a call that has begun."""

    async def serve() -> None:
        target: Any = LargeAnswers()
        server, port = bind_grpc(ServerOptions(folder, grpc=("127.0.0.1", 0)), target, GenerationService({}, 1))
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await use(target, channel.stream_stream(METHOD)(empty_requests(), timeout=60))
        finally:
            await server.stop(0)

    run_in_loop(serve())


def test_a_stream_that_is_not_read_for_long_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives the memory of all its requests back, and the client is told."""
    limit_reading(monkeypatch, 0.3)

    async def use(target: LargeAnswers, call: Any) -> None:
        await until(lambda: target.account.used > 10 * ANSWER)
        await until(lambda: target.account.used == 0)
        asked = target.asked
        assert asked < 60
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async for _ in call:
                pass
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "does not read" in ended.value.details()
        assert target.asked == asked
        await until(lambda: target.account.used == 0)

    run(tmp_path, use)


def test_a_stream_that_is_read_slowly_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer has its own time, so that a slow client gets all of them."""
    limit_reading(monkeypatch, 5.0)

    async def use(target: LargeAnswers, call: Any) -> None:
        for _ in range(COUNT - 10):
            await asyncio.sleep(0.002)
            assert len(await call.read()) > ANSWER
        assert target.account.used <= 34 * ANSWER
        call.cancel()
        await until(lambda: target.account.used == 0)

    run(tmp_path, use)


def test_a_client_that_leaves_its_stream_takes_its_requests_along(tmp_path: Path) -> None:
    """The memory of requests whose answers wait is given back, whether the answer that is being sent fails or not."""

    async def use(target: LargeAnswers, call: Any) -> None:
        await until(lambda: target.account.used > 10 * ANSWER)
        call.cancel()
        await until(lambda: target.account.used == 0)

    run(tmp_path, use)


def test_a_client_that_leaves_while_an_answer_is_sent_ends_its_stream() -> None:
    """The failed write counts as the end of the call, not as an error of the server; memory is given back."""
    target: Any = LargeAnswers()

    class Left:
        def invocation_metadata(self) -> tuple[()]:
            return ()

        async def write(self, response: Any) -> None:
            raise grpc.aio.InternalError(f"cannot send {response.ByteSize()} bytes")

    async def serve() -> None:
        handlers = GrpcService(target, GenerationService({}, 1)).handlers(20.0)
        with pytest.raises(asyncio.CancelledError):
            await handlers.service(SimpleNamespace(method=METHOD)).stream_stream(empty_requests(), Left())
        await until(lambda: target.account.used == 0)

    run_in_loop(serve())


def test_an_error_while_requests_are_read_ends_the_stream() -> None:
    """Its client does not wait for ever."""

    async def requests() -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.sleep(0)
        raise RuntimeError("unreadable")

    async def answer(content: bytes) -> bytes:
        return content

    async def read() -> None:
        async with asyncio.timeout(10):
            async for response in StreamedRequests(answer, lambda _: None).responses(requests()):
                assert response == b"first"

    with pytest.raises(RuntimeError, match="unreadable"):
        run_in_loop(read())
