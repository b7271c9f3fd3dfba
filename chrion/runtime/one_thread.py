"""The one-thread session of a HybridSession: a plain session that gives each request a single core.

It serves requests where a plan, or a plain session with several threads, would be slower: while several requests are in
flight, or while something else uses the cores. It holds the weights once more, so it is opened when it is first wanted,
in a thread of its own, and dropped when it has not been used for a while. If its requests contend for the lock of its
memory arena (:mod:`chrion.runtime.arena_contention`), it is replaced by one that takes memory from the C library.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable

from chrion.machine.allocator import trim
from chrion.runtime import process_hooks
from chrion.runtime.execution.plain_engine import PlainEngine

log = logging.getLogger(__name__)

#: The session is dropped when it has not been used for this time, in seconds: 60 times as long as it takes at most to
#: open one of a small model (0.1 to 0.5 s), so that a load that comes and goes does not open it all the time.
_KEPT_S = 30.0


class OneThreadSession:
    """A plain session of one thread that is opened on demand.

    Args:
        open_session: Opens the session, with a memory arena if its argument is true; returns None if there cannot be
            one.
        clock: Returns the time in seconds.
        check_s: Interval of checks whether to drop or to replace the session, in seconds.

    Attributes:
        arena: Whether sessions are opened with a memory arena.
        replaceable: Whether a session without an arena may be tried; set to false when it is.
    """

    def __init__(
        self,
        open_session: Callable[[bool], PlainEngine | None],
        clock: Callable[[], float] = time.monotonic,
        check_s: float = 1.0,
    ) -> None:
        self.arena = self.replaceable = True
        self._open_session = open_session
        self._clock = clock
        self._check_s = check_s
        self._engine: PlainEngine | None = None
        #: Whether the open session has an arena.
        self._has_arena = True
        self._used_s = 0.0
        #: Held from the time a thread is started until the session is dropped; for ever if there cannot be one.
        self._opening = threading.Lock()
        #: Set when an attempt to open the session has ended; None before the first one.
        self._attempted: threading.Event | None = None
        self._closed = False

    @property
    def is_open(self) -> bool:
        """True if requests can be served."""
        return self._engine is not None

    def get(self) -> PlainEngine | None:
        """Return the session. If it is not open, return None and open it in the background."""
        engine = self._engine
        self._used_s = self._clock()
        if engine is None and self._opening.acquire(blocking=False):
            self._start()
        return engine

    def avoid_arena(self) -> None:
        """Open sessions without a memory arena from now on; in the background, replace one that is open.

        If it cannot be replaced, it serves on. This is tried once.
        """
        if self.replaceable:
            self.replaceable = self.arena = False

    def close(self, until: float | None = None) -> None:
        """Drop the session; it is closed when no request uses it any longer.

        Args:
            until: Time of ``time.monotonic()`` until which to wait for a session that is being opened; None does not
                wait.
        """
        self._closed = True
        self._opening.acquire(blocking=False)  # never released, so that no session is opened later
        self._engine = None
        attempted = self._attempted
        if until is not None and attempted:
            attempted.wait(max(0.0, until - time.monotonic()))

    def after_fork(self) -> None:
        """Wait for no thread in a forked child, where there is none."""
        self._closed, self._attempted = True, None

    def _start(self) -> None:
        """Open the session in a new thread; without one, requests are served as before."""
        own, attempted = weakref.ref(self), threading.Event()
        arguments = own, attempted, self._check_s
        thread = threading.Thread(target=_open_and_drop, args=arguments, name="chrion-one-thread", daemon=True)
        self._attempted = attempted
        process_hooks.register(self, OneThreadSession.after_fork, OneThreadSession.close)  # it may outlive its owner
        try:
            thread.start()
        except RuntimeError as error:  # the interpreter exits, or a limit of the system is reached
            log.warning("no session of one thread: %s", error)
            attempted.set()

    def _open(self) -> bool:
        """Open the session, or another one in its place; return whether one is open."""
        arena = self.arena
        try:
            engine = self._open_session(arena)
        except Exception as error:  # noqa: BLE001 - requests are served as before
            log.warning("no session of one thread%s: %s", "" if arena else " without an arena", error)
            engine = None
        if engine is not None:
            self._engine, self._has_arena = engine, arena
        elif self._engine is not None:
            self.arena = self._has_arena
        if self._closed:
            self._engine = None
        return self._engine is not None

    def _check(self) -> bool:
        """Drop the session if it was not used for a while or is closed, else replace it if necessary.

        Returns:
            Whether it was dropped.
        """
        if not self._closed and self._clock() - self._used_s < _KEPT_S:
            if self._has_arena and not self.arena:
                self._replace()
            return False
        self._engine = None
        if not self._closed:
            self._opening.release()
        trim()
        return True

    def _replace(self) -> None:
        """Open another session in the place of the open one, unless closed."""
        attempted = self._attempted = threading.Event()
        try:
            if not self._closed:  # after that, close() waits for the event
                self._open()
                trim()
        finally:
            attempted.set()


def _open_and_drop(reference: weakref.ref[OneThreadSession], attempted: threading.Event, check_s: float) -> None:
    """Open a session, replace it and drop it when it is time, without keeping its owner alive."""
    owner = reference()
    done = owner is None or not owner._open()  # noqa: SLF001 - the class's own thread
    attempted.set()
    while not done:
        del owner
        time.sleep(check_s)
        owner = reference()
        done = owner is None or owner._check()  # noqa: SLF001
