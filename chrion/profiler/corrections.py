"""Correction factors of estimated times, fitted from a few operators that were measured on the machine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from chrion.errors import ProfileError
from chrion.profiler.profiles import OperatorCost, Profile

#: The weight of the factor of all types in the factor of one type, in operators: a type with three measured operators
#: lies half-way between both.
_PRIOR = 3.0

Time = Callable[[OperatorCost], float | None]


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors from estimated to measured times on one device."""

    #: By operator type.
    by_type: Mapping[str, float]
    #: For types of which no operator was measured.
    other: float = 1.0

    def of(self, op_type: str) -> float:
        """Return the factor of a type."""
        return self.by_type.get(op_type, self.other)


def fit_factors(estimated: Mapping[str, OperatorCost], measured: Mapping[str, OperatorCost], time: Time) -> Factors:
    """Fit the factors of one device: medians of measured over estimated times, in logarithms.

    Args:
        estimated: Estimated costs by signature.
        measured: Measured costs by signature; only signatures that are in both are used.
        time: The time of an operator on the device, or None.
    """
    logs: dict[str, list[float]] = {}
    for signature in estimated.keys() & measured.keys():
        before, after = time(estimated[signature]), time(measured[signature])
        if before and after:
            logs.setdefault(estimated[signature].op_type, []).append(math.log(after / before))
    if not logs:
        return Factors({})
    other = statistics.median(statistics.median(own) for own in logs.values())
    by_type = {
        op_type: math.exp((len(own) * statistics.median(own) + _PRIOR * other) / (len(own) + _PRIOR))
        for op_type, own in logs.items()
    }
    return Factors(by_type, math.exp(other))


def correct_profile(estimated: Profile, measured: Profile) -> Profile:
    """Return an estimated profile with its times multiplied by factors that are fitted from measured operators.

    Args:
        estimated: The profile of a machine that is known from datasheets.
        measured: A profile of some of the same operators, measured on that machine.

    Raises:
        ProfileError: The profiles have no operator in common.
    """
    common = estimated.operators.keys() & measured.operators.keys()
    if not common:
        raise ProfileError(
            f"the profile of {measured.machine} has none of the model's operators",
            hint="measure the model, or a smaller one with layers of the same sizes, on that machine",
        )
    cpu = fit_factors(estimated.operators, measured.operators, lambda cost: cost.cpu_ms[0])
    accelerator = fit_factors(estimated.operators, measured.operators, lambda cost: cost.accelerator_ms)

    def corrected(cost: OperatorCost) -> OperatorCost:
        factor = cpu.of(cost.op_type)
        ms = cost.accelerator_ms
        return replace(
            cost,
            cpu_ms=tuple(factor * each for each in cost.cpu_ms),
            wide_ms=tuple(factor * each for each in cost.wide_ms),
            accelerator_ms=None if ms is None else accelerator.of(cost.op_type) * ms,
        )

    hardware = f"{estimated.machine.hardware}, corrected by {len(common)} measured operators"
    return replace(
        estimated,
        operators={signature: corrected(cost) for signature, cost in estimated.operators.items()},
        machine=replace(estimated.machine, hardware=hardware),
        _estimators={},
    )
