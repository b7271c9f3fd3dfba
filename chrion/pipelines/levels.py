"""The level of scores over time: what is added to the scores of a model so that they fit the rows of a time.

The share of a class often changes from day to day, for reasons that no feature tells. Leaves that are fitted on such
days take their level as if it were a property of the features, and carry it into the future. So the level is a random
effect of parts of the rows that follow each other: each part has an own one, which the leaves are fitted beside.

Levels vary if Cochran's test says so (1954). How much is DerSimonian and Laird's estimate (1986). What is kept for rows
to come is the mean level, shrunk by this variance as a James-Stein estimator does: nothing if the level is as often on
one side of the original's as on the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chrion.pipelines import leaves
from chrion.pipelines.leaves import Array, Loss

#: The parts of the rows, and the steps to the mean level.
_PARTS, _STEPS = 20, 30
#: The quantile of 99 % of the chi-squared distribution with a degree of freedom less than there are parts.
_VARIES = 36.19
#: The least sum of second derivatives of a part.
_LEAST = 1e-9


@dataclass(frozen=True, eq=False)
class Levels:
    """What to add to raw scores.

    Attributes:
        rows: Of each row, [rows, targets].
        future: Of rows to come, [targets].
        vary: Whether it varies with time.
    """

    rows: Array
    future: Array
    vary: bool = False


def levels_of(raw: Array, y: Array, loss: Loss) -> Levels:
    """Return the levels of rows in the order of time.

    Args:
        raw: Their raw scores, [rows, targets].
        y: Their classes or numbers.
        loss: The loss.
    """
    mean = np.zeros(raw.shape[1])
    if loss not in leaves.OPEN:
        return Levels(np.zeros_like(raw), mean)
    most = np.inf if loss is leaves.SQUARED else 1.0
    for _ in range(_STEPS):
        slopes, curvatures = loss.evaluate(raw + mean, y)[1], loss.curvatures(raw + mean)
        step = slopes.sum(axis=0) / np.maximum(curvatures.sum(axis=0), _LEAST)
        # Classes of a softmax share their scores: half a step, since twice the second derivatives bound the Hessian.
        mean = mean - np.clip(step / (2 if len(mean) > 1 else 1), -most, most)
    slopes, curvatures = loss.evaluate(raw + mean, y)[1], loss.curvatures(raw + mean)
    part = np.arange(len(y)) * _PARTS // len(y)
    starts = np.searchsorted(part, np.arange(_PARTS))
    weights = np.maximum(np.add.reduceat(curvatures, starts), _LEAST)
    found = -np.add.reduceat(slopes, starts) / weights  # a Newton step from the mean
    spread = ((slopes + curvatures * found[part]) ** 2).sum(axis=0) / (1 - _PARTS / len(y))
    weights *= weights.sum(axis=0) / np.maximum(spread, _LEAST)  # 1 / variance by chance
    total = weights.sum(axis=0)
    deviation = (weights * found**2).sum(axis=0)
    excess = np.where(deviation > _VARIES, deviation - (_PARTS - 1), 0.0)
    variance = excess / (total - (weights**2).sum(axis=0) / total)
    own = mean + found * variance / (variance + 1 / weights)
    kept = np.maximum(1 - variance / np.maximum(mean**2, _LEAST), 0.0)
    return Levels(own[part], mean * kept, bool((excess > 0).any()))
