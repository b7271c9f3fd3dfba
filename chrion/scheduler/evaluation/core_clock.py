"""The availability of lanes, some of which run segments on the cores of others."""

from __future__ import annotations

from collections.abc import Sequence

from chrion.profiler.costs import Costs


class CoreClock:
    """When each lane is free, and which lane's thread has used it last.

    Args:
        costs: The machine's costs.
    """

    def __init__(self, costs: Costs) -> None:
        self._handoff_ms = costs.handoff_ms
        self._after_wide_ms = costs.handoff_ms + costs.wake_ms
        #: By lane: the end of its last segment in ms, the lane that ran it, and when any other lane may use the core.
        self._last: dict[int, tuple[float, int, float]] = {}

    def available_ms(self, occupied: Sequence[int]) -> float:
        """Return when the first of some lanes may run a segment that occupies all of them, in ms."""
        first, latest = occupied[0], 0.0
        for lane in occupied:
            end, runner, others = self._last.get(lane, (0.0, first, 0.0))
            latest = max(latest, end if runner == first else others)
        return latest

    def occupy(self, occupied: Sequence[int], end_ms: float) -> None:
        """Record a segment that the first of some lanes has run on all of them."""
        others = end_ms + (self._handoff_ms if len(occupied) == 1 else self._after_wide_ms)
        for lane in occupied:
            before = self._last.get(lane)
            self._last[lane] = (end_ms, occupied[0], max(others, before[2]) if before else others)
