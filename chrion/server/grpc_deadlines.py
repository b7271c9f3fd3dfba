"""The time within which the message of a gRPC call with one message must have arrived."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

import grpc

_timer: ContextVar[asyncio.TimerHandle] = ContextVar("timer")


class TimedHandlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Handlers of a service whose calls end if their message is late.

    grpc.aio asks for the handler of a call when the header of the call has arrived, in the task that waits for the
    message afterwards; the end of that task ends the call.

    Args:
        handlers: The handlers; those of calls with one message must call :func:`message_received` first.
        limit_s: The time for a message, in seconds.
    """

    def __init__(self, handlers: grpc.GenericRpcHandler, limit_s: float) -> None:
        self._handlers = handlers
        self._limit_s = limit_s

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a call, and start its timer."""
        found = self._handlers.service(handler_call_details)
        if found is not None and not found.request_streaming and (task := asyncio.current_task()):
            timer = asyncio.get_running_loop().call_later(self._limit_s, task.cancel)
            task.add_done_callback(lambda _: timer.cancel())  # the client may leave before
            _timer.set(timer)
        return found


def message_received() -> None:
    """Stop the timer of the current call."""
    _timer.get().cancel()
