"""Texts of the server: their tokens as they come, and the time within which they must begin."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from chrion.errors import OptionError
from chrion.generation import Sampling, Stream, Token
from chrion.serving.server.failures import RequestFailure, Status
from chrion.serving.server.generation_service import GenerationService, TextOptions
from chrion.serving.server.generators import ServedGenerator
from chrion.serving.server.statistics import ModelStatistics


def service(timeout_ms: float = math.inf) -> GenerationService:
    """Return a service of one model, whose streams the test writes."""
    generator: Any = None
    return GenerationService({"m": ServedGenerator("m", "1", generator, None, 0, timeout_ms)}, 8)


def test_a_model_that_cannot_generate_is_refused_with_the_reason() -> None:
    """A request for its texts says why it does not generate, as the log does."""
    failure = GenerationService({}, 8, {"m": "it has no output 'logits'"}).unknown("m")
    assert (failure.status, str(failure)) == (
        Status.UNSUPPORTED,
        "model 'm' does not generate: it has no output 'logits'",
    )


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


def test_a_request_for_several_texts_counts_once() -> None:
    """It succeeds when the last one ends, with a row for each; one that fails is a failure."""
    statistics = ModelStatistics()
    generator: Any = None
    models = {"m": ServedGenerator("m", "1", generator, None, 0, math.inf)}
    counting = GenerationService(models, 8, statistics={("m", "1"): statistics}.get)
    streams = [Stream(1, lambda _: None) for _ in range(3)]
    for stream in streams[:2]:
        stream.put(Token(5))
        stream.finish("stop")
    asyncio.run(read(counting, streams[:2]))
    assert (statistics.success.count, statistics.inferences, statistics.fail.count) == (1, 2, 0)
    with pytest.raises(RequestFailure):
        asyncio.run(read(counting, streams[2:], 10.0))
    assert (statistics.success.count, statistics.inferences, statistics.fail.count) == (1, 2, 1)


class Queue:
    """A generator whose requests wait; the one with the number ``failing`` fails.

    Args:
        failing: The number of a request; 0 for none.
    """

    stop_tokens: frozenset[int] = frozenset()

    def __init__(self, failing: int = 0) -> None:
        self.streams: list[Stream] = []
        self.cancelled = 0
        #: Is called when a request is queued.
        self.queued: Callable[[], object] = lambda: None
        self._failing = failing

    def most_new_tokens(self, prompt: int) -> int:
        return prompt + 100

    def encode(self, prompt: list[int], *, special: bool) -> list[int]:
        assert special
        return prompt

    def statistics(self) -> SimpleNamespace:
        return SimpleNamespace(waiting_requests=len(self.streams) - self.cancelled)

    def submit(self, ids: list[int], *_: Any, **__: Any) -> Stream:
        self.queued()
        if len(self.streams) + 1 == self._failing:
            raise OptionError("at fault")
        self.streams.append(Stream(len(ids), self._cancel))
        return self.streams[-1]

    def _cancel(self, _: Stream) -> None:
        self.cancelled += 1


def queueing(queue: Any) -> tuple[GenerationService, Callable[[int], Coroutine[Any, Any, list[Stream]]]]:
    """Return a service with at most 8 waiting texts, and what queues a number of texts of one prompt."""
    model = ServedGenerator("m", "1", queue, None, 0, math.inf)
    served = GenerationService({"m": model}, 8)
    return served, lambda count: served.submit(model, [[1, 2]], [Sampling()] * count, TextOptions(), lambda _: 5)


def test_other_tasks_run_while_texts_are_queued() -> None:
    """Each text of a prompt is checked by itself; the loop is free after each of them."""
    queue = Queue()
    submit = queueing(queue)[1]
    turns, seen = itertools.count(), []
    now = 0
    queue.queued = lambda: seen.append(now)

    async def queue_beside_another_task() -> None:
        nonlocal now
        queued = asyncio.create_task(submit(5))
        while not queued.done():
            now = next(turns)
            await asyncio.sleep(0)
        assert await queued == queue.streams

    asyncio.run(queue_beside_another_task())
    assert len(seen) == len(set(seen)) == 5


def test_texts_that_are_not_queued_yet_count_as_waiting() -> None:
    """While 6 of at most 8 texts are queued, 3 others are refused and 2 are not, whenever they are asked for."""
    queue = Queue()
    service, submit = queueing(queue)
    refused = []

    def admit_others() -> None:
        service.admit(2)
        with pytest.raises(RequestFailure, match="too many requests wait") as failure:
            service.admit(3)
        refused.append(failure.value.status)

    queue.queued = admit_others
    # The text that is queued just now counts: it has been admitted.
    asyncio.run(submit(6))
    assert refused == [Status.OVERLOADED] * 6
    admit_others()


def test_no_text_is_queued_if_one_fails() -> None:
    """Those before it are cancelled, and those after it no longer count as waiting."""
    queue = Queue(failing=3)
    service, submit = queueing(queue)
    with pytest.raises(OptionError, match="at fault"):
        asyncio.run(submit(6))
    assert queue.cancelled == len(queue.streams) == 2
    service.admit(8)


def test_no_text_is_queued_if_its_request_is_cancelled() -> None:
    """A client that leaves while texts are queued leaves none of them."""
    queue = Queue()
    service, submit = queueing(queue)

    async def leave() -> None:
        task = asyncio.create_task(submit(6))
        queue.queued = lambda: len(queue.streams) == 2 and task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert queue.cancelled == len(queue.streams) == 3
    service.admit(8)


def test_a_text_that_has_begun_may_take_longer() -> None:
    """The time ends with the first token, also if it has no text."""
    stream = Stream(1, lambda _: None)
    stream.put(Token(5))

    async def late() -> list[Any]:
        asyncio.get_running_loop().call_later(0.2, stream.finish, "length")
        return await read(service(), [stream], 100.0)

    assert asyncio.run(late()) == [(0, Token(5)), (0, None)]
