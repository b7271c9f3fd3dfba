"""Ready requests of one GPU in the order in which they start: by priority, and in batches of one model.

A request that becomes ready joins the batch of its model and priority that has room and has not started, or begins a
new one. A batch enters the queue when it is full, or a delay after its first request became ready; until it starts,
requests still join it. Of batches of one priority, the one that entered the queue first is at its head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from chrion.serving.simulator.cluster_state import Batching, Job

#: Requests of one model and priority that start together: the first one, and the others.
Batch = tuple[Job, Sequence[Job]]


class ReadyQueue:
    """The queue of one GPU.

    Args:
        batching: Limits of batches; None if each request is a batch of its own.
        ticket: Numbers that order the batches of all GPUs of a server by their entrance.

    Attributes:
        heap: The queued batches, after two numbers by which they are compared, also with those of other GPUs: less the
            priority, and the ticket.
    """

    def __init__(self, batching: Batching | None, ticket: Iterator[int]) -> None:
        self.heap: list[tuple[int, int, Job, Sequence[Job]]] = []
        self._batching = batching
        self._ticket = ticket
        #: Batches that have room and have not started, by model and priority, and those of them not in the queue.
        self._open: dict[tuple[int, int], tuple[Job, list[Job]]] = {}
        self._delayed: set[tuple[int, int]] = set()

    def add(self, job: Job, priority: int) -> Batch | None:
        """Add a request that is ready; return the batch that it begins and that is not queued yet."""
        limits = self._batching
        if limits is None:
            heappush(self.heap, (-priority, next(self._ticket), job, ()))
            return None
        key = job[1], priority
        batch = self._open.get(key)
        if batch:
            batch[1].append(job)
        else:
            batch = self._open[key] = job, []
            self._delayed.add(key)
        is_full = len(batch[1]) + 1 == limits.max_size[job[1]]
        if is_full or not limits.delay_ms[job[1]]:
            self.enter(batch, priority)
        if is_full:
            del self._open[key]
        return batch if batch[0] is job and key in self._delayed else None

    def enter(self, batch: Batch, priority: int) -> None:
        """Put a batch into the queue, unless it is there or has started."""
        key = batch[0][1], priority
        if key in self._delayed and self._open[key] is batch:
            self._delayed.remove(key)
            heappush(self.heap, (-priority, next(self._ticket), *batch))

    def pop(self) -> None:
        """Remove the batch at the head."""
        less_priority, _, first, _ = heappop(self.heap)
        if self._batching:
            key = first[1], -less_priority
            if key in self._open and self._open[key][0] is first:
                del self._open[key]

    def clear(self) -> list[Job]:
        """Remove all batches; return their requests."""
        waiting = [*(item[2:] for item in self.heap), *(self._open[key] for key in self._delayed)]
        self.heap.clear()
        self._open.clear()
        self._delayed.clear()
        return [job for first, others in waiting for job in (first, *others)]
