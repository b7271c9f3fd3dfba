"""Correction of estimated times by a few operators that were measured on the machine.

An operator's time is modelled as

    time = factor of its type * sum over the bounds of (factor of the bound * estimated part),

since a machine may have slower memory, arithmetic or calls than its datasheet says, for all types of operators, and
onnxruntime's kernels of one type may be better or worse than estimated. The factors are those of the greatest
probability, in logarithms, if errors and factors are normally distributed around the estimate. Thus the few operators
of a type change its factor little, but all operators together determine the factors of the bounds. This is a multilevel
model with partial pooling: A. Gelman and J. Hill, *Data Analysis Using Regression and Multilevel/Hierarchical Models*,
2007, chapter 12. Outliers have less weight: P. Huber, "Robust Estimation of a Location Parameter", Annals of
Mathematical Statistics 35(1), 1964.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from chrion.profiler.datasheet import Bound, Parts, Scales

#: Standard deviations in logarithms: of operators of one type around their factors, and of the factors around 1.
#: They are assumptions: operators differ from their estimates by a factor of 1.5, machines from their datasheets by one
#: of 2, and a type from the others by 15%.
_NOISE, _OF_BOUND, _OF_TYPE = 0.4, 0.7, 0.15
#: Errors in logarithms beyond which an operator has less weight: one assumed standard deviation.
_OUTLIER = 0.4
#: Steps of the Gauss-Newton method, and the maximum change of a factor in one, in logarithms (choices, not measured).
_STEPS, _LARGEST_STEP = 30, 0.5
_BOUNDS = tuple(Bound)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CorrectionSample:
    """An operator that was estimated and measured on one device."""

    op_type: str
    #: The parts of its estimate, one for each node.
    parts: tuple[Parts, ...]
    measured_ms: float


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors of estimated times on one device."""

    bounds: Scales = field(default_factory=dict)
    #: By operator type; types of which no operator was measured have 1.
    types: Mapping[str, float] = field(default_factory=dict)

    def time_ms(self, op_type: str, parts: Sequence[Parts]) -> float:
        """Return the corrected time of an operator from the parts of its estimate."""
        return self.types.get(op_type, 1.0) * sum(part.time_ms(self.bounds) for part in parts)


def fit_factors(samples: Sequence[CorrectionSample]) -> Factors:
    """Return the most probable factors given some measured operators; all are 1 without any.

    Each step takes O(n (b + t)^2 + (b + t)^3) for n operators, b bounds and t types.
    """
    samples = [s for s in samples if s.measured_ms > 0 and sum(part.time_ms() for part in s.parts) > 0]
    if not samples:
        return Factors()
    types = sorted({s.op_type for s in samples})
    prior = np.array([_OF_BOUND] * len(_BOUNDS) + [_OF_TYPE] * len(types)) ** -2.0
    logs = np.zeros(len(prior))
    for _ in range(_STEPS):
        errors, slopes = _linearise(samples, types, logs)
        weights = np.minimum(1.0, _OUTLIER / np.maximum(np.abs(errors), 1e-12)) / _NOISE**2
        curvature = slopes.T @ (weights[:, None] * slopes) + np.diag(prior)
        step = np.linalg.solve(curvature, slopes.T @ (weights * errors) + prior * logs)
        logs = logs - np.clip(step, -_LARGEST_STEP, _LARGEST_STEP)
    return _factors(logs, types)


def _linearise(samples: Sequence[CorrectionSample], types: Sequence[str], logs: Floats) -> tuple[Floats, Floats]:
    """Return the errors of corrected times in logarithms, and their derivatives by the logarithms of the factors."""
    factors = _factors(logs, types)
    errors = np.zeros(len(samples))
    slopes = np.zeros((len(samples), len(logs)))
    for at, sample in enumerate(samples):
        shares = np.zeros(len(_BOUNDS))
        for part in sample.parts:
            shares += list(part.by_bound(factors.bounds).values())
        total = float(shares.sum())
        errors[at] = math.log(factors.types[sample.op_type] * total / sample.measured_ms)
        slopes[at, : len(_BOUNDS)] = shares / total
        slopes[at, len(_BOUNDS) + types.index(sample.op_type)] = 1.0
    return errors, slopes


def _factors(logs: Floats, types: Sequence[str]) -> Factors:
    values = [float(each) for each in np.exp(logs)]
    count = len(_BOUNDS)
    return Factors(dict(zip(_BOUNDS, values[:count], strict=True)), dict(zip(types, values[count:], strict=True)))
