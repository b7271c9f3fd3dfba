"""A counter that one thread advances and others wait for: spinning first, then parked.

A spinning waiter sees a change about a microsecond later, a parked one after twenty or more; but a spinner burns its
core. So waiters spin for about as long as a handoff between lanes is worth, then park.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterator

#: Turns a waiter spins before it parks; a turn is a few microseconds.
SPIN_TURNS = 250
#: A parked waiter looks again after this long, whatever happens.
_LOOK_AGAIN_S = 0.05

#: zlib releases the interpreter lock for more than 5 kB.
_BALLAST = bytes(6 * 1024)


def relax() -> None:
    """Pass a few microseconds without the interpreter lock, and without going to sleep.

    ``os.sched_yield`` gives the lock away for a moment only: a thread that waits for it is asleep, and by the time it
    has woken up the spinner holds the lock again. So a lane coming back from a kernel would wait for tens of
    microseconds. A checksum leaves the lock free nearly all the time.
    """
    zlib.crc32(_BALLAST)


class Counter:
    """A count that only grows.

    One thread at a time may call :meth:`advance`; any number may call :meth:`wait`. Everything the advancing thread
    did before is visible to a waiter once :meth:`wait` returns.
    """

    __slots__ = ("_parked", "count")

    def __init__(self) -> None:
        #: The present count; waiters in a hurry may read it themselves.
        self.count = 0
        self._parked: list[threading.Event] = []

    def advance(self, count: int) -> None:
        """Set the count and wake whoever is parked."""
        self.count = count
        if self._parked:
            for event in tuple(self._parked):
                event.set()

    def wait(self, count: int, patience: int | None = None) -> None:
        """Return once the count has reached ``count``.

        Args:
            count: What to wait for.
            patience: Turns to spin before parking; ``SPIN_TURNS`` if missing.
        """
        patience = SPIN_TURNS if patience is None else patience
        turns = 0
        while self.count < count:
            if turns < patience:
                relax()
                turns += 1
            else:
                self._park(count)

    def _park(self, count: int) -> None:
        # The waiter registers and then reads the count; `advance` writes the count and then reads the register. Each
        # writes before it reads, so at least one sees the other. Should a build of Python reorder that, the waiter
        # looks again by itself.
        event = threading.Event()
        self._parked.append(event)
        try:
            if self.count < count:
                event.wait(_LOOK_AGAIN_S)
        finally:
            self._parked.remove(event)


class Gate:
    """Any number of threads pass together, or one alone."""

    def __init__(self) -> None:
        self._inside = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Pass together with others; waits while somebody is alone."""
        with self._changed:
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nobody is inside, and keep everybody out. Not for a thread that is inside itself."""
        with self._changed:  # held all the while, so that nobody enters
            self._changed.wait_for(lambda: not self._inside)
            yield
