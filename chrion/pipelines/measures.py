"""Measures of predictions with bootstrap intervals, and the detection of prior shift."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
#: Bootstrap samples of an interval, its level, and how many rows of samples are computed at once.
_SAMPLES, _LEVEL, _BLOCK = 1000, 0.95, 1 << 16
#: The blocks of rows that bootstrap samples are drawn of.
_TIMES = 50
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
    weights = np.ones(len(y)) if weights is None else weights
    loss = float(_losses(scores, y) @ weights / weights.sum())
    calibration = _calibration(scores, y, weights) if scores.ndim > 1 else None
    return Measures(float(_Ranks(scores, y).gain(weights[None])[0]), loss, calibration)


@dataclass(frozen=True, eq=False)
class Pair:
    """Two predictions of the same rows, in the order of time, as for :func:`measure`."""

    new: Array
    old: Array
    y: Array
    weights: Array | None = None


def compare(pairs: Sequence[Pair], seed: int) -> tuple[Interval, Interval]:
    """Return by how much new predictions differ from old ones in both measures, with paired bootstrap intervals.

    Rows that follow each other may have what no feature tells in common, as a day has. So the samples are of blocks of
    rows that follow each other (Carlstein, 1986).

    Args:
        pairs: Predictions, which may be of several models at different times. Measures are means by the number of rows.
        seed: The seed of the bootstrap samples.
    """
    rng, rows = np.random.default_rng(seed), sum(len(pair.y) for pair in pairs)
    found = [(len(pair.y) / rows, *_differences(pair, rng)) for pair in pairs]
    gains, losses = (sum(own[0] * own[at] for own in found) for at in (1, 2))
    return _interval(np.asarray(gains)), _interval(np.asarray(losses))


def _differences(pair: Pair, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return by how much predictions differ in both measures, for all rows and for bootstrap samples."""
    y, own = pair.y, np.ones(len(pair.y)) if pair.weights is None else pair.weights
    ranked = [_Ranks(pair.new, y), _Ranks(pair.old, y)]
    difference = _losses(pair.new, y) - _losses(pair.old, y)
    gains, losses = [], []
    for drawn in chain([own[None]], _samples(rng, own)):
        gains.append(ranked[0].gain(drawn) - ranked[1].gain(drawn))
        losses.append(drawn @ difference / np.maximum(drawn.sum(axis=1), 1e-300))
    return np.concatenate(gains), np.concatenate(losses)


def _samples(rng: np.random.Generator, weights: Array) -> Iterator[Array]:
    """Yield what rows count in bootstrap samples, [samples, rows]."""
    rows, left = len(weights), _SAMPLES
    parts = min(rows, _TIMES)
    of_rows = np.arange(rows) * parts // rows
    while left:
        count = min(left, max(1, _BLOCK // rows))
        drawn = rng.integers(0, parts, (count, parts)) + parts * np.arange(count)[:, None]
        times = np.bincount(drawn.ravel(), minlength=count * parts).reshape(count, parts)
        yield weights * times[:, of_rows]
        left -= count


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


class _Ranks:
    """Predictions that are sorted once, to be measured with many weights of rows."""

    def __init__(self, scores: Array, y: Array) -> None:
        self._scores, self._y = scores, y
        if scores.ndim > 1:
            columns = [1] if scores.shape[1] == 2 else range(scores.shape[1])
            self._sorted = [_sorted(scores[:, column], y == column) for column in columns]

    def gain(self, weights: Array) -> Array:
        """Return the AUC or R2 for each of several weights of rows, [samples, rows]."""
        if self._scores.ndim == 1:
            return _r2(self._scores, self._y, weights)
        found = [_auc(weights[:, order], ends, positive) for order, ends, positive in self._sorted]
        return np.asarray(np.mean(found, axis=0))


def _sorted(scores: Array, positive: Array) -> tuple[Array, Array, Array]:
    """Return the order of scores, the end of each run of equal ones, and which rows are positive in this order."""
    order = np.argsort(scores, kind="stable")
    ends = np.flatnonzero(np.diff(scores[order], append=np.inf))
    return order, ends, positive[order]


def _auc(weights: Array, ends: Array, positive: Array) -> Array:
    """Return the area under the ROC curve of sorted rows by their weights; 0.5 if there is one class only."""
    up = np.diff(np.cumsum(weights * positive, axis=1)[:, ends], prepend=0)
    down = np.diff(np.cumsum(weights * ~positive, axis=1)[:, ends], prepend=0)
    total = up.sum(axis=1) * down.sum(axis=1)
    below = np.cumsum(down, axis=1) - down
    pairs = (up * (below + 0.5 * down)).sum(axis=1)
    return np.where(total > 0, pairs / np.where(total > 0, total, 1), 0.5)


def _r2(predicted: Array, y: Array, weights: Array) -> Array:
    mean = weights @ y / weights.sum(axis=1)
    spread = (weights * (y - mean[:, None]) ** 2).sum(axis=1)
    return np.where(spread > 0, 1 - weights @ (y - predicted) ** 2 / np.where(spread > 0, spread, 1), 0.0)


def _losses(scores: Array, y: Array) -> Array:
    """Return the log loss of each row, or its absolute error."""
    if scores.ndim == 1:
        return np.asarray(np.abs(scores - y))
    chosen = scores[np.arange(len(y)), y.astype(np.int64)]
    return np.asarray(-np.log(np.clip(chosen, _LEAST, 1.0)))


def _calibration(scores: Array, y: Array, weights: Array) -> float:
    """Return the expected calibration error of the last class's probability."""
    probability, hit = scores[:, -1], y == scores.shape[1] - 1
    parts = np.array_split(np.argsort(probability, kind="stable"), _BINS)
    errors = [abs((probability[part] - hit[part]) @ weights[part]) for part in parts]
    return float(sum(errors) / max(weights.sum(), 1e-300))


def _interval(values: Array) -> Interval:
    """Return the first value with the interval of the others."""
    low, high = np.quantile(values[1:], [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return Interval(float(values[0]), float(low), float(high))
