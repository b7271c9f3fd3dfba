"""Request traces: files that are checked row by row and kept as compact arrays.

Formats:

- ``csv``: a header that begins with ``time_s`` or ``timestamp``, then a line for each request. Times are in seconds or
  in ISO 8601 and do not decrease. Further columns, in any order and each of them optional, are ``model``,
  ``duration_ms``, ``deadline_ms`` and ``priority``; their cells may be empty. Those of a decoder are ``prompt_tokens``
  and ``new_tokens``, and ``session``, ``prefix`` and ``prefix_tokens``, whose cells may be empty;
- ``azure-functions-2019``: the invocation counts per minute of "Serverless in the Wild" (ATC 2020), one line for each
  function: ``HashOwner,HashApp,HashFunction,Trigger`` and one column for each minute.
  Its files of execution times and of memory, one line for each function, have the columns ``HashFunction``,
  ``Average`` and ``percentile_Average_N``, or ``HashFunction`` and ``AverageAllocatedMb``, among others;
- ``azure-llm-2023``: ``TIMESTAMP,ContextTokens,GeneratedTokens``, one line for each request (Splitwise, ISCA 2024).

Servers have no use for the tokens, since a simulated request has the latency of its model, and decoders none for models
and their figures.
"""

from __future__ import annotations

import csv
import math
import re
import stat
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from chrion.common.records import LARGEST, SMALLEST
from chrion.errors import ScenarioError, TraceError
from chrion.serving.simulator.requests import Details

_FUNCTION_COLUMNS = ["HashOwner", "HashApp", "HashFunction", "Trigger"]
_LLM_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
#: Columns of a CSV trace with figures of single requests.
_DETAILS = ("duration_ms", "deadline_ms", "priority")
#: Columns of a CSV trace with the requests of a decoder: tokens, and names of what requests have in common.
_TOKENS, _GROUPS = ("prompt_tokens", "new_tokens", "prefix_tokens"), ("session", "prefix")

#: The latest time of a trace: thirty thousand years, at which times in ms are exact to 0.1.
_LAST_S = 1e12
#: Maximum digits of a count, so that sums over a day of minutes fit int64.
_DIGITS = 9

#: Numbers and cells of the lines that are not empty.
_Rows = Iterator[tuple[int, list[str]]]


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """What the requests of a trace are to a decoder. All of shape [n]."""

    #: Tokens of prompts, and tokens to generate.
    prompts: npt.NDArray[np.int64]
    new: npt.NDArray[np.int64]
    #: Numbers of sessions and of prefixes of prompts, -1 for none, and the tokens of these prefixes.
    sessions: npt.NDArray[np.int64]
    prefixes: npt.NDArray[np.int64]
    prefix_tokens: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """A trace with a time for each request."""

    #: Seconds since the start of the trace, not decreasing. Shape [n].
    times_s: npt.NDArray[np.float64]
    #: Index of each request's function in ``names``; zero if the trace does not name functions. Shape [n].
    functions: npt.NDArray[np.int64]
    #: Distinct functions in order of appearance; empty if the trace does not name them.
    names: tuple[str, ...]
    #: Figures of single requests; None if the trace has none.
    details: Details | None = None
    #: None if the trace has none.
    tokens: Tokens | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MinuteCounts:
    """A trace with the number of requests of each minute."""

    #: Requests by function and minute. Shape [functions, minutes].
    counts: npt.NDArray[np.int64]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class FunctionFigures:
    """Figures of the functions of a trace."""

    #: The row of each function.
    rows: Mapping[str, int]
    #: What the columns of figures are; quantiles have the number of their percentile.
    labels: tuple[str, ...]
    #: Shape [functions, columns].
    values: npt.NDArray[np.float64]


_Reader = Callable[[Path, _Rows], Arrivals | MinuteCounts]


def read_trace(kind: str, path: Path, key: str = "workload.path") -> Arrivals | MinuteCounts:
    """Return the content of a trace file.

    Args:
        kind: The format; see the module.
        path: The file. It is read again only if it has changed.
        key: The key of the scenario that names it, for messages.

    Raises:
        ScenarioError: The file cannot be read.
        TraceError: A row is malformed, or there are no requests. The message about a row contains the line, the column
            and the expected value.
    """
    return _read(kind, path, key, *_state(path, key))


def read_durations(path: Path) -> FunctionFigures:
    """Return the average and the percentiles of the execution times of functions in ms, of Azure Functions 2019.

    Raises:
        ScenarioError: The file cannot be read.
        TraceError: A row is malformed, or there are no two percentiles up to the maximum.
    """
    figures = _read_figures(path, "Average", r"percentile_Average_([0-9]+)", *_state(path, "workload.durations_path"))
    shares = [int(label) for label in figures.labels[1:]]
    if shares[-1:] != [100] or len(shares) < 3 or shares != sorted(set(shares)):
        raise TraceError(f"{path}: expected ascending columns percentile_Average_N up to 100, found {shares}")
    falling = np.flatnonzero((np.diff(figures.values[:, 1:], axis=1) < 0).any(axis=1))
    if len(falling):
        name = next(name for name, row in figures.rows.items() if row == falling[0])
        raise TraceError(f"{path}: function {name}: expected percentiles that do not fall")
    return figures


def read_memory(path: Path) -> FunctionFigures:
    """Return the average memory of functions in MB, of Azure Functions 2019.

    Raises:
        ScenarioError: The file cannot be read.
        TraceError: A row is malformed.
    """
    return _read_figures(path, "AverageAllocatedMb", None, *_state(path, "workload.memory_path"))


def _state(path: Path, key: str) -> tuple[int, int]:
    """Return the time of the last change of a file and its size."""
    try:
        state = path.stat()
    except OSError as error:
        raise ScenarioError(f"{key}: {path}: {error.strerror}") from error
    if not stat.S_ISREG(state.st_mode):  # reading a device may never end
        raise ScenarioError(f"{key}: {path}: not a regular file")
    return state.st_mtime_ns, state.st_size


@lru_cache(maxsize=4)
def _read_figures(path: Path, average: str, quantiles: str | None, changed_ns: int, size: int) -> FunctionFigures:
    """Return the average and the quantiles of each function; ``quantiles`` is the pattern of their columns."""
    del changed_ns, size  # part of the cache's key
    with _rows(path, "workload.durations_path" if quantiles else "workload.memory_path") as rows:
        line, header = next(rows, (1, []))
        header = [text.strip() for text in header]
        if "HashFunction" not in header or average not in header:
            expected = f"a header with HashFunction and {average}"
            raise TraceError(f"{path}, line {line}: expected {expected}, found {','.join(header)[:80]!r}")
        matches = [(at, match[1]) for at, text in enumerate(header) if (match := re.fullmatch(quantiles or "", text))]
        columns = [(header.index(average), average), *matches]
        name_at, names, values = header.index("HashFunction"), dict[str, int](), array("d")
        for line, row in rows:
            _width(path, line, row, len(header))
            if row[name_at] in names:
                raise _bad(path, line, "HashFunction", "a function that no line above has", row[name_at])
            names[row[name_at]] = len(names)
            for at, _ in columns:
                value = _number(row[at])
                if not 0 <= value <= LARGEST:
                    raise _bad(path, line, header[at], f"a number from 0 to {LARGEST:g}", row[at])
                values.append(value)
    table = np.array(values).reshape(len(names), len(columns))
    return FunctionFigures(names, tuple(label for _, label in columns), table)


@lru_cache(maxsize=4)
def _read(kind: str, path: Path, key: str, changed_ns: int, size: int) -> Arrivals | MinuteCounts:
    del changed_ns, size  # part of the cache's key
    readers: dict[str, _Reader] = {
        "csv": _read_csv,
        "azure-functions-2019": _read_functions,
        "azure-llm-2023": _read_llm,
    }
    with _rows(path, key) as rows:
        trace = readers[kind](path, rows)
    empty = not trace.counts.any() if isinstance(trace, MinuteCounts) else not len(trace.times_s)
    if empty:
        raise TraceError(f"{path}: the trace has no requests")
    return trace


@contextmanager
def _rows(path: Path, key: str) -> Iterator[_Rows]:
    """Yield the numbers and cells of the lines that are not empty."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            yield ((reader.line_num, row) for row in reader if row)
    except OSError as error:
        raise ScenarioError(f"{key}: {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: not a CSV file in UTF-8: {error}") from error


def _read_csv(path: Path, rows: _Rows) -> Arrivals:
    columns = _csv_header(path, rows)
    read_time = _seconds if columns[0] == "time_s" else _timestamps()
    times, functions, names = array("d"), array("q"), dict[str, int]()
    details = {column: array("d") for column in columns if column in _DETAILS}
    tokens = {column: array("q") for column in columns if column in (*_TOKENS, *_GROUPS)}
    groups: dict[str, dict[str, int]] = {column: {"": -1} for column in _GROUPS}
    token_places = [(columns.index(column), column, values) for column, values in tokens.items()]
    model_at = columns.index("model") if "model" in columns else None
    places = [(columns.index(column), column, values) for column, values in details.items()]
    for line, row in rows:
        _width(path, line, row, len(columns))
        time_s = read_time(path, line, row[0])
        if times and time_s < times[-1]:
            before = f", {times[-1]:g}" if columns[0] == "time_s" else ""
            raise _bad(path, line, columns[0], f"a time of at least the previous one{before}", row[0])
        times.append(time_s)
        model = "" if model_at is None else row[model_at].strip()
        functions.append(names.setdefault(model, len(names)))
        for at, column, values in places:
            values.append(_detail(path, line, column, row[at].strip()))
        for at, column, numbers in token_places:
            cell = row[at].strip()
            if column in groups:
                numbers.append(groups[column].setdefault(cell, len(groups[column]) - 1))
            else:
                numbers.append(_tokens(path, line, column, cell))
    own = _details(details, len(times))
    return Arrivals(np.array(times), np.array(functions, np.int64), tuple(names), own, _as_tokens(tokens, len(times)))


def _csv_header(path: Path, rows: _Rows) -> list[str]:
    line, header = next(rows, (1, []))
    columns = [text.strip() for text in header]
    further = columns[1:]
    names = ("model", *_DETAILS, *_TOKENS, *_GROUPS)
    known = set(further) <= set(names) and len(set(further)) == len(further)
    if columns[:1] not in (["time_s"], ["timestamp"]) or not known:
        form = f"time_s or timestamp, then any of {','.join(names)}"
        raise TraceError(f"{path}, line {line}: expected the header {form}, found {','.join(columns)[:80]!r}")
    return columns


def _detail(path: Path, line: int, column: str, text: str) -> float:
    """Return the figure of one request; an empty cell is NaN, or priority 0."""
    if column == "priority":
        if text and not re.fullmatch(r"-?[0-9]{1,9}", text):
            raise _bad(path, line, column, "a whole number", text)
        return float(text or 0)
    value = _number(text)
    if text and not SMALLEST <= value <= LARGEST:
        raise _bad(path, line, column, f"ms from {SMALLEST:g} to {LARGEST:g}", text)
    return value


def _tokens(path: Path, line: int, column: str, text: str) -> int:
    """Return a number of tokens; an empty cell of prefixes is none."""
    least = int(column != "prefix_tokens")
    if not _is_count(text or "0") or int(text or 0) < least:
        raise _bad(path, line, column, f"a whole number of at least {least}", text)
    return int(text or 0)


def _as_tokens(columns: Mapping[str, array[int]], number: int) -> Tokens | None:
    if not {"prompt_tokens", "new_tokens"} <= set(columns):
        return None
    none = {"prefix_tokens": 0}
    order = ("prompt_tokens", "new_tokens", "session", "prefix", "prefix_tokens")
    return Tokens(*(np.array(columns.get(name, np.full(number, none.get(name, -1))), np.int64) for name in order))


def _details(columns: Mapping[str, array[float]], number: int) -> Details | None:
    if not columns:
        return None
    none = np.full(number, np.nan)
    duration, deadline = (np.array(columns.get(column, none)) for column in _DETAILS[:2])
    return Details(duration, deadline, np.array(columns.get("priority", np.zeros(number))).astype(np.int64))


def _seconds(path: Path, line: int, text: str) -> float:
    time_s = _number(text)
    if not 0 <= time_s <= _LAST_S:
        raise _bad(path, line, "time_s", f"seconds from 0 to {_LAST_S:g}", text)
    return time_s


def _timestamps() -> Callable[[Path, int, str], float]:
    """Return a function that reads ISO 8601 timestamps as seconds since the first of them."""
    first: datetime | None = None

    def read(path: Path, line: int, text: str) -> float:
        nonlocal first
        expected = "a time in ISO 8601 like 2023-11-16T18:15:46.680"
        try:
            moment = datetime.fromisoformat(text.strip())
        except ValueError:
            raise _bad(path, line, "timestamp", expected, text) from None
        first = first or moment
        if (moment.tzinfo is None) != (first.tzinfo is None):
            raise _bad(path, line, "timestamp", f"{expected}, with or without a time zone as in the first row", text)
        return (moment - first).total_seconds()

    return read


def _read_llm(path: Path, rows: _Rows) -> Arrivals:
    _header(path, rows, _LLM_COLUMNS)
    times, first, last = array("d"), None, None
    counts = array("q")
    for line, row in rows:
        _width(path, line, row, 3)
        try:
            moment = datetime.fromisoformat(row[0])
        except ValueError:
            raise _bad(path, line, "TIMESTAMP", "a time like 2023-11-16 18:15:46.6805900", row[0]) from None
        first = first or moment
        if last and ((moment.tzinfo is None) != (last.tzinfo is None) or moment < last):
            raise _bad(path, line, "TIMESTAMP", f"a time of at least the previous one, {last}", row[0])
        last = moment
        for column, text in zip(_LLM_COLUMNS[1:], row[1:], strict=True):
            if not _is_count(text):
                raise _bad(path, line, column, "a whole number of at least 0", text)
            counts.append(int(text))
        times.append((moment - first).total_seconds())
    none = np.full(len(times), -1)
    tokens = Tokens(np.array(counts[::2]), np.array(counts[1::2]), none, none, np.zeros(len(times), np.int64))
    return Arrivals(np.array(times), np.zeros(len(times), np.int64), (), tokens=tokens)


def _read_functions(path: Path, rows: _Rows) -> MinuteCounts:
    minutes = _header(path, rows, _FUNCTION_COLUMNS, more=True)[len(_FUNCTION_COLUMNS) :]
    for before, after in pairwise(minutes):
        if not (_is_count(before) and _is_count(after) and int(after) == int(before) + 1):
            raise _bad(path, 1, after, "consecutive numbers of minutes", after)
    names, counts = [], []
    for line, row in rows:
        _width(path, line, row, len(_FUNCTION_COLUMNS) + len(minutes))
        for minute, text in zip(minutes, row[len(_FUNCTION_COLUMNS) :], strict=True):
            if not _is_count(text):
                raise _bad(path, line, minute, "a whole number of at least 0", text)
        names.append(row[2])
        counts.append(np.array(row[len(_FUNCTION_COLUMNS) :], np.int64))
    return MinuteCounts(np.array(counts, np.int64).reshape(len(names), len(minutes)), tuple(names))


def _header(path: Path, rows: _Rows, expected: list[str], *, more: bool = False) -> list[str]:
    line, header = next(rows, (1, []))
    header = [text.strip() for text in header]
    if (header[: len(expected)] if more else header) != expected or (more and len(header) == len(expected)):
        form = ",".join(expected) + (",<minute>,..." if more else "")
        raise TraceError(f"{path}, line {line}: expected the header {form}, found {','.join(header)[:80]!r}")
    return header


def _width(path: Path, line: int, row: list[str], columns: int) -> None:
    if len(row) != columns:
        raise TraceError(f"{path}, line {line}: expected {columns} columns, found {len(row)}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS


def _bad(path: Path, line: int, column: str, expected: str, text: str) -> TraceError:
    return TraceError(f"{path}, line {line}, column {column}: expected {expected}, found {text[:60]!r}")
