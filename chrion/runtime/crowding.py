"""Crowding: the session that serves requests while at least as many are in flight as there are cores.

A plan, or a plain session with several threads, gives all cores to one request. When as many requests are in flight as
there are cores, one thread for each is faster: no request waits for the others' threads. So crowded requests go to a
plain session of one thread, until there has been no crowd for a while. That session is opened after a number of crowded
requests and holds the weights once more, so large models have none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from chrion.cores import physical_cores
from chrion.runtime.execution.engine import PlainEngine

log = logging.getLogger(__name__)

#: Time for which requests still count as crowded after the last crowd, in seconds.
_HOLD_S = 0.1
#: Number of crowded requests after which the session is opened.
_PATIENCE = 32


class Crowding:
    """Decides which requests of a session are crowded.

    Args:
        open_session: Opens the session of one thread; returns None to have no session for crowded requests.
        cores: Number of requests in flight that are a crowd, but at least two; by default that of physical cores.
        clock: Returns the time in seconds.

    Attributes:
        in_flight: One entry for each request in flight; appending and removing are atomic.
        active: Whether requests were crowded at the last check.
    """

    def __init__(
        self,
        open_session: Callable[[], PlainEngine | None],
        cores: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.in_flight: deque[None] = deque()
        self.active = False
        self._open_session = open_session
        self._cores = cores
        self._clock = clock
        self._until_s = 0.0
        self._requests = 0
        self._opening = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._engine: PlainEngine | None = None

    def engine(self) -> PlainEngine | None:
        """Return the session for a request in flight; None if it is not crowded.

        Called only if several requests are in flight or ``active`` is set, so that it costs a single caller nothing.
        """
        if self._cores is None:  # counting the cores takes as long as creating the session of a small model
            self._cores = len(physical_cores())
        if len(self.in_flight) >= max(2, self._cores):
            self.active = True
            self._until_s = self._clock() + _HOLD_S
            if self._engine is None:
                self._requests += 1  # a lost count does not matter
                if self._requests >= _PATIENCE and self._opening.acquire(blocking=False):
                    self._start()
        elif self.active and self._clock() >= self._until_s:
            self.active = False
        return self._engine if self.active else None

    def close(self, until: float | None = None) -> None:
        """Drop the session; it is closed when no request uses it any longer.

        Args:
            until: Time of ``time.monotonic()`` until which to wait for a session that is being opened; None does not
                wait.
        """
        self._closed = True
        self._opening.acquire(blocking=False)  # never released, so that no session is opened later
        self._engine = None
        thread = self._thread
        if until is not None and thread:
            thread.join(max(0.0, until - time.monotonic()))

    def _start(self) -> None:
        """Open the session in a new thread; if none can be started, crowded requests are served as before."""
        thread = threading.Thread(target=self._open, name="chrion-crowding", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the interpreter exits, or a limit of the system is reached
            log.warning("crowded requests: no session of one thread: %s", error)
        else:
            self._thread = thread

    def _open(self) -> None:
        try:
            self._engine = self._open_session()
        except Exception as error:  # noqa: BLE001 - crowded requests are served as before
            log.warning("crowded requests: no session of one thread: %s", error)
        if self._closed:
            self._engine = None
