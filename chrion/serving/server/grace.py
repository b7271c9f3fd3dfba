"""The end of a server: the time that requests in flight have, and the signals that end it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

log = logging.getLogger("chrion.server")

#: Time within which signals are one wish to stop: a terminal and a supervisor may send one each.
_SAME_S = 0.5


class Grace:
    """The time that requests in flight have, from now on.

    Args:
        seconds: The time.
    """

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._ended = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """True if the server no longer waits for requests in flight. Any thread may ask."""
        return self._ended.is_set() or time.monotonic() >= self._until

    def end(self) -> None:
        """End it at once. Idempotent."""
        self._ended.set()

    async def wait_for(self, event: asyncio.Event) -> bool:
        """Wait for an event until the time is over; return whether it has occurred."""
        waits = [asyncio.create_task(one.wait()) for one in (event, self._ended)]
        try:
            remaining_s = max(self._until - time.monotonic(), 0.0)
            await asyncio.wait(waits, timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        return event.is_set()


class StopSignals:
    """The handling of signals: the first one stops the server, and a later one ends the grace, as in uvicorn.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: Is set by the first signal.
        self.stopped = asyncio.Event()
        self._first_s = 0.0
        self._grace: Grace | None = None

    def receive(self) -> None:
        """Handle a signal, in the event loop."""
        if not self.stopped.is_set():
            self.stop()
        elif self._grace is not None and self._clock() - self._first_s > _SAME_S:
            log.info("requests in flight are given up")
            self._grace.end()

    def stop(self) -> None:
        """Stop the server, if it is not being stopped already."""
        if not self.stopped.is_set():
            self._first_s = self._clock()
            self.stopped.set()

    def grant(self, seconds: float) -> Grace:
        """Return the time that requests in flight have; a further signal ends it."""
        self._grace = Grace(seconds)
        return self._grace
