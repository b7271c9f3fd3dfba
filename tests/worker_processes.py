"""Jobs that may take their process with them, run in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

#: How often jobs that take too long are looked for.
_TICK_S = 1.0


@dataclass(frozen=True)
class Lost:
    """What becomes of a job that gave no result."""

    how: str


class _Worker:
    """A process that does one job at a time, and is made anew when one has killed it."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work
        self._process: BaseProcess | None = None
        self.pipe: Connection
        self.job: Any
        #: Seconds that the job has taken while this process was awake too.
        self._waited_s = 0.0

    def begin(self, job: Any) -> None:
        if self._process is None:
            self.pipe, other = multiprocessing.Pipe()
            self._process = multiprocessing.Process(target=_serve, args=(self._work, other), daemon=True)
            self._process.start()
            other.close()
        self.job, self._waited_s = job, 0.0
        self.pipe.send(job)

    def result(self) -> Any:
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            return self.stop("crashed")

    def hung(self, since_s: float, patience_s: float) -> bool:
        self._waited_s += min(since_s, 2 * _TICK_S)  # more: the machine slept, or all processes were stopped
        return self._waited_s > patience_s

    def stop(self, how: str = "") -> Lost:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
        return Lost(how)


def run_all(
    work: Callable[[Any], Any], jobs: Iterable[Any], processes: int, patience_s: float = 120.0
) -> Iterator[tuple[Any, Any]]:
    """Do jobs in several processes; yields each with its result, or with a :class:`Lost`, as they end."""
    waiting = iter(jobs)
    busy: list[_Worker] = []
    try:
        for worker in [_Worker(work) for _ in range(processes)]:
            _next(worker, waiting, busy)
        last = time.monotonic()
        while busy:
            ready = wait([w.pipe for w in busy], timeout=_TICK_S)
            before, last = last, time.monotonic()
            for worker in tuple(busy):
                if worker.pipe in ready:
                    result = worker.result()
                elif worker.hung(last - before, patience_s):
                    result = worker.stop(f"no answer in {patience_s:.0f} s")
                else:
                    continue
                job = worker.job
                busy.remove(worker)
                _next(worker, waiting, busy)
                yield job, result
    finally:
        for worker in busy:
            worker.stop()


def _next(worker: _Worker, jobs: Iterator[Any], busy: list[_Worker]) -> None:
    for job in jobs:
        worker.begin(job)
        busy.append(worker)
        return
    worker.stop()


def _serve(work: Callable[[Any], Any], pipe: Connection) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    while True:
        pipe.send(work(pipe.recv()))
