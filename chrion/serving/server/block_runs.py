"""Requests of models that are served in blocks: one dispatcher and one set of lanes for all of them.

A block is at most a few milliseconds long. After each, the request whose objective ends first goes on, so that a short
one does not wait for the end of a long one. Models that are not served in blocks have the cores beside these lanes.
"""

from __future__ import annotations

import asyncio
import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from chrion.errors import DroppedError
from chrion.runtime.block_chain import BlockChain
from chrion.runtime.options.terminable import TerminableRunOptions
from chrion.runtime.requests import check_feed
from chrion.serving.manager import Reason
from chrion.serving.manager.live_manager import MIN_RETRY_MS
from chrion.serving.multi.block_lanes import BlockLanes, TaskFuture
from chrion.serving.multi.dispatcher import Dispatcher, ModelRules
from chrion.serving.server.batching import BatchResult
from chrion.serving.server.tensors import Array, TensorSpec

#: Why a request is dropped.
_REASONS = {"late": Reason.NO_TIME, "removed": Reason.REMOVED, "expired": Reason.EXPIRED}
_NO_TIME = 0.0, 0.0, 0.0
#: Time that blocks have to end after they were terminated: at their next operator, which may take longer.
_LAST_BLOCK_S = 1.0


class BlockJob(NamedTuple):
    """A request."""

    #: Datatype and array of each input.
    feeds: Mapping[str, tuple[str, Array]]
    #: The outputs to return.
    outputs: Sequence[TensorSpec]
    #: With them, another thread can terminate it.
    options: TerminableRunOptions
    #: The time until it must have started, and the time of its latency objective; both count from now.
    start_ms: float
    objective_ms: float
    #: Called in the event loop with the result, and the time in ms since the first block began.
    ended: Callable[[BatchResult, float], None]


class BlockRuns:
    """The requests of models in blocks; used in the event loop.

    Args:
        cores: The cores of the lanes, which start with the first model.
        drop_late: Whether requests end that cannot meet their objective any more.
    """

    def __init__(self, cores: Sequence[int], *, drop_late: bool) -> None:
        self._cores = tuple(cores)
        self._drop_late = drop_late
        self._lanes: BlockLanes | None = None

    def add(self, number: int, chain: BlockChain) -> None:
        """Add a model that is in memory. The manager limits its queue."""
        if self._lanes is None:
            count = len(self._cores)
            new_dispatcher = functools.partial(Dispatcher, {}, count, "edf", drop_late=self._drop_late)
            self._lanes = BlockLanes({}, {}, count, new_dispatcher, cores=self._cores)
        self._lanes.add(str(number), chain, ModelRules(chain.block_ms, queue=sys.maxsize))

    def remove(self, number: int) -> None:
        """Forget a model, none of whose requests runs, if it is one in blocks."""
        if self._lanes and str(number) in self._lanes.chains:
            self._lanes.remove(str(number))

    def count(self, number: int) -> int:
        """Return the number of a model's blocks; 0 if it is not in memory, or not in blocks."""
        chain = self._lanes.chains.get(str(number)) if self._lanes else None
        return len(chain.block_ms) if chain else 0

    def waiting(self) -> dict[int, int]:
        """Return the number of each model's requests of which no block has begun."""
        return {int(name): count for name, count in self._lanes.waiting().items()} if self._lanes else {}

    def busy_ms(self, core: int) -> float:
        """Return the time for which the lane of a core has run blocks."""
        return self._lanes.busy_ms[self._cores.index(core)] if self._lanes and core in self._cores else 0.0

    def retry_ms(self, number: int) -> float:
        """Return a rough estimate of the time in which a model's waiting requests are served."""
        rules = self._lanes.rules.get(str(number)) if self._lanes else None
        work_ms = self.waiting().get(number, 0) * rules.total_ms / len(self._cores) if rules else 0.0
        return max(MIN_RETRY_MS, work_ms)

    def start(self, number: int, job: BlockJob) -> TaskFuture | None:
        """Submit a request of a model; return a future with which it can be stopped, or None if it failed at once."""
        loop = asyncio.get_running_loop()
        try:
            task = self._submit(number, job)
        except Exception as error:  # noqa: BLE001 - the request gets it
            loop.call_soon(job.ended, BatchResult([error], _NO_TIME), 0.0)
            return None
        late: list[Exception] = []

        def report(done: object) -> None:
            assert isinstance(done, TaskFuture)  # noqa: S101 - the task, which must not hold itself
            took_ms = 0.0 if done.begun_ms is None else time.perf_counter() * 1e3 - done.begun_ms
            result = BatchResult([*late], _NO_TIME) if late else _result(done, job.outputs, took_ms)
            if not loop.is_closed():
                loop.call_soon_threadsafe(end, result, took_ms)

        def end(result: BatchResult, took_ms: float) -> None:
            if timer:
                timer.cancel()
            job.ended(result, took_ms)

        def expire() -> None:
            if task.begun_ms is None:
                late.append(DroppedError("it did not start in time", outcome="expired"))
                task.stop()

        timer = loop.call_later(max(0.0, job.start_ms) / 1000, expire) if job.start_ms < math.inf else None
        task.add_done_callback(report)
        return task

    def _submit(self, number: int, job: BlockJob) -> TaskFuture:
        """Submit a request.

        Raises:
            Exception: As InferenceSession does for wrong inputs.
        """
        assert self._lanes is not None  # noqa: S101 - the model was added
        arrays = {name: np.require(array, requirements="C") for name, (_, array) in job.feeds.items()}
        check_feed(self._lanes.chains[str(number)].inputs, arrays)
        objective_ms = job.objective_ms if job.objective_ms < math.inf else None
        return self._lanes.submit(str(number), arrays, objective_ms, job.options)

    def close(self) -> None:
        """End the lanes; wait for a short time for blocks that were terminated."""
        if self._lanes is not None:
            self._lanes.close(_LAST_BLOCK_S)


def _result(task: TaskFuture, outputs: Sequence[TensorSpec], took_ms: float) -> BatchResult:
    """Return the outputs of a request that is over, or what it raised."""
    error = task.exception()
    if error is not None:
        return BatchResult([error if isinstance(error, Exception) else RuntimeError(str(error))], _NO_TIME)
    named = task.result()
    return BatchResult([[np.asarray(named[spec.name]) for spec in outputs]], (0.0, took_ms, 0.0))


def drop_reason(error: Exception) -> Reason | None:
    """Return why the dispatcher has dropped a request; None for another error."""
    return _REASONS.get(error.outcome) if isinstance(error, DroppedError) else None
