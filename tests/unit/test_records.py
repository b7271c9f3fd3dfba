"""Records of tables in files."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

from chrion.common.records import NonNegative, Positive, Record, read_record
from chrion.errors import HardwareError, ScenarioError


class Inner(Record, frozen=True):
    """A nested table."""

    size: Annotated[int, Meta(ge=1, le=10)] = 1
    kind: Literal["a", "b"] = "a"


class Outer(Record, frozen=True):
    """A table."""

    name: str
    weight: Positive = 1.0
    share: NonNegative | None = None
    inner: Inner = Inner()
    listed: tuple[Inner, ...] = ()
    either: Literal["all"] | tuple[int, ...] = "all"
    words: Annotated[tuple[str, ...], Meta(min_length=1, max_length=2)] = ("a",)
    named: dict[str, Inner] = {}  # noqa: RUF012 - each record gets its own


def test_a_table_becomes_a_record() -> None:
    """Nested tables become records, whole numbers become floats, and other keys have their defaults."""
    read = read_record(Outer, {"name": "x", "weight": 2, "named": {"my own": {"size": 3}}})
    assert read == Outer("x", 2.0, named={"my own": Inner(3)})
    assert isinstance(read.weight, float)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nam": "x"}, "top: unknown key 'nam' (did you mean 'name'?)"),
        ({"name": 3}, "top.name: expected text, found 3"),
        ({"weight": True}, "top.weight: expected a number, found True"),
        ({"weight": 0}, "top.weight: expected a number above 0, at least 1e-09, found 0"),
        ({"weight": 10**400}, f"top.weight: expected a number of at most 1e+12, found 1{'0' * 96}..."),
        ({"share": float("nan")}, "top.share: expected a number of at least 0, found nan"),
        ({"share": "x"}, "top.share: expected a number, found 'x'"),
        ({"inner": 3}, "top.inner: expected a table, found 3"),
        ({"inner": {"size": 1.5}}, "top.inner.size: expected a whole number, found 1.5"),
        ({"inner": {"size": 11}}, "top.inner.size: expected a whole number of at most 10, found 11"),
        ({"inner": {"kind": "c"}}, "top.inner.kind: expected one of a, b, found 'c'"),
        ({"either": 3}, "top.either: expected all or a list, found 3"),
        ({"either": "x"}, "top.either: expected one of all, found 'x'"),
        ({"either": [1, None]}, "top.either[1]: expected a whole number, found None"),
        ({"words": ["a"] * 3}, "top.words: expected a list of at most 2 entries, found ['a', 'a', 'a']"),
        ({"words": []}, "top.words: expected a list of at least one entry, found []"),
        ({"listed": {}}, "top.listed: expected a list, found {}"),
        ({"listed": [{}, {"sise": 1}]}, "top.listed[1]: unknown key 'sise' (did you mean 'size'?)"),
        (
            {"named": {"two\nlines": {"size": 0}}},
            r"top.named.'two\nlines'.size: expected a whole number of at least 1, found 0",
        ),
        (
            {"named": {"my own": {"size": 0}}},
            "top.named.my own.size: expected a whole number of at least 1, found 0",
        ),
    ],
)
def test_messages_name_the_key_what_was_expected_and_what_was_found(change: dict[str, Any], message: str) -> None:
    """The message is one line with the key's path, the value, the expectation, and a hint for an unknown key."""
    with pytest.raises(ScenarioError) as caught:
        read_record(Outer, {"name": "x", **change}, "top")
    assert str(caught.value).endswith(message)


def test_a_missing_key_and_the_class_of_the_error() -> None:
    """A key without a default is required; the caller chooses the class of the error."""
    with pytest.raises(HardwareError, match=r"^name is missing$"):
        read_record(Outer, {}, failure=HardwareError)
