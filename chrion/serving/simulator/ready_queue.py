"""Ready requests of one GPU in the order in which they start: by priority, and in batches of one model.

A request that becomes ready joins the batch of its model and priority that has room and has not started, or begins a
new one. A batch enters the queue when it is full, or a delay after its first request became ready; until it starts,
requests still join it. Of batches of one priority, the one that entered the queue first is at its head.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from chrion.serving.simulator.cluster_state import Job


@dataclass(frozen=True, slots=True)
class Batching:
    """Dynamic batching. Sequences are indexed by model."""

    #: Maximum requests of a batch.
    max_size: Sequence[int]
    #: The longest time for which a request waits for others, while its batch has room.
    delay_ms: Sequence[float]


@dataclass(slots=True, eq=False)
class ReadyBatch:
    """Requests that start together."""

    model: int
    priority: int
    jobs: list[Job] = field(default_factory=list)
    #: True if it is in the queue.
    queued: bool = False


class ReadyQueue:
    """The queue of one GPU.

    Args:
        batching: Limits of batches; None if each request is a batch of its own.
        ticket: Numbers that order the batches of all GPUs of a server by their entrance.
    """

    def __init__(self, batching: Batching | None, ticket: Iterator[int] | None = None) -> None:
        self._batching = batching
        self._ticket = count() if ticket is None else ticket
        self._heap: list[tuple[int, int, ReadyBatch]] = []
        #: Batches that have room and have not started, by model and priority.
        self._open: dict[tuple[int, int], ReadyBatch] = {}

    def __bool__(self) -> bool:
        """Return whether there is a batch at the head of the queue."""
        return bool(self._heap)

    def __iter__(self) -> Iterator[ReadyBatch]:
        """Return an iterator of the queued batches in order."""
        return (batch for _, _, batch in sorted(self._heap))

    @property
    def head(self) -> tuple[int, int, ReadyBatch]:
        """The batch that starts next, after two numbers by which it is compared with those of other GPUs."""
        return self._heap[0]

    def add(self, job: Job, priority: int) -> ReadyBatch | None:
        """Add a request that is ready; return the batch that it begins and that is not queued yet."""
        model = job[1]
        if self._batching is None:
            self.enter(ReadyBatch(model, priority, [job]))
            return None
        batch = self._open.get((model, priority))
        begins = batch is None
        if batch is None:
            batch = self._open[model, priority] = ReadyBatch(model, priority)
        batch.jobs.append(job)
        if len(batch.jobs) == self._batching.max_size[model]:
            del self._open[model, priority]
            self.enter(batch)
        elif begins and self._batching.delay_ms[model] == 0:
            self.enter(batch)
        return batch if begins and not batch.queued else None

    def enter(self, batch: ReadyBatch) -> None:
        """Put a batch into the queue, unless it is there or has started."""
        if not batch.queued:
            batch.queued = True
            heapq.heappush(self._heap, (-batch.priority, next(self._ticket), batch))

    def pop(self) -> ReadyBatch:
        """Remove the batch at the head."""
        batch = heapq.heappop(self._heap)[2]
        if self._open.get((batch.model, batch.priority)) is batch:
            del self._open[batch.model, batch.priority]
        return batch

    def clear(self) -> list[Job]:
        """Remove all batches; return their requests."""
        batches = {id(batch): batch for batch in (*self, *self._open.values())}
        self._heap.clear()
        self._open.clear()
        return [job for batch in batches.values() for job in batch.jobs]
