"""Quantities as people write them: durations, shapes, sizes.

Inside Chrion a latency is a float in milliseconds, a memory figure a float in megabytes (1 MB = 10^6 bytes),
and the unit stands in the name: ``latency_ms``, ``memory_mb``, ``bytes``, ``_us``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from chrion.errors import OptionError

_QUANTITY = re.compile(r"\s*(?P<number>[-+]?\d+(\.\d*)?([eE][-+]?\d+)?|[-+]?\.\d+)\s*(?P<unit>[a-zA-Z]*)\s*")
_MS_PER_UNIT = {"us": 1e-3, "ms": 1.0, "s": 1e3, "": 1.0}
_MB_PER_UNIT = {"kB": 1e-3, "MB": 1.0, "GB": 1e3, "": 1.0}
_SHAPE = re.compile(r"(?P<name>.+?)=(?P<dims>\d+(x\d+)*|scalar)")


def parse_duration_ms(text: str | float, what: str = "duration") -> float:
    """Read ``60ms``, ``0.06s``, ``500us`` or a plain number of milliseconds.

    Args:
        text: The duration.
        what: Its name in the error message.

    Returns:
        Milliseconds, finite and above zero.

    Raises:
        OptionError: It is not a duration, or not above zero.
    """
    value = _quantity(text, _MS_PER_UNIT)
    if not (math.isfinite(value) and value > 0):
        raise OptionError(f"{what}: {text!r} is not a duration above zero", hint="write it as 60ms, 0.06s or 500us")
    return value


def parse_size_mb(text: str | float, what: str = "size") -> float:
    """Read ``600MB``, ``0.6GB``, ``500kB`` or a plain number of megabytes.

    Args:
        text: The size.
        what: Its name in the error message.

    Returns:
        Megabytes (10^6 bytes), finite and not negative.

    Raises:
        OptionError: It is not a size, or negative.
    """
    value = _quantity(text, _MB_PER_UNIT)
    if not (math.isfinite(value) and value >= 0):
        raise OptionError(f"{what}: {text!r} is not a size from zero up", hint="write it as 600MB, 0.6GB or 500kB")
    return value


def parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Read ``NAME=1x3x224x224``, or ``NAME=scalar``.

    Returns:
        The name and its dimensions. A single number may stand for a named dimension (``batch=8``).

    Raises:
        OptionError: It is not of that form.
    """
    match = _SHAPE.fullmatch(text.strip())
    if not match:
        raise OptionError(f"shape: {text!r} is not NAME=DxD", hint="for example x=1x3x224x224, or batch=8")
    dims = match["dims"]
    return match["name"], () if dims == "scalar" else tuple(int(d) for d in dims.split("x"))


def parse_range(text: str, what: str = "range") -> tuple[float, ...]:
    """Read ``0:1:0.1`` (first, last, step; the last is included), or a list as ``0,0.1,0.5``.

    Raises:
        OptionError: It is neither, or more than a thousand values.
    """
    try:
        numbers = [float(part) for part in text.split(":" if ":" in text else ",")]
        if ":" not in text:
            values = numbers
        else:
            first, last, step = numbers
            values = [first + step * i for i in range(math.floor((last - first) / step + 1e-9) + 1)]
    except (ValueError, ZeroDivisionError, OverflowError):
        values = []
    if not 0 < len(values) <= 1000 or not all(math.isfinite(value) for value in values):
        raise OptionError(f"{what}: {text!r} is not a range of numbers", hint="write it as 0:1:0.1 or 0,0.2,0.5")
    return tuple(round(value, 12) for value in values)


def format_ms(ms: float) -> str:
    """Three significant digits with the unit that suits: ``59.3 ms``, ``4.71 ms``, ``830 us``, ``1.2 s``."""
    if ms >= 1000:
        return f"{ms / 1000:.3g} s"
    if ms >= 1 or ms == 0:
        return f"{ms:.{max(0, 2 - _digits(ms))}f} ms"
    return f"{ms * 1000:.3g} us"


def format_mb(mb: float) -> str:
    """Megabytes with one decimal, kilobytes below one: ``1643.0 MB``, ``12.4 kB``."""
    return f"{mb:.1f} MB" if mb >= 1 or mb == 0 else f"{mb * 1000:.1f} kB"


def format_shape(shape: tuple[int | str | None, ...]) -> str:
    """``1x3x224x224``; an unknown dimension prints as ``?``, no dimension as ``scalar``."""
    return "x".join("?" if d is None else str(d) for d in shape) or "scalar"


def _quantity(text: str | float, per_unit: Mapping[str, float]) -> float:
    """A number with one of some units; NaN if it is none."""
    match = _QUANTITY.fullmatch(str(text))
    return float(match["number"]) * per_unit.get(match["unit"], math.nan) if match else math.nan


def _digits(value: float) -> int:
    return math.floor(math.log10(value)) if value > 0 else 0
