"""The operators of a plan that run on Chrion's native kernels, and what those in bfloat16 change."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.common.units import format_share
from chrion.graph.chains import STATES
from chrion.graph.dag import Dag
from chrion.profiler.precision import Precision
from chrion.profiler.profiles import Profile
from chrion.scheduler.schedule import Schedule

#: Most types of operators that a remark names.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """The fields of a plan that describe native kernels."""

    native: tuple[str, ...]
    precision: Precision
    expected_error: float
    packed_mb: float


def native_kernels(dag: Dag, profile: Profile, schedule: Schedule) -> NativeKernels:
    """Return the operators on CPU lanes whose native kernel was measured to be the faster one, and their precision.

    The error to expect in bfloat16 is the root of the sum of the squares of the operators' errors, as of independent
    ones. Chunks of a recurrent layer, which have the same weights, count as the one with the largest error: a cell
    forgets old errors as it forgets old inputs. Each weight is packed once, in the precision of products.
    """
    names, errors, weights = [], dict[tuple[int, ...], float](), set[int]()
    for i, signature in enumerate(dag.signatures):
        if not is_accelerator_lane(schedule.lanes[i]) and profile.is_native(signature, schedule.width(i)):
            names.append(dag.names[i])
            error = profile.operators[signature].native_error
            layer = dag.weights[i] if dag.op_types[i] in STATES else (-1 - i,)
            errors[layer] = max(errors.get(layer, 0.0), error)
            weights.update(dag.weights[i])
    packed_mb = sum(dag.weight_bytes[weight] for weight in weights) / 1e6
    if not names or profile.precision == "float32":
        return NativeKernels(tuple(names), "float32", 0.0, packed_mb)
    return NativeKernels(tuple(names), profile.precision, math.hypot(*errors.values()), packed_mb / 2)


def remark_on_precision(dag: Dag, profile: Profile, native: Container[str]) -> str:
    """Return what bfloat16 gives where it was asked for; empty otherwise.

    Args:
        dag: The operators of a plan.
        profile: Their costs.
        native: The names of those that run on native kernels.
    """
    if profile.precision == "float32":
        return profile.other_precision
    total_ms, saved_ms, without_ms = 0.0, 0.0, dict[str, float]()
    for name, signature, kind in zip(dag.names, dag.signatures, dag.op_types, strict=True):
        if cost := profile.operators.get(signature):
            total_ms += cost.cpu_ms[0]
            if name in native:
                saved_ms += max(0.0, cost.cpu_ms[0] - cost.native_ms[0])
            elif not cost.native_ms:
                without_ms[kind] = without_ms.get(kind, 0.0) + cost.cpu_ms[0]
    gain = (
        f"bf16 saves {format_share(saved_ms / total_ms)} of the operators' time" if saved_ms else "bf16 changes nothing"
    )
    rest_ms = sum(without_ms.values())
    if 2 * rest_ms > total_ms:
        types = ", ".join(sorted(without_ms, key=lambda kind: -without_ms[kind])[:_NAMED])
        return f"{gain}: {format_share(rest_ms / total_ms)} of the time is spent in {types}, without a kernel for bf16"
    return gain if saved_ms else f"{gain}: no operator of a CPU lane is faster in it"
