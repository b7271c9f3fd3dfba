"""Parsing and formatting of quantities: durations, sizes, shapes and ranges.

Inside Chrion a latency is a float in milliseconds, a memory figure is a float in megabytes (1 MB = 10^6 bytes), and
names carry the unit: ``latency_ms``, ``memory_mb``, ``bytes``, ``_us``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import ROUND_FLOOR, Decimal

from chrion.common.wrong_values import wrong_value
from chrion.errors import OptionError

_QUANTITY = re.compile(r"\s*(?P<number>[-+]?\d+(\.\d*)?([eE][-+]?\d+)?|[-+]?\.\d+)\s*(?P<unit>[^\W\d_]*)\s*")
#: Nanoseconds per unit of time, and bytes per unit of size. Keys are in lower case; the empty one is for plain numbers.
#: Microseconds may be written with either of Unicode's two mus.
_NS_PER_UNIT = {"ns": 1, "us": 10**3, "µs": 10**3, "μs": 10**3, "ms": 10**6, "s": 10**9, "": 10**6}
_BYTES_PER_UNIT = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
    "": 10**6,
}
_SHAPE = re.compile(r"(?P<name>.+?)=(?P<dims>\d+(x\d+)*|scalar)")
#: Maximum values of a range, each of which is planned (a choice, not measured).
MAX_RANGE_VALUES = 1000


def parse_duration_ms(text: str | float, name: str = "duration", *, zero: bool = False) -> float:
    """Parse a duration such as ``60ms``, ``0.06 s``, ``500us`` or ``500µs``; a plain number is in milliseconds.

    Args:
        text: The duration. Upper and lower case are the same, and a space may precede the unit.
        name: The name of the option, for the error message.
        zero: Whether zero is a duration, too.

    Returns:
        Milliseconds, finite and above zero, or zero if that is allowed.

    Raises:
        OptionError: The text is not a duration, or not in this range.
    """
    value = _quantity(text, _NS_PER_UNIT) / 1e6
    if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
        bound = "of at least" if zero else "above"
        hint = "write it as 60ms, 0.06s or 500us; a plain number is in ms"
        raise wrong_value(name, f"a duration {bound} zero", text, hint=hint)
    return value


def parse_size_mb(text: str | float, name: str = "size", *, zero: bool = True) -> float:
    """Parse a size such as ``600MB``, ``1.5 gb``, ``800kB`` or ``512MiB``; a plain number is in megabytes.

    Decimal units are powers of 1000 bytes (1 MB = 10^6 bytes), binary units powers of 1024 (1 MiB = 2^20 bytes).

    Args:
        text: The size. Upper and lower case are the same, and a space may precede the unit.
        name: The name of the option, for the error message.
        zero: Whether zero is a size, too.

    Returns:
        Megabytes (10^6 bytes), finite and above zero, or zero if that is allowed.

    Raises:
        OptionError: The text is not a size, or not in this range.
    """
    value = _quantity(text, _BYTES_PER_UNIT) / 1e6
    if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
        hint = "write it as 600MB, 0.6GB, 500kB or 512MiB; a plain number is in MB"
        raise wrong_value(name, f"a size {'of zero or more' if zero else 'above zero'}", text, hint=hint)
    return value


def parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse ``NAME=1x3x224x224`` or ``NAME=scalar``.

    Returns:
        The name and its dimensions. A single number may stand for a named dimension (``batch=8``).

    Raises:
        OptionError: The text does not have that form.
    """
    match = _SHAPE.fullmatch(text.strip())
    if not match:
        raise wrong_value("--shape", "NAME=SHAPE", text, hint="for example x=1x96x64 for an input, or batch=8")
    dims = match["dims"]
    return match["name"], () if dims == "scalar" else tuple(int(d) for d in dims.split("x"))


def parse_range(text: str, name: str = "range") -> tuple[float, ...]:
    """Parse ``0:1:0.1`` (first, last, step; the last value is included) or a list such as ``0,0.1,0.5``.

    The values of a range are computed in decimal, so that they equal those of the corresponding list.

    Raises:
        OptionError: The text is neither, has no values, or has more than ``MAX_RANGE_VALUES``.
    """
    separator = ":" if ":" in text else ","
    try:
        numbers = [_finite(part) for part in text.split(separator)]
        count = _range_count(*numbers) if separator == ":" else Decimal(len(numbers))
    except (ArithmeticError, TypeError, ValueError):  # not a number, not three numbers, or a step of zero
        numbers, count = [], Decimal(0)
    if count < 1:
        raise wrong_value(name, "a range of numbers", text, hint="write it as 0:1:0.1 or 0,0.2,0.5")
    if count > MAX_RANGE_VALUES:
        number = f"{count:.0f}" if count < 10**15 else f"{count:.1g}"
        raise OptionError(f"{name}: expected a range of at most {MAX_RANGE_VALUES} values, found {number}")
    if separator == ":":
        first, _, step = numbers
        numbers = [first + step * i for i in range(int(count))]
    return tuple(float(number) for number in numbers)


def _finite(text: str) -> Decimal:
    """Parse a decimal number; raise ValueError if its float value is not finite."""
    number = Decimal(text.strip())
    if not math.isfinite(float(number)):
        raise ValueError(text)
    return number


def _range_count(first: Decimal, last: Decimal, step: Decimal) -> Decimal:
    """Return the number of values of a range; zero or less if it has none."""
    return ((last - first) / step).to_integral_value(ROUND_FLOOR) + 1


def format_ms(ms: float) -> str:
    """Format a duration with three significant digits in a suitable unit: ``59.3 ms``, ``830 us``, ``1.20 s``."""
    ms = float(f"{ms:.3g}")  # before the unit is chosen: 0.9999 ms are 1.00 ms
    if ms == math.inf:
        return "inf s"
    size = abs(ms)
    number, unit = (ms / 1000, "s") if size >= 1000 else (ms, "ms") if size >= 1 or ms == 0 else (ms * 1000, "us")
    return f"{number:.{max(0, 2 - _magnitude(abs(number)))}f} {unit}"


def format_ms_like(ms: float, other_ms: float) -> str:
    """Format a duration in the unit and with the decimals of a longer one: ``0.02 ms`` beside ``3.41 ms``."""
    number, unit = format_ms(other_ms).split()
    decimals = len(number.partition(".")[2])
    return f"{ms * {'us': 1e3, 'ms': 1.0, 's': 1e-3}[unit]:.{decimals}f} {unit}"


def format_beyond_ms(ms: float, limit_ms: float) -> str:
    """Format a duration above a limit: as what it has beyond it if both read alike, ``11.2 us longer``."""
    text = format_ms(ms)
    return text if text != format_ms(limit_ms) else f"{format_ms(ms - limit_ms)} longer"


def format_range_ms(low_ms: float, high_ms: float) -> str:
    """Format two durations in the unit of the longer one: ``0.98 to 1.02 ms``."""
    return f"{format_ms_like(low_ms, high_ms).split()[0]} to {format_ms(high_ms)}"


def format_mb(mb: float) -> str:
    """Format a size in megabytes with one decimal, or in a smaller unit: ``1643.0 MB``, ``12.4 kB``, ``80 B``."""
    if mb >= 1:
        return f"{mb:.1f} MB"
    if mb == 0:
        return "0 MB"
    return f"{mb * 1e3:.1f} kB" if mb >= 1e-3 else f"{mb * 1e6:.0f} B"


def format_shape(shape: tuple[int | str | None, ...]) -> str:
    """Format a shape as ``1x3x224x224``, with ``?`` for an unknown dimension and ``scalar`` for no dimension.

    Named dimensions are set apart: ``batch x 64``.
    """
    between = " x " if any(isinstance(d, str) for d in shape) else "x"
    return between.join("?" if d is None else str(d) for d in shape) or "scalar"


def format_shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Format the shapes that are given for a model: ``x=1x96x64, batch=8``."""
    return ", ".join(f"{name}={format_shape(shape)}" for name, shape in shapes.items()) or "the shapes of the model"


def format_share(share: float) -> str:
    """Return a share as a percentage with two significant digits, or three from 100 % on."""
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def format_count(count: int, noun: str) -> str:
    """Format a number of things: ``1 model``, ``2 models``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _quantity(text: str | float, per_unit: Mapping[str, int]) -> float:
    """Return a number times its unit, or NaN if the text is not a number with one of the units."""
    match = _QUANTITY.fullmatch(str(text))
    return float(match["number"]) * per_unit.get(match["unit"].lower(), math.nan) if match else math.nan


def _magnitude(value: float) -> int:
    return math.floor(math.log10(value)) if value > 0 else 0
