"""A known base rate: rows weighted to it, and scores moved to it.

If the share of a class changes and nothing else does (prior shift), the odds of each class change by one factor for all
rows. In a sum of weights of leaves, with a logistic function or a softmax after it, that is a constant that is added to
the score of each class. It is fitted on labelled rows in which each class counts as much as its share says: the mean
probability of a class becomes its share (Elkan, 2001; Saerens et al., 2002).
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np

from chrion.common.wrong_values import wrong_value
from chrion.errors import DataError, OptionError
from chrion.pipelines import leaves
from chrion.pipelines.pipeline import Array, Pipeline

#: The share of a class by its label; for two classes, a number is that of the second one.
BaseRate = float | Mapping[Any, float]
_STEPS, _ENOUGH = 100, 1e-10


class ClassShares:
    """The share that each class is known to have.

    Args:
        pipeline: The pipeline.
        rate: The shares.

    Raises:
        OptionError: They are no shares of the pipeline's classes, or its scores cannot be moved.
    """

    def __init__(self, pipeline: Pipeline, rate: BaseRate) -> None:
        labels = pipeline.labels or ()
        if pipeline.tail or pipeline.loss not in {leaves.LOGISTIC, leaves.SOFTMAX}:
            raise OptionError(
                "base_rate: the scores of this model cannot be moved to it",
                hint="it needs a classifier with a logistic function or a softmax after its trees",
            )
        shares = dict(rate) if isinstance(rate, Mapping) else {}
        if not isinstance(rate, Mapping):
            if len(labels) != 2 or not isinstance(rate, Real):
                raise wrong_value("base_rate", "a share for each class", rate, hint=_listed(labels))
            shares = {labels[0]: 1 - rate, labels[1]: rate}
        if labels and isinstance(labels[0], str):
            shares = {str(label): share for label, share in shares.items()}
        if not all(isinstance(share, Real) and not isinstance(share, bool) for share in shares.values()):
            raise wrong_value("base_rate", "a number for each class", rate, hint=_listed(labels))
        if set(shares) != set(labels):
            raise wrong_value("base_rate", "a share for each class", ", ".join(map(str, shares)), hint=_listed(labels))
        self._shares = np.array([shares[label] for label in labels], np.float64)
        if not ((self._shares > 0).all() and abs(self._shares.sum() - 1) < 1e-6):
            raise wrong_value("base_rate", "shares between 0 and 1 that add up to 1", rate)

    def weights(self, y: Array) -> Array:
        """Return what rows count, so that each class has its share.

        Raises:
            DataError: There is no row of a class.
        """
        found = np.bincount(y.astype(np.int64), minlength=len(self._shares)) / len(y)
        if not found.all():
            raise DataError("base_rate: the rows have no example of a class", hint="give more rows")
        return np.asarray((self._shares / found)[y.astype(np.int64)])

    def constants(self, raw: Array, y: Array, loss: leaves.Loss) -> Array:
        """Return what to add to raw scores, [targets], so that mean probabilities are the shares.

        Args:
            raw: Raw scores of labelled rows, [rows, targets].
            y: Their classes.
            loss: What turns them into probabilities.
        """
        weights = self.weights(y)
        constants = np.zeros(raw.shape[1])
        for _ in range(_STEPS):
            mean = np.average(loss.predict(raw + constants), axis=0, weights=weights)
            steps = np.log(self._shares / np.maximum(mean, 1e-300))
            change = steps[-1:] - steps[:1] if loss is leaves.LOGISTIC else steps
            constants = constants + change
            if np.abs(change).max() < _ENOUGH:
                break
        return constants


def _listed(labels: tuple[Any, ...]) -> str:
    return f"the classes are {', '.join(map(repr, labels))}"
