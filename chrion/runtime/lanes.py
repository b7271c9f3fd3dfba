"""Lanes: threads pinned to a core each, that carry out their part of a request.

Guarantees. Every lane takes its parts in the order of :meth:`Lanes.submit`, the same for all lanes; so two requests
never wait for each other crosswise. A part either ends or its request has failed, and then all of its parts end soon.

A lane that has nothing to do spins for a moment, since the next request often follows at once, then parks.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Mapping

from chrion.cores import pin
from chrion.waiting import relax

#: Turns a lane looks for its next part before it parks; a turn is a few microseconds.
_IDLE_TURNS = 50

Part = Callable[[], None]


class Lanes:
    """One thread for each of some lanes.

    Args:
        cores: The logical CPU of each lane; None leaves a lane to the system.
    """

    def __init__(self, cores: Mapping[int, int | None]) -> None:
        self._queues: dict[int, queue.SimpleQueue[Part | None]] = {lane: queue.SimpleQueue() for lane in cores}
        self._order = threading.Lock()
        self._closed = False
        self._threads = []
        for lane, core in cores.items():
            # Daemons: a lane never keeps the interpreter from exiting. They know their queue, not this object, so
            # that it can be collected, which stops them.
            thread = threading.Thread(
                target=_work, args=(self._queues[lane], core), name=f"chrion-lane-{lane}", daemon=True
            )
            thread.start()
            self._threads.append(thread)
        self._finalizer = weakref.finalize(self, _stop, list(self._queues.values()))

    def submit(self, parts: Mapping[int, Part]) -> None:
        """Give lanes their parts of one request.

        Raises:
            RuntimeError: The lanes are closed.
        """
        with self._order:
            if self._closed:
                raise RuntimeError("this session is closed")
            for lane, part in parts.items():
                self._queues[lane].put(part)

    def close(self) -> None:
        """Let the lanes end what they have been given, then stop them. May be called twice."""
        with self._order:
            self._closed = True
        self._finalizer()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()


def _work(parts: queue.SimpleQueue[Part | None], core: int | None) -> None:
    if core is not None:
        pin(core)
    while True:
        for _ in range(_IDLE_TURNS):
            if not parts.empty():
                break
            relax()
        part = parts.get()
        if part is None:
            return
        part()
        del part  # or its frame would live on until the next one comes


def _stop(queues: list[queue.SimpleQueue[Part | None]]) -> None:
    for parts in queues:
        parts.put(None)
