"""Handlers of HTTP requests, and the end of work whose client has left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

Result = TypeVar("Result")
Handler = Callable[[Request], Awaitable[Response]]
#: Returns the JSON object in the body of a request, whose time it stores as ``request.state.arrival_s``.
ReadBody = Callable[[Request], Awaitable[dict[str, Any]]]


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


def event(document: Mapping[str, Any]) -> str:
    """Return a server-sent event with a document."""
    return f"data: {json.dumps(document)}\n\n"


async def until_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for the work of a request whose body has been read; cancel it if the client leaves.

    Raises:
        ClientDisconnect: The client has left.
    """
    worker = asyncio.current_task()
    assert worker is not None  # noqa: S101 # coroutines of the event loop run in tasks
    has_left = False

    async def cancel_when_left() -> None:
        nonlocal has_left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        has_left = True
        worker.cancel()

    watch = asyncio.create_task(cancel_when_left())
    try:
        return await work
    except asyncio.CancelledError:
        if has_left and not worker.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        watch.cancel()
