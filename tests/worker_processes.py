"""Worker processes for jobs that may crash or hang.

They are started anew, since a fork of a process with threads, which onnxruntime has, can wait for a lock for ever.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

#: Interval in seconds at which jobs are checked for a timeout.
_TICK_S = 1.0
_CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class FailedJob:
    """The result of a job whose process crashed or timed out."""

    reason: str


class _Worker:
    """A process that runs one job at a time and is restarted after a job has ended it."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._process: BaseProcess | None = None
        self.pipe: Connection
        self.job: Any
        #: Seconds that the job has run while the parent process was running, too.
        self._elapsed_s = 0.0

    def start(self, job: Any) -> None:
        if self._process is None:
            self.pipe, other = _CONTEXT.Pipe()
            self._process = _CONTEXT.Process(target=_serve, args=(self._function, other), daemon=True)
            self._process.start()
            other.close()
            self.pipe.recv()  # the process has done its imports, so that the job's time starts now
        self.job, self._elapsed_s = job, 0.0
        self.pipe.send(job)

    def result(self) -> Any:
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            self.stop()
            return FailedJob("crashed")

    def timed_out(self, since_s: float, timeout_s: float) -> bool:
        # A longer interval means that the machine slept or that all processes were stopped.
        self._elapsed_s += min(since_s, 2 * _TICK_S)
        return self._elapsed_s > timeout_s

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def run_all(
    function: Callable[[Any], Any], jobs: Iterable[Any], processes: int, timeout_s: float = 120.0
) -> Iterator[tuple[Any, Any]]:
    """Run jobs in several processes and yield each with its result, or with a :class:`FailedJob`, as they end.

    The function is imported by the processes, so it must be one of a module.
    """
    pending = iter(jobs)
    busy: list[_Worker] = []
    try:
        for worker in [_Worker(function) for _ in range(processes)]:
            _start_next(worker, pending, busy)
        last = time.monotonic()
        while busy:
            ready = wait([w.pipe for w in busy], timeout=_TICK_S)
            before, last = last, time.monotonic()
            for worker in tuple(busy):
                if worker.pipe in ready:
                    result = worker.result()
                elif worker.timed_out(last - before, timeout_s):
                    worker.stop()
                    result = FailedJob(f"no result within {timeout_s:.0f} s")
                else:
                    continue
                job = worker.job
                busy.remove(worker)
                _start_next(worker, pending, busy)
                yield job, result
    finally:
        for worker in busy:
            worker.stop()


def _start_next(worker: _Worker, jobs: Iterator[Any], busy: list[_Worker]) -> None:
    for job in jobs:
        worker.start(job)
        busy.append(worker)
        return
    worker.stop()


def _serve(function: Callable[[Any], Any], pipe: Connection) -> None:
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    pipe.send(None)
    while True:
        pipe.send(function(pipe.recv()))
