"""Leaves fitted anew on the exact leaf of each row: a convex problem, ridge towards the original leaves.

The raw score of a row and target is the sum of the weights of the leaves that it reaches. The weights w minimise

    sum of losses(y, base + scale * A w) + ridge / 2 * |w - w0|^2,

in which A, with a 1 for each leaf that a row reaches, has one entry for each row and tree. It is a sparse matrix of a
few thousand rows at a time. The solver is SciPy's L-BFGS (Liu and Nocedal, 1989), in units in which the diagonal of a
bound of the Hessian is 1. Leaves that no row reaches keep their weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from chrion.common.installation import install_hint
from chrion.errors import OptionError

Array = np.ndarray[Any, Any]
#: The entries of the matrix of a block of rows, and the most entries of all blocks that are kept.
_BLOCK, _KEPT = 1 << 20, 1 << 24
#: The most steps of the solver, and the gradient relative to that of the original at which it stops.
_STEPS, _TOLERANCE = 100, 1e-4
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
#: The losses whose scores may be moved by a constant, or by more trees.
OPEN = (LOGISTIC, SOFTMAX, SQUARED)


@dataclass(frozen=True, eq=False)
class LeafProblem:
    """Rows, the weights that each of them adds up, and the loss."""

    #: For each row, the weights that it reaches, in columns of one tree and target each; may be a memory-mapped file.
    reached: Array
    #: The columns of each target.
    columns: Sequence[slice]
    y: Array
    #: Raw scores without weights, by target, or by row and target.
    base: Array
    #: What sums are multiplied with: 1, or 1 / trees for averages.
    scale: float
    loss: Loss
    #: The original weights.
    original: Array

    def part(self, rows: slice) -> LeafProblem:
        """Return the problem for some of the rows."""
        return LeafProblem(
            self.reached[rows], self.columns, self.y[rows], self._base(rows), self.scale, self.loss, self.original
        )

    def moved(self, levels: Array) -> LeafProblem:
        """Return the problem with numbers added to raw scores, [rows, targets] or [targets]."""
        return replace(self, base=self.base + levels)

    def _base(self, rows: slice) -> Array:
        return self.base[rows] if self.base.ndim > 1 else self.base

    def raw(self, weights: Array, rows: slice = slice(None)) -> Array:
        """Return raw scores, [rows, targets]."""
        reached = self.reached[rows]
        sums = np.empty((len(reached), len(self.columns)))
        for own in blocks(*reached.shape):
            for at, columns in enumerate(self.columns):
                sums[own, at] = weights[reached[own, columns]].sum(axis=1)
        return self._base(rows) + self.scale * sums

    def predict(self, weights: Array) -> Array:
        """Return the predictions of all rows."""
        return np.concatenate([self.loss.predict(self._sums(weights, *block)) for block in self._blocks()])

    def evaluate(self, weights: Array) -> tuple[float, Array]:
        """Return the sum of the losses, and its gradient by weights."""
        total, gradient = 0.0, np.zeros(len(weights))
        for rows, own in self._blocks():
            loss, slopes = self.loss.evaluate(self._sums(weights, rows, own), self.y[rows])
            total += loss
            for matrix, slope in zip(own, slopes.T, strict=True):
                gradient += matrix.T @ slope
        return total, self.scale * gradient

    def counts(self) -> Array:
        """Return how many rows reach each weight."""
        total = np.zeros(len(self.original))
        for _, own in self._blocks():
            for matrix in own:
                total += np.bincount(matrix.indices, minlength=len(total))
        return total

    def _sums(self, weights: Array, rows: slice, own: Sequence[Any]) -> Array:
        return self._base(rows) + self.scale * np.stack([matrix @ weights for matrix in own], axis=1)

    def _blocks(self) -> Iterable[tuple[slice, Sequence[Any]]]:
        """Return rows, and the matrix of each target for them."""
        return self._all_blocks if self.reached.size <= _KEPT else self._made_blocks()

    @cached_property
    def _all_blocks(self) -> list[tuple[slice, Sequence[Any]]]:
        return list(self._made_blocks())

    def _made_blocks(self) -> Iterator[tuple[slice, Sequence[Any]]]:
        for rows in blocks(*self.reached.shape):
            yield rows, [_sparse(self.reached[rows, columns], len(self.original)) for columns in self.columns]


def blocks(rows: int, each: int) -> Iterator[slice]:
    """Yield the rows of blocks with about a million entries, of which each row has so many."""
    size = max(1, _BLOCK // max(1, each))
    return (slice(at, at + size) for at in range(0, rows, size))


def _sparse(reached: Array, weights: int) -> Any:
    """Return the matrix with a 1 for each weight that a row reaches."""
    rows, each = reached.shape
    ends = np.arange(rows + 1, dtype=np.int32) * each
    return _scipy("sparse").csr_matrix(
        (np.ones(rows * each), reached.astype(np.int32).ravel(), ends), shape=(rows, weights)
    )


def _scipy(module: str) -> Any:
    """Return a module of SciPy, which scikit-learn requires.

    Raises:
        OptionError: It is not installed.
    """
    try:
        return importlib.import_module(f"scipy.{module}")
    except ImportError as error:
        raise OptionError("fitting leaves needs the package scipy", hint=install_hint("finetune")) from error


def fit_leaves(problem: LeafProblem, ridge: float, start: Array | None = None, tolerance: float = _TOLERANCE) -> Array:
    """Return the weights that minimise the losses plus the ridge towards the original ones.

    Args:
        problem: The problem.
        ridge: The weight of the squared distance to the original weights, in units of rows.
        start: The first weights; the original ones if missing.
        tolerance: The largest gradient, relative to that of the original weights, at which the solver stops.
    """
    ridge *= problem.loss.curvature
    trees = problem.reached.shape[1] / len(problem.columns)
    diagonal = problem.loss.curvature * problem.scale**2 * problem.counts() * np.sqrt(trees) + ridge
    unit = 1 / np.sqrt(diagonal)

    def evaluate(steps: Array) -> tuple[float, Array]:
        moved = unit * steps
        loss, gradient = problem.evaluate(problem.original + moved)
        return loss + ridge / 2 * float(moved @ moved), unit * (gradient + ridge * moved)

    first = np.zeros(len(unit)) if start is None else (start - problem.original) / unit
    enough = tolerance * float(np.abs(unit * problem.evaluate(problem.original)[1]).max(initial=0.0))
    options = {"maxiter": _STEPS, "gtol": enough, "ftol": 0.0}
    found = _scipy("optimize").minimize(evaluate, first, jac=True, method="L-BFGS-B", options=options)
    return np.asarray(problem.original + unit * found.x)


def refit(problem: LeafProblem, shrinkage: float) -> Array:
    """Return weights as LightGBM's ``refit`` computes them, tree by tree, for a logistic or a squared loss.

    A weight becomes nine tenths of itself plus a tenth of the Newton step of its rows, shrunk as in training, for the
    scores of all trees before it. Weights that no row reaches keep nine tenths, as in LightGBM.

    Args:
        problem: A problem with one target.
        shrinkage: The learning rate of the original.
    """
    weights = _DECAY * problem.original
    raw = np.zeros((len(problem.y), 1)) + problem.base
    for tree in range(problem.reached.shape[1]):
        chosen = problem.reached[:, tree]
        _, slopes = problem.loss.evaluate(raw, problem.y)
        gradient = np.bincount(chosen, slopes[:, 0], minlength=len(weights))
        hessian = np.bincount(chosen, problem.loss.curvatures(raw)[:, 0], minlength=len(weights))
        own = np.unique(chosen)
        newton = -gradient[own] / np.maximum(hessian[own], _LEAST_HESSIAN)
        weights[own] += (1 - _DECAY) * shrinkage * newton
        raw = raw + problem.scale * weights[chosen][:, None]
    return weights
