"""Histograms of latencies, in memory that does not grow with the number of requests.

Bins grow by 1 % each, so quantiles are exact to half a percent. They cover 1e-6 ms to 1e17 ms, more than a simulation
can contain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

#: Ratio of the edges of a bin: quantiles are exact to half a percent.
_GROWTH = 1.01
_LOG_GROWTH = float(np.log(_GROWTH))
#: The edges are 0.01 ms x 1.01 ** k, for k from the first number to the second.
_ORIGIN_MS = 0.01
_FIRST, _LAST = -926, 4400
#: Bins of a histogram.
BINS = _LAST - _FIRST
#: Latencies that are kept before they are sorted into histograms, 1 MB, or as many as there are bins with a count:
#: many at a time cost less.
_BUFFERED = 1 << 17
_NONE: Counts = np.zeros(0, np.int64)


def bin_edges() -> Floats:
    """Return the edges in ms of the histograms' bins, shape [bins + 1]; the first bin also counts shorter latencies."""
    edges: Floats = np.multiply(_ORIGIN_MS, _GROWTH ** np.arange(_FIRST, _LAST + 1, dtype=np.float64))
    return edges


def bin_index(values_ms: Floats) -> Counts:
    """Return the bin of each value; values out of range are in the first or the last bin."""
    with np.errstate(divide="ignore"):
        index = np.floor(np.log(values_ms / _ORIGIN_MS) / _LOG_GROWTH) - _FIRST
    clipped: Counts = np.clip(index, 0, BINS - 1).astype(np.int64)
    return clipped


def quantile(counts: Counts, share: float) -> float:
    """Return the ``share`` quantile in ms, exact to half a bin; NaN for an empty histogram."""
    total = int(counts.sum())
    if total == 0:
        return float("nan")
    index = int(np.searchsorted(np.cumsum(counts), max(1, np.ceil(share * total))))
    return _middle(index)


def _middle(index: int) -> float:
    return float(_ORIGIN_MS * _GROWTH ** (_FIRST + index + 0.5))


class SparseHistograms:
    """One histogram for each of many models, of which only the bins that are not empty take memory.

    Args:
        keys: ``model * BINS + bin`` of the bins that are not empty at first, ascending. Shape [n].
        counts: Their counts. Shape [n].
    """

    def __init__(self, keys: Counts = _NONE, counts: Counts = _NONE) -> None:
        self._keys, self._counts = keys, counts
        #: Keys that are not counted yet, and their number.
        self._buffer: list[Counts] = []
        self._buffered = 0

    def __len__(self) -> int:
        """Return the number of bins that are not empty."""
        return len(self._sorted()[0])

    def add(self, models: Counts, bins: Counts) -> None:
        """Count latencies, given their models and their bins. Shapes: [n]."""
        self._buffer.append(models * BINS + bins)
        self._buffered += len(models)
        if self._buffered >= max(_BUFFERED, len(self._keys)):
            self._sorted()

    def total(self, first: int = 0) -> Counts:
        """Return the histogram of all models from ``first`` on. Shape [bins]."""
        keys, counts = self._sorted()
        own = slice(int(np.searchsorted(keys, first * BINS)), None)
        total = np.zeros(BINS, np.int64)
        np.add.at(total, keys[own] % BINS, counts[own])
        return total

    def counts_until(self, value_ms: float, models: int) -> Counts:
        """Return how many latencies of the first models are in the bin of a value or below it. Shape [models]."""
        keys, counts = self._sorted()
        own = keys % BINS <= bin_index(np.array([value_ms]))[0]
        return np.bincount(keys[own] // BINS, counts[own], models)[:models].astype(np.int64)

    def row(self, model: int) -> Counts:
        """Return the histogram of one model. Shape [bins]."""
        keys, counts = self._sorted()
        own = slice(*np.searchsorted(keys, [model * BINS, (model + 1) * BINS]))
        row = np.zeros(BINS, np.int64)
        row[keys[own] - model * BINS] = counts[own]
        return row

    def grouped(self, groups: Counts) -> SparseHistograms:
        """Return the histograms of groups of models, given the group of each model. Shape of ``groups``: [models]."""
        keys, counts = self._sorted()
        models = keys // BINS
        merged, inverse = np.unique(groups[models] * BINS + keys % BINS, return_inverse=True)
        return SparseHistograms(merged, np.bincount(inverse, counts, len(merged)).astype(np.int64))

    def quantiles(self, models: int, shares: tuple[float, ...]) -> list[tuple[float, ...]]:
        """Return quantiles of the latencies of the first models in ms; see :func:`quantile`."""
        keys, counts = self._sorted()
        sums = np.append(0, np.cumsum(counts))
        before = sums[np.searchsorted(keys, np.arange(models + 1) * BINS)]
        totals = np.diff(before)
        ranks = before[:-1, np.newaxis] + np.maximum(1, np.ceil(np.multiply.outer(totals, shares)))
        # The ranks of a model without latencies are those of the next one, and are not used.
        bins = keys[np.minimum(np.searchsorted(sums[1:], ranks), len(keys) - 1)] % BINS if len(keys) else ranks
        empty = (float("nan"),) * len(shares)
        rows = zip(totals.tolist(), bins.tolist(), strict=True)
        return [tuple(map(_middle, row)) if total else empty for total, row in rows]

    def _sorted(self) -> tuple[Counts, Counts]:
        """Count the buffered latencies; return the keys and their counts."""
        if self._buffer:
            keys, counts = np.unique(np.concatenate(self._buffer), return_counts=True)
            self._buffer, self._buffered = [], 0
            at = np.asarray(np.searchsorted(self._keys, keys))
            known = np.zeros(len(keys), bool)
            inside = at < len(self._keys)
            known[inside] = self._keys[at[inside]] == keys[inside]
            self._counts[at[known]] += counts[known]
            self._keys = np.insert(self._keys, at[~known], keys[~known])
            self._counts = np.insert(self._counts, at[~known], counts[~known])
        return self._keys, self._counts


class NamedHistograms(Mapping[str, Counts]):
    """Histograms by name, in the order of the names; each is expanded to all bins when it is read.

    Args:
        names: The names.
        histograms: The histogram of each name, by its position.
    """

    def __init__(self, names: Sequence[str], histograms: SparseHistograms) -> None:
        self._index = {name: i for i, name in enumerate(names)}
        self._histograms = histograms

    def __getitem__(self, name: str) -> Counts:
        """Return the counts of a name. Shape [bins]."""
        return self._histograms.row(self._index[name])

    def __iter__(self) -> Iterator[str]:
        """Return an iterator of the names."""
        return iter(self._index)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._index)
