"""Results of simulated decoders, as frozen records and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chrion.serving.simulator import confidence
from chrion.serving.simulator.confidence import Interval
from chrion.serving.simulator.decoder_scenario import DecoderScenario, build_decoder_scenario
from chrion.serving.simulator.export import csv_rows
from chrion.serving.simulator.histograms import Floats, quantile
from chrion.serving.simulator.iterations import DecoderResult, draw_requests, simulate_decoder
from chrion.serving.simulator.results import plain, provenance
from chrion.serving.simulator.scenario import ScenarioSource
from chrion.serving.simulator.sweep import run_tasks

#: Generated tokens from which several processes save more time than they take to start: one takes 2 to 3 us.
WORTHWHILE = 1_000_000
#: The figure that is a share.
VIOLATIONS = "violations"
#: Figures that a condition can limit, by name; all others are in ms.
METRICS: Mapping[str, Callable[[DecoderSummary], float]] = {
    VIOLATIONS: lambda summary: summary.violations,
    "token_p50": lambda summary: summary.normalised_p50_ms,
    "token_p99": lambda summary: summary.normalised_p99_ms,
    "first_p50": lambda summary: summary.first_token_p50_ms,
    "first_p99": lambda summary: summary.first_token_p99_ms,
    "between_p50": lambda summary: summary.between_tokens_p50_ms,
    "between_p99": lambda summary: summary.between_tokens_p99_ms,
    "gap_p99": lambda summary: summary.gap_p99_ms,
}
#: Other figures of replications.
_RATES: Mapping[str, Callable[[DecoderSummary], float]] = {
    "requests_per_s": lambda summary: summary.requests_per_s,
    "tokens_per_s": lambda summary: summary.tokens_per_s,
    "goodput_per_s": lambda summary: summary.goodput_per_s,
}
_COLUMNS = (
    *("policy", "number", "replica", "arrival_ms", "first_token_ms", "end_ms"),
    *("prompt_tokens", "new_tokens", "preemptions", "outcome"),
)
SCHEMA, SWEEP_SCHEMA = "chrion.decoder-simulation/2", "chrion.decoder-simulation-sweep/2"
REPLICATIONS_SCHEMA = "chrion.decoder-simulation-replications/1"


@dataclass(frozen=True, slots=True)
class DecoderSummary:
    """Figures of one policy; latencies are NaN if no request ended."""

    policy: str
    served: int
    #: Requests that need more slots than there are.
    refused: int
    requests_per_s: float
    #: Generated tokens per second.
    tokens_per_s: float
    #: Latency divided by generated tokens (Orca, section 6.2).
    normalised_p50_ms: float
    normalised_p99_ms: float
    #: Time from arrival to the first token.
    first_token_p50_ms: float
    first_token_p99_ms: float
    #: Mean time between two tokens of a request.
    between_tokens_p50_ms: float
    between_tokens_p99_ms: float
    #: Single times between two tokens, to half a percent.
    gap_p99_ms: float
    #: Requests that did not meet all objectives or were refused, as a share, and those that did, per second; NaN
    #: without objectives.
    violations: float
    goodput_per_s: float
    iterations: int
    #: Requests of an iteration.
    mean_batch: float
    #: Reserved slots of a replica: the mean over time, and the maximum.
    mean_reserved: float
    most_reserved: int
    #: The share of the time in which workers run iterations.
    utilisation: float
    #: How often requests were preempted, and the tokens of prompts that were kept from other requests.
    preemptions: int
    reused_tokens: int


@dataclass(frozen=True, slots=True)
class DecoderPoint:
    """The results at one point of a sweep."""

    #: The swept values, by key.
    values: Mapping[str, Any]
    scenario: DecoderScenario
    summaries: tuple[DecoderSummary, ...]


def summarise(result: DecoderResult) -> DecoderSummary:
    """Return the figures of a result."""
    slo, new = result.objectives, result.workload.new
    has_objectives = slo.first_token_ms or slo.between_tokens_ms
    return DecoderSummary(
        policy=result.policy,
        served=result.served,
        refused=result.refused,
        requests_per_s=result.requests_per_s,
        tokens_per_s=result.per_s(int(new[~np.isnan(result.ends_ms)].sum())),
        normalised_p50_ms=_quantile(result.normalised_ms, 0.5),
        normalised_p99_ms=_quantile(result.normalised_ms, 0.99),
        first_token_p50_ms=_quantile(result.first_token_ms, 0.5),
        first_token_p99_ms=_quantile(result.first_token_ms, 0.99),
        between_tokens_p50_ms=_quantile(result.between_tokens_ms, 0.5),
        between_tokens_p99_ms=_quantile(result.between_tokens_ms, 0.99),
        gap_p99_ms=quantile(result.gaps, 0.99),
        violations=1.0 - result.met / len(result.ends_ms),
        goodput_per_s=result.per_s(result.met) if has_objectives else math.nan,
        iterations=result.iterations,
        mean_batch=result.mean_batch,
        mean_reserved=result.mean_reserved,
        most_reserved=result.most_reserved,
        utilisation=result.utilisation,
        preemptions=int(result.preempted.sum()),
        reused_tokens=result.reused,
    )


def sweep_decoder(
    source: ScenarioSource,
    points: Sequence[Mapping[str, Any]],
    progress: Callable[[int], None] = lambda _: None,
    workers: int = 1,
) -> list[DecoderPoint]:
    """Simulate a scenario at every point; all points are checked before the first one is simulated.

    Args:
        source: The scenario.
        points: The values to set at each point.
        progress: Called with the number of points that are done.
        workers: Number of processes, which are used if the simulations take longer than their start.

    Raises:
        InputError: The scenario of a point is invalid.
    """
    sources = [source.changed(values) for values in points]
    scenarios = [build_decoder_scenario(one) for one in sources]
    tokens = sum(int(draw_requests(scenario).new.sum()) for scenario in scenarios) if workers > 1 else 0
    parallel = workers if tokens >= WORTHWHILE else 1
    simulated = run_tasks(simulate_source, sources, workers=parallel, progress=progress)
    return [DecoderPoint(*point) for point in zip(points, scenarios, simulated, strict=True)]


def simulate_source(source: ScenarioSource) -> tuple[DecoderSummary, ...]:
    """Return the figures of every policy of a scenario."""
    return tuple(map(summarise, simulate_decoder(build_decoder_scenario(source))))


def export_requests(path: Path, results: Sequence[DecoderResult]) -> None:
    """Write every request to a CSV file.

    Raises:
        OptionError: The file cannot be written.
    """
    with csv_rows(path, _COLUMNS) as write:
        for result in results:
            write(_rows(result))


def _rows(result: DecoderResult) -> Iterator[tuple[object, ...]]:
    workload = result.workload
    times_ms = (workload.arrivals_ms, result.first_ms, result.ends_ms)
    counts = (result.replicas, workload.prompts, workload.new, result.preempted)
    rows = zip(*(values.tolist() for values in (*times_ms, *counts)), strict=True)
    for number, (*times, replica, prompt, new, preempted) in enumerate(rows):
        refused = replica < 0
        shown = ("" if math.isnan(time_ms) else f"{time_ms:.6f}" for time_ms in times)
        outcome = "refused" if refused else "completed"
        yield result.policy, number, "" if refused else replica, *shown, prompt, new, preempted, outcome


def intervals(runs: Sequence[tuple[DecoderSummary, ...]]) -> dict[str, dict[str, Interval]]:
    """Return the intervals of figures by policy, over runs with several seeds."""
    return confidence.intervals([summary.policy for summary in runs[0]], runs, {**_RATES, **METRICS})


def to_json(scenario: DecoderScenario, summaries: Sequence[DecoderSummary]) -> dict[str, Any]:
    """Return the results of one simulation, with the scenario, as plain data for JSON."""
    return {**provenance(SCHEMA, [scenario]), "policies": [plain(summary) for summary in summaries]}


def sweep_to_json(points: Sequence[DecoderPoint]) -> dict[str, Any]:
    """Return the results of a sweep as plain data for JSON."""
    rows = [
        {"values": dict(point.values), "policies": [plain(summary) for summary in point.summaries]} for point in points
    ]
    return {**provenance(SWEEP_SCHEMA, [point.scenario for point in points]), "points": rows}


def _quantile(values: Floats, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else math.nan
