"""The watch over runs: one that takes longer than it may is terminated.

Most runs end long before their limit. So there is one timer, for the run whose limit is next, and it is left alone when
that run ends: it fires in vain, at most once in the time of the limit, and is then set for the next run.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chrion.runtime.options.terminable import TerminableRunOptions
from chrion.serving.multi.block_lanes import TaskFuture


@dataclass(slots=True)  # one for each run: to freeze it would cost more than the rest of the watch
class WatchedRun:
    """A run that has not ended, and the answers of the requests that share it."""

    options: TerminableRunOptions
    answers: Sequence[asyncio.Future[Any]]
    #: Time that it may take.
    limit_ms: float
    #: Called when that time is over, after the run was told to end.
    expired: Callable[[], None]
    #: The task of a run in blocks; its time counts from the first one.
    task: TaskFuture | None = None

    def end(self) -> None:
        """Terminate the run at its next operator."""
        self.options.end()
        if self.task:
            self.task.stop()

    def end_if_unwanted(self) -> None:
        """Terminate the run if none of its requests waits for an answer any more."""
        if all(answer.done() for answer in self.answers):
            self.end()

    def left_ms(self) -> float:
        """Return what is left of the limit when it seems to be over: a run in blocks may have begun late."""
        if self.task is None:
            return 0.0
        begun_ms = self.task.begun_ms
        return self.limit_ms if begun_ms is None else begun_ms + self.limit_ms - time.perf_counter() * 1e3


class RunWatch:
    """The runs that have not ended; used in the event loop."""

    def __init__(self) -> None:
        #: Runs and their ends, in seconds of the event loop's clock, by number.
        self._runs: dict[int, tuple[WatchedRun, float]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, number: int, run: WatchedRun) -> None:
        """Watch a run, which begins now."""
        end_s = asyncio.get_running_loop().time() + run.limit_ms / 1000
        self._runs[number] = run, end_s
        self._set_timer(end_s)

    def remove(self, number: int) -> None:
        """Forget a run, which has ended."""
        del self._runs[number]

    def close(self) -> None:
        """Terminate all runs, and watch them no longer."""
        for run, _ in self._runs.values():
            run.end()
        if self._timer:
            self._timer.cancel()

    def _set_timer(self, end_s: float) -> None:
        if end_s < math.inf and (self._timer is None or end_s < self._timer.when()):
            if self._timer:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(end_s, self._terminate_late)

    def _terminate_late(self) -> None:
        """Terminate the runs whose time is over, and set the timer for the others."""
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        for number, (run, planned_s) in list(self._runs.items()):
            end_s = planned_s if planned_s > now_s else now_s + run.left_ms() / 1000
            if end_s > now_s:
                self._runs[number] = run, end_s
                self._set_timer(end_s)
            elif not run.options.terminate:
                run.end()
                run.expired()
