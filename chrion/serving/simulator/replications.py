"""Replications: a scenario simulated with several seeds, and confidence intervals of its figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, mean, stdev

from chrion.common.wrong_values import wrong_value
from chrion.serving.simulator.find import METRICS
from chrion.serving.simulator.sweep import SweepPoint

REPLICATIONS_SCHEMA = "chrion.simulation-replications/1"
#: The probability that an interval contains the expected value.
CONFIDENCE = 0.95
#: Quantiles of Student's t distribution at 0.975, for 1 to 12 degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)


@dataclass(frozen=True, slots=True)
class Interval:
    """The mean of independent replications, and half the width of its confidence interval."""

    mean: float
    half_width: float


def seeds(first: int, number: int) -> list[dict[str, int]]:
    """Return the points of a sweep over seeds.

    Raises:
        OptionError: There are fewer than two replications, from which no interval follows.
    """
    if number < 2:
        raise wrong_value("--replications", "2 or more", number)
    return [{"seed": first + i} for i in range(number)]


def intervals(points: Sequence[SweepPoint]) -> dict[str, dict[str, Interval]]:
    """Return the interval of each figure of :data:`chrion.serving.simulator.find.METRICS`, by pattern and figure."""
    patterns = [result.pattern for result in points[0].results]
    return {
        pattern: {name: interval([figure(point.results[i]) for point in points]) for name, figure in METRICS.items()}
        for i, pattern in enumerate(patterns)
    }


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent values and half the width of its 95 % confidence interval (Student's t)."""
    if any(math.isnan(value) for value in values):
        return Interval(math.nan, math.nan)
    return Interval(mean(values), t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values)))


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
