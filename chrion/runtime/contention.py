"""Contention of requests for the lock of a session's memory arena, found by their context switches.

onnxruntime's arena has one lock for all requests of a session. A model of many small operators takes it thousands of
times a request. If the system interrupts a thread that holds it, all others wait, and from then on most of them find it
taken: throughput falls to a half or less, for seconds. A thread that waits for a lock gives up its core, which the
system counts as a voluntary context switch.

Measured on two cores, with 2 to 16 threads on one session of one thread: requests of unfolded LSTMs and GRUs have 100
to 2000 voluntary context switches each, and without an arena at most one and 1.4 to 3.6 times the throughput. Requests
of other models have at most 4; without an arena, some of them are 7 % slower, since large blocks of memory go back to
the system after each request.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass

try:
    import resource
except ImportError:  # not a system of the Unix family
    resource = None  # type: ignore[assignment]

#: One of so many requests is a sample; the number of samples that decide.
_INTERVAL, _SAMPLES = 4, 16
#: The least median of voluntary context switches of a request that shows contention.
_LIMIT = 16


@dataclass(frozen=True, slots=True)
class Sample:
    """A request of which voluntary context switches are counted.

    Attributes:
        before: Voluntary context switches of its thread before it.
    """

    before: int


class Contention:
    """Counts voluntary context switches of requests that several threads send to a session.

    Thread-safe. On systems that do not count them for each thread, nothing is found.

    Args:
        found: Called when samples show contention, perhaps more than once.
    """

    def __init__(self, found: Callable[[], None]) -> None:
        self._found = found
        self._requests = 0
        self._lock = threading.Lock()
        self._switches: list[int] = []

    def sample(self) -> Sample | None:
        """Return a sample for the request that the calling thread begins, if it is to be one."""
        self._requests += 1  # a lost count does not matter
        if self._requests % _INTERVAL:
            return None
        before = voluntary_switches()
        return None if before is None else Sample(before)

    def add(self, sample: Sample) -> None:
        """Count the switches of a request that the calling thread has ended."""
        after = voluntary_switches()
        if after is None:
            return
        with self._lock:
            self._switches.append(after - sample.before)
            if len(self._switches) < _SAMPLES:
                return
            switches, self._switches = self._switches, []
        if statistics.median(switches) >= _LIMIT:
            self._found()


def voluntary_switches() -> int | None:
    """Return the voluntary context switches of the calling thread; None if the system does not count them."""
    if not hasattr(resource, "RUSAGE_THREAD"):
        return None
    return int(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw)
