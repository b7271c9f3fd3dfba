"""Texts of the server: their tokens as they come, and the time within which they must begin."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest

from chrion.generation import Stream, Token
from chrion.server.failures import RequestFailure, Status
from chrion.server.generation_service import GenerationService
from chrion.server.generators import ServedGenerator


def service(timeout_ms: float = math.inf) -> GenerationService:
    """Return a service of one model, whose streams the test writes."""
    generator: Any = None
    return GenerationService({"m": ServedGenerator("m", "1", generator, None, 0, timeout_ms)}, 8)


async def read(served: GenerationService, streams: list[Stream], timeout_ms: float = math.inf) -> list[Any]:
    return [event async for event in served.events("m", streams, time.perf_counter(), timeout_ms)]


@pytest.mark.parametrize(("request_ms", "model_ms"), [(20.0, math.inf), (math.inf, 20.0), (20.0, 1e9)])
def test_a_text_that_does_not_begin_in_time_fails(request_ms: float, model_ms: float) -> None:
    """The shorter one of the times of the request and of the model counts, for each of several texts."""
    begun, waiting = (Stream(1, lambda _: None) for _ in range(2))
    begun.put(Token(5))
    with pytest.raises(RequestFailure, match="did not begin within its timeout") as late:
        asyncio.run(read(service(model_ms), [begun, waiting], request_ms))
    assert late.value.status is Status.EXPIRED


def test_a_text_that_has_begun_may_take_longer() -> None:
    """The time ends with the first token, also if it has no text."""
    stream = Stream(1, lambda _: None)
    stream.put(Token(5))

    async def late() -> list[Any]:
        asyncio.get_running_loop().call_later(0.2, stream.finish, "length")
        return await read(service(), [stream], 100.0)

    assert asyncio.run(late()) == [(0, Token(5)), (0, None)]
