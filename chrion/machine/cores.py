"""The CPU cores that this process may use, the pinning of threads to them, and the niceness of threads.

On Linux each thread has a niceness of its own, and those of a lower one get more of the cores' time.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

from chrion.common.wrong_values import wrong_value
from chrion.machine.cgroups import cpu_quota

_TOPOLOGY = Path("/sys/devices/system/cpu")

Result = TypeVar("Result")


def check_cores(cores: int | None) -> None:
    """Check a number of cores that a user wants; None stands for all.

    Raises:
        OptionError: It is no whole number, or this process does not have so many.
    """
    if cores is None:
        return
    available = len(physical_cores())
    if isinstance(cores, bool) or not isinstance(cores, int) or not 1 <= cores <= available:
        raise wrong_value("cores", f"a whole number from 1 to {available}, the cores of this process", cores)


def physical_cores() -> tuple[int, ...]:
    """Return one logical CPU of each physical core that this process may use at the same time, in ascending order.

    The result respects the affinity of the calling thread and the quotas of the process's control groups, both of which
    are read again by each call. Outside Linux, physical cores are counted and numbered from 0.
    """
    return allowed_cores()[: _whole_cpus()]


def allowed_cores() -> tuple[int, ...]:
    """Return one logical CPU of each physical core that the calling thread may use, in ascending order.

    A quota of CPU time does not count: it limits how many of these cores can be busy, not which.
    """
    try:
        allowed = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return tuple(range(psutil.cpu_count(logical=False) or 1))
    cores: dict[str, int] = {}
    for cpu in allowed:
        cores.setdefault(_siblings(_TOPOLOGY, cpu), cpu)
    return tuple(cores.values())


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """Pin the calling thread to one logical CPU, and restore its affinity afterwards.

    Do nothing if the system does not support pinning.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        pin(core)
        yield
    finally:
        with contextlib.suppress(OSError):  # the allowed CPUs may have changed
            os.sched_setaffinity(0, before)


def affinity() -> set[int] | None:
    """Return the logical CPUs that the calling thread may use, or None without support for pinning."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else None


def pin(core: int) -> bool:
    """Pin the calling thread to one logical CPU permanently; return whether the system supports and allows it."""
    try:
        os.sched_setaffinity(0, {core})
    except (AttributeError, OSError):
        return False
    return True


def run_on_cores(cores: Sequence[int], work: Callable[[], Result]) -> list[Result]:
    """Run a function on several cores at the same time, in one pinned thread per core.

    Returns:
        The results, in the order of ``cores``.

    Raises:
        BaseException: The exception of one of the threads.
    """
    results: dict[int, Result] = {}
    failures: list[BaseException] = []
    start = threading.Barrier(len(cores))

    def perform(at: int) -> None:
        try:
            pin(cores[at])
            start.wait()
            results[at] = work()
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    threads = [threading.Thread(target=perform, args=(at,), daemon=True) for at in range(len(cores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[at] for at in range(len(cores))]


def private_cache_bytes(cpu: int) -> int:
    """Return the size of the largest cache that belongs to one physical core only; zero if unknown."""
    sizes = [0]
    for cache in (_TOPOLOGY / f"cpu{cpu}" / "cache").glob("index*"):
        with contextlib.suppress(OSError, ValueError):
            if (cache / "shared_cpu_list").read_text().strip() == _siblings(_TOPOLOGY, cpu):
                sizes.append(int((cache / "size").read_text().strip().removesuffix("K")) * 1024)
    return max(sizes)


@functools.cache
def _siblings(topology: Path, cpu: int) -> str:
    """Return the logical CPUs of a CPU's physical core as text, which identifies the core."""
    try:
        return (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _whole_cpus() -> int | None:
    """Return the quota in whole CPUs, at least one; None without a quota.

    Fractions are cut off: lanes on more cores than the quota use it up before its period ends, and then all of them
    wait.
    """
    quota = cpu_quota()
    return None if quota is None else max(1, math.floor(quota))


#: The highest niceness that the system knows.
MAX_NICENESS = 19


def has_thread_niceness() -> bool:
    """Return whether threads of this system have a niceness of their own."""
    return sys.platform == "linux"


def raise_niceness(steps: int) -> None:
    """Raise the niceness of the calling thread, which needs no privilege; it cannot be lowered again without one."""
    if steps and has_thread_niceness():
        thread = threading.get_native_id()
        level = os.getpriority(os.PRIO_PROCESS, thread) + steps
        os.setpriority(os.PRIO_PROCESS, thread, min(MAX_NICENESS, level))
