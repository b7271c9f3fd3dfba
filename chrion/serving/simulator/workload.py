"""Workloads: requests as chunks of arrival times and models, in order of time, synthetic or replayed from a trace.

A workload is a small record that yields the same requests each time: arrival times, models and the scaling of traces
have separate random streams, all from one seed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from chrion.errors import ScenarioError
from chrion.serving.simulator.function_durations import FunctionDurations
from chrion.serving.simulator.rate_curve import RateCurve
from chrion.serving.simulator.requests import Details, Floats, Indices, Requests
from chrion.serving.simulator.settings import SYNTHETIC, ClassSpec, WorkloadSpec
from chrion.serving.simulator.traces import MinuteCounts, read_durations, read_memory, read_trace

#: Requests in a chunk: numpy's fixed costs are negligible for so many, and they take less than 1 MB.
_CHUNK = 1 << 15
#: A minute or a gap of a scaled trace with more requests than this is divided, so that memory is bounded.
_PIECE = 1 << 16
#: Maximum requests of a run: they take about half a day.
MAX_REQUESTS = 1e10
_MINUTE_MS = 60_000.0
#: Where the traces of a kind are published.
_PUBLISHED = dict.fromkeys(
    ("azure-functions-2019", "azure-llm-2023"), "published at https://github.com/Azure/AzurePublicDataset; "
)
_DEFAULT_MAPPING = {"csv": "name", "azure-functions-2019": "rank", "azure-llm-2023": "draw"}


class Workload(Protocol):
    """The requests to a cluster."""

    @property
    def requests(self) -> int:
        """The number of requests; for a scaled trace, its expected value."""

    @property
    def details(self) -> Details | None:
        """The figures of single requests before scaling; None if there are none."""

    def chunks(self) -> Iterator[Requests]:
        """Yield chunks of requests in order of time."""


@dataclass(frozen=True, slots=True, eq=False)
class SyntheticWorkload:
    """Independent requests with gaps of mean ``1 / rate``: constant, exponential (Poisson) or Gamma-distributed."""

    kind: str
    requests: int
    rate_per_s: float
    burst_cv: float
    #: Probability of each model. Shape [models].
    chances: Floats
    seed: int
    #: The rate over time relative to ``rate_per_s``; None for a constant rate.
    curve: RateCurve | None = None

    @property
    def details(self) -> None:
        """None: no request has figures of its own."""
        return

    def chunks(self) -> Iterator[Requests]:
        """Yield chunks of requests; see :class:`Workload`."""
        gaps, models = _streams(self.seed, 2)
        start_ms, mean_ms = 0.0, 1000.0 / self.rate_per_s
        for first in range(0, self.requests, _CHUNK):
            size = min(_CHUNK, self.requests - first)
            times = start_ms + np.cumsum(mean_ms * self._gaps(gaps, size))
            start_ms = float(times[-1])
            if self.curve:
                times = 1000 * self.curve.times_s(times / 1000)
            yield Requests(times, draw(models, self.chances, size))

    def _gaps(self, rng: np.random.Generator, size: int) -> Floats:
        if self.kind == "uniform":
            return np.ones(size)
        if self.kind == "poisson":
            return rng.standard_exponential(size)
        shape = self.burst_cv**-2
        return rng.gamma(shape, 1 / shape, size)


@dataclass(frozen=True, slots=True, eq=False)
class TraceReplay:
    """The requests of a trace at their times; with a rate scale above 1, copies fill the gap to the next one."""

    #: Not decreasing. Shape [n].
    times_ms: Floats
    #: The model of each request, shape [n]; None if models are drawn.
    models: Indices | None
    #: Probability of each model if models are drawn. Shape [models].
    chances: Floats
    rate_scale: float
    seed: int
    #: Figures of single requests, which copies of a request share; None if there are none.
    details: Details | None = None

    @property
    def requests(self) -> int:
        """The expected number of requests; the fractional part of the scale is applied at random."""
        return round(len(self.times_ms) * self.rate_scale)

    def chunks(self) -> Iterator[Requests]:
        """Yield chunks of requests; see :class:`Workload`."""
        thinning, models = _streams(self.seed, 2)
        ends = np.append(self.times_ms[1:], self.times_ms[-1])
        for first in range(0, len(self.times_ms), _CHUNK):
            part = slice(first, first + _CHUNK)
            copies = scale_counts(np.ones(len(self.times_ms[part])), self.rate_scale, thinning)
            for rows in _pieces(copies):
                for times, index in self._scaled(first + rows.start, copies[rows], ends, thinning):
                    own = draw(models, self.chances, len(index)) if self.models is None else self.models[index]
                    yield Requests(times, own, self.details.rows(index) if self.details else None)

    def _scaled(
        self, first: int, copies: Indices, ends: Floats, rng: np.random.Generator
    ) -> Iterator[tuple[Floats, Indices]]:
        """Yield times and rows of requests: ``copies`` of each row from ``first`` on, the first of them at its time."""
        if len(copies) == 1 and copies[0] > _PIECE:
            begin, length = self.times_ms[first], ends[first] - self.times_ms[first]
            yield np.array([begin]), np.array([first])
            for shares, size in _divided(np.array([copies[0] - 1]), rng):
                times = begin + np.sort(rng.uniform(*shares, int(size[0]))) * length
                yield times, np.full(len(times), first)
            return
        index = first + np.repeat(np.arange(len(copies)), copies)
        times = self.times_ms[index]
        if self.rate_scale > 1:
            repeated = np.append([False], index[1:] == index[:-1]) if len(index) else np.zeros(0, bool)
            times = times + repeated * rng.random(len(index)) * (ends[index] - times)
        order = np.argsort(times, kind="stable")
        yield times[order], index[order]


@dataclass(frozen=True, slots=True, eq=False)
class MinuteReplay:
    """Requests counted by minute, at times drawn uniformly within each minute."""

    #: Shape [functions, minutes]; not whole if a part of a function's requests is replayed.
    counts: Indices | Floats
    #: The model of each function. Shape [functions].
    models: Indices
    rate_scale: float
    time_scale: float
    seed: int
    #: The execution times of the functions; None if requests have those of their models.
    durations: FunctionDurations | None = None
    #: The mean memory of each model's functions in MB, NaN if it is not known, shape [models]; None without a file.
    memory_mb: Floats | None = None

    @property
    def details(self) -> Details | None:
        """The execution time of one request, if requests have their own."""
        return None if self.durations is None else _durations_only(np.ones(1))

    @property
    def requests(self) -> int:
        """The expected number of requests; the fractional part of the scale is applied at random."""
        return round(float(self.counts.sum()) * self.rate_scale)

    def chunks(self) -> Iterator[Requests]:
        """Yield chunks of requests; see :class:`Workload`."""
        thinning, moments, shares = _streams(self.seed, 3)
        for minute in range(self.counts.shape[1]):
            copies = scale_counts(self.counts[:, minute].astype(float), self.rate_scale, thinning)
            for (begin, end), counts in _divided(copies, moments):
                functions = np.repeat(np.arange(len(counts)), counts)
                times = (minute + moments.uniform(begin, end, len(functions))) * _MINUTE_MS * self.time_scale
                order = np.argsort(times, kind="stable")
                functions, details = functions[order], None
                if self.durations:
                    details = _durations_only(self.durations.draw(functions, shares.random(len(functions))))
                yield Requests(times[order], self.models[functions], details)


def _durations_only(duration_ms: Floats) -> Details:
    return Details(duration_ms, np.full(len(duration_ms), np.nan), np.zeros(len(duration_ms), np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class ClassifiedWorkload:
    """The requests of another workload, each of a class that is drawn by the shares.

    What a trace gives for a request takes precedence over what its class gives.
    """

    whole: Workload
    classes: Sequence[ClassSpec]
    seed: int

    @property
    def requests(self) -> int:
        """As of the whole workload."""
        return self.whole.requests

    @property
    def details(self) -> Details | None:
        """The figures of single requests of the whole workload, and one request of each class."""
        rows = self._details(np.arange(len(self.classes)))
        given = self.whole.details
        if given:
            rows = Details(*(np.concatenate([a, b]) for a, b in zip(given[:3], rows[:3], strict=True)))
        return rows

    def chunks(self) -> Iterator[Requests]:
        """Yield chunks of requests; see :class:`Workload`."""
        rng = np.random.default_rng(np.random.SeedSequence([self.seed, 3]))
        shares: Floats = np.array([own.share for own in self.classes])
        for times, models, given in self.whole.chunks():
            index = draw(rng, shares / shares.sum(), len(times))
            rows = self._details(index)
            if given:
                deadlines = np.where(np.isnan(given.deadline_ms), rows.deadline_ms, given.deadline_ms)
                priority = np.where(given.priority != 0, given.priority, rows.priority)
                rows = Details(given.duration_ms, deadlines, priority, index)
            yield Requests(times, models, rows)

    def _details(self, index: Indices) -> Details:
        deadlines: Floats = np.array([own.slo_ms or np.nan for own in self.classes])
        priority = np.array([own.priority for own in self.classes], np.int64)
        return Details(np.full(len(index), np.nan), deadlines[index], priority[index], index)


def build_workload(
    spec: WorkloadSpec, names: Sequence[str], shares: Sequence[float], seed: int, folder: Path
) -> Workload:
    """Return the workload of a scenario; a trace is read and checked.

    Args:
        spec: The section ``[workload]``.
        names: The models.
        shares: Their shares of the requests.
        seed: Equal seeds give equal requests.
        folder: The folder of a relative path of a trace.

    Raises:
        ScenarioError: There is no trace file, its mapping does not suit it, the selected part has no requests, or there
            are more than :data:`MAX_REQUESTS`.
        TraceError: A row of the trace is malformed.
    """
    workload = _build(spec, names, shares, seed, folder)
    if workload.requests > MAX_REQUESTS:
        key = "requests" if spec.kind in SYNTHETIC else "rate_scale"
        raise ScenarioError(
            f"workload: {workload.requests:.3g} requests: expected at most {MAX_REQUESTS:g}", hint=f"reduce {key}"
        )
    return workload


def _build(spec: WorkloadSpec, names: Sequence[str], shares: Sequence[float], seed: int, folder: Path) -> Workload:
    chances = popularity(shares, spec.zipf_exponent)
    if spec.kind in SYNTHETIC:
        curve = RateCurve(spec.curve) if spec.curve else None
        return SyntheticWorkload(spec.kind, spec.requests, spec.rate_per_s, spec.burst_cv, chances, seed, curve)
    if not spec.path:
        hint = f"{_PUBLISHED.get(spec.kind, '')}name it with --set workload.path=FILE"
        raise ScenarioError(f"workload.path is missing: kind {spec.kind!r} requires a trace file", hint=hint)
    trace = read_trace(spec.kind, folder / spec.path)
    mapping = spec.mapping or _DEFAULT_MAPPING[spec.kind]
    if isinstance(trace, MinuteCounts):
        return _per_minute(trace, spec, mapping, names, seed, folder)
    for key in ("durations_path", "memory_path"):
        if getattr(spec, key):
            raise ScenarioError(f"workload.{key}: only for kind 'azure-functions-2019'", hint="leave it out")
    part = spec.part(trace.times_s, "workload")
    totals = np.bincount(trace.functions, minlength=len(trace.names))
    functions = _with_default(trace.names, spec.default_model, names) if mapping == "name" else trace.names
    models = None if mapping == "draw" else map_functions(functions, totals, mapping, names)[trace.functions[part]]
    times_ms = (trace.times_s[part] - spec.start_s) * 1000.0 * spec.time_scale
    details = trace.details.rows(np.flatnonzero(part)) if trace.details else None
    return TraceReplay(times_ms, models, chances, spec.rate_scale, seed, details)


def _with_default(functions: Sequence[str], default: str, names: Sequence[str]) -> list[str]:
    """Return the functions of a trace with the default model in the place of an empty name."""
    if default and default not in names:
        known = ", ".join(names[:12])
        raise ScenarioError(f"workload.default_model = {default!r}: not a model", hint=f"known: {known}")
    if "" in functions and not default:
        hint = "set workload.default_model, or mapping = 'draw'"
        raise ScenarioError("workload: the trace has requests without a model", hint=hint)
    return [function or default for function in functions]


def popularity(shares: Sequence[float], zipf_exponent: float) -> Floats:
    """Return the probability of each model, share / rank ** exponent, normalised to sum 1. Shape [models]."""
    logs = np.log(shares) - zipf_exponent * np.log(np.arange(1, len(shares) + 1))
    raw = np.exp(logs - logs.max())
    chances: Floats = raw / raw.sum()
    return chances


def map_functions(functions: Sequence[str], totals: Indices, mapping: str, names: Sequence[str]) -> Indices:
    """Return the model of each function of a trace.

    Args:
        functions: Names of the functions.
        totals: Their numbers of requests. Shape [functions].
        mapping: ``name``: the model of the function's name. ``round-robin``: the models in rotation, in the order of
            the file. ``rank``: the models in rotation, most requested function first. ``hash``: by a checksum of the
            name, so that a function has the same model in every part of a trace.
        names: Names of the models.

    Raises:
        ScenarioError: The trace does not name functions, or a function is not the name of a model.
    """
    if not functions:
        raise ScenarioError(f"workload.mapping = {mapping!r}: the trace names no functions", hint="use draw")
    if mapping == "name":
        index = {name: i for i, name in enumerate(names)}
        for function in functions:
            if function not in index:
                hint = "other mappings: 'round-robin', 'rank', 'hash'"
                raise ScenarioError(f"workload: the trace requests {function!r}, which is not a model", hint=hint)
        return np.array([index[function] for function in functions])
    if mapping == "hash":
        return np.array([zlib.crc32(function.encode()) % len(names) for function in functions])
    if mapping == "round-robin":
        return np.arange(len(functions)) % len(names)
    ranks = np.empty(len(functions), np.int64)
    ranks[np.argsort(-totals, kind="stable")] = np.arange(len(functions))
    return ranks % len(names)


def scale_counts(counts: Floats, scale: float, rng: np.random.Generator) -> Indices:
    """Return counts times ``scale``; a fraction is rounded up with a probability equal to it, which keeps the mean."""
    scaled = counts * scale
    whole = np.floor(scaled)
    return (whole + (rng.random(len(counts)) < scaled - whole)).astype(np.int64)


def _per_minute(  # noqa: PLR0913, PLR0917 - what a workload is built from
    trace: MinuteCounts, spec: WorkloadSpec, mapping: str, names: Sequence[str], seed: int, folder: Path
) -> MinuteReplay:
    if mapping == "draw":
        raise ScenarioError("workload.mapping = 'draw': the trace names functions", hint="use rank or hash")
    begin, length = spec.start_s / 60, spec.length_s / 60
    if begin % 1 or length % 1:
        raise ScenarioError("workload: expected start_s and length_s in whole minutes for a trace of minutes")
    counts = trace.counts[:, int(begin) : int(begin + length) if length else None]
    if not counts.any():
        until = f"to minute {begin + length:g}" if length else "to its end"
        raise ScenarioError(f"workload: the trace has no requests from minute {begin:g} {until}")
    models = map_functions(trace.names, trace.counts.sum(axis=1), mapping, names)
    durations, memory_mb = None, None
    if spec.durations_path:
        durations = FunctionDurations(read_durations(folder / spec.durations_path), trace.names)
    if spec.memory_path:
        memory = read_memory(folder / spec.memory_path)
        found = [(at, memory.rows[name]) for at, name in enumerate(trace.names) if name in memory.rows]
        functions, rows = np.array(found, np.int64).reshape(-1, 2).T
        of, requests = models[functions], trace.counts[functions].sum(axis=1)
        sums = np.bincount(of, requests * memory.values[rows, 0], len(names))
        known = np.bincount(of, requests, len(names))
        memory_mb = np.divide(sums, known, out=np.full(len(names), np.nan), where=known > 0)
    return MinuteReplay(counts, models, spec.rate_scale, spec.time_scale, seed, durations, memory_mb)


def _pieces(copies: Indices) -> Iterator[slice]:
    """Yield consecutive parts of a sequence whose sums are at most ``_PIECE``, or which have one entry."""
    sums = np.cumsum(copies)
    first = 0
    while first < len(copies):
        before = int(sums[first - 1]) if first else 0
        after = max(first + 1, int(np.searchsorted(sums, before + _PIECE, side="right")))
        yield slice(first, after)
        first = after


def _divided(counts: Indices, rng: np.random.Generator) -> Iterator[tuple[tuple[float, float], Indices]]:
    """Yield equal parts of the interval [0, 1) and the counts of events in them, about ``_PIECE`` in all.

    The counts are those of events at uniformly distributed times: the part ``i`` of ``n`` has a binomial number of the
    remaining events, with probability 1 / (n - i).
    """
    parts = max(1, round(int(counts.sum()) / _PIECE))
    for i in range(parts):
        taken = rng.binomial(counts, 1 / (parts - i)) if i + 1 < parts else counts
        counts = counts - taken
        yield (i / parts, (i + 1) / parts), taken


def _streams(seed: int, number: int) -> list[np.random.Generator]:
    return [np.random.default_rng(s) for s in np.random.SeedSequence([seed, 0]).spawn(number)]


def draw(rng: np.random.Generator, chances: Floats, size: int) -> Indices:
    """Return random numbers, each with its chance. Shape [size]."""
    picked = np.searchsorted(np.cumsum(chances), rng.random(size), side="right")
    return np.minimum(picked, len(chances) - 1)
