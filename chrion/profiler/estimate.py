"""Times of operators that a profile lacks, from those it has: ``time = a + flops / f + bytes / w`` for each type."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Work:
    """What an operator does, and how long it took where it was measured."""

    op_type: str
    flops: float
    #: Read and written: inputs, weights, outputs.
    bytes: float
    time_ms: float = 0.0


class Estimator:
    """Fits the known operators of each type; a type without any borrows from all the others that take time."""

    def __init__(self, known: Sequence[Work]) -> None:
        self._known = known
        self._fits: dict[str, npt.NDArray[np.float64]] = {}

    def time_ms(self, work: Work) -> float:
        """Estimated time; zero if nothing at all is known."""
        if work.op_type not in self._fits:
            same = [w for w in self._known if w.op_type == work.op_type] or [w for w in self._known if w.time_ms]
            self._fits[work.op_type] = fit(same)
        return float(self._fits[work.op_type] @ np.array([1.0, work.flops, work.bytes]))


def fit(known: Sequence[Work]) -> npt.NDArray[np.float64]:
    """Coefficients of 1, flops and bytes, none below zero, with the least squared relative error.

    Non-negative least squares over three columns: the best of the seven ways to leave columns out whose coefficients
    are all positive. Fewer columns win unless more of them explain the times better.
    """
    best = np.zeros(3)
    if not known:
        return best
    columns = np.array([[1.0, w.flops, w.bytes] for w in known])
    times = np.maximum([w.time_ms for w in known], 1e-9)
    least = np.inf
    for size in (1, 2, 3):
        for chosen in map(list, itertools.combinations((1, 2, 0) if len(known) == 1 else (0, 1, 2), size)):
            scaled = columns[:, chosen] / times[:, None]
            if not scaled.any(axis=0).all():
                continue
            solution, *_ = np.linalg.lstsq(scaled, np.ones(len(known)), rcond=None)
            error = float(np.sum((scaled @ solution - 1) ** 2))
            if (solution >= 0).all() and error < least - 1e-9:
                least, best = error, np.zeros(3)
                best[chosen] = solution
    return best
