"""Confidence intervals: of independent replications, and of the requests of one run.

Requests of one run depend on each other, as they share queues. Their means over long batches hardly do: the interval of
batch means (Law, Simulation Modeling and Analysis, section 9.5) takes these as the sample. What is left of the
correlation of neighbouring batches widens it, as in SBatch (Lada, Steiger and Wilson, 2008).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, mean, stdev
from typing import TypeVar

import numpy as np

from chrion.serving.simulator.histograms import Floats

_Result = TypeVar("_Result")
#: The probability that an interval contains the expected value.
CONFIDENCE = 0.95
#: Quantiles of Student's t distribution at 0.975, for 1 to 12 degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
#: Batches of an interval, or up to twice as many: with more, neighbours depend on each other; with fewer, the interval
#: is wide (Schmeiser, 1982, recommends 10 to 30).
BATCHES = 20
#: The largest correlation of neighbouring batches that is corrected; beyond it, the run is too short for an estimate.
_CORRELATED = 0.8


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate, and half the width of its confidence interval; NaN if it is not known."""

    mean: float
    half_width: float

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half_width


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent values and half the width of its 95 % confidence interval (Student's t)."""
    if any(math.isnan(value) for value in values):
        return Interval(math.nan, math.nan)
    if any(math.isinf(value) for value in values):
        return Interval(math.inf, 0.0)
    return Interval(mean(values), t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values)))


def intervals(
    names: Sequence[str], runs: Sequence[Sequence[_Result]], figures: Mapping[str, Callable[[_Result], float]]
) -> dict[str, dict[str, Interval]]:
    """Return the interval of each figure by name, given independent runs, each with one result for every name."""
    return {
        name: {figure: interval([value(run[at]) for run in runs]) for figure, value in figures.items()}
        for at, name in enumerate(names)
    }


def batch_half_width(means: Floats) -> float:
    """Return half the width of the interval of a figure, given its means over equal batches in their order.

    It is NaN for fewer than half of :data:`BATCHES`.
    """
    number = len(means)
    if number < BATCHES // 2:
        return math.nan
    deviations = means - means.mean()
    squares = float(deviations @ deviations)
    if squares == 0.0:
        return 0.0
    correlation = min(max(0.0, float(deviations[1:] @ deviations[:-1]) / squares), _CORRELATED)
    variance = squares / (number - 1) * (1 + correlation) / (1 - correlation)
    return t_quantile(number - 1) * math.sqrt(variance / number)


def warm_up(means: Floats) -> int:
    """Return the number of leading batch means that belong to the warm-up (MSER, White 1997).

    It is the number from 0 to half of all whose removal gives the rest the least squared standard error.
    """
    number = len(means)
    if number < BATCHES:
        return 0
    left = number - np.arange(number // 2 + 1)
    backwards = (means - means.mean())[::-1]
    sums, squares = (np.cumsum(values)[::-1][: len(left)] for values in (backwards, backwards**2))
    return int(np.argmin((squares - sums**2 / left) / left**2))


def t_quantile(degrees: int) -> float:
    """Return the 0.975 quantile of Student's t distribution.

    Above 12 degrees of freedom it is the expansion of Cornish and Fisher (Abramowitz and Stegun 26.7.5), which is exact
    to three decimals.
    """
    if degrees <= len(_T):
        return _T[degrees - 1]
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3
