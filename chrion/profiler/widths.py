"""Widths: operators on several cores at once, with threads of onnxruntime (intra-operator parallelism).

Operators are measured at a few widths. Between them, their time is fitted by Amdahl's law with one parameter, the
serial share ``s`` of the time on one core: ``t(w) = t(1) * (s + (1 - s) / w)``.

Amdahl, "Validity of the single processor approach to achieving large scale computing capabilities", AFIPS 1967.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

#: Operators that take less on one core are not measured on several: waking a thread takes about as long.
MIN_WIDE_MS = 0.02


def measured_widths(cores: int) -> tuple[int, ...]:
    """Return the widths at which operators are measured: 2, 4, 8, ... and all cores; none for one core."""
    powers = [2**power for power in range(1, cores.bit_length()) if 2**power <= cores]
    return tuple(sorted({*powers, cores} - {0, 1}))


def planned_widths(cores: int) -> tuple[int, ...]:
    """Return the widths that plans may use: those measured, and half of the cores."""
    return tuple(sorted({*measured_widths(cores), cores // 2} - {0, 1}))


def serial_share(alone_ms: float, times_ms: Mapping[int, float]) -> float:
    """Fit Amdahl's law by least squares of the relative error.

    Args:
        alone_ms: Time on one core.
        times_ms: Measured times by width, of 2 or more.

    Returns:
        The serial share, 0 or more; above 1 if the operator is slower on several cores. It is 1 without measurements.
    """
    if not times_ms or not alone_ms:
        return 1.0
    # t(w) / t = a + b s with a = alone / (w t), b = alone (1 - 1 / w) / t; minimise the sum of (a + b s - 1)^2.
    rows = [(alone_ms / (w * ms), alone_ms * (1 - 1 / w) / ms) for w, ms in times_ms.items() if ms > 0]
    weight = sum(b * b for _, b in rows)
    return max(0.0, sum(b * (1 - a) for a, b in rows) / weight) if weight else 1.0


def amdahl_ms(alone_ms: float, share: float, width: int) -> float:
    """Return the time on ``width`` cores by Amdahl's law."""
    return alone_ms * (share + (1 - share) / width)


def times_at(alone_ms: float, measured: Mapping[int, float], widths: Iterable[int]) -> tuple[float, ...]:
    """Return the times at some widths: as measured, or else fitted. Without measurements, no width is a gain."""
    share = serial_share(alone_ms, measured)
    return tuple(measured[w] if w in measured else amdahl_ms(alone_ms, share, w) for w in widths)


def fit_errors(operators: Sequence[tuple[float, Mapping[int, float]]]) -> list[float]:
    """Return the relative error of the fit at each measured width of each operator.

    An operator with a single measured width is left out, since one parameter fits it exactly.

    Args:
        operators: The time on one core, and measured times by width.
    """
    errors = []
    for alone_ms, measured in operators:
        if len(measured) > 1:
            share = serial_share(alone_ms, measured)
            errors += [abs(amdahl_ms(alone_ms, share, w) / ms - 1) for w, ms in measured.items() if ms > 0]
    return errors


def describe_fit(errors: Sequence[float]) -> str:
    """Return the error of the fit as text; empty without errors."""
    if not errors:
        return ""
    high = statistics.quantiles(errors, n=10, method="inclusive")[-1] if len(errors) > 1 else errors[0]
    return f"times on several cores: error of Amdahl's law {statistics.median(errors):.0%}, 90th percentile {high:.0%}"
