"""Tables of TOML files as records, with the range of every value beside its default.

:func:`read_section` reads one; it refuses unknown keys, wrong types and values out of range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, field, fields
from typing import Any, TypeVar

from chrion.common.suggestions import did_you_mean
from chrion.errors import ScenarioError

Section = TypeVar("Section")

#: The largest number in a scenario, and the smallest that must be above zero: sums and products stay finite.
LARGEST, SMALLEST = 1e12, 1e-9
_TYPE_NAMES = {"float": "a number", "int": "a whole number", "str": "text", "bool": "true or false"}
_TYPES = {"float": (float, int), "int": (int,), "str": (str,), "bool": (bool,)}


def above_zero(default: float) -> Any:
    """Return a dataclass field for a number above zero."""
    return field(default=default, metadata={"above_zero": True})


def at_least(default: float, low: float = 0, most: float = LARGEST) -> Any:
    """Return a dataclass field for a number from ``low`` to ``most``."""
    return field(default=default, metadata={"at_least": low, "most": most})


def one_of(default: str, names: Sequence[str]) -> Any:
    """Return a dataclass field for one of the given words."""
    return field(default=default, metadata={"one_of": tuple(names)})


def read_section(kind: type[Section], table: Any, where: str) -> Section:
    """Return the record of a table of a scenario.

    Args:
        kind: The record's class.
        table: The table.
        where: The section's name, for messages.

    Raises:
        ScenarioError: The section is not a table, a key is unknown or missing, or a value has a wrong type or is out of
            range.
    """
    if not isinstance(table, Mapping):
        raise ScenarioError(f"{where}: expected a table, found {table!r}")
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type] # every section is a dataclass
    refuse_unknown(table, known, where)
    if "name" in known and "name" not in table:
        raise ScenarioError(f"{where}: name is missing")
    return kind(**{key: _value(known[key], value, where) for key, value in table.items()})


def refuse_unknown(table: Mapping[str, Any], known: Mapping[str, Any] | Sequence[str], where: str) -> None:
    """Refuse unknown keys; the hint names the closest known key.

    Raises:
        ScenarioError: A key is unknown.
    """
    for key in table:
        if key not in known:
            raise ScenarioError(f"{where}: unknown key {key!r}", hint=did_you_mean(key, known))


def _value(spec: Field[Any], value: Any, where: str) -> Any:
    types = _TYPES[str(spec.type)]
    where = f"{where}.{spec.name} = {value!r}"
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise ScenarioError(f"{where}: expected {_TYPE_NAMES[str(spec.type)]}")
    limits = spec.metadata
    if "one_of" in limits and value not in limits["one_of"]:
        names = ", ".join(name for name in limits["one_of"] if name)
        raise ScenarioError(f"{where}: expected one of {names}")
    if isinstance(value, float | int):
        _check_range(value, limits, where)
    return float(value) if spec.type == "float" else value


def _check_range(value: float, limits: Mapping[str, Any], where: str) -> None:
    """Refuse a number out of its range; NaN is out of every range."""
    most = limits.get("most", LARGEST)
    if not abs(value) <= most:
        raise ScenarioError(f"{where}: expected a number of at most {most:g}")
    if "above_zero" in limits and value < SMALLEST:
        raise ScenarioError(f"{where}: expected a number above 0, at least {SMALLEST:g}")
    if "at_least" in limits and value < limits["at_least"]:
        raise ScenarioError(f"{where}: expected a number of at least {limits['at_least']:g}")
