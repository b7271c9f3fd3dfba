"""Estimated times of operators that a profile lacks: ``time = a + flops / f + bytes / w``, fitted per type."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """The work of an operator, and its time if it was measured."""

    op_type: str
    flops: float
    #: Bytes read and written: inputs, weights and outputs.
    bytes: float
    time_ms: float = 0.0


class Estimator:
    """An estimator fitted to the known operators of the same type, or to all of non-zero time if there are none."""

    def __init__(self, known: Sequence[OperatorWork]) -> None:
        self._known = known
        self._fits: dict[str, npt.NDArray[np.float64]] = {}

    def time_ms(self, work: OperatorWork) -> float:
        """Return the estimated time in ms; zero if no operator is known."""
        if work.op_type not in self._fits:
            same = [w for w in self._known if w.op_type == work.op_type] or [w for w in self._known if w.time_ms]
            self._fits[work.op_type] = fit(same)
        return float(self._fits[work.op_type] @ np.array([1.0, work.flops, work.bytes]))


def fit(known: Sequence[OperatorWork]) -> npt.NDArray[np.float64]:
    """Return the coefficients of 1, flops and bytes, none negative, with the least squared relative error.

    This is non-negative least squares over three columns: each of the seven non-empty sets of columns is fitted, and
    the best fit without a negative coefficient is returned. A larger set is chosen only if its error is smaller.
    """
    best = np.zeros(3)
    if not known:
        return best
    columns = np.array([[1.0, w.flops, w.bytes] for w in known], np.float64)
    times = np.maximum([w.time_ms for w in known], 1e-9)
    least_error = np.inf
    for size in (1, 2, 3):
        for chosen in map(list, itertools.combinations((1, 2, 0) if len(known) == 1 else (0, 1, 2), size)):
            scaled = columns[:, chosen] / times[:, None]
            if not scaled.any(axis=0).all():
                continue
            solution, *_ = np.linalg.lstsq(scaled, np.ones(len(known)), rcond=None)
            error = float(np.sum((scaled @ solution - 1) ** 2))
            if (solution >= 0).all() and error < least_error - 1e-9:
                least_error, best = error, np.zeros(3)
                best[chosen] = solution
    return best
