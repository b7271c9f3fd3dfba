"""The requests of one gRPC stream, served at the same time, and their responses.

Requests with one response are answered in their order, as Triton does. The responses of requests with several, which
are those for texts, are sent as soon as they are ready, between those of others. A client that does not read stops the
requests of its own stream only: each waits for room among the responses, and no request of another stream is involved.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from chrion.serving.server.openai_bodies import MAX_CHOICES

#: Requests with one response that are in progress at the same time, and responses that wait for the client: enough for
#: full batches, and a bound on the memory of a stream.
_DEPTH = 16

Answer = Callable[[bytes], Awaitable[Any]]
Answers = Callable[[bytes], AsyncGenerator[Any, None] | None]


class StreamedRequests:
    """The requests of one stream.

    Args:
        answer: Returns the only response to a request.
        texts: Returns the responses to a request that may have several, or None for another request.
    """

    def __init__(self, answer: Answer, texts: Answers) -> None:
        self._answer, self._texts = answer, texts
        self._responses: asyncio.Queue[Any] = asyncio.Queue(_DEPTH)
        self._tasks: set[asyncio.Task[None]] = set()

    async def responses(self, requests: AsyncIterator[bytes]) -> AsyncGenerator[Any, None]:
        """Yield the responses; all requests end with the iteration."""
        reader = asyncio.create_task(self._guarded(functools.partial(self._read, requests)))
        try:
            while (response := await self._responses.get()) is not None:
                if isinstance(response, Exception):
                    raise response
                yield response
        finally:
            unfinished = [reader, *self._tasks]
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        places, texts = asyncio.Semaphore(_DEPTH), asyncio.Semaphore(MAX_CHOICES)
        last: asyncio.Task[None] | None = None
        async for content in requests:
            several = self._texts(content)
            if several is not None:
                await texts.acquire()
                self._start(functools.partial(self._forward, several), texts)
            else:
                await places.acquire()
                last = self._start(functools.partial(self._put_answer, content, last), places)
        await asyncio.gather(*self._tasks)
        await self._responses.put(None)

    def _start(self, work: Callable[[], Awaitable[None]], room: asyncio.Semaphore) -> asyncio.Task[None]:
        """Start the work for a request; its place becomes free at the end."""
        task = asyncio.create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: room.release())
        return task

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do some work; an error ends the stream."""
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - raised where the responses are read
            await self._responses.put(error)

    async def _put_answer(self, content: bytes, before: asyncio.Task[None] | None) -> None:
        """Put the response to a request into the queue, after that of the request before it."""
        response = await self._answer(content)
        if before is not None:
            await asyncio.wait((before,))
        await self._responses.put(response)

    async def _forward(self, several: AsyncGenerator[Any, None]) -> None:
        async with contextlib.aclosing(several) as responses:
            async for response in responses:
                await self._responses.put(response)
