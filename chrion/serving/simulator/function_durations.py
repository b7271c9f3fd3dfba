"""Execution times of functions, drawn from the quantiles of their distributions that a trace gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chrion.serving.simulator.requests import Floats, Indices
from chrion.serving.simulator.traces import FunctionFigures

#: The shortest execution time: traces round to whole ms, also to 0.
_SHORTEST_MS = 1.0


class FunctionDurations:
    """The distributions of the execution times of functions: their given quantiles, and between them lines.

    Above the last quantile but the maximum, a power of a uniform number takes the place of the line, such that the mean
    of the distribution is the given average, if that is possible: lines would about double it, since the longest
    execution times are rare.

    Args:
        figures: The figures of functions: ``Average``, and quantiles in %, ascending.
        names: The functions that are requested; those without figures have NaN.
    """

    def __init__(self, figures: FunctionFigures, names: Sequence[str]) -> None:
        rows = np.array([figures.rows.get(name, len(figures.values)) for name in names])
        values = np.vstack([figures.values, np.full(figures.values.shape[1:], np.nan)])[rows]
        self._averages, self._quantiles = values[:, 0], values[:, 1:]
        self._shares: Floats = np.array([float(label) for label in figures.labels[1:]]) / 100
        self._exponents = self._fit()

    def draw(self, functions: Indices, uniform: Floats) -> Floats:
        """Return execution times in ms, given the functions and uniform random numbers. Shapes: [n]."""
        part = np.clip(np.searchsorted(self._shares, uniform, side="right") - 1, 0, len(self._shares) - 2)
        low, high = self._quantiles[functions, part], self._quantiles[functions, part + 1]
        inside = (uniform - self._shares[part]) / (self._shares[part + 1] - self._shares[part])
        last = part == len(self._shares) - 2
        inside = np.where(last, np.clip(inside, 0, 1) ** self._exponents[functions], inside)
        drawn: Floats = np.maximum(low + (high - low) * inside, _SHORTEST_MS)
        return drawn

    def _fit(self) -> Floats:
        """Return the exponents of the last parts: low + (high - low) / (exponent + 1) is the mean of a part."""
        widths = np.diff(self._shares)
        middles = (self._quantiles[:, :-1] + self._quantiles[:, 1:]) / 2
        low, high = self._quantiles[:, -2], self._quantiles[:, -1]
        missing = (self._averages - middles[:, :-1] @ widths[:-1]) / widths[-1] - low
        with np.errstate(divide="ignore", invalid="ignore"):
            exponents = np.where(missing > 0, (high - low) / missing - 1, np.inf)
        fitted: Floats = np.clip(exponents, 0.0, 1e6)
        return fitted
