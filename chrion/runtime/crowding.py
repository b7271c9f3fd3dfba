"""Crowding: requests in flight, and whether they are too many for each to have several cores.

A plan, or a plain session with several threads, gives several cores to one request. When more requests are in flight
than those cores can serve, one thread for each is faster: no request waits for the others' threads. So crowded requests
go to the one-thread session, until there has been no crowd for a while. Requests of all sessions in the process count,
since they share its cores.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable

from chrion.runtime.execution.engine import Engine, PlainEngine
from chrion.runtime.one_thread import OneThreadSession

#: Time for which requests still count as crowded after the last crowd, in seconds.
_HOLD_S = 0.1
#: Number of crowded requests of a session after which its one-thread session is opened.
_PATIENCE = 32

#: One entry for each request in flight in this process. Appending and removing are atomic.
in_flight: deque[None] = deque()


class Crowding:
    """Decides which requests of a session are crowded.

    Args:
        one_thread: The session's one-thread session.
        clock: Returns the time in seconds.

    Attributes:
        active: Whether requests were crowded at the last check.
    """

    def __init__(self, one_thread: OneThreadSession, clock: Callable[[], float] = time.monotonic) -> None:
        self.active = False
        self._one_thread = one_thread
        self._clock = clock
        self._until_s = 0.0
        self._requests = 0

    def engine(self, engine: Engine) -> PlainEngine | None:
        """Return the one-thread session for a request in flight; None if it is not crowded or the session is not open.

        Called only if several requests are in flight or ``active`` is set, so that it costs a single caller nothing.

        Args:
            engine: The engine for the request otherwise.
        """
        if len(in_flight) > engine.capacity:
            self.active = True
            self._until_s = self._clock() + _HOLD_S
            self._requests += 1  # a lost count does not matter
        elif self.active and self._clock() >= self._until_s:
            self.active = False
        if not self.active or self._requests < _PATIENCE:
            return None
        return self._one_thread.get()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=in_flight.clear)  # the parent's threads have requests in flight
