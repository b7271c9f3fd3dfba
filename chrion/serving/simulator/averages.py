"""Averages and counts over time, in memory that does not grow with the number of steps and events."""

from __future__ import annotations

import numpy as np

from chrion.serving.simulator.histograms import Counts, Floats


class BinnedAverage:
    """The peak of a step function and its means over equal bins of time, of which there are at most ``bins``."""

    def __init__(self, bins: int = 512, width_ms: float = 1000.0) -> None:
        self.bins = bins
        self.width_ms = width_ms
        self.peak = 0.0
        #: The time of the last step in ms, and the integral until then.
        self.now = 0.0
        self.area = 0.0
        #: The integral of each bin, and the present value.
        self.areas = [0.0] * bins
        self.value = 0.0

    def step(self, now: float, value: float) -> None:
        """Set the function's value from ``now`` on; times must not decrease."""
        self._advance(now)
        self.value = value
        self.peak = max(self.peak, value)

    def means(self, end_ms: float) -> tuple[float, list[float]]:
        """End the function at ``end_ms``; return the width of a bin in ms and the mean of each bin until then."""
        end_ms = max(end_ms, self.now)
        self._advance(end_ms)
        covered = np.minimum(self.width_ms, end_ms - np.arange(self.bins) * self.width_ms)
        filled = covered > 0
        return self.width_ms, (np.array(self.areas)[filled] / covered[filled]).tolist()

    def _advance(self, now: float) -> None:
        while now >= self.width_ms * self.bins:
            pairs = zip(self.areas[::2], self.areas[1::2], strict=True)
            self.areas = [a + b for a, b in pairs] + [0.0] * (self.bins // 2)
            self.width_ms *= 2
        self.area += self.value * (now - self.now)
        index = int(self.now / self.width_ms)
        while self.now < now:
            until = min(now, (index + 1) * self.width_ms)
            self.areas[index] += self.value * (until - self.now)
            self.now = until
            index += 1


class BinnedCounts:
    """Counts of several kinds of events in equal bins of time, of which there are at most ``bins``, an even number."""

    def __init__(self, kinds: int, bins: int = 512, width_ms: float = 1000.0) -> None:
        self.width_ms = width_ms
        #: Shape [kinds, bins].
        self.counts: Counts = np.zeros((kinds, bins), np.int64)

    def add(self, kind: int, times_ms: Floats) -> None:
        """Count events of one kind at some times. Shape [n]."""
        if not len(times_ms):
            return
        kinds, bins = self.counts.shape
        while times_ms.max() >= self.width_ms * bins:
            halves = self.counts.reshape(kinds, bins // 2, 2).sum(axis=2)
            self.counts = np.concatenate([halves, np.zeros_like(halves)], axis=1)
            self.width_ms *= 2
        self.counts[kind] += np.bincount((times_ms / self.width_ms).astype(np.int64), minlength=bins)
