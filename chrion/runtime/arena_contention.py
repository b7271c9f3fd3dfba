"""Contention of requests for the lock of a session's memory arena, found by their context switches.

onnxruntime's arena has one lock for all requests of a session. A model of many small operators takes it thousands of
times a request. If the system interrupts a thread that holds it, the others queue up, and the lock convoy lasts for
seconds. A thread that waits for a lock gives up its core, which the system counts as a voluntary context switch.

Measured on two cores, with 2 to 16 threads on one session of one thread: requests of unfolded LSTMs and GRUs have 90
to 2000 voluntary context switches each, and without an arena at most one and 1.4 to 3.6 times the throughput. Requests
of other models have at most 4; without an arena, some of them are 7 % slower, since large blocks of memory go back to
the system after each request.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

try:
    import resource
except ImportError:  # not a system of the Unix family
    resource = None  # type: ignore[assignment]

#: One of so many requests is a sample, since counting takes two system calls; number of samples that decide by their
#: median (a choice, not measured).
_INTERVAL, _SAMPLES = 4, 16
#: The least median of voluntary context switches of a request that shows contention: between the 4 and the 90 above.
_LIMIT = 16
#: The least switch interval of Python that is assumed, in seconds (a choice, not measured).
_LEAST_INTERVAL_S = 1e-3


def voluntary_switches() -> int | None:
    """Return the voluntary context switches of the calling thread; None if the system does not count them."""
    if not hasattr(resource, "RUSAGE_THREAD"):
        return None
    return int(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw)


@dataclass(frozen=True, slots=True)
class SwitchSample:
    """A request whose voluntary context switches are counted.

    Attributes:
        start_s: Its start.
        switches_before: Voluntary context switches of its thread before it.
    """

    start_s: float
    switches_before: int


class ArenaContention:
    """Counts voluntary context switches of requests that several threads send to a session of one thread.

    A thread that waits for the GIL wakes up once in a switch interval; one switch for each interval of a request does
    not count. Thread-safe. On systems that do not count switches by thread, no contention is found.

    Args:
        on_contention: Called when samples show contention, perhaps more than once.
        clock: Returns the time in seconds.
        switches: Returns the voluntary context switches of the calling thread; None if the system does not count them.
    """

    def __init__(
        self,
        on_contention: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
        switches: Callable[[], int | None] = voluntary_switches,
    ) -> None:
        self._on_contention = on_contention
        self._clock = clock
        self._count_switches = switches
        self._requests = 0
        self._lock = threading.RLock()  # a signal handler may serve a request
        self._switches: list[float] = []

    def sample(self) -> SwitchSample | None:
        """Return a sample for the request that the calling thread begins, if it is selected."""
        self._requests += 1  # a lost count does not matter
        if self._requests % _INTERVAL:
            return None
        switches = self._count_switches()
        return None if switches is None else SwitchSample(self._clock(), switches)

    def add(self, sample: SwitchSample) -> None:
        """Count the switches of a request that the calling thread has ended."""
        switches = self._count_switches()
        if switches is None:
            return
        for_gil = (self._clock() - sample.start_s) / max(sys.getswitchinterval(), _LEAST_INTERVAL_S)
        with self._lock:
            self._switches.append(switches - sample.switches_before - for_gil)
            if len(self._switches) < _SAMPLES:
                return
            samples, self._switches = self._switches, []
        if statistics.median(samples) >= _LIMIT:
            self._on_contention()
