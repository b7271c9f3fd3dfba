"""New trees after those of a pipeline: at most a tenth of them, boosted on what its scores leave over.

A round grows a tree for each target by scikit-learn's histogram method: on the Newton step of each row, weighted by its
second derivative (Friedman, 2001). The rate and the number of rounds have the least loss on the rows to choose with.
Features are put into bins once for all trees: scikit-learn would do it for each, which takes most of the time.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from chrion.graph.trees import TreeEnsemble
from chrion.pipelines import leaves
from chrion.pipelines.histograms import ensemble_of_numbers
from chrion.pipelines.leaves import Loss
from chrion.pipelines.pipeline import Array
from chrion.pipelines.rows import Rows

#: New trees are at most this share of the old ones.
_SHARE = 10
_RATES = (0.1, 0.3)
#: The most leaves of a tree, and the most rows that trees are grown on: scikit-learn has them in memory in float64.
_LEAVES, _ROWS = 255, 200_000
#: The bins of a feature, which is also scikit-learn's limit.
_BINS = 255
#: The least second derivative of a row.
_LEAST = 1e-6


@dataclass(frozen=True, eq=False)
class NewTrees:
    """Trees to append, with a tree a target in each round."""

    trees: Sequence[TreeEnsemble]
    targets: Sequence[int]

    def raw(self, x: Array) -> Array:
        """Return what the trees add to raw scores, [rows, targets]."""
        total = np.zeros((len(x), len(self.targets)))
        for at, tree in enumerate(self.trees):
            total[:, at % len(self.targets)] += tree.entry_weights[tree.leaves_of(x)[:, 0]]
        return total


def grow(rows: Rows, x: Array, first: Array, whole: Array, seed: int) -> NewTrees | None:
    """Return new trees; None if none is better on the rows to choose with.

    Args:
        rows: The rows.
        x: Their features.
        first: Their raw scores by leaves that were fitted on the rows to fit, [rows, targets].
        whole: The same by leaves fitted on the rows to fit and to choose with.
        seed: The seed of scikit-learn.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    from threadpoolctl import threadpool_limits  # noqa: PLC0415 - scikit-learn requires it

    pipeline, y, choose = rows.pipeline, rows.y, rows.chosen
    ensemble, loss = pipeline.ensemble, pipeline.loss
    rounds = ensemble.trees // _SHARE // len(pipeline.targets)
    # Trees that are fitted to features in float32 may compare those in float64 otherwise.
    if not rounds or loss not in leaves.OPEN or ensemble.aggregate != "SUM" or ensemble.dtype != np.float32:
        return None
    size = int(np.clip(np.median(np.bincount(ensemble.leaf_trees)), 2, _LEAVES))
    with threadpool_limits(1, "openmp"):  # threads that wait for each other on busy cores take many times as long
        own = slice(max(0, rows.fit.stop - _ROWS), rows.fit.stop)
        bins = _Bins(x[own])
        binned, others = bins(x[own]), bins(x[choose])
        best, chosen = loss.evaluate(first[choose], y[choose])[0], (0, 0.0)
        for rate in _RATES:
            raw, grown = first[choose], _boost(binned, y[own], first[own], loss, rounds, rate, size, seed)
            for count, trees in enumerate(grown, start=1):
                raw = raw + np.stack([tree.predict(others) for tree in trees], axis=1)
                value = loss.evaluate(raw, y[choose])[0]
                if value < best:
                    best, chosen = value, (count, rate)
        count, rate = chosen
        if not count:
            return None
        own = slice(max(0, choose.stop - _ROWS), choose.stop)
        grown = _boost(bins(x[own]), y[own], whole[own], loss, count, rate, size, seed)
        targets = pipeline.targets.tolist()
        return NewTrees(
            [tree.ensemble(bins, at, ensemble) for part in grown for tree, at in zip(part, targets, strict=True)],
            targets,
        )


class _Bins:
    """The bins of features, as numbers that are compared in place of values.

    Args:
        x: Rows, [rows, features].
    """

    def __init__(self, x: Array) -> None:
        self._edges = [_edges(column[np.isfinite(column)]) for column in x.T]

    def __call__(self, x: Array) -> Array:
        """Return the bins of rows: of each value, how many edges are below it; missing values stay."""
        found = [np.searchsorted(edges, column) for edges, column in zip(self._edges, x.T, strict=True)]
        return np.where(np.isnan(x), np.nan, np.stack(found, axis=1))

    def thresholds(self, features: Array, bins: Array) -> Array:
        """Return the values below which features are in these bins or lower ones; infinity for all bins."""
        pairs = zip(features.tolist(), bins.tolist(), strict=True)
        return np.array(
            [self._edges[at][int(b)] if b < len(self._edges[at]) else np.inf for at, b in pairs], np.float32
        )


def _edges(values: Array) -> Array:
    """Return the edges between bins: in the middle between few values, else quantiles."""
    few = np.unique(values)
    if len(few) <= _BINS:
        return np.asarray(few[:-1] + (few[1:] - few[:-1]) / 2)
    shares = np.linspace(0, 1, _BINS + 1)[1:-1]
    return np.unique(np.quantile(values, shares, method="averaged_inverted_cdf").astype(np.float32))


@dataclass(frozen=True, eq=False)
class _Tree:
    """A fitted estimator of one tree on bins, shrunk by a rate."""

    estimator: Any
    rate: float

    def predict(self, x: Array) -> Array:
        return np.asarray(self.rate * self.estimator.predict(x))

    def ensemble(self, bins: _Bins, target: int, like: TreeEnsemble) -> TreeEnsemble:
        """Return the tree as an ensemble for a target of another one."""
        found = ensemble_of_numbers(self.estimator)
        return replace(
            found,
            thresholds=bins.thresholds(found.features, found.thresholds),
            entry_targets=np.full(found.leaf_count, target),
            entry_weights=(self.rate * (found.entry_weights + found.base[0])).astype(like.dtype),
            targets=like.targets,
            base=found.base[:0],
        )


def _boost(  # noqa: PLR0913, PLR0917 - as documented above
    x: Array, y: Array, raw: Array, loss: Loss, rounds: int, rate: float, size: int, seed: int
) -> Iterator[list[_Tree]]:
    """Yield the trees of each round, one a target."""
    from sklearn.ensemble import HistGradientBoostingRegressor  # noqa: PLC0415 - part of an extra

    missing = np.isnan(x).all(axis=0)
    x = np.where(missing, 0.0, x) if missing.any() else x  # scikit-learn has no bins for features without values
    for _ in range(rounds):
        slopes, curvatures = loss.evaluate(raw, y)[1], loss.curvatures(raw)
        trees = []
        for slope, curvature in zip(slopes.T, np.maximum(curvatures, _LEAST).T, strict=True):
            estimator = HistGradientBoostingRegressor(
                max_iter=1, learning_rate=1.0, max_leaf_nodes=size, l2_regularization=1.0, early_stopping=False,
                random_state=seed,
            )  # fmt: skip
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trees.append(_Tree(estimator.fit(x, -slope / curvature, sample_weight=curvature), rate))
        raw = raw + np.stack([tree.predict(x) for tree in trees], axis=1)
        yield trees
