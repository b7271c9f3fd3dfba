"""CPU time that the system counts: of all processes, and of others than this one."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import NamedTuple

import psutil

from chrion.machine.cores import affinity

#: Kinds of CPU time that are not idle time; guests are counted as users.
_USED = ("user", "nice", "system", "irq", "softirq", "steal")
#: The system counts in steps of a hundredth of a second, so shorter intervals have an error of several percent. In
#: seconds.
_MIN_S = 0.25
#: Difference in the number of used cores from which on other work has eased (a choice, not
#: measured).
_EASED = 0.3
#: Other work matters from this number of cores on, or from this share of the CPUs if that is more (choices,
#: not measured).
_BUSY, _BUSY_SHARE = 0.3, 0.1


class CpuUse(NamedTuple):
    """CPU time that was used until some time, in seconds."""

    #: That time, of ``time.perf_counter()``.
    now_s: float
    #: CPU time of all processes on some CPUs; 0 if the system does not count it.
    all_s: float
    #: CPU time of this process.
    own_s: float


def cpu_use(cpus: Collection[int] | None) -> CpuUse:
    """Return the CPU time that was used until now.

    Args:
        cpus: Logical CPUs; None for all.
    """
    try:
        counted = psutil.cpu_times(percpu=True)
        chosen = counted if cpus is None else [counted[cpu] for cpu in cpus]
        all_s = sum(getattr(times, kind, 0.0) for times in chosen for kind in _USED)
    except (OSError, RuntimeError, IndexError, NotImplementedError):
        all_s = 0.0
    return CpuUse(time.perf_counter(), all_s, time.process_time())


def cores_in_use(before: CpuUse, cpus: Collection[int] | None) -> tuple[float, float] | None:
    """Return the numbers of cores that all processes and this one have used since a measurement of some CPUs.

    Returns:
        None if the measurement is too recent, or if the system does not count CPU time.
    """
    now = cpu_use(cpus)
    took_s = now.now_s - before.now_s
    if not now.all_s or took_s < _MIN_S:
        return None
    return (now.all_s - before.all_s) / took_s, (now.own_s - before.own_s) / took_s


class OtherWork:
    """The use of cores by other processes since its creation.

    It is measured a few times a second, however often the methods are called.

    Args:
        measure: Returns the CPU time that was used until now on some logical CPUs.
        cpus: The logical CPUs; by default those that the calling thread may use.

    Attributes:
        counted: Whether the system counts CPU time.
    """

    def __init__(
        self, measure: Callable[[Collection[int] | None], CpuUse] = cpu_use, cpus: Collection[int] | None = None
    ) -> None:
        self._measure_use = measure
        self._cpus = affinity() if cpus is None else cpus
        self._before = measure(self._cpus)
        self.counted = self._before.all_s > 0
        #: Cores in use at the first and at the last measurement; None if there is none, or if nothing is counted.
        self._first: float | None = None
        self._cores: float | None = None

    def has_eased(self) -> bool:
        """Return whether other processes use fewer cores than right after the creation.

        Work that came and went in between does not count.
        """
        self._measure()
        return self._first is not None and self._cores is not None and self._cores <= self._first - _EASED

    def is_busy(self) -> bool | None:
        """Return whether other processes use cores; None if it is not known yet."""
        self._measure()
        if self._cores is None and self.counted:
            return None
        return (self._cores or 0.0) >= max(_BUSY, _BUSY_SHARE * len(self._cpus or ()))

    def _measure(self) -> None:
        before = self._before
        if time.perf_counter() - before.now_s < _MIN_S:
            return
        self._before = now = self._measure_use(self._cpus)
        if self.counted and now.all_s:
            others_s = (now.all_s - before.all_s) - (now.own_s - before.own_s)
            self._cores = others_s / (now.now_s - before.now_s)
            if self._first is None:
                self._first = self._cores
