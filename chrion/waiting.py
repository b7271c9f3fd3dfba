"""A counter that one thread advances and others wait for: spinning first, then parked.

A spinning waiter sees a change about a microsecond later, a parked one after twenty or more; but a spinner burns its
core. So waiters spin for about as long as a handoff between lanes is worth, then park.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterator

#: Turns a waiter spins before it parks: half a millisecond to one.
SPIN_TURNS = 45
#: A parked waiter looks again after this long, whatever happens.
_LOOK_AGAIN_S = 0.05
#: How often somebody who wants to be alone looks whether all others have gone.
_ALONE_S = 0.0005

#: What each turn reads: zlib releases the interpreter lock for more than 5 kB, and 48 kB take 12 to 20 us.
_BALLASTS = tuple(bytes(size * 1024) for size in (6, 12, 24, 48))


def relax(turn: int) -> None:
    """Pass some microseconds without the interpreter lock, and without going to sleep.

    ``os.sched_yield`` gives the lock away for a moment only: a thread that waits for it is asleep, and by the time it
    has woken up the spinner holds the lock again. So a lane coming back from a kernel would wait for tens of
    microseconds. A checksum leaves the lock free nearly all the time; yet the lane that comes back when the spinner has
    just taken it again does wait. So turns grow: who has waited long looks less often.

    Args:
        turn: How many there were before, in the same wait.
    """
    zlib.crc32(_BALLASTS[min(turn, len(_BALLASTS) - 1)])


class Counter:
    """A count that only grows.

    One thread at a time may call :meth:`advance`; any number may call :meth:`wait`. Everything the advancing thread
    did before is visible to a waiter once :meth:`wait` returns. A waiter may be interrupted by an exception from
    outside at any moment: it holds no lock that the advancing thread needs.
    """

    __slots__ = ("_parked", "count")

    def __init__(self) -> None:
        #: The present count; waiters in a hurry may read it themselves.
        self.count = 0
        self._parked: list[queue.SimpleQueue[None]] = []

    def advance(self, count: int) -> None:
        """Set the count and wake whoever is parked."""
        self.count = count
        if self._parked:
            for bell in tuple(self._parked):
                bell.put(None)

    def wait(self, count: int, patience: int | None = None, look: Callable[[], None] | None = None) -> None:
        """Return once the count has reached ``count``.

        Args:
            count: What to wait for.
            patience: Turns to spin before parking; ``SPIN_TURNS`` if missing.
            look: Called now and then while parked: what has to be seen to if this takes long.
        """
        patience = SPIN_TURNS if patience is None else patience
        turns = 0
        while self.count < count:
            if turns < patience:
                relax(turns)
                turns += 1
            elif not self._park(count) and look is not None:
                look()

    def _park(self, count: int) -> bool:
        """Sleep until the count changes, true, or for a while."""
        # The waiter registers and then reads the count; `advance` writes the count and then reads the register. Each
        # writes before it reads, so at least one sees the other. Should a build of Python reorder that, the waiter
        # looks again by itself.
        bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        try:
            self._parked.append(bell)
            if self.count < count:
                bell.get(timeout=_LOOK_AGAIN_S)
        except queue.Empty:
            return False
        finally:
            self._parked.remove(bell)
        return True


class Gate:
    """Any number of requests pass together, or one thread alone.

    A thread that is interrupted on its way in or out leaves nothing behind: who is inside is noted in a set, and both
    ways are one operation on it.

    Attributes:
        inside: Who is. To leave is ``inside.discard(token)``, by the thread itself: an interrupt that came on the way
            into a method of ours would leave the token behind.
    """

    def __init__(self) -> None:
        self.inside: set[object] = set()
        self._closed = threading.Lock()

    def enter(self, token: object) -> None:
        """Pass together with others; waits while somebody is alone. Discard the token even where this was cut off."""
        with self._closed:
            self.inside.add(token)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nobody is inside, and keep everybody out. Not for a thread that is inside itself."""
        with self._closed:
            self.wait_empty()
            yield

    def wait_empty(self, until: float | None = None) -> bool:
        """Wait until nobody is inside, true, or until then by ``time.monotonic``."""
        while self.inside and (until is None or time.monotonic() < until):
            time.sleep(_ALONE_S)
        return not self.inside
