"""The end of work whose client has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse

Result = TypeVar("Result")


class EventResponse(StreamingResponse):  # type: ignore[misc]
    """A response of server-sent events.

    Args:
        events: The events.
        end: Called once at the end, also if the client leaves before the first event is read.
    """

    def __init__(self, events: AsyncIterator[str], end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._end = end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


async def until_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for the work of a request whose body has been read; cancel it if the client leaves.

    Raises:
        ClientDisconnect: The client has left.
    """
    task = asyncio.create_task(work)
    left = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for unfinished in (task, left):
            unfinished.cancel()
        await asyncio.gather(task, left, return_exceptions=True)
        del task, left, unfinished  # in a cycle with the traceback of a failure, they would hold the request's memory


async def _disconnected(request: Request) -> None:
    """Wait until the client leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
