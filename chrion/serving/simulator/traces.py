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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from chrion.common.records import LARGEST, SMALLEST
from chrion.errors import ScenarioError, TraceError
from chrion.serving.simulator.requests import Details

_FUNCTION_COLUMNS = ["HashOwner", "HashApp", "HashFunction", "Trigger"]
#: Columns of azure-llm-2023, and what they are called in the format csv.
_LLM_COLUMNS = {"TIMESTAMP": "timestamp", "ContextTokens": "prompt_tokens", "GeneratedTokens": "new_tokens"}
#: Columns of a CSV trace with figures of single requests.
_DETAILS = ("duration_ms", "deadline_ms", "priority")
#: Columns of a CSV trace with the requests of a decoder: tokens, and names of what requests have in common.
_TOKENS, _GROUPS = ("prompt_tokens", "new_tokens", "prefix_tokens"), ("session", "prefix")

#: The latest time of a trace: thirty thousand years, at which times in ms are exact to 0.1.
_LAST_S = 1e12
#: Maximum digits of a count, so that sums over a day of minutes fit int64.
_DIGITS = 9


class Tokens(NamedTuple):
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
    with _opened(path, "workload.durations_path" if quantiles else "workload.memory_path") as file:
        header = file.header
        if "HashFunction" not in header or average not in header:
            raise file.bad_header(f"a header with HashFunction and {average}")
        matches = [(at, match[1]) for at, text in enumerate(header) if (match := re.fullmatch(quantiles or "", text))]
        columns = [(header.index(average), average), *matches]
        name_at, names, values = header.index("HashFunction"), dict[str, int](), array("d")
        for line, row in file.rows:
            if row[name_at] in names:
                raise file.bad(line, "HashFunction", "a function that no line above has", row[name_at])
            names[row[name_at]] = len(names)
            for at, _ in columns:
                value = _number(row[at])
                if not 0 <= value <= LARGEST:
                    raise file.bad(line, header[at], f"a number from 0 to {LARGEST:g}", row[at])
                values.append(value)
    table = np.array(values).reshape(len(names), len(columns))
    return FunctionFigures(names, tuple(label for _, label in columns), table)


@lru_cache(maxsize=4)
def _read(kind: str, path: Path, key: str, changed_ns: int, size: int) -> Arrivals | MinuteCounts:
    del changed_ns, size  # part of the cache's key
    readers: dict[str, Callable[[_File], Arrivals | MinuteCounts]] = {
        "csv": _read_csv,
        "azure-functions-2019": _read_functions,
        "azure-llm-2023": _read_llm,
    }
    with _opened(path, key) as file:
        trace = readers[kind](file)
    empty = not trace.counts.any() if isinstance(trace, MinuteCounts) else not len(trace.times_s)
    if empty:
        raise TraceError(f"{path}: the trace has no requests")
    return trace


@dataclass(frozen=True, slots=True)
class _File:
    """An open CSV file, and errors about its lines."""

    path: Path
    #: The first line that is not empty, and its number.
    line: int
    header: list[str]
    #: Numbers and cells of the other lines that are not empty; each line has as many cells as the header.
    rows: Iterator[tuple[int, list[str]]]

    def bad(self, line: int, column: str, expected: str, text: str) -> TraceError:
        """Return an error about a cell."""
        return TraceError(f"{self.path}, line {line}, column {column}: expected {expected}, found {text[:60]!r}")

    def bad_header(self, expected: str) -> TraceError:
        """Return an error about the header."""
        return TraceError(f"{self.path}, line {self.line}: expected {expected}, found {','.join(self.header)[:80]!r}")


@contextmanager
def _opened(path: Path, key: str) -> Iterator[_File]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = [text.strip() for text in next((row for row in reader if row), [])]
            yield _File(path, reader.line_num or 1, header, _rows(path, reader, len(header)))
    except OSError as error:
        raise ScenarioError(f"{key}: {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: not a CSV file in UTF-8: {error}") from error


def _rows(path: Path, reader: Any, columns: int) -> Iterator[tuple[int, list[str]]]:
    for row in reader:
        if row and len(row) != columns:
            raise TraceError(f"{path}, line {reader.line_num}: expected {columns} columns, found {len(row)}")
        if row:
            yield reader.line_num, row


def _read_csv(file: _File) -> Arrivals:
    first, *further = file.header or [""]
    names = ("model", *_DETAILS, *_TOKENS, *_GROUPS)
    if first not in {"time_s", "timestamp"} or not set(further) <= set(names) or len(set(further)) < len(further):
        raise file.bad_header(f"the header time_s or timestamp, then any of {','.join(names)}")
    return _read_requests(file, file.header)


def _read_llm(file: _File) -> Arrivals:
    if file.header != list(_LLM_COLUMNS):
        raise file.bad_header(f"the header {','.join(_LLM_COLUMNS)}")
    return replace(_read_requests(file, list(_LLM_COLUMNS.values()), least_tokens=0), names=())


def _read_requests(file: _File, columns: Sequence[str], least_tokens: int = 1) -> Arrivals:
    """Return a trace with a line for each request.

    Args:
        file: The file.
        columns: What its columns are, by the names of the format ``csv``; the first one is the time.
        least_tokens: The minimum of the tokens of prompts and of those to generate.
    """
    read_time = _seconds if columns[0] == "time_s" else _timestamps()
    times, before = array("d"), ""
    values: dict[str, array[Any]] = {column: array("d" if column in _DETAILS else "q") for column in columns[1:]}
    places = [(at, column, values[column]) for at, column in enumerate(columns) if at]
    #: The numbers of names by column; an empty one of a group is none.
    numbers: dict[str, dict[str, int]] = {"model": {}} | {column: {"": -1} for column in _GROUPS}
    for line, row in file.rows:
        time_s = read_time(file, line, row[0])
        if times and time_s < times[-1]:
            raise file.bad(line, file.header[0], f"a time of at least the previous one, {before}", row[0])
        times.append(time_s)
        before = row[0]
        for at, column, own in places:
            cell = row[at].strip()
            if column in numbers:
                known = numbers[column]
                own.append(known.setdefault(cell, len(known) - (column in _GROUPS)))
            elif column in _DETAILS:
                own.append(_detail(file, line, at, column, cell))
            elif column == "prefix_tokens":  # without a cell there is no prefix
                own.append(_tokens(file, line, at, cell or "0", 0))
            else:
                own.append(_tokens(file, line, at, cell, least_tokens))

    def read(column: str, default: float) -> npt.NDArray[Any]:
        kind = np.float64 if column in _DETAILS else np.int64
        return np.array(values.get(column, np.full(len(times), default)), kind)

    details, tokens = None, None
    if not values.keys().isdisjoint(_DETAILS):
        priority = read("priority", 0).astype(np.int64)
        details = Details(read("duration_ms", np.nan), read("deadline_ms", np.nan), priority)
    if {"prompt_tokens", "new_tokens"} <= values.keys():
        groups = read("session", -1), read("prefix", -1), read("prefix_tokens", 0)
        tokens = Tokens(read("prompt_tokens", 0), read("new_tokens", 0), *groups)
    return Arrivals(np.array(times), read("model", 0), tuple(numbers["model"] or [""]), details, tokens)


def _detail(file: _File, line: int, at: int, column: str, text: str) -> float:
    """Return the figure of one request; an empty cell is NaN, or priority 0."""
    if column == "priority":
        if text and not re.fullmatch(r"-?[0-9]{1,9}", text):
            raise file.bad(line, file.header[at], "a whole number", text)
        return float(text or 0)
    value = _number(text)
    if text and not SMALLEST <= value <= LARGEST:
        raise file.bad(line, file.header[at], f"ms from {SMALLEST:g} to {LARGEST:g}", text)
    return value


def _tokens(file: _File, line: int, at: int, text: str, least: int) -> int:
    if not _is_count(text) or int(text) < least:
        raise file.bad(line, file.header[at], f"a whole number of at least {least}", text)
    return int(text)


def _seconds(file: _File, line: int, text: str) -> float:
    time_s = _number(text)
    if not 0 <= time_s <= _LAST_S:
        raise file.bad(line, "time_s", f"seconds from 0 to {_LAST_S:g}", text)
    return time_s


def _timestamps() -> Callable[[_File, int, str], float]:
    """Return a function that reads ISO 8601 timestamps as seconds since the first of them."""
    first: datetime | None = None

    def read(file: _File, line: int, text: str) -> float:
        nonlocal first
        expected = "a time in ISO 8601 like 2023-11-16T18:15:46.680"
        try:
            moment = datetime.fromisoformat(text.strip())
        except ValueError:
            raise file.bad(line, file.header[0], expected, text) from None
        first = first or moment
        if (moment.tzinfo is None) != (first.tzinfo is None):
            zone = f"{expected}, with or without a time zone as in the first row"
            raise file.bad(line, file.header[0], zone, text)
        return (moment - first).total_seconds()

    return read


def _read_functions(file: _File) -> MinuteCounts:
    fixed = len(_FUNCTION_COLUMNS)
    minutes = file.header[fixed:]
    if file.header[:fixed] != _FUNCTION_COLUMNS or not minutes:
        raise file.bad_header(f"the header {','.join(_FUNCTION_COLUMNS)},<minute>,...")
    for before, after in pairwise(minutes):
        if not (_is_count(before) and _is_count(after) and int(after) == int(before) + 1):
            raise file.bad(1, after, "consecutive numbers of minutes", after)
    names, counts = [], []
    for line, row in file.rows:
        for minute, text in zip(minutes, row[fixed:], strict=True):
            if not _is_count(text):
                raise file.bad(line, minute, "a whole number of at least 0", text)
        names.append(row[2])
        counts.append(np.array(row[fixed:], np.int64))
    return MinuteCounts(np.array(counts, np.int64).reshape(len(names), len(minutes)), tuple(names))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS
