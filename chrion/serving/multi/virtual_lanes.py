"""Lanes on a virtual clock: when the blocks that run will end.

The lanes of a session have a core each, or their threads share the cores by niceness.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from chrion.serving.multi.dispatcher import BlockSpan, Run

#: The time of a block in ms, by model and block: alone on the machine, and with all cores busy.
BlockTimes = Mapping[str, tuple[Sequence[float], Sequence[float]]]
#: A thread gets so many times as much of a core as one whose niceness is higher by one (kernel/sched/core.c of Linux).
_STEP = 1.25
#: The time of a block of which the time is unknown.
_LEAST_MS = 1e-6


class VirtualLanes(Protocol):
    """Lanes that run blocks on a virtual clock."""

    @property
    def end_ms(self) -> float:
        """When the next block ends if no other one begins before; infinite if none runs."""

    def begin(self, run: Run, now_ms: float, busy: int) -> None:
        """Begin a block, with which so many lanes are busy."""

    def end(self) -> BlockSpan:
        """End the next block."""


class PinnedLanes:
    """Lanes with a core each: the time of a block depends on the number of busy lanes when it begins.

    Args:
        lanes: The number of lanes.
        times: The times of blocks.
    """

    def __init__(self, lanes: int, times: BlockTimes) -> None:
        self._lanes, self._times = lanes, times
        self._ends: list[tuple[float, int, BlockSpan]] = []
        self._count = 0

    @property
    def end_ms(self) -> float:
        """See :class:`VirtualLanes`."""
        return self._ends[0][0] if self._ends else math.inf

    def begin(self, run: Run, now_ms: float, busy: int) -> None:
        """See :class:`VirtualLanes`."""
        alone, full = self._times[run.model]
        share = (busy - 1) / max(1, self._lanes - 1)
        end_ms = now_ms + (1 - share) * alone[run.block] + share * full[run.block]
        self._count += 1
        heapq.heappush(self._ends, (end_ms, self._count, _span(run, now_ms, end_ms)))

    def end(self) -> BlockSpan:
        """See :class:`VirtualLanes`."""
        return heapq.heappop(self._ends)[2]


@dataclass(slots=True)
class _Share:
    """A block that runs."""

    run: Run
    start_ms: float
    #: What is left of it, from 1 to 0.
    left: float = 1.0
    #: What is done in a millisecond.
    speed: float = 0.0


class SharedCores:
    """Lanes of priority classes: the system divides the cores among their threads by niceness.

    A thread gets a share of the cores in proportion to its weight, but one core at most (generalised processor sharing,
    Parekh and Gallager, IEEE/ACM Transactions on Networking 1993; the least share that all others get is found by
    giving the heaviest threads a whole core each). Slices, migrations and the time that a thread takes to wake are left
    out. Lanes without a niceness, those of accelerators, do not take part.

    Args:
        cores: The number of cores.
        niceness: That of each lane that shares them.
        times: The times of blocks.
    """

    def __init__(self, cores: int, niceness: Mapping[int, int], times: BlockTimes) -> None:
        self._cores, self._times = cores, times
        self._weights = {lane: _STEP**-level for lane, level in niceness.items()}
        self._running: dict[int, _Share] = {}
        self._now_ms = 0.0

    @property
    def end_ms(self) -> float:
        """See :class:`VirtualLanes`."""
        return min(map(self._end_of, self._running.values()), default=math.inf)

    def begin(self, run: Run, now_ms: float, busy: int) -> None:
        """See :class:`VirtualLanes`."""
        del busy  # every block that begins or ends changes the shares
        self._advance(now_ms)
        self._running[run.lane] = _Share(run, now_ms)
        self._divide()

    def end(self) -> BlockSpan:
        """See :class:`VirtualLanes`."""
        ended = min(self._running.values(), key=self._end_of)
        self._advance(self._end_of(ended))
        del self._running[ended.run.lane]
        self._divide()
        return _span(ended.run, ended.start_ms, self._now_ms)

    def _end_of(self, share: _Share) -> float:
        return self._now_ms + max(0.0, share.left) / share.speed

    def _advance(self, now_ms: float) -> None:
        for share in self._running.values():
            share.left -= share.speed * (now_ms - self._now_ms)
        self._now_ms = now_ms

    def _divide(self) -> None:
        """Give each thread its share of the cores."""
        sharing = sorted((lane for lane in self._running if lane in self._weights), key=lambda at: -self._weights[at])
        crowd = (min(len(sharing), self._cores) - 1) / max(1, self._cores - 1) if sharing else 0.0
        cores, weight = float(self._cores), sum(self._weights[lane] for lane in sharing)
        for share in self._running.values():
            alone, full = self._times[share.run.model]
            block_ms = (1 - crowd) * alone[share.run.block] + crowd * full[share.run.block]
            share.speed = 1 / max(_LEAST_MS, block_ms)
        for lane in sharing:
            part = min(1.0, cores * self._weights[lane] / weight)
            self._running[lane].speed *= part
            if part == 1.0:
                cores, weight = cores - 1, weight - self._weights[lane]


def _span(run: Run, start_ms: float, end_ms: float) -> BlockSpan:
    return BlockSpan(run.lane, run.model, run.number, run.block, start_ms, end_ms)
