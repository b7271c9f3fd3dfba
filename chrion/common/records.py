"""Records of tables in files: msgspec checks keys, types and ranges, and errors have the form of the project.

::

    class Batching(Record, frozen=True):
        max_size: Annotated[int, Meta(ge=2, le=65536)] = 8
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from chrion.common.suggestions import did_you_mean
from chrion.common.wrong_values import wrong_value
from chrion.errors import InputError, ScenarioError

Kind = TypeVar("Kind")

#: The largest number in a file, and the smallest that must be above zero: sums and products stay finite.
LARGEST, SMALLEST = 1e12, 1e-9
NonNegative = Annotated[float, Meta(ge=0, le=LARGEST)]
Positive = Annotated[float, Meta(ge=SMALLEST, le=LARGEST)]
Count = Annotated[int, Meta(ge=0, le=int(LARGEST))]
PositiveCount = Annotated[int, Meta(ge=1, le=int(LARGEST))]
#: The texts of msgspec's errors, and those of Chrion's.
_TERMS = {
    r"^Expected ": "expected ",
    r"`| \| null|, got .*": "",
    r"\bobject\b": "a table",
    r"\barray\b": "a list",
    r"\bstr\b": "text",
    r"\bbool\b": "true or false",
    r"\bint\b": "a whole number",
    r"\bfloat\b": "a number",
    r" \| ": " or ",
    r" of length <= (\d+)": r" of at most \1 entries",
    r" of length >= 1$": " of at least one entry",
    r" of length >= (\d+)": r" of at least \1 entries",
    r" >= 1e-09$": f" above 0, at least {SMALLEST:g}",
    r" > ": " above ",
    r" >= ": " of at least ",
    r" <= ": " of at most ",
    r"^Number out of range": f"expected a number of at most {LARGEST:g}",
}


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table with known keys; a key without a default is required."""


def read_record(kind: type[Kind], table: Any, where: str = "", failure: type[InputError] = ScenarioError) -> Kind:
    """Return the record of a table.

    Args:
        kind: The record's class.
        table: The table.
        where: The table's path in its file, for messages.
        failure: The error to raise.

    Raises:
        InputError: The table is none, a key is unknown or missing, or a value has a wrong type or is out of range.
    """
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise _explain(kind, table, where, str(error), failure) from error


def refuse_unknown(
    table: Mapping[str, Any], known: Iterable[str], where: str, failure: type[InputError] = ScenarioError
) -> None:
    """Refuse unknown keys; the hint names the closest known key.

    Raises:
        InputError: A key is unknown.
    """
    known = list(known)
    for key in table:
        if key not in known:
            raise failure(f"{where}: unknown key {key!r}".removeprefix(": "), hint=did_you_mean(key, known))


def _explain(kind: Any, value: Any, where: str, message: str, failure: type[InputError]) -> InputError:
    """Return the error for a message of msgspec such as ``Expected `int` >= 1 - at `$.servers[0].count```."""
    problem, _, path = message.partition(" - at `$")
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        bare = _bare(kind, value)
        if index == "...":  # an entry of a mapping, without its key
            for key, entry in value.items():
                shown = key if key.isprintable() else repr(key)
                read_record(get_args(bare)[1], entry, f"{where}.{shown[:100]}", failure)
        kind = get_type_hints(bare, include_extras=True)[name] if name else get_args(bare)[0]
        value = value[name or int(index)]
        where = f"{where}.{name}".removeprefix(".") if name else f"{where}[{index}]"
    bare = _bare(kind, value)
    if problem.startswith("Object "):  # contains unknown field `key`, or: missing required field `key`
        key = problem.split("`")[1]
        if "missing" in problem:
            return failure(f"{where}.{key}".removeprefix(".") + " is missing")
        hint = did_you_mean(key, bare.__struct_fields__)
        return failure(f"{where}: unknown key {key!r}".removeprefix(": "), hint=hint)
    words = [word for one in get_args(kind) if get_origin(one) is Literal for word in get_args(one) if word]
    if words:
        problem = problem.replace("`str", f"`{', '.join(words)}", 1)
    if problem.startswith("Invalid enum value"):
        problem = f"expected one of {', '.join(filter(None, get_args(bare)))}"
    for pattern, term in _TERMS.items():
        problem = re.sub(pattern, term, problem)
    problem = re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?$", lambda number: f"{float(number[0]):g}", problem)
    return wrong_value(where, problem.removeprefix("expected "), value, failure=failure)


def _bare(kind: Any, value: Any) -> Any:
    """Return a type without its annotations; of a union, the last type for a list, and the first one otherwise."""
    while (origin := get_origin(kind)) in (Annotated, Union, UnionType):
        kinds = [one for one in get_args(kind) if one is not NoneType]
        kind = kinds[-1] if origin is not Annotated and isinstance(value, list) else kinds[0]
    return kind
