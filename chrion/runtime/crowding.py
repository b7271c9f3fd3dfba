"""Crowding: requests in flight, and whether they are too many for each to have several cores.

A plan, or a plain session with several threads, gives several cores to one request. When more requests are in flight
than those cores can serve, one thread for each is faster: no request waits for the others' threads. So crowded requests
go to the one-thread session, until there has been no crowd for a while. Requests of all sessions in the process count,
since they share its cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from chrion.runtime.execution.engine import Engine
from chrion.runtime.execution.plain_engine import PlainEngine
from chrion.runtime.one_thread import OneThreadSession
from chrion.runtime.process_hooks import in_flight

#: Time for which requests still count as crowded after the last crowd, in seconds, so that gaps between the requests of
#: several callers do not end it (a choice, not measured).
_HOLD_S = 0.1
#: The one-thread session is opened after this many crowded requests, or when a crowd has lasted this long, in seconds:
#: a short crowd is not worth a second copy of the weights, which takes as long to open.
_PATIENCE, _PATIENCE_S = 32, 0.2


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
        #: Begin of the current crowd, and the time at which it is over unless there are further crowded requests.
        self._since_s = self._until_s = 0.0
        self._requests = 0

    def engine(self, engine: Engine) -> PlainEngine | None:
        """Return the one-thread session for a request in flight; None if it is not crowded or the session is not open.

        Called only if several requests are in flight or ``active`` is set, so that it costs a single caller nothing.

        Args:
            engine: The engine for the request otherwise.
        """
        now_s = self._clock()
        if len(in_flight) > engine.capacity:
            if not self.active:
                self.active, self._since_s = True, now_s
            self._until_s = now_s + _HOLD_S
            self._requests += 1  # a lost count does not matter
        elif self.active and now_s >= self._until_s:
            self.active = False
        if not self.active:
            return None
        if now_s - self._since_s >= _PATIENCE_S:
            self._requests = max(self._requests, _PATIENCE)
        return self._one_thread.get() if self._requests >= _PATIENCE else None
