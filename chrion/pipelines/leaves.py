"""Leaves fitted anew on the exact leaf of each row: a convex problem, ridge towards the original leaves.

The raw score of a row and target is the sum of the weights of the leaves that it reaches. The weights w minimise

    sum of losses(y, base + scale * A w) + ridge / 2 * |w - w0|^2,

in which A, with a 1 for each leaf that a row reaches, has one entry for each row and tree. It is never stored as a
matrix: scores are sums of gathered weights, and gradients are counted by ``bincount``. The solver is L-BFGS (Liu and
Nocedal, 1989) with the diagonal of a bound of the Hessian as its first approximation. Leaves that no row reaches keep
their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
#: Rows that are computed at once.
_BLOCK = 1 << 15
#: Pairs of steps and gradients that L-BFGS keeps, the most steps, and the gradient relative to the first one at which
#: it stops.
_PAIRS, _STEPS, _TOLERANCE = 10, 40, 1e-4
#: LightGBM's default share of the old leaf value in ``refit``, and its least sum of second derivatives.
_DECAY, _LEAST_HESSIAN = 0.9, 1e-3


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss of raw scores [rows, targets] and true classes or numbers, as a sum over rows."""

    name: str
    #: Return the loss, and its gradient by raw scores.
    evaluate: Callable[[Array, Array], tuple[float, Array]]
    #: Return probabilities [rows, classes], or numbers [rows].
    predict: Callable[[Array], Array]
    #: A bound of the second derivatives.
    curvature: float
    #: Return the second derivatives by each raw score.
    curvatures: Callable[[Array], Array] = np.ones_like


def _logistic(raw: Array, y: Array) -> tuple[float, Array]:
    margin = raw[:, 0]
    return float((np.logaddexp(0, margin) - y * margin).sum()), (_sigmoid(margin) - y)[:, None]


def _softmax_loss(raw: Array, y: Array) -> tuple[float, Array]:
    probabilities = _softmax(raw)
    rows = np.arange(len(y))
    loss = -np.log(np.maximum(probabilities[rows, y.astype(np.int64)], 1e-300)).sum()
    probabilities[rows, y.astype(np.int64)] -= 1
    return float(loss), probabilities


def _brier(raw: Array, y: Array) -> tuple[float, Array]:
    difference = raw - np.eye(raw.shape[1])[y.astype(np.int64)]
    return float((difference**2).sum() / 2), difference


def _squared(raw: Array, y: Array) -> tuple[float, Array]:
    difference = raw[:, 0] - y
    return float((difference**2).sum() / 2), difference[:, None]


def _sigmoid(margin: Array) -> Array:
    return 0.5 * (1 + np.tanh(margin / 2))


def _two_classes(raw: Array) -> Array:
    positive = _sigmoid(raw[:, 0])
    return np.stack([1 - positive, positive], axis=1)


def _softmax(raw: Array) -> Array:
    powers = np.exp(raw - raw.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def _variance(probability: Array) -> Array:
    return np.asarray(probability * (1 - probability))


LOGISTIC = Loss("logistic", _logistic, _two_classes, 0.25, lambda raw: _variance(_sigmoid(raw)))
SOFTMAX = Loss("softmax", _softmax_loss, _softmax, 0.5, lambda raw: _variance(_softmax(raw)))
#: The probability of the second class as a sum of weights, and averaged probabilities of forests.
PROBABILITY = Loss("brier", _squared, lambda raw: np.stack([1 - raw[:, 0], raw[:, 0]], axis=1), 1.0)
BRIER = Loss("brier", _brier, lambda raw: raw, 1.0)
SQUARED = Loss("squared", _squared, lambda raw: raw[:, 0], 1.0)


@dataclass(frozen=True, eq=False)
class LeafProblem:
    """Rows, the weights that each of them adds up, and the loss."""

    #: For each row, the weights that it reaches, in columns of one tree and target each; may be a memory-mapped file.
    reached: Array
    #: The columns of each target.
    columns: Sequence[slice]
    y: Array
    #: Raw scores without weights, by target.
    base: Array
    #: What sums are multiplied with: 1, or 1 / trees for averages.
    scale: float
    loss: Loss
    #: The original weights.
    original: Array

    def part(self, rows: slice) -> LeafProblem:
        """Return the problem for some of the rows."""
        return LeafProblem(
            self.reached[rows], self.columns, self.y[rows], self.base, self.scale, self.loss, self.original
        )

    def raw(self, weights: Array, rows: slice = slice(None)) -> Array:
        """Return raw scores, [rows, targets]."""
        reached = self.reached[rows]
        sums = [weights[reached[:, columns]].sum(axis=1) for columns in self.columns]
        return self.base + self.scale * np.stack(sums, axis=1)

    def predict(self, weights: Array) -> Array:
        """Return the predictions of all rows."""
        blocks = [self.loss.predict(self.raw(weights, rows)) for rows in self._blocks()]
        return np.concatenate(blocks)

    def evaluate(self, weights: Array) -> tuple[float, Array]:
        """Return the sum of the losses, and its gradient by weights."""
        total, gradient = 0.0, np.zeros(len(weights))
        for rows in self._blocks():
            loss, slopes = self.loss.evaluate(self.raw(weights, rows), self.y[rows])
            total += loss
            gradient += self._sums(slopes, rows)
        return total, self.scale * gradient

    def counts(self) -> Array:
        """Return how many rows reach each weight."""
        ones = np.ones((len(self.y), len(self.columns)))
        return sum((self._sums(ones[rows], rows) for rows in self._blocks()), np.zeros(len(self.original)))

    def _sums(self, values: Array, rows: slice) -> Array:
        """Return the sum over rows of their values, [rows, targets], by the weights that they reach."""
        reached = self.reached[rows]
        total = np.zeros(len(self.original))
        for target, columns in enumerate(self.columns):
            chosen = reached[:, columns]
            repeated = np.repeat(values[:, target], chosen.shape[1])
            total += np.bincount(chosen.ravel(), repeated, minlength=len(total))
        return total

    def _blocks(self) -> list[slice]:
        return [slice(at, at + _BLOCK) for at in range(0, len(self.y), _BLOCK)]


def fit_leaves(problem: LeafProblem, ridge: float, start: Array | None = None) -> Array:
    """Return the weights that minimise the losses plus the ridge towards the original ones.

    Args:
        problem: The problem.
        ridge: The weight of the squared distance to the original weights, in units of rows.
        start: The first weights; the original ones if missing.
    """
    ridge *= problem.loss.curvature

    def evaluate(weights: Array) -> tuple[float, Array]:
        loss, gradient = problem.evaluate(weights)
        step = weights - problem.original
        return loss + ridge / 2 * float(step @ step), gradient + ridge * step

    trees = problem.reached.shape[1] / len(problem.columns)
    diagonal = problem.loss.curvature * problem.scale**2 * problem.counts() * np.sqrt(trees) + ridge
    return _minimise(evaluate, problem.original if start is None else start, diagonal)


def _minimise(evaluate: Callable[[Array], tuple[float, Array]], start: Array, diagonal: Array) -> Array:
    """Return the minimum of a convex function by L-BFGS with backtracking."""
    point = start.copy()
    value, gradient = evaluate(point)
    enough = _TOLERANCE * float(np.abs(gradient).max(initial=0.0))
    pairs: list[tuple[Array, Array]] = []
    for _ in range(_STEPS):
        if float(np.abs(gradient).max(initial=0.0)) <= enough:
            break
        direction = -_product(gradient, pairs, diagonal)
        slope, length = float(gradient @ direction), 1.0
        while length > 1e-6:
            after = point + length * direction
            value_after, gradient_after = evaluate(after)
            if value_after <= value + 1e-4 * length * slope:
                break
            length /= 2
        else:
            break
        step, change = after - point, gradient_after - gradient
        if float(step @ change) > 0:
            pairs = [*pairs, (step, change)][-_PAIRS:]
        point, value, gradient = after, value_after, gradient_after
    return point


def _product(gradient: Array, pairs: Sequence[tuple[Array, Array]], diagonal: Array) -> Array:
    """Return the approximate inverse Hessian times a gradient: the two loops of L-BFGS."""
    left, factors = gradient.copy(), []
    for step, change in reversed(pairs):
        factor = float(step @ left) / float(step @ change)
        factors.append(factor)
        left = left - factor * change
    left = left / diagonal
    if pairs:
        step, change = pairs[-1]
        left *= float(step @ change) / float(change @ (change / diagonal))
    for (step, change), factor in zip(pairs, reversed(factors), strict=True):
        left = left + step * (factor - float(change @ left) / float(step @ change))
    return left


def refit(problem: LeafProblem, shrinkage: float) -> Array:
    """Return weights as LightGBM's ``refit`` computes them, tree by tree, for a logistic or a squared loss.

    A weight becomes nine tenths of itself plus a tenth of the Newton step of its rows, shrunk as in training, for the
    scores of all trees before it. Weights that no row reaches keep nine tenths, as in LightGBM.

    Args:
        problem: A problem with one target.
        shrinkage: The learning rate of the original.
    """
    weights = problem.original.copy()
    raw = np.repeat(problem.base[None, :], len(problem.y), axis=0)
    for tree in range(problem.reached.shape[1]):
        chosen = problem.reached[:, tree]
        _, slopes = problem.loss.evaluate(raw, problem.y)
        gradient = np.bincount(chosen, slopes[:, 0], minlength=len(weights))
        hessian = np.bincount(chosen, problem.loss.curvatures(raw)[:, 0], minlength=len(weights))
        own = np.unique(chosen)
        newton = -gradient[own] / np.maximum(hessian[own], _LEAST_HESSIAN)
        weights[own] = _DECAY * weights[own] + (1 - _DECAY) * shrinkage * newton
        raw = raw + problem.scale * weights[chosen][:, None]
    return weights
