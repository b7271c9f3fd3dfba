"""Durations, shapes and sizes as people write them."""

from __future__ import annotations

import pytest

from chrion.errors import OptionError
from chrion.units import format_mb, format_ms, format_shape, parse_duration_ms, parse_shape, parse_size_mb


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
    ],
)
def test_durations(text: str | float, ms: float) -> None:
    """A number with its unit; milliseconds where it has none."""
    assert parse_duration_ms(text) == pytest.approx(ms)


@pytest.mark.parametrize(
    "text", ["fast", "", "ms", "60 min", "60m", "-1ms", "0", "0s", "1e999s", "nan", "inf", "1,5ms"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    """The error names the option and the text, and shows what to write."""
    with pytest.raises(OptionError) as caught:
        parse_duration_ms(text, "slo")
    assert str(caught.value).startswith(f"slo: {text!r}")
    assert "60ms" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "mb"), [("600MB", 600.0), ("0.6GB", 600.0), ("500 kB", 0.5), ("600", 600.0), (348.2, 348.2), (0, 0.0)]
)
def test_sizes(text: str | float, mb: float) -> None:
    """A number with its unit; megabytes of a million bytes where it has none; zero is a size."""
    assert parse_size_mb(text) == pytest.approx(mb)


@pytest.mark.parametrize("text", ["much", "", "MB", "600mb", "600MiB", "-1MB", "1e999GB", "nan", "inf", "1,5GB", "6ms"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """The error names the option and the text, and shows what to write."""
    with pytest.raises(OptionError) as caught:
        parse_size_mb(text, "gpu budget")
    assert str(caught.value).startswith(f"gpu budget: {text!r}")
    assert "600MB" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "name", "dims"),
    [("x=1x3x224", "x", (1, 3, 224)), ("batch=8", "batch", (8,)), ("s=scalar", "s", ()), ("a=b=2x0", "a=b", (2, 0))],
)
def test_shapes(text: str, name: str, dims: tuple[int, ...]) -> None:
    """A name, and dimensions joined by x; names may hold equals signs."""
    assert parse_shape(text) == (name, dims)


@pytest.mark.parametrize("text", ["x", "x=", "=1x2", "x=1x", "x=axb", "x=-1", "x=1,2", ""])
def test_what_is_no_shape_is_refused(text: str) -> None:
    """Anything else is refused."""
    with pytest.raises(OptionError, match="NAME=DxD"):
        parse_shape(text)


@pytest.mark.parametrize(
    ("ms", "text"),
    [(59.3, "59.3 ms"), (4.711, "4.71 ms"), (0.83, "830 us"), (1200, "1.2 s"), (0, "0.00 ms"), (123.4, "123 ms")],
)
def test_durations_print_with_three_digits(ms: float, text: str) -> None:
    """The unit is the one that suits."""
    assert format_ms(ms) == text


def test_sizes_print_with_their_unit() -> None:
    """Megabytes with one decimal, kilobytes below one."""
    assert [format_mb(mb) for mb in (1643.0, 0.0124, 0)] == ["1643.0 MB", "12.4 kB", "0.0 MB"]


def test_shapes_print_as_they_are_read() -> None:
    """Unknown dimensions are question marks, none is a scalar."""
    assert [format_shape(s) for s in ((1, 3), ("n", None), ())] == ["1x3", "nx?", "scalar"]
