"""Metrics of a run, in memory that does not grow with the number of requests.

Latencies are counted in histograms whose bins grow by 1 % each, so quantiles from 0.01 ms to a day are exact to half a
percent. Sums are exact. Memory over time is a step function averaged over equal bins; bins are merged in pairs when
the run exceeds them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

#: Number of columns of a request's record: number, model, server; arrival, start and end in ms; 1 if the request waited
#: for a load, else 0.
COLUMNS = 7
#: Requests that are recorded before the histograms are updated.
_BATCH = 1 << 15

_FIRST_MS = 0.01
_GROWTH = 1.01
_BINS = 2300
_LOG_GROWTH = float(np.log(_GROWTH))


def bin_edges() -> Floats:
    """Return the edges in ms of the histograms' bins, shape [bins + 1]; the first bin also counts shorter latencies."""
    edges: Floats = np.multiply(_FIRST_MS, _GROWTH ** np.arange(_BINS + 1), dtype=np.float64)
    return edges


def bin_index(values_ms: Floats) -> Counts:
    """Return the bin of each value; values out of range are in the first or the last bin."""
    with np.errstate(divide="ignore"):
        index = np.floor(np.log(values_ms / _FIRST_MS) / _LOG_GROWTH)
    return np.clip(index, 0, _BINS - 1).astype(np.int64)


def quantile(counts: Counts, share: float) -> float:
    """Return the ``share`` quantile in ms, exact to half a bin; NaN for an empty histogram."""
    total = int(counts.sum())
    if total == 0:
        return float("nan")
    index = int(np.searchsorted(np.cumsum(counts), max(1, np.ceil(share * total))))
    return float(_FIRST_MS * _GROWTH ** (index + 0.5))


class BinnedAverage:
    """The peak of a step function and its means over equal bins of time, of which there are at most ``bins``."""

    def __init__(self, bins: int = 512, width_ms: float = 1000.0) -> None:
        self.bins = bins
        self.width_ms = width_ms
        self.peak = 0.0
        #: The time of the last step in ms, and the integral until then.
        self.now = 0.0
        self.area = 0.0
        self._areas = [0.0] * bins
        self._value = 0.0

    def step(self, now: float, value: float) -> None:
        """Set the function's value from ``now`` on; times must not decrease."""
        self._advance(now)
        self._value = value
        self.peak = max(self.peak, value)

    def means(self, end_ms: float) -> tuple[float, list[float]]:
        """End the function at ``end_ms``; return the width of a bin in ms and the mean of each bin until then."""
        end_ms = max(end_ms, self.now)
        self._advance(end_ms)
        width, filled = self.width_ms, []
        for i, area in enumerate(self._areas):
            covered = min(width, end_ms - i * width)
            if covered <= 0:
                break
            filled.append(area / covered)
        return width, filled

    def _advance(self, now: float) -> None:
        while now >= self.width_ms * self.bins:
            pairs = zip(self._areas[::2], self._areas[1::2], strict=True)
            self._areas = [a + b for a, b in pairs] + [0.0] * (self.bins // 2)
            self.width_ms *= 2
        self.area += self._value * (now - self.now)
        index = int(self.now / self.width_ms)
        while self.now < now:
            until = min(now, (index + 1) * self.width_ms)
            self._areas[index] += self._value * (until - self.now)
            self.now = until
            index += 1


class RequestMetrics:
    """Counts, sums and histograms of requests, by model and by server."""

    def __init__(self, models: int, servers: int, slo_ms: Sequence[float], *, from_arrival: bool) -> None:
        self._slo_ms = np.array(slo_ms)
        self._from_arrival = from_arrival
        self.arrivals, self.dropped, self.late, self.cold = (np.zeros(models, np.int64) for _ in range(4))
        self.wait_ms, self.execution_ms, self.response_ms = (np.zeros(models) for _ in range(3))
        self.responses = np.zeros((models, _BINS), np.int64)
        self.executions = np.zeros((models, _BINS), np.int64)
        self.cold_responses = np.zeros(_BINS, np.int64)
        self.end_ms = 0.0
        #: Execution time by server and model, from which busy times follow.
        self.served_ms = np.zeros((servers, models))
        self.server_arrivals = np.zeros(servers, np.int64)
        self._rows = array("d")
        #: Adds the record of one request; see :data:`COLUMNS`.
        self.record = self._rows.extend

    def flush(self, *, force: bool = False) -> npt.NDArray[np.float64] | None:
        """Add the recorded requests to the metrics, if there are many or if ``force`` is true.

        Returns:
            The records that were added, shape [n, 7]; None if none were.
        """
        if not self._rows or (len(self._rows) < _BATCH * COLUMNS and not force):
            return None
        rows = np.frombuffer(self._rows.tobytes()).reshape(-1, COLUMNS)
        del self._rows[:]
        self._add(rows)
        return rows

    def _add(self, rows: Floats) -> None:
        models, servers = rows[:, 1].astype(np.int64), rows[:, 2].astype(np.int64)
        self.arrivals += _count(models, len(self.arrivals))
        self.server_arrivals += _count(servers, len(self.server_arrivals))
        ended = ~np.isnan(rows[:, 4])
        self.dropped += _count(models[~ended], len(self.arrivals))
        if ended.any():
            self._add_ended(rows[ended], models[ended], servers[ended])

    def _add_ended(self, rows: Floats, models: Counts, servers: Counts) -> None:
        arrival, start, end, cold = rows[:, 3], rows[:, 4], rows[:, 5], rows[:, 6] > 0
        response, execution = end - arrival, end - start
        size = len(self.arrivals)
        measured = response if self._from_arrival else execution
        self.late += _count(models[measured > self._slo_ms[models]], size)
        self.cold += _count(models[cold], size)
        self.wait_ms += np.bincount(models, start - arrival, size)
        self.execution_ms += np.bincount(models, execution, size)
        self.response_ms += np.bincount(models, response, size)
        bins = bin_index(response)
        np.add.at(self.responses, (models, bins), 1)
        np.add.at(self.executions, (models, bin_index(execution)), 1)
        np.add.at(self.cold_responses, bins[cold], 1)
        np.add.at(self.served_ms, (servers, models), execution)
        self.end_ms = max(self.end_ms, float(end.max()))


def _count(values: Counts, size: int) -> Counts:
    return np.bincount(values, minlength=size).astype(np.int64)
