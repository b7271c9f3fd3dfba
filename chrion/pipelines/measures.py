"""Measures of predictions with bootstrap intervals, and the detection of prior shift."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
#: Bootstrap samples of an interval, and its level.
_SAMPLES, _LEVEL = 1000, 0.95
#: The blocks of rows that bootstrap samples are drawn of.
_BLOCKS = 50
#: The share of a sum of squares up to which a difference from it is rounding.
_EXACT = 1e-12
#: Probabilities are at least this in a logarithm.
_LEAST = 1e-7
#: A base rate differs from another one if a two-sided test of both says so at this level.
_SHIFT_Z = 2.576
#: The number of classes that a calibration error is computed with.
_BINS = 10


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its bootstrap interval of 95 %."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """True if the estimate differs from zero beyond chance."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class Differences:
    """By how much the measures of one model exceed those of another one; see :class:`Measures`."""

    gain: Interval
    loss: Interval
    calibration: Interval | None


@dataclass(frozen=True, slots=True)
class Measures:
    """How good predictions are: of classes, or of numbers."""

    #: The names of the two measures that decide, the larger-is-better one first.
    #: ``auc`` (between classes, the mean over all for several) and ``log_loss``; ``r2`` and ``mae`` for numbers.
    gain: float
    loss: float
    #: Mean difference between probabilities and frequencies in ten classes of equal size; None for numbers.
    calibration: float | None

    def beats(self, other: Measures) -> bool:
        """Return whether these are better in both measures that decide."""
        return self.gain > other.gain and self.loss < other.loss


def measure(scores: Array, y: Array, weights: Array | None = None) -> Measures:
    """Return the measures of predictions.

    Args:
        scores: Probabilities, [rows, classes]; or predicted numbers, [rows].
        y: The class of each row, or the number.
        weights: What each row counts; all the same if None.
    """
    found = _Sums(scores, y, weights, np.zeros(len(y), np.int64)).measures(np.ones((1, 1)))
    gain, loss, *calibration = found[:, 0].tolist()
    return Measures(gain, loss, calibration[0] if calibration else None)


@dataclass(frozen=True, eq=False)
class Pair:
    """Two predictions of the same rows, in the order of time, as for :func:`measure`."""

    new: Array
    old: Array
    y: Array
    weights: Array | None = None


def compare(pairs: Sequence[Pair], seed: int) -> Differences:
    """Return by how much new predictions differ from old ones in all measures, with paired bootstrap intervals.

    Rows that follow each other may have what no feature tells in common, as a day has. So the samples are of blocks of
    rows that follow each other (Carlstein, 1986).

    Args:
        pairs: Predictions, which may be of several models at different times. Measures are means by the number of rows.
        seed: The seed of the bootstrap samples.
    """
    rng, rows = np.random.default_rng(seed), sum(len(pair.y) for pair in pairs)
    found = sum(len(pair.y) / rows * _differences(pair, rng) for pair in pairs)
    gain, loss, *calibration = map(_interval, np.asarray(found))
    return Differences(gain, loss, _reflected(calibration[0]) if calibration else None)


def _reflected(own: Interval) -> Interval:
    """Return the basic bootstrap interval: sums of absolute values are larger in samples than in all rows."""
    return Interval(own.value, 2 * own.value - own.high, 2 * own.value - own.low)


def _differences(pair: Pair, rng: np.random.Generator) -> Array:
    """Return by how much predictions differ in each measure, for all rows and for bootstrap samples."""
    rows = len(pair.y)
    blocks = min(rows, _BLOCKS)
    of_rows = np.arange(rows) * blocks // rows
    drawn = rng.integers(0, blocks, (_SAMPLES, blocks)) + blocks * np.arange(_SAMPLES)[:, None]
    times = np.bincount(drawn.ravel(), minlength=_SAMPLES * blocks).reshape(_SAMPLES, blocks)
    times = np.concatenate([np.ones((1, blocks)), times])
    new, old = (_Sums(scores, pair.y, pair.weights, of_rows).measures(times) for scores in (pair.new, pair.old))
    return np.asarray(new - old)


def prior_shift(earlier: Array, recent: Array, classes: int) -> tuple[float, float] | None:
    """Return the share of the class that changed most, in earlier and in recent rows, if it differs beyond chance."""
    worst: tuple[float, float, float] | None = None
    for label in range(1 if classes == 2 else 0, classes):
        before, after = float((earlier == label).mean()), float((recent == label).mean())
        pooled = (before * len(earlier) + after * len(recent)) / (len(earlier) + len(recent))
        deviation = math.sqrt(pooled * (1 - pooled) * (1 / len(earlier) + 1 / len(recent)))
        z = abs(after - before) / deviation if deviation else 0.0
        if z > _SHIFT_Z and (worst is None or z > worst[0]):
            worst = z, before, after
    return worst[1:] if worst else None


class _Sums:
    """Sums over blocks of rows, from which the measures of samples of blocks follow.

    The area under the ROC curve is a share of pairs of rows, of which a sample has each as often as it has both blocks.

    Args:
        scores: As for :func:`measure`.
        y: As there.
        weights: As there.
        of_rows: The block of each row.
    """

    def __init__(self, scores: Array, y: Array, weights: Array | None, of_rows: Array) -> None:
        weights = np.ones(len(y)) if weights is None else weights
        self._of_rows, self._blocks = of_rows, int(of_rows.max()) + 1
        self._count, self._loss = self._of(weights), self._of(weights * _losses(scores, y))
        self._classes = scores.shape[1] if scores.ndim > 1 else 0
        if not self._classes:
            centred = y - y.mean()
            self._moments = [self._of(weights * own) for own in (centred, centred**2, (y - scores) ** 2)]
            return
        columns = [1] if self._classes == 2 else range(self._classes)
        self._pairs = [self._pairs_of(scores[:, column], y == column, weights) for column in columns]
        probability = scores[:, -1]
        above = weights * (probability - (y == self._classes - 1))
        parts = np.array_split(np.argsort(probability, kind="stable"), _BINS)
        self._errors = np.stack([self._of(above[part], part) for part in parts], axis=1)

    def measures(self, times: Array) -> Array:
        """Return the gain, the loss and, for classes, the calibration error of samples, [measures, samples].

        Args:
            times: How often each sample has each block, [samples, blocks].
        """
        count = np.maximum(times @ self._count, 1e-300)
        loss = times @ self._loss / count
        if not self._classes:
            mean, square, error = (times @ own for own in self._moments)
            spread = square - mean**2 / count
            varies = spread > _EXACT * square
            return np.stack([np.where(varies, 1 - error / np.where(varies, spread, 1), 0.0), loss])
        gains = []
        for pairs, up, down in self._pairs:
            total = (times @ up) * (times @ down)
            ordered = (times @ pairs * times).sum(axis=1)
            gains.append(np.where(total > 0, ordered / np.where(total > 0, total, 1), 0.5))
        return np.stack([np.mean(gains, axis=0), loss, np.abs(times @ self._errors).sum(axis=1) / count])

    def _of(self, values: Array, rows: Array | slice = slice(None)) -> Array:
        """Return the sums over blocks of the values of some rows."""
        return np.bincount(self._of_rows[rows], values, self._blocks)

    def _pairs_of(self, scores: Array, positive: Array, weights: Array) -> tuple[Array, Array, Array]:
        """Return the pairs of positive and negative rows in order, by their blocks, and how many of both blocks have.

        Pairs of equal scores count half.
        """
        order = np.argsort(scores, kind="stable")
        ends = np.flatnonzero(np.diff(scores[order], append=np.inf))  # of runs of equal scores
        run, of_rows = np.searchsorted(ends, np.arange(len(order))), self._of_rows[order]
        up, down = weights * positive, weights * ~positive
        pairs = np.empty((self._blocks, self._blocks))
        for block in range(self._blocks):
            below = np.cumsum(np.where(of_rows == block, down[order], 0))[ends]
            middle = (below + np.append(0, below[:-1])) / 2
            pairs[:, block] = np.bincount(of_rows, up[order] * middle[run], self._blocks)
        return pairs, self._of(up), self._of(down)


def _losses(scores: Array, y: Array) -> Array:
    """Return the log loss of each row, or its absolute error."""
    if scores.ndim == 1:
        return np.asarray(np.abs(scores - y))
    chosen = scores[np.arange(len(y)), y.astype(np.int64)]
    return np.asarray(-np.log(np.clip(chosen, _LEAST, 1.0)))


def _interval(values: Array) -> Interval:
    """Return the first value with the interval of the others."""
    low, high = np.quantile(values[1:], [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Interval(float(values[0]), float(low), float(high))
