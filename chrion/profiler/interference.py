"""Are the cores ours just now?

On a shared machine another guest may take part of a core, or two virtual cores may sit on one real one for a while;
lanes then look slow that are not. So measurements look first: a fixed piece of arithmetic on all cores at once, beside
the fastest that it has been.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from chrion.cores import run_on_cores
from chrion.devices import CPU_PROVIDER
from chrion.devices.probe import product_session
from chrion.timing import time_calls

#: A matrix product of about a tenth of a millisecond, and how often a look runs it.
_SIZE = (64, 256)
_CALLS = 40
#: The fastest look is taken for what the cores can do once so many have been taken.
_FIRST_LOOKS = 12
#: Slower than the fastest by more than this is a disturbance: clocks vary by less, cores shared with others by more.
TOLERANCE = 1.1
_PAUSE_S = 0.02


class InterferenceMonitor(Protocol):
    """What a measurement asks of the cores."""

    def wait(self) -> bool:
        """Wait for a quiet moment; returns whether this is one."""

    def has_interference(self) -> bool:
        """Whether somebody is using the cores."""


class CoreMonitor:
    """Tells whether some cores run at their full speed, all at once.

    Args:
        cores: Logical CPUs.
        patience_s: How long to wait for quiet moments, all waits together: a machine that is never quiet is measured
            as it is.

    Attributes:
        cores: Those watched.
        patience_s: What is left of the patience.
        fastest_ms: The fastest look so far.
    """

    def __init__(self, cores: Sequence[int], patience_s: float) -> None:
        self.cores = tuple(cores)
        self.patience_s = patience_s
        self._session = product_session(CPU_PROVIDER, *_SIZE)
        self._feed = {"x": np.ones(_SIZE, np.float32)}
        self.fastest_ms = math.inf
        for _ in range(_FIRST_LOOKS):
            self.measure_ms()

    def measure_ms(self) -> float:
        """What the arithmetic takes now on the slowest of the cores, in ms."""
        now_ms = max(run_on_cores(self.cores, self._median_ms))
        self.fastest_ms = min(self.fastest_ms, now_ms)
        return now_ms

    def has_interference(self) -> bool:
        """Whether somebody is using the cores."""
        return self.measure_ms() > TOLERANCE * self.fastest_ms

    def wait(self) -> bool:
        """Wait for a quiet moment while there is patience left; returns whether this is one."""
        start = time.perf_counter()
        while disturbed := self.has_interference():
            if time.perf_counter() - start > self.patience_s:
                break
            time.sleep(_PAUSE_S)
        self.patience_s = max(0.0, self.patience_s - (time.perf_counter() - start))
        return not disturbed

    def _median_ms(self) -> float:
        """Return the median of many calls; preempted threads, which few calls show, scale it by the time they wait."""
        start, start_running = time.perf_counter(), time.thread_time()
        times = time_calls(lambda: self._session.run(None, self._feed), _CALLS)
        elapsed_s, running_s = time.perf_counter() - start, time.thread_time() - start_running
        return statistics.median(times) * max(1.0, elapsed_s / running_s)
