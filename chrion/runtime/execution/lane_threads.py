"""Lane threads: Python threads, each pinned to a core, that carry out their lane's part of every request.

Guarantees. Every thread takes its parts in the order of :meth:`LaneThreads.submit`, which is the same for all lanes, so
two requests never deadlock. Either all lanes of a request receive their parts or, if submitting is interrupted, none
does. If one part of a request fails, its other parts end soon. A thread that dies fails its request and no other:
waiting callers detect dead threads and replace them (:meth:`LaneThreads.replace_dead`).

An idle thread spins briefly and then parks. It parks at once if its last wait was long: if requests come at intervals,
spinning does not save the wake-up.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from chrion.machine.cores import pin, raise_niceness
from chrion.machine.waiting import spin

#: Number of spins of an idle thread before it parks, and the time that they take at most.
_IDLE_SPINS, IDLE_SPINS_S = 8, 2e-4


class LanePart(Protocol):
    """One lane's part of a request."""

    def __call__(self) -> None:
        """Carry out the part."""

    def fail(self) -> None:
        """Fail the request, after the thread that carried out the part has died."""


@dataclass(slots=True)
class _LaneThread:
    """State of one thread. Only the thread keeps it alive, so that ``LaneThreads`` can be collected."""

    name: str
    core: int | None
    #: Steps by which the system prefers threads of the process to it.
    niceness: int = 0
    parts: queue.SimpleQueue[LanePart | None] = field(default_factory=queue.SimpleQueue)
    #: The part in progress.
    part: LanePart | None = None
    #: Whether the thread was pinned to the core.
    pinned: bool = False
    #: Whether the thread has stopped on request.
    stopped: bool = False
    thread: threading.Thread | None = None

    def start(self) -> None:
        # A daemon thread does not keep the interpreter from exiting.
        self.thread = threading.Thread(target=_work, args=(self,), name=self.name, daemon=True)
        self.thread.start()

    @property
    def dead(self) -> bool:
        return not self.stopped and (self.thread is None or not self.thread.is_alive())

    @property
    def moved(self) -> bool:
        """Whether the thread may no longer use its core."""
        number = self.thread.native_id if self.thread is not None else None
        if not self.pinned or number is None:
            return False
        try:
            return self.core not in os.sched_getaffinity(number)
        except OSError:  # the thread has died
            return False


class LaneThreads:
    """Threads of several lanes, one for each lane.

    Args:
        cores: The logical CPU of each lane; None leaves the choice to the system.
        niceness: Steps by which the system prefers other threads of the process to a lane; 0 if not given.

    Attributes:
        moved: Whether a thread may no longer use its core, as :meth:`check_cores` has found.
    """

    def __init__(self, cores: Mapping[int, int | None], niceness: Mapping[int, int] | None = None) -> None:
        self.moved = False
        levels = niceness or {}
        self._lanes = {at: _LaneThread(f"chrion-lane-{at}", core, levels.get(at, 0)) for at, core in cores.items()}
        self._order = threading.Lock()
        # Stops the threads when this object is collected, and when the interpreter exits.
        self._stop = weakref.finalize(self, _stop, list(self._lanes.values()))
        for lane in self._lanes.values():
            lane.start()

    def submit(self, parts: Mapping[int, LanePart]) -> None:
        """Give lanes their parts of one request: all of them or, if this raises, none.

        Raises:
            RuntimeError: The threads are stopped.
        """
        queues = [self._lanes[lane].parts for lane in parts]
        with self._order:
            if not self._stop.alive:
                raise RuntimeError("the lane threads are stopped")
            # One call that runs no Python code, so that no interrupt occurs between two lanes.
            deque(map(queue.SimpleQueue.put, queues, parts.values()), maxlen=0)

    @property
    def are_calling(self) -> bool:
        """Whether the calling thread is one of them."""
        return any(lane.thread is threading.current_thread() for lane in self._lanes.values())

    def check_cores(self) -> None:
        """Find out whether a thread may no longer use its core."""
        self.moved = any(lane.moved for lane in self._lanes.values())

    def replace_dead(self) -> None:
        """Replace threads that have died, and fail the parts that they were carrying out."""
        for lane in self._lanes.values():
            if lane.dead:
                with self._order:
                    _replace(lane)

    def close(self, until: float | None = None) -> None:
        """Stop the threads after they have finished the parts they were given. May be called repeatedly.

        Args:
            until: Time at which to stop waiting, in seconds of ``time.monotonic``; None waits without limit.
        """
        with self._order:
            self._stop()
        for lane in self._lanes.values():
            if lane.thread is not None and lane.thread is not threading.current_thread():
                lane.thread.join(None if until is None else max(0.0, until - time.monotonic()))


def _replace(lane: _LaneThread) -> None:
    if lane.dead:  # no other caller has replaced it meanwhile
        part, lane.part = lane.part, None
        if part is not None:
            part.fail()
        lane.start()


def _work(lane: _LaneThread) -> None:
    lane.pinned = lane.core is not None and pin(lane.core)
    raise_niceness(lane.niceness)
    parts, spins = lane.parts, 0
    while True:
        idle_since_s = time.monotonic()
        for done in range(spins):
            if not parts.empty():
                break
            spin(done)
        lane.part = parts.get()
        spins = _IDLE_SPINS if time.monotonic() - idle_since_s < IDLE_SPINS_S else 0
        if lane.part is None:
            lane.stopped = True
            return
        lane.part()
        lane.part = None  # otherwise the request's frame would stay alive until the next request


def _stop(lanes: list[_LaneThread]) -> None:
    for lane in lanes:
        lane.parts.put(None)
