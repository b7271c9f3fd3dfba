"""Synchronisation of threads: a counter that threads can wait for, and a gate that one thread can close.

A spinning waiter sees a change after about a microsecond, a parked waiter after 20 us or more, but a spinning waiter
occupies its core. Therefore waiters spin for about the time that a handoff between lanes may take, and then park.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterator

#: The number of spins before a waiter parks; together they take 0.5 to 1 ms (a choice, not measured).
MAX_SPINS = 45
#: The maximum time between two checks of the count by a parked waiter, for the rare case that it misses a change;
#: checks take a negligible part of it.
_PARK_S = 0.05
#: The interval between checks whether a gate is empty: about the time of a short request, which may leave it.
_EMPTY_CHECK_S = 0.0005

#: The data of each spin's checksum: zlib releases the GIL for more than 5 kB, and 48 kB take 12 to 20 us.
_SPIN_DATA = tuple(bytes(size * 1024) for size in (6, 12, 24, 48))


def spin(number: int) -> None:
    """Wait for some microseconds without the GIL, and without sleeping.

    The GIL is free during a checksum of more than 5 kB, which is nearly all of the time. ``os.sched_yield`` releases
    the GIL only for a moment: a thread that waits for the GIL is asleep, and by the time it has woken up, the spinning
    thread holds the GIL again. A lane that returns from a kernel would then wait for tens of microseconds.

    A lane still waits if it returns just when the spinning thread holds the GIL. Therefore spins become longer, and the
    checks between them rarer, in the course of a wait.

    Args:
        number: The number of spins before this one in the same wait.
    """
    zlib.crc32(_SPIN_DATA[min(number, len(_SPIN_DATA) - 1)])


class Counter:
    """A count that only grows, and that threads can wait for.

    One thread at a time may call :meth:`advance`; any number of threads may call :meth:`wait`. All writes of the
    advancing thread before :meth:`advance` are visible to a waiter when :meth:`wait` returns. An asynchronous exception
    may interrupt a waiter at any point, since it holds no lock that the advancing thread needs.
    """

    __slots__ = ("_parked", "count")

    def __init__(self) -> None:
        #: The present count, which may be read without a wait.
        self.count = 0
        self._parked: list[queue.SimpleQueue[None]] = []

    def advance(self, count: int) -> None:
        """Set the count and wake all parked waiters."""
        self.count = count
        if self._parked:
            for wakeup in tuple(self._parked):
                wakeup.put(None)

    def wait(self, count: int, max_spins: int | None = None, on_timeout: Callable[[], None] | None = None) -> None:
        """Wait until the count has reached ``count``.

        Args:
            count: The count to wait for.
            max_spins: The number of spins before parking; ``MAX_SPINS`` if None.
            on_timeout: A function that is called at intervals while parked, for checks that a long wait requires.
        """
        max_spins = MAX_SPINS if max_spins is None else max_spins
        spins = 0
        while self.count < count:
            if spins < max_spins:
                spin(spins)
                spins += 1
            elif not self._park(count) and on_timeout is not None:
                on_timeout()

    def _park(self, count: int) -> bool:
        """Sleep until the count changes or a timeout expires; return False after a timeout."""
        # The waiter registers and then reads the count; `advance` writes the count and then reads the list of waiters.
        # Each writes before it reads, so at least one sees the other's write. If a build of Python reorders them, the
        # waiter checks the count again after the timeout.
        wakeup: queue.SimpleQueue[None] = queue.SimpleQueue()
        try:
            self._parked.append(wakeup)
            if self.count < count:
                wakeup.get(timeout=_PARK_S)
        except queue.Empty:
            return False
        finally:
            self._parked.remove(wakeup)
        return True


class Gate:
    """A lock that any number of requests share, or that one thread holds exclusively.

    Entering and leaving are single operations on a set of tokens, so that a thread that is interrupted during either
    does not leave its token behind.

    Attributes:
        inside: The tokens of the requests inside. A request leaves by ``inside.discard(token)``. There is no method for
            leaving: an exception at the start of the method would leave the token inside.
    """

    def __init__(self) -> None:
        self.inside: set[object] = set()
        self._closed = threading.Lock()

    def enter(self, token: object) -> None:
        """Enter, after waiting until no thread holds the gate exclusively.

        The caller must discard the token even if this method is interrupted.
        """
        with self._closed:
            self.inside.add(token)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait until no request is inside, and keep all requests out during the context.

        A thread whose own request is inside would wait forever.
        """
        with self._closed:
            self.wait_empty()
            yield

    def wait_empty(self, until: float | None = None) -> bool:
        """Wait until no request is inside.

        Args:
            until: The time of ``time.monotonic`` at which the wait ends; no limit if None.

        Returns:
            True if no request is inside.
        """
        while self.inside and (until is None or time.monotonic() < until):
            time.sleep(_EMPTY_CHECK_S)
        return not self.inside
