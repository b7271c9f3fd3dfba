"""A network store of weights whose bandwidth the loads of all servers share.

Each read gets an equal share of the bandwidth, but at most the rate of its server; what one cannot use, the others get
(max-min fairness). Shares change whenever a read begins or ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappush
from typing import Any


@dataclass(slots=True, eq=False)
class _Read:
    """A read in progress."""

    left_mb: float
    most_mb_per_ms: float
    done: Callable[[float], None]
    mb_per_ms: float = 0.0


class NetworkStore:
    """The reads in progress.

    Args:
        gb_per_s: The bandwidth.
        events: The queue of events of the cluster; see :mod:`chrion.serving.simulator.cluster_state`.
        sequence: Their numbers.
    """

    def __init__(self, gb_per_s: float, events: list[Any], sequence: Iterator[int]) -> None:
        self._mb_per_ms = gb_per_s
        self._events, self._sequence = events, sequence
        #: By number of the GPU.
        self._reads: dict[int, _Read] = {}
        self._now = 0.0
        #: The read that is expected to end first; an event of another one is out of date.
        self._next: tuple[float, _Read] | None = None

    def begin(self, now: float, gpu: int, size_mb: float, most_gb_per_s: float, done: Callable[[float], None]) -> None:
        """Begin a read; ``done`` is called with the time of its end."""
        self._advance(now)
        self._reads[gpu] = _Read(size_mb, most_gb_per_s, done)
        self._share(now)

    def cancel(self, now: float, gpu: int) -> None:
        """End the read of a GPU whose server has failed, if there is one."""
        self._advance(now)
        if self._reads.pop(gpu, None):
            self._share(now)

    def _advance(self, now: float) -> None:
        for read in self._reads.values():
            read.left_mb -= read.mb_per_ms * (now - self._now)
        self._now = now

    def _share(self, now: float) -> None:
        """Divide the bandwidth, and expect the first end."""
        left = self._mb_per_ms
        reads = sorted(self._reads.values(), key=lambda read: read.most_mb_per_ms)
        for i, read in enumerate(reads):
            read.mb_per_ms = min(read.most_mb_per_ms, left / (len(reads) - i))
            left -= read.mb_per_ms
        ends = [(now + max(0.0, read.left_mb) / read.mb_per_ms, read) for read in self._reads.values()]
        self._next = min(ends, key=lambda end: end[0], default=None)
        if self._next:
            heappush(self._events, (self._next[0], next(self._sequence), self._on_end, self._next))

    def _on_end(self, now: float, expected: tuple[float, _Read]) -> None:
        if expected is not self._next:
            return
        self._advance(now)
        read = expected[1]
        self._reads = {gpu: other for gpu, other in self._reads.items() if other is not read}
        self._share(now)
        read.done(now)
