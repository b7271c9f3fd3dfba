"""Rates of arrivals that change over time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chrion.errors import ScenarioError
from chrion.serving.simulator.histograms import Floats


class RateCurve:
    """A factor of the rate, linear between points; after the last point, the curve begins again.

    Arrivals are those of a process of constant rate whose time is the integral of the factor. For exponential gaps this
    is exactly the Poisson process of the changing rate (Cinlar, Introduction to Stochastic Processes, section 4.7),
    without the rejected arrivals of thinning.

    Args:
        points: Times in s and factors. The first time is 0, times do not decrease, and equal ones make a step.
        section: The section of the scenario's key ``curve``, for messages.

    Raises:
        ScenarioError: The points have another form, or the rate is zero at all times.
    """

    def __init__(self, points: Sequence[tuple[float, float]], section: str = "workload") -> None:
        times, factors = np.array(points, np.float64).reshape(-1, 2).T
        lengths = np.diff(times)
        if len(times) < 2 or times[0] or (lengths < 0).any() or not times[-1]:
            expected = "two or more points [time_s, factor] from time 0 on, whose times do not decrease"
            raise ScenarioError(
                f"{section}.curve: expected {expected}, found {[list(point) for point in points]}"[:300]
            )
        kept = lengths > 0
        #: Of each part: its begin in s, its first factor, and the change of the factor in a second.
        self._begins, self._factors = times[:-1][kept], factors[:-1][kept]
        self._slopes = np.diff(factors)[kept] / lengths[kept]
        areas = (factors[:-1] + factors[1:])[kept] / 2 * lengths[kept]
        #: The integral of the factor at the begin of each part, and after the last one.
        self._sums = np.concatenate([[0.0], np.cumsum(areas)])
        self._period_s = float(times[-1])
        if not self._sums[-1]:
            raise ScenarioError(f"{section}.curve: expected a factor above 0")

    def times_s(self, integrals: Floats) -> Floats:
        """Return the times at which the integral of the factor has some values. Shape [n]."""
        rounds, rest = np.divmod(integrals, self._sums[-1])
        part = np.clip(np.searchsorted(self._sums, rest, side="right") - 1, 0, len(self._begins) - 1)
        missing, factor = rest - self._sums[part], self._factors[part]
        # The positive solution of factor x + slope x^2 / 2 = missing, in a form without cancellation.
        root = np.sqrt(np.maximum(0.0, factor**2 + 2 * self._slopes[part] * missing))
        inside = np.divide(2 * missing, factor + root, out=np.zeros_like(rest), where=missing > 0)
        times: Floats = rounds * self._period_s + self._begins[part] + inside
        return times
