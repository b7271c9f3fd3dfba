"""The time within which the message of a gRPC call must have arrived."""

from __future__ import annotations

import asyncio
from typing import Any


class MessageReceiver:
    """Receives the messages of calls; those that are late end with an error.

    One timer serves all calls: one for each would take 4 % of the time of a small call.

    Args:
        limit_s: The time for a message, in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        #: When the messages of calls are late, by the tasks that wait for them, in this order.
        self._due_s: dict[asyncio.Task[Any], float] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def receive(self, context: Any) -> Any:
        """Return the next message of a call; ``grpc.aio.EOF`` if there is none.

        Raises:
            TimeoutError: It is late.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None  # noqa: S101 # grpc.aio answers each call in one
        self._due_s[task] = loop.time() + self._limit_s
        if self._timer is None:
            self._timer = loop.call_at(self._due_s[task], self._end_late)
        try:
            return await context.read()
        except asyncio.CancelledError:
            if task in self._due_s:  # the client has left
                raise
            task.uncancel()
            raise TimeoutError from None
        finally:
            self._due_s.pop(task, None)

    def _end_late(self) -> None:
        loop = asyncio.get_running_loop()
        late = [task for task, due_s in self._due_s.items() if due_s <= loop.time()]
        for task in late:
            del self._due_s[task]
            task.cancel()
        following = next(iter(self._due_s.values()), None)
        self._timer = None if following is None else loop.call_at(following, self._end_late)
