"""The operators of a plan that run on Chrion's native kernels, and the error that those in bfloat16 add."""

from __future__ import annotations

import math
from dataclasses import dataclass

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.graph.dag import Dag
from chrion.profiler.precision import Precision
from chrion.profiler.profiles import Profile
from chrion.scheduler.schedule import Schedule


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """The fields of a plan that describe native kernels."""

    native: tuple[str, ...]
    precision: Precision
    expected_error: float


def native_kernels(dag: Dag, profile: Profile, schedule: Schedule) -> NativeKernels:
    """Return the operators on one core whose native kernel was measured to be the faster one, and their precision.

    The error to expect in bfloat16 is the root of the sum of the squares of the operators' errors, as of independent
    ones. Chunks of a layer, which have the same weights, count as the one with the largest error: a cell forgets old
    errors as it forgets old inputs.
    """
    names, errors = [], dict[tuple[int, ...], float]()
    for i in sorted(profile.native(dag)):
        if not is_accelerator_lane(schedule.lanes[i]) and schedule.width(i) == 1:
            names.append(dag.names[i])
            error = profile.operators[dag.signatures[i]].native_error
            errors[dag.weights[i]] = max(errors.get(dag.weights[i], 0.0), error)
    if not names or profile.precision == "float32":
        return NativeKernels(tuple(names), "float32", 0.0)
    return NativeKernels(tuple(names), profile.precision, math.hypot(*errors.values()))
