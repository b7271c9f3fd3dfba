"""Detection of interference: other processes or virtual machines that use the cores during a measurement.

On a shared machine another guest may use part of a core, or two virtual cores may share a physical one for a while,
which makes lanes seem slower than they are. To detect this, a fixed amount of arithmetic is timed on all cores at once
and compared with its fastest time so far.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import numpy as np

from chrion.common.timing import time_calls
from chrion.devices import CPU_PROVIDER
from chrion.machine.cores import run_on_cores
from chrion.machine.cpu_use import cpu_use

#: The rows and the width of a matrix product of about 0.1 ms, and the number of its calls in a measurement, which then
#: takes several milliseconds, the time slice of other processes.
_SIZE = (64, 256)
_CALLS = 40
#: The number of initial measurements, some 50 ms in all, of which one is likely to be at full speed.
_FIRST_MEASUREMENTS = 12
#: The cause and the consequence, as messages say them.
OTHERS_USED_CORES = "other processes or virtual machines used the cores"
TOO_BUSY = "the machine was too busy for a reliable comparison"
#: A time above the fastest by more than this factor is interference: clocks vary by less, shared cores by more.
TOLERANCE = 1.1
#: Pause between two checks while waiting, so that the check itself uses a fraction of the cores.
_PAUSE_S = 0.02
#: The share of the cores' time above which the use by other processes is interference (a choice, not measured): less
#: than half a core of a small machine.
_MAX_OTHERS = 0.15


class CoreMonitor:
    """A monitor that measures whether cores run at full speed, all at the same time.

    Args:
        cores: Logical CPUs.
        patience_s: The total time that all calls of :meth:`wait` may take; on a machine with permanent interference,
            measurements then go ahead.

    Attributes:
        cores: The monitored CPUs.
        patience_s: The time that is left for waiting.
        fastest_ms: The fastest measurement so far.
    """

    def __init__(self, cores: Sequence[int], patience_s: float) -> None:
        self.cores = tuple(cores)
        from chrion.devices.small_models import product_session  # noqa: PLC0415 - plain sessions do not need onnx

        self.patience_s = patience_s
        self._session = product_session(CPU_PROVIDER, *_SIZE)
        self._feed = {"x": np.ones(_SIZE, np.float32)}
        self.fastest_ms = math.inf
        for _ in range(_FIRST_MEASUREMENTS):
            self.measure_ms()

    @property
    def gave_up(self) -> bool:
        """Whether the patience is used up, so that measurements go ahead beside other work."""
        return self.patience_s <= 0

    def measure_ms(self) -> float:
        """Measure the arithmetic on all cores at once; return the time of the slowest core in ms."""
        now_ms = max(run_on_cores(self.cores, self._median_ms))
        self.fastest_ms = min(self.fastest_ms, now_ms)
        return now_ms

    def has_interference(self) -> bool:
        """Return whether other work is using the cores."""
        return self.measure_ms() > TOLERANCE * self.fastest_ms

    def wait(self) -> bool:
        """Wait until there is no interference or the patience is used up; return whether there is none."""
        start = time.perf_counter()
        while disturbed := self.has_interference():
            if time.perf_counter() - start > self.patience_s:
                break
            time.sleep(_PAUSE_S)
        self.patience_s = max(0.0, self.patience_s - (time.perf_counter() - start))
        return not disturbed

    def _median_ms(self) -> float:
        """Return the median time of many calls, scaled by the elapsed time over the CPU time of the thread.

        Preemption delays a few calls by a long time, so the median alone does not show it.
        """
        start, start_running = time.perf_counter(), time.thread_time()
        times = time_calls(lambda: self._session.run(None, self._feed), _CALLS)
        elapsed_s, running_s = time.perf_counter() - start, time.thread_time() - start_running
        return statistics.median(times) * max(1.0, elapsed_s / running_s)


class UsageMonitor(CoreMonitor):
    """A monitor that also measures how much other processes have used the cores since its last check.

    It detects processes that run for part of the time, which a short measurement may miss. The measurement in turn
    detects other virtual machines, which the system does not count.

    Args:
        cores: Logical CPUs.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        super().__init__(cores, patience_s=0.0)
        self._before = cpu_use(self.cores)

    def has_interference(self) -> bool:
        """Return whether other work is using the cores, or used them since the last check."""
        now, before = cpu_use(self.cores), self._before
        others_s = (now.all_s - before.all_s) - (now.own_s - before.own_s)
        used = others_s > _MAX_OTHERS * len(self.cores) * (now.now_s - before.now_s)
        slow = super().has_interference()
        self._before = cpu_use(self.cores)
        return used or slow
