"""What sessions in production are surrounded by: a busy process, and a control group with a quota."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

_NUMBERS = itertools.count()
_PERIOD_US = 100_000


class Neighbour:
    """A process that computes without pause on one core; suspended at first."""

    def __init__(self, core: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_compute, args=(core, os.getpid()), daemon=True)
        self._process.start()
        time.sleep(1.0)  # so that its imports are over
        self.suspend()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid or 0

    def resume(self) -> None:
        """Let the process compute."""
        os.kill(self.pid, signal.SIGCONT)

    def suspend(self) -> None:
        """Suspend the process."""
        os.kill(self.pid, signal.SIGSTOP)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _compute(core: int, parent: int) -> None:
    """Compute on a core until the parent process has ended."""
    os.sched_setaffinity(0, {core})
    while os.getppid() == parent:
        sum(range(100_000))


class Quota:
    """A control group below that of this process, with a quota of CPU time; version 1 or 2 of the interface.

    Args:
        cpus: Quota in CPUs.
        above: The folder of the group above, and whether it is of version 2; by default that of this process.

    Raises:
        OSError: The system has no such control groups, or this process must not create any.
    """

    def __init__(self, cpus: float, above: tuple[Path, bool] | None = None) -> None:
        parent, newer = above or _own_group()
        self._folder = parent / f"bench-serving-{os.getpid()}-{next(_NUMBERS)}"
        self._folder.mkdir()
        try:
            quota_us = round(cpus * _PERIOD_US)
            if newer:
                (self._folder / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
            else:
                (self._folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (self._folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        except OSError:
            self._folder.rmdir()
            raise

    def add(self, process: int) -> None:
        """Move a process into the group."""
        (self._folder / "cgroup.procs").write_text(str(process))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for _attempt in range(50):  # the group is busy until its processes are gone
            with suppress(OSError):
                self._folder.rmdir()
                return
            time.sleep(0.1)


def _own_group() -> tuple[Path, bool]:
    """Return the folder of this process' control group for CPU time, and whether it is of version 2.

    Raises:
        OSError: There is none.
    """
    root = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        newer = not controllers and (root / "cgroup.controllers").exists()
        if newer or "cpu" in controllers.split(","):
            top = root if newer else root / "cpu"
            own = top / path.lstrip("/")
            return (own if own.exists() else top), newer  # in a container, its group is the top
    raise OSError("no control groups for CPU time")
