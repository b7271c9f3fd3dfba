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

_GROWTH = 1.01
_LOG_GROWTH = float(np.log(_GROWTH))
#: The edges are 0.01 ms x 1.01 ** k, for k from the first number to the second.
_ORIGIN_MS = 0.01
_FIRST, _LAST = -926, 4400
#: Bins of a histogram.
BINS = _LAST - _FIRST


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
    """One histogram for each of many models, of which only the bins that are not empty take memory."""

    def __init__(self) -> None:
        #: ``model * BINS + bin``, ascending, and the count of each. Both of shape [bins that are not empty].
        self._keys: Counts = np.zeros(0, np.int64)
        self._counts: Counts = np.zeros(0, np.int64)

    def __len__(self) -> int:
        """Return the number of bins that are not empty."""
        return len(self._keys)

    def add(self, models: Counts, bins: Counts, weights: Counts | None = None) -> None:
        """Count latencies, given their models, their bins and optionally how often each occurs. Shapes: [n]."""
        keys, inverse = np.unique(models * BINS + bins, return_inverse=True)
        counts = np.bincount(inverse, weights, len(keys)).astype(np.int64)
        at = np.asarray(np.searchsorted(self._keys, keys))
        known = np.zeros(len(keys), bool)
        inside = at < len(self._keys)
        known[inside] = self._keys[at[inside]] == keys[inside]
        self._counts[at[known]] += counts[known]
        if not known.all():
            self._keys = np.insert(self._keys, at[~known], keys[~known])
            self._counts = np.insert(self._counts, at[~known], counts[~known])

    def total(self) -> Counts:
        """Return the histogram of all models. Shape [bins]."""
        total = np.zeros(BINS, np.int64)
        np.add.at(total, self._keys % BINS, self._counts)
        return total

    def row(self, model: int) -> Counts:
        """Return the histogram of one model. Shape [bins]."""
        own = self._slice(model)
        row = np.zeros(BINS, np.int64)
        row[self._keys[own] - model * BINS] = self._counts[own]
        return row

    def grouped(self, groups: Counts) -> SparseHistograms:
        """Return the histograms of groups of models, given the group of each model. Shape of ``groups``: [models]."""
        merged = SparseHistograms()
        models = self._keys // BINS
        merged.add(groups[models], self._keys - models * BINS, self._counts)
        return merged

    def quantiles(self, model: int, shares: tuple[float, ...]) -> tuple[float, ...]:
        """Return quantiles of one model's latencies in ms; see :func:`quantile`."""
        own = self._slice(model)
        if own.start == own.stop:
            return (float("nan"),) * len(shares)
        sums = np.cumsum(self._counts[own])
        ranks = [max(1, np.ceil(share * sums[-1])) for share in shares]
        bins = self._keys[own.start + np.searchsorted(sums, ranks)] - model * BINS
        return tuple(_middle(int(index)) for index in bins)

    def _slice(self, model: int) -> slice:
        first, last = np.searchsorted(self._keys, [model * BINS, (model + 1) * BINS])
        return slice(int(first), int(last))


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
