"""Lane threads: Python threads, each pinned to a core, that carry out their lane's part of every request.

Guarantees. Every thread takes its parts in the order of :meth:`LaneThreads.submit`, which is the same for all lanes, so
two requests never wait for each other crosswise. A request is given to all of its lanes or, if that is interrupted, to
none. A part ends unless its request has failed, and then all parts of the request end soon. A thread that dies fails
its request and no other: callers that wait look for dead threads (:meth:`LaneThreads.tend`) and start new ones.

An idle thread spins briefly, since the next request often follows at once, and then parks.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from chrion.cores import pin
from chrion.waiting import relax

#: Turns a lane looks for its next part before it parks: about a tenth of a millisecond.
_IDLE_TURNS = 8


class Part(Protocol):
    """What one lane does of a request."""

    def __call__(self) -> None:
        """Do it."""

    def lose(self) -> None:
        """Fail the request: the thread that did it has died."""


@dataclass(slots=True)
class _LaneThread:
    """A thread's work; the thread knows it, and it alone, so that ``LaneThreads`` can be collected."""

    name: str
    core: int | None
    parts: queue.SimpleQueue[Part | None] = field(default_factory=queue.SimpleQueue)
    #: What is being done.
    part: Part | None = None
    #: Whether it has been told to stop, and has.
    stopped: bool = False
    thread: threading.Thread | None = None

    def start(self) -> None:
        # A daemon: a lane never keeps the interpreter from exiting.
        self.thread = threading.Thread(target=_work, args=(self,), name=self.name, daemon=True)
        self.thread.start()

    @property
    def dead(self) -> bool:
        return not self.stopped and (self.thread is None or not self.thread.is_alive())


class LaneThreads:
    """One thread for each of some lanes.

    Args:
        cores: The logical CPU of each lane; None leaves a lane to the system.
    """

    def __init__(self, cores: Mapping[int, int | None]) -> None:
        self._lanes = {lane: _LaneThread(f"chrion-lane-{lane}", core) for lane, core in cores.items()}
        self._order = threading.Lock()
        # Stops them when this object is collected, and when the interpreter exits.
        self._stop = weakref.finalize(self, _stop, list(self._lanes.values()))
        for lane in self._lanes.values():
            lane.start()

    def submit(self, parts: Mapping[int, Part]) -> None:
        """Give lanes their parts of one request: all of them, or none where this raises.

        Raises:
            RuntimeError: The lanes are closed.
        """
        queues = [self._lanes[lane].parts for lane in parts]
        with self._order:
            if not self._stop.alive:
                raise RuntimeError("this session is closed")
            # One call that runs no Python code, so that no interrupt comes between two lanes.
            deque(map(queue.SimpleQueue.put, queues, parts.values()), maxlen=0)

    def tend(self) -> None:
        """Look after lanes whose thread has died: fail what it was doing, and let a new one go on."""
        for lane in self._lanes.values():
            if lane.dead:
                with self._order:
                    _revive(lane)

    def close(self, until: float | None = None) -> None:
        """Let the lanes end what they have been given, then stop them. May be called twice.

        Args:
            until: Wait no longer than until then, by ``time.monotonic``.
        """
        with self._order:
            self._stop()
        for lane in self._lanes.values():
            if lane.thread is not None and lane.thread is not threading.current_thread():
                lane.thread.join(None if until is None else max(0.0, until - time.monotonic()))


def _revive(lane: _LaneThread) -> None:
    if lane.dead:  # nobody else has done it meanwhile
        part, lane.part = lane.part, None
        if part is not None:
            part.lose()
        lane.start()


def _work(lane: _LaneThread) -> None:
    if lane.core is not None:
        pin(lane.core)
    parts = lane.parts
    while True:
        for turn in range(_IDLE_TURNS):
            if not parts.empty():
                break
            relax(turn)
        lane.part = parts.get()
        if lane.part is None:
            lane.stopped = True
            return
        lane.part()
        lane.part = None  # or its frame would live on until the next one comes


def _stop(lanes: list[_LaneThread]) -> None:
    for lane in lanes:
        lane.parts.put(None)
