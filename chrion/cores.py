"""The CPU cores this process may use, and threads pinned to one of them."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_TOPOLOGY = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def physical_cores() -> tuple[int, ...]:
    """One logical CPU of each physical core that this process may use, in ascending order.

    Respects the process's affinity and the control group's quota. Where neither topology nor affinity can be read
    (outside Linux), physical cores are counted and numbered from 0.
    """
    try:
        allowed = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return tuple(range(psutil.cpu_count(logical=False) or 1))
    cores: dict[str, int] = {}
    for cpu in allowed:
        cores.setdefault(_siblings(cpu), cpu)
    return tuple(cores.values())[: _quota()]


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """Keep the calling thread on one logical CPU; its affinity is restored afterwards.

    Does nothing where threads cannot be pinned.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    pin(core)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the allowed set has shrunk meanwhile
            os.sched_setaffinity(0, before)


def pin(core: int) -> None:
    """Keep the calling thread on one logical CPU for good, where the system knows how and allows it."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {core})


def _siblings(cpu: int) -> str:
    """Names the physical core of a logical CPU."""
    try:
        return (_TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota() -> int | None:
    """How many CPUs' worth of time the control group may use; None without a limit."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (_CGROUP / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (_CGROUP / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if quota in {"max", "-1"}:
        return None
    return max(1, math.floor(int(quota) / int(period)))
