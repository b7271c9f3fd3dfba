"""Results of simulated decoders, as frozen records and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from chrion.common.version import __version__
from chrion.serving.simulator.decoder_scenario import DecoderScenario, build_decoder_scenario
from chrion.serving.simulator.iterations import DecoderResult, Floats, simulate_decoder
from chrion.serving.simulator.results import plain
from chrion.serving.simulator.scenario import ScenarioSource

SCHEMA, SWEEP_SCHEMA = "chrion.decoder-simulation/1", "chrion.decoder-simulation-sweep/1"


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
    iterations: int
    #: Requests of an iteration.
    mean_batch: float
    #: Reserved slots: the mean over time, and the maximum.
    mean_reserved: float
    most_reserved: int


@dataclass(frozen=True, slots=True)
class DecoderPoint:
    """The results at one point of a sweep."""

    #: The swept values, by key.
    values: Mapping[str, Any]
    summaries: tuple[DecoderSummary, ...]


def summarise(result: DecoderResult) -> DecoderSummary:
    """Return the figures of a result."""
    return DecoderSummary(
        policy=result.policy,
        served=result.served,
        refused=result.refused,
        requests_per_s=result.requests_per_s,
        tokens_per_s=result.tokens_per_s,
        normalised_p50_ms=_quantile(result.normalised_ms, 0.5),
        normalised_p99_ms=_quantile(result.normalised_ms, 0.99),
        first_token_p50_ms=_quantile(result.first_token_ms, 0.5),
        first_token_p99_ms=_quantile(result.first_token_ms, 0.99),
        between_tokens_p50_ms=_quantile(result.between_tokens_ms, 0.5),
        iterations=result.iterations,
        mean_batch=result.mean_batch,
        mean_reserved=result.mean_reserved,
        most_reserved=result.most_reserved,
    )


def sweep_decoder(
    source: ScenarioSource, points: Sequence[Mapping[str, Any]], progress: Callable[[int], None] = lambda _: None
) -> list[DecoderPoint]:
    """Simulate a scenario at every point; all points are checked before the first one is simulated.

    Args:
        source: The scenario.
        points: The values to set at each point.
        progress: Called with the number of points that are done.

    Raises:
        InputError: The scenario of a point is invalid.
    """
    scenarios = [build_decoder_scenario(source.changed(values)) for values in points]
    results = []
    for values, scenario in zip(points, scenarios, strict=True):
        results.append(DecoderPoint(values, tuple(map(summarise, simulate_decoder(scenario)))))
        progress(len(results))
    return results


def to_json(scenario: DecoderScenario, summaries: Sequence[DecoderSummary]) -> dict[str, Any]:
    """Return the results of one simulation, with the scenario, as plain data for JSON."""
    return {
        "schema": SCHEMA,
        "chrion": __version__,
        "scenario": scenario.name,
        "estimated_hardware": list(scenario.estimated_hardware),
        "content": dict(scenario.content),
        "policies": [plain(summary) for summary in summaries],
    }


def sweep_to_json(name: str, points: Sequence[DecoderPoint]) -> dict[str, Any]:
    """Return the results of a sweep as plain data for JSON."""
    rows = [
        {"values": dict(point.values), "policies": [plain(summary) for summary in point.summaries]} for point in points
    ]
    return {"schema": SWEEP_SCHEMA, "chrion": __version__, "scenario": name, "points": rows}


def _quantile(values: Floats, quantile: float) -> float:
    return float(np.quantile(values, quantile)) if len(values) else float("nan")
