"""Results of a simulation, as frozen records and as JSON.

Rates follow the paper: SLO violations = (late + dropped + failed) / arrivals (Equation 12), swapping = loads / arrivals
(Equation 13). Requests fail only if servers do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from msgspec.structs import asdict

from chrion.common.version import __version__
from chrion.serving.simulator.confidence import Interval
from chrion.serving.simulator.decoder_scenario import DecoderScenario
from chrion.serving.simulator.engine import ClusterEngine
from chrion.serving.simulator.histograms import Counts, NamedHistograms, bin_edges, quantile
from chrion.serving.simulator.metrics import RequestMetrics
from chrion.serving.simulator.request_batches import Settled
from chrion.serving.simulator.scenario import Scenario

SCHEMA = "chrion.simulation/1"
#: A model misses its objective if a greater share of its requests violates it: objectives are usually stated for the
#: 99th percentile.
_TOLERATED = 0.01
#: The quantiles of a :class:`LatencySummary`.
_SHARES = (0.5, 0.95, 0.99)
_HOUR_MS = 3_600_000.0
SWEEP_SCHEMA = "chrion.simulation-sweep/1"


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Mean and quantiles of latencies in ms; NaN without requests."""

    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """Counts and latencies of the requests of one model, or of all models."""

    name: str
    arrivals: int
    #: Requests that ended, in time or late.
    completed: int
    dropped: int
    #: Requests that had no server, or were on three servers that failed.
    failed: int
    late: int
    #: Completed requests that waited for a load.
    cold: int
    loads: int
    #: Times from arrival to end.
    response: LatencySummary
    #: Times from start to end, while the weights are in memory.
    execution: LatencySummary
    mean_wait_ms: float

    @property
    def violation_rate(self) -> float:
        """The rate of SLO violations (Equation 12)."""
        return (self.late + self.dropped + self.failed) / self.arrivals if self.arrivals else 0.0

    @property
    def swapping_rate(self) -> float:
        """The rate of swapping (Equation 13)."""
        return self.loads / self.arrivals if self.arrivals else 0.0


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """Counts and quantiles of response times of the requests of one class; NaN without completed requests."""

    name: str
    arrivals: int
    violation_rate: float
    p50_ms: float
    p95_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class ServerResult:
    """The work and the memory of one server."""

    index: int
    arrivals: int
    loads: int
    loaded_mb: float
    evictions: int
    #: Busy shares of the run's time: of the GPU slots, of the cores, of the PCIe link.
    gpu_busy: float
    cpu_busy: float
    link_busy: float
    memory_budget_mb: float
    memory_peak_mb: float
    memory_mean_mb: float
    #: Memory over time: the width of a bin in ms, and the mean of each bin.
    memory_bin_ms: float
    memory_mb: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Series:
    """Figures over time, one for each bin."""

    #: Width of a bin.
    bin_ms: float
    arrivals_per_s: tuple[float, ...]
    #: Requests at the end of the bin that have arrived and not started.
    waiting: tuple[int, ...]
    #: Violations / arrivals, of the requests that arrive in the bin; NaN without arrivals.
    violation_rate: tuple[float, ...]
    #: Servers that are on, and those that receive requests, in the mean; empty if all servers are always there.
    servers_on: tuple[float, ...] = ()
    servers_available: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """The time for which the servers of one ``[[servers]]`` table were on, and its price."""

    servers: int
    hardware: str
    server_hours: float
    cost: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Figures of servers that may be off, or have a disk."""

    #: Time for which servers were on, summed, and its price.
    server_hours: float = 0.0
    cost: float = 0.0
    #: Loads that read the disk.
    disk_loads: int = 0
    #: Work of the requests over what all GPU slots, or all cores, can do while requests arrive, whichever is larger.
    offered_load: float = 0.0
    groups: tuple[GroupUsage, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PatternResult:
    """The results of one pattern."""

    pattern: str
    #: From time 0 to the last arrival, end of a request, or end of a load.
    duration_ms: float
    total: RequestSummary
    models: tuple[RequestSummary, ...]
    servers: tuple[ServerResult, ...]
    classes: tuple[ClassSummary, ...]
    #: Response times of requests that waited for a load; their mean is not kept and is NaN.
    cold_response: LatencySummary
    usage: Usage
    series: Series = field(repr=False)
    #: Confidence intervals of violations and of response times from this run alone, and its figures without the
    #: warm-up; empty and None if the rate of arrivals changes over time, since parts of the run then differ as well.
    intervals: Mapping[str, Interval]
    settled: Settled | None
    #: Histograms of execution time by family of models, and of all response times; see
    #: :func:`chrion.serving.simulator.histograms.bin_edges`.
    executions: Mapping[str, Counts] = field(repr=False)
    responses: Counts = field(repr=False)

    @property
    def models_missing(self) -> int:
        """The number of models with more than 1 % of their requests in violation, which the overall rate may hide."""
        return sum(model.violation_rate > _TOLERATED for model in self.models)

    @property
    def cost_per_hour(self) -> float:
        """The mean price of the servers that are on for an hour."""
        return self.usage.cost / self.duration_ms * _HOUR_MS if self.duration_ms else 0.0

    @property
    def loads_per_s(self) -> float:
        """Loads per second."""
        return self.total.loads / self.duration_ms * 1000 if self.duration_ms else 0.0

    @property
    def loaded_mb_per_s(self) -> float:
        """Megabytes loaded per second over all links."""
        return sum(s.loaded_mb for s in self.servers) / self.duration_ms * 1000 if self.duration_ms else 0.0


#: Figures that conditions limit and replications estimate, as a share or in ms.
METRICS: dict[str, Callable[[PatternResult], float]] = {
    "violations": lambda result: result.total.violation_rate,
    "swapping": lambda result: result.total.swapping_rate,
    "mean": lambda result: result.total.response.mean_ms,
    "p50": lambda result: result.total.response.p50_ms,
    "p95": lambda result: result.total.response.p95_ms,
    "p99": lambda result: result.total.response.p99_ms,
}
#: Those that are shares.
SHARES = ("violations", "swapping")
#: The price of an hour, which is not searched.
COST = "cost_per_hour"


def collect(scenario: Scenario, pattern: str, engine: ClusterEngine) -> PatternResult:
    """Return the results of an engine after its run."""
    duration_ms = max(engine.metrics.end_ms, engine.now)
    servers = tuple(_server(engine, i, duration_ms) for i in range(len(engine.servers)))
    usage = _usage(engine, duration_ms, scenario.groups)
    result = from_metrics(scenario, pattern, engine.metrics, engine.cluster.loads, servers, duration_ms, usage)
    if not engine.availability:
        return result
    on, available = _mean_levels(engine.availability.changes, result.series, duration_ms)
    return replace(result, series=replace(result.series, servers_on=on, servers_available=available))


def from_metrics(  # noqa: PLR0913, PLR0917 - the parts of a result
    scenario: Scenario,
    pattern: str,
    metrics: RequestMetrics,
    loads: Sequence[int],
    servers: tuple[ServerResult, ...],
    duration_ms: float,
    usage: Usage = Usage(),  # it cannot be changed
) -> PatternResult:
    """Return the results of requests that were simulated or measured, given the loads of each model."""
    latencies = zip(
        *(histograms.quantiles(len(loads), _SHARES) for histograms in (metrics.responses, metrics.executions)),
        strict=True,
    )
    counts = (metrics.arrivals, metrics.dropped, metrics.failed, metrics.late, metrics.cold)
    columns = (*counts, metrics.response_ms, metrics.execution_ms, metrics.wait_ms)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    models = tuple(
        _summarise(model.name, row, own_loads, own)
        for model, row, own_loads, own in zip(scenario.models, rows, loads, latencies, strict=True)
    )
    responses = metrics.responses.total()
    quantiles = [_quantiles(counts) for counts in (responses, metrics.executions.total())]
    families = {model.family: i for i, model in enumerate({m.family: m for m in scenario.models}.values())}
    groups = np.array([families[model.family] for model in scenario.models])
    steady = scenario.is_steady
    executions = metrics.executions if len(families) == len(groups) else metrics.executions.grouped(groups)
    return PatternResult(
        pattern=pattern,
        duration_ms=duration_ms,
        total=_summarise("all", [column.sum().item() for column in columns], sum(loads), quantiles),
        models=models,
        servers=servers,
        classes=tuple(_class_summaries(scenario.classes, metrics)),
        cold_response=LatencySummary(math.nan, *_quantiles(metrics.cold_responses)),
        usage=usage,
        series=_series(metrics, duration_ms),
        intervals=metrics.batches.intervals() if steady else {},
        settled=metrics.batches.settled() if steady else None,
        executions=NamedHistograms(list(families), executions),
        responses=responses,
    )


def provenance(schema: str, scenarios: Sequence[Scenario | DecoderScenario]) -> dict[str, Any]:
    """Return what the JSON of results begins with, given their scenarios; ``content`` is that of the first."""
    first = scenarios[0]
    return {
        "schema": schema,
        "version": __version__,
        "scenario": first.name,
        "seed": first.seed,
        "estimated_hardware": list(dict.fromkeys(part for each in scenarios for part in each.estimated_hardware)),
        "content": dict(first.content),
    }


def to_json(scenario: Scenario, results: tuple[PatternResult, ...]) -> dict[str, Any]:
    """Return results as plain data for JSON; values that are not known are null."""
    return {
        **provenance(SCHEMA, [scenario]),
        "servers": len(scenario.servers),
        "models": len(scenario.models),
        "slo_measure": scenario.measure,
        "policies": asdict(scenario.policies),
        "cost_per_hour": sum(spec.cost_per_hour for spec in scenario.servers),
        "patterns": [_pattern_json(result) for result in results],
    }


def summary(result: PatternResult) -> dict[str, Any]:
    """Return a pattern's figures as plain data, without models, servers and histograms."""
    return {
        "pattern": result.pattern,
        "duration_ms": result.duration_ms,
        **_summary_json(result.total),
        "cold_response": plain(result.cold_response),
        "models_missing": result.models_missing,
        "loads_per_s": result.loads_per_s,
        "loaded_mb_per_s": result.loaded_mb_per_s,
        **plain(result.usage),
        "cost_per_hour": result.cost_per_hour,
        "memory_peak_mb": max(s.memory_peak_mb for s in result.servers),
        "intervals": {name: plain(entry) for name, entry in result.intervals.items()},
        "warm_up_requests": result.settled.removed if result.settled else None,
    }


def _pattern_json(result: PatternResult) -> dict[str, Any]:
    return {
        **summary(result),
        "per_model": [_summary_json(model) for model in result.models],
        "per_class": [plain(own) for own in result.classes],
        "per_server": [plain(server) for server in result.servers],
        "series": plain(result.series),
        "response_histogram": histogram_rows(result.responses),
        "execution_histograms": {name: histogram_rows(counts) for name, counts in result.executions.items()},
    }


def histogram_rows(counts: Counts) -> list[list[float]]:
    """Return the bins that are not empty, as ``[from_ms, to_ms, count]``."""
    edges = bin_edges()
    return [[float(edges[i]), float(edges[i + 1]), int(counts[i])] for i in np.flatnonzero(counts)]


def _summary_json(requests: RequestSummary) -> dict[str, Any]:
    rates = {"violation_rate": requests.violation_rate, "swapping_rate": requests.swapping_rate}
    return {**plain(requests), **rates}


def plain(record: Any) -> Any:
    """Return a record as plain data for JSON: objects for records, lists for tuples, null for NaN."""
    if isinstance(record, float):
        return record if math.isfinite(record) else None
    if isinstance(record, tuple):
        return [plain(value) for value in record]
    if hasattr(record, "__dataclass_fields__"):
        return {f.name: plain(getattr(record, f.name)) for f in fields(record)}
    return record


def _summarise(name: str, sums: Sequence[Any], loads: int, quantiles: Sequence[Sequence[float]]) -> RequestSummary:
    """Return the summary of a model or of several, given the quantiles of response and execution times.

    Args:
        name: Its name.
        sums: The numbers of its requests, and of those that were dropped, failed, late and cold; the sums of their
            response times, execution times and waits.
        loads: Its loads.
        quantiles: Those of response and of execution times.
    """
    arrivals, dropped, failed, late, cold, *times_ms = sums
    completed = arrivals - dropped - failed
    response, execution, wait = (_mean(total_ms, completed) for total_ms in times_ms)
    return RequestSummary(
        name=name,
        arrivals=arrivals,
        completed=completed,
        dropped=dropped,
        failed=failed,
        late=late,
        cold=cold,
        loads=loads,
        response=LatencySummary(response, *quantiles[0]),
        execution=LatencySummary(execution, *quantiles[1]),
        mean_wait_ms=wait,
    )


def _class_summaries(names: Sequence[str], metrics: RequestMetrics) -> Iterator[ClassSummary]:
    quantiles = metrics.class_responses.quantiles(len(names), _SHARES)
    for name, (arrivals, violations), own in zip(names, metrics.class_counts.T.tolist(), quantiles, strict=False):
        yield ClassSummary(name, arrivals, violations / arrivals if arrivals else 0.0, *own)


def _server(engine: ClusterEngine, i: int, end_ms: float) -> ServerResult:
    server = engine.servers[i]
    spec = server.host.spec
    on_gpu, on_cores = engine.metrics.gpu_ms[i], engine.metrics.cores_ms[i]
    width_ms, memory = server.memory.means(end_ms)
    return ServerResult(
        index=i,
        arrivals=int(engine.metrics.server_arrivals[i]),
        loads=server.loads,
        loaded_mb=server.loaded_mb,
        evictions=server.evictions,
        gpu_busy=_share(on_gpu, spec.gpu_slots * end_ms),
        cpu_busy=_share(on_cores, spec.cpu_cores * end_ms),
        link_busy=_share(server.link_busy_ms, end_ms),
        memory_budget_mb=spec.budget_bytes / 1e6,
        memory_peak_mb=server.memory.peak / 1e6,
        memory_mean_mb=_share(server.memory.area, server.memory.now) / 1e6,
        memory_bin_ms=width_ms,
        memory_mb=tuple(mean / 1e6 for mean in memory),
    )


def _usage(engine: ClusterEngine, duration_ms: float, sizes: Sequence[int]) -> Usage:
    """Return the use of servers, given the number of servers in each group."""
    specs = engine.config.servers
    on_ms = [duration_ms] * len(specs)
    if engine.availability:
        on_ms = [engine.availability.on_ms(host, duration_ms) for host in engine.hosts]
    groups, first = [], 0
    for size in sizes:
        spec, hours = specs[first], sum(on_ms[first : first + size]) / _HOUR_MS
        groups.append(GroupUsage(size, spec.hardware, hours, spec.cost_per_hour * hours))
        first += size
    return Usage(
        server_hours=sum(group.server_hours for group in groups),
        cost=sum(group.cost for group in groups),
        disk_loads=sum(host.memory.disk_loads for host in engine.hosts),
        offered_load=_offered_load(engine),
        groups=tuple(groups),
    )


def _offered_load(engine: ClusterEngine) -> float:
    metrics, gpus = engine.metrics, engine.config.gpus
    arrivals, span_ms = int(metrics.arrivals.sum()), engine.arrived_ms
    ran = arrivals - int(metrics.dropped.sum())
    if arrivals < 2 or not span_ms or not ran:
        return 0.0
    slots, cores = sum(spec.gpu_slots for spec in gpus), sum(spec.cpu_cores for spec in engine.config.servers)
    work_ms = (float(metrics.gpu_ms.sum()), slots), (float(metrics.cores_ms.sum()), cores)
    # Requests beyond a limit of those that wait are work, too; admission by deadlines chooses what is work.
    counted = ran if engine.config.policies.deadlines else arrivals
    busy = max(busy_ms / units for busy_ms, units in work_ms if units)
    return busy * counted / ran * (arrivals - 1) / arrivals / span_ms


def _series(metrics: RequestMetrics, duration_ms: float) -> Series:
    width_ms = metrics.series.width_ms
    bins = min(metrics.series.counts.shape[1], int(duration_ms / width_ms) + 1)
    arrivals, departures, violations = metrics.series.counts[:, :bins]
    # The last bin ends with the run.
    seconds = np.minimum(width_ms, np.maximum(duration_ms - np.arange(bins) * width_ms, 1e-9)) / 1000
    with np.errstate(invalid="ignore"):
        rates = violations / arrivals
    return Series(
        width_ms,
        tuple((arrivals / seconds).tolist()),
        tuple(np.cumsum(arrivals - departures).tolist()),
        tuple(rates.tolist()),
    )


def _mean_levels(changes: Sequence[tuple[float, ...]], series: Series, duration_ms: float) -> list[tuple[float, ...]]:
    """Return the means over the bins of a series of levels that have new values at some times, from 0 on."""
    times, *rows = np.array(changes, np.float64).T
    edges = np.minimum(np.arange(len(series.waiting) + 1) * series.bin_ms, duration_ms)
    at, lengths = np.searchsorted(times, edges, side="right") - 1, np.diff(edges)
    means = []
    for levels in rows:
        areas = np.append(0.0, np.cumsum(levels[:-1] * np.diff(times)))
        integrals = areas[at] + levels[at] * (edges - times[at])
        mean = np.divide(np.diff(integrals), lengths, out=levels[at[1:]].copy(), where=lengths > 0)
        means.append(tuple(mean.tolist()))
    return means


def _quantiles(counts: Counts) -> list[float]:
    return [quantile(counts, share) for share in _SHARES]


def _mean(total: float, number: int) -> float:
    return float(total) / number if number else math.nan


def _share(part: float, whole: float) -> float:
    return float(part) / whole if whole else 0.0
