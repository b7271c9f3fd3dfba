"""Parsing and formatting of durations, sizes, shapes and ranges."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.common.units import (
    format_count,
    format_mb,
    format_ms,
    format_range_ms,
    format_shape,
    parse_duration_ms,
    parse_range,
    parse_shape,
    parse_size_mb,
)
from chrion.errors import OptionError
from property_tests import examples


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("60ms", 60.0),
        ("0.06s", 60.0),
        ("500us", 0.5),
        ("60", 60.0),
        (60, 60.0),
        (0.5, 0.5),
        (" 1.5 s ", 1500.0),
        ("1e2ms", 100.0),
        (".5ms", 0.5),
        ("2.s", 2000.0),
        ("60 ms", 60.0),
        ("60MS", 60.0),
        ("500µs", 0.5),
        ("500 \N{GREEK SMALL LETTER MU}s", 0.5),
        ("250ns", 0.00025),
    ],
)
def test_durations(text: str | float, ms: float) -> None:
    """A duration is a number and a unit in any case, or a number of milliseconds without a unit."""
    assert parse_duration_ms(text) == pytest.approx(ms)


@pytest.mark.parametrize(
    "text", ["fast", "", "ms", "60 min", "60m", "-1ms", "0", "0s", "1e999s", "nan", "inf", "1,5ms"]
)
def test_invalid_durations_are_refused(text: str) -> None:
    """The error names the option and the text, and its hint has examples."""
    with pytest.raises(OptionError) as caught:
        parse_duration_ms(text, "slo")
    assert str(caught.value).startswith(f"slo: expected a duration above zero, found {text!r}")
    assert "60ms" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "mb"),
    [
        ("600MB", 600.0),
        ("600mb", 600.0),
        ("600 MB", 600.0),
        ("0.6GB", 600.0),
        ("1.5gb", 1500.0),
        ("500 kB", 0.5),
        ("800kB", 0.8),
        ("1GiB", 1073.741824),
        ("512MiB", 536.870912),
        ("1.5 kib", 0.001536),
        ("2TB", 2e6),
        ("4096B", 0.004096),
        ("600", 600.0),
        (348.2, 348.2),
        (0, 0.0),
    ],
)
def test_sizes(text: str | float, mb: float) -> None:
    """A size is a number and a decimal or binary unit, or a number of megabytes without a unit; zero is valid."""
    assert parse_size_mb(text) == mb


@pytest.mark.parametrize("text", ["much", "", "MB", "600M", "600MiBs", "-1MB", "1e999GB", "nan", "inf", "1,5GB", "6ms"])
def test_invalid_sizes_are_refused(text: str) -> None:
    """The error names the option and the text, and its hint has examples."""
    with pytest.raises(OptionError) as caught:
        parse_size_mb(text, "gpu budget")
    assert str(caught.value).startswith(f"gpu budget: expected a size of zero or more, found {text!r}")
    assert "600MB" in caught.value.hint


@examples(100)
@given(
    st.integers(0, 10**6),
    st.sampled_from(
        [("B", 1), ("kB", 10**3), ("MB", 10**6), ("GB", 10**9), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30)]
    ),
    st.sampled_from([str, str.lower, str.upper, str.swapcase]),
    st.sampled_from(["", " ", "  "]),
)
def test_sizes_are_exact_in_any_case(count: int, unit: tuple[str, int], case: Callable[[str], str], gap: str) -> None:
    """A whole number of any unit gives the nearest float to its exact number of megabytes."""
    name, size = unit
    assert parse_size_mb(f"{count}{gap}{case(name)}") == float(Fraction(count * size, 10**6))


@examples(100)
@given(
    st.integers(1, 10**6),
    st.sampled_from([("ns", 1), ("us", 10**3), ("µs", 10**3), ("ms", 10**6), ("s", 10**9)]),
    st.sampled_from([str, str.upper]),
    st.sampled_from(["", " "]),
)
def test_durations_are_exact_in_any_case(
    count: int, unit: tuple[str, int], case: Callable[[str], str], gap: str
) -> None:
    """A whole number of any unit gives the nearest float to its exact number of milliseconds."""
    name, ns = unit
    assert parse_duration_ms(f"{count}{gap}{case(name)}") == float(Fraction(count * ns, 10**6))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0:1:0.25", (0.0, 0.25, 0.5, 0.75, 1.0)),
        ("0:1:0.4", (0.0, 0.4, 0.8)),
        ("-0.3:0.3:0.1", (-0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3)),
        ("1:0:-0.5", (1.0, 0.5, 0.0)),
        ("2:2:1", (2.0,)),
        ("0, 0.2,1e-13", (0.0, 0.2, 1e-13)),
        ("0:3e-13:1e-13", (0.0, 1e-13, 2e-13, 3e-13)),
        ("0.5", (0.5,)),
    ],
)
def test_ranges(text: str, values: tuple[float, ...]) -> None:
    """A range is given by its first value, last value (included) and step, or by a list of values."""
    assert parse_range(text) == values


@examples(100)
@given(st.integers(-1000, 1000), st.integers(1, 500), st.integers(1, 200), st.integers(0, 6))
def test_ranges_equal_the_list_of_their_values(first: int, step: int, count: int, digits: int) -> None:
    """Every value of a range is the float of its decimal number."""
    numbers = [f"{Decimal(first + i * step).scaleb(-digits):f}" for i in range(count)]
    gap = f"{Decimal(step).scaleb(-digits):f}"
    assert parse_range(f"{numbers[0]}:{numbers[-1]}:{gap}") == tuple(map(float, numbers))


@pytest.mark.parametrize(
    ("text", "count"),
    [("0:1e9:1e-9", "1e+18"), ("0:1000:1", "1001"), ("0:1e300:1e-300", "1e+600"), (",".join("1" * 1001), "1001")],
)
def test_ranges_of_too_many_values_are_refused(text: str, count: str) -> None:
    """The message has the number of values, which are not created, and the limit."""
    with pytest.raises(OptionError) as caught:
        parse_range(text, "alpha")
    assert caught.value.message == f"alpha: expected a range of at most 1000 values, found {count}"


@pytest.mark.parametrize(
    "text", ["", "a", "0:1", "0:1:0", "1:0:0.1", "0:nan:1", "0:inf:1", "1e400", "0:1:x", "1,,2", "0:1:1:1", "snan"]
)
def test_invalid_ranges_are_refused(text: str) -> None:
    """The message names the option and the text, and the hint shows both forms."""
    with pytest.raises(OptionError) as caught:
        parse_range(text, "alpha")
    assert caught.value.message == f"alpha: expected a range of numbers, found {text!r}"
    assert "0:1:0.1" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "name", "dims"),
    [("x=1x3x224", "x", (1, 3, 224)), ("batch=8", "batch", (8,)), ("s=scalar", "s", ()), ("a=b=2x0", "a=b", (2, 0))],
)
def test_shapes(text: str, name: str, dims: tuple[int, ...]) -> None:
    """A shape is a name and dimensions joined by x; the name may contain equals signs."""
    assert parse_shape(text) == (name, dims)


@pytest.mark.parametrize("text", ["x", "x=", "=1x2", "x=1x", "x=axb", "x=-1", "x=1,2", ""])
def test_invalid_shapes_are_refused(text: str) -> None:
    """Any text that is not a shape is refused."""
    with pytest.raises(OptionError, match="--shape: expected NAME=SHAPE"):
        parse_shape(text)


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        *(
            (59.3, "59.3 ms"),
            (4.711, "4.71 ms"),
            (0.83, "830 us"),
            (1200, "1.20 s"),
            (0, "0.00 ms"),
            (123.4, "123 ms"),
        ),
        (0.011, "11.0 us"),
        *((0.99999, "1.00 ms"), (999.99, "1.00 s"), (9.999, "10.0 ms"), (1.234e6, "1230 s"), (math.inf, "inf s")),
    ],
)
def test_durations_are_formatted_with_three_digits(ms: float, text: str) -> None:
    """The unit of a formatted duration depends on the duration."""
    assert format_ms(ms) == text


def test_sizes_are_formatted_with_their_unit() -> None:
    """Megabytes have one decimal; smaller sizes are in kilobytes or bytes, and none is printed as zero."""
    assert [format_mb(mb) for mb in (1643.0, 0.0124, 8e-5, 0)] == ["1643.0 MB", "12.4 kB", "80 B", "0 MB"]


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(0.982, 1.024, "0.98 to 1.02 ms"), (0.4, 0.83, "400 to 830 us"), (980.0, 1234.0, "0.98 to 1.23 s")],
)
def test_ranges_have_one_unit(low: float, high: float, text: str) -> None:
    """Both ends are in the unit of the upper one."""
    assert format_range_ms(low, high) == text


def test_shapes_are_formatted_as_they_are_parsed() -> None:
    """An unknown dimension is formatted as a question mark, and a shape without dimensions as a scalar."""
    assert [format_shape(s) for s in ((1, 3), ("n", None), ())] == ["1x3", "n x ?", "scalar"]


def test_counts_are_formatted_with_their_noun() -> None:
    """The noun is in the singular for one thing only."""
    assert [format_count(n, "model") for n in (0, 1, 2)] == ["0 models", "1 model", "2 models"]
