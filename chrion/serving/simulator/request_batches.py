"""Figures of requests in batches by their numbers, from which warm-up and confidence intervals of a run follow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from chrion.serving.simulator.confidence import BATCHES, Interval, batch_half_width, warm_up
from chrion.serving.simulator.histograms import Counts, Floats, SparseHistograms, quantile

_Values = npt.NDArray[Any]
#: Requests of a batch in a short run (MSER-5), and the maximum number of batches; for more requests, batches double.
_SMALLEST, _MOST = 5, 1024
#: Quantiles of response times by name.
QUANTILES: Mapping[str, float] = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
#: A queue grows if response times of the last third of the requests are longer than those of the second by more than
#: this factor. The thirds of a queue that grows linearly have the ratio 5 / 3; in a steady state it is 1, and that of a
#: queue as long as the root of the time is 1.3.
_GROWTH = 1.4


@dataclass(frozen=True, slots=True)
class Settled:
    """The figures of a run without its warm-up."""

    #: Requests of the warm-up, the first ones of the run.
    removed: int
    #: Violations as a share, response times in ms.
    figures: Mapping[str, float]
    #: By how many ms the mean response time of the last third of the requests exceeds 1.4 times that of the second; NaN
    #: if there are too few.
    growth_ms: float


class RequestBatches:
    """Counts and response times in at most 1024 batches of 5 x 2 ** k successive requests."""

    def __init__(self) -> None:
        #: Requests of a batch.
        self.size = _SMALLEST
        #: Arrivals, violations and ends of requests. Shape [3, batches].
        self._counts: Counts = np.zeros((3, _MOST), np.int64)
        self._response_ms: Floats = np.zeros(_MOST)
        self._responses = SparseHistograms()

    def add(self, numbers: Counts, violated: npt.NDArray[np.bool_]) -> None:
        """Count requests, given their numbers and whether each missed its objective. Shapes: [n]."""
        while len(numbers) and numbers.max() >= self.size * _MOST:
            self._double()
        batches = numbers // self.size
        self._counts[0] += np.bincount(batches, minlength=_MOST)
        self._counts[1] += np.bincount(batches[violated], minlength=_MOST)

    def add_responses(self, numbers: Counts, response_ms: Floats, bins: Counts) -> None:
        """Count the response times of requests that :meth:`add` has counted, and their bins. Shapes: [n]."""
        batches = numbers // self.size
        self._counts[2] += np.bincount(batches, minlength=_MOST)
        self._response_ms += np.bincount(batches, response_ms, _MOST)
        self._responses.add(batches, bins)

    def intervals(self, first: int = 0) -> dict[str, Interval]:
        """Return violations, and mean and quantiles of response times in ms, from the batch ``first`` on."""
        own = slice(first, self._used)
        arrivals, violations, ended = self._counts[:, own]
        response_ms = self._response_ms[own]
        found = {"violations": _ratio(violations, arrivals), "mean": _ratio(response_ms, ended)}
        total = self._responses.total(first)
        if not total.any():
            return {**found, **dict.fromkeys(QUANTILES, Interval(math.nan, math.nan))}
        for name, share in QUANTILES.items():
            value = quantile(total, share)
            not_longer = self._responses.counts_until(value, self._used)[own]
            width = _ratio(not_longer, ended).half_width  # of the share, which is mapped to times
            if not math.isnan(width):
                low, high = (quantile(total, min(1.0, max(0.0, share + change))) for change in (-width, width))
                width = max(value - low, high - value)
            found[name] = Interval(value, width)
        return found

    def settled(self) -> Settled:
        """Return the figures without the warm-up, which :func:`chrion.serving.simulator.confidence.warm_up` finds.

        It is that of the mean response times of batches.
        """
        ended = self._counts[2, : self._used]
        known = np.flatnonzero(ended)
        means = self._response_ms[known] / ended[known]
        cut = warm_up(means)
        first = int(known[cut]) if cut else 0
        growth_ms = math.nan
        if len(means) >= BATCHES:
            _, second, last = np.array_split(means, 3)
            growth_ms = float(last.mean() - _GROWTH * second.mean())
        figures = {name: entry.mean for name, entry in self.intervals(first).items()}
        return Settled(int(self._counts[0, :first].sum()), figures, growth_ms)

    @property
    def _used(self) -> int:
        filled = np.flatnonzero(self._counts[0])
        return int(filled[-1]) + 1 if len(filled) else 0

    def _double(self) -> None:
        self._counts = np.stack([_doubled(counts) for counts in self._counts])
        self._response_ms = _doubled(self._response_ms)
        self._responses = self._responses.grouped(np.arange(_MOST) // 2)
        self.size *= 2


def _doubled(values: _Values) -> _Values:
    pairs = values.reshape(-1, 2).sum(axis=1)
    return np.concatenate([pairs, np.zeros_like(pairs)])


def _ratio(parts: _Values, of: Counts) -> Interval:
    """Return the ratio of two sums over batches, with the interval of its values in 20 to 39 larger batches."""
    if not of.any():
        return Interval(math.nan, math.nan)
    size = max(1, len(of) // BATCHES)
    whole = len(of) // size * size
    above, below = (values[:whole].reshape(-1, size).sum(axis=1) for values in (parts, of))
    return Interval(float(parts.sum() / of.sum()), batch_half_width(above[below > 0] / below[below > 0]))
