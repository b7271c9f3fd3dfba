"""Latencies of tokens that a simulation predicts, beside those of a server at a share of its capacity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from chrion.serving.simulator.decoder_requests import DecoderWorkload
from chrion.serving.simulator.decoder_results import summarise
from chrion.serving.simulator.decoder_scenario import DecoderScenario
from chrion.serving.simulator.iterations import draw_requests, simulate_decoder
from decoding.costs import CostMeter
from decoding.live_server import LiveServer, live_server
from decoding.load import SIZES, Costs, IterationTotals, load_scenario
from decoding.recorder import recorded

#: The share of the capacity, which is the throughput of a simulation with all requests at once.
SHARE = 0.7
#: The max batch, the max batches at which costs are measured, and the number by which Orca's lengths are divided.
MAX_BATCH, BATCHES, SCALE = 8, (1, 2, 4, 8), 4
_SATURATING = 2000
#: What is compared: the share of a figure that is a quantile, and its name.
FIGURES = ("requests/s", "first ms p50", "first ms p99", "between ms p50", "between ms p99")
PREDICTION_HEAD = ("weights", "figure", "measured", "predicted / measured", "at equal speed")


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One load of a server."""

    workload: DecoderWorkload
    #: Values of :data:`FIGURES`.
    figures: Mapping[str, float]
    iterations: IterationTotals


def measure_load(server: LiveServer, workload: DecoderWorkload) -> MeasuredRun:
    """Send requests at their times of arrival, and return the latencies that their clients see."""
    with recorded(server.generator) as recorder:
        times = server.send(workload)
    first = np.array([own[0] for own in times]) - workload.arrivals_ms
    between = [(own[-1] - own[0]) / (len(own) - 1) for own in times if len(own) > 1]
    took_ms = max(own[-1] for own in times) - workload.arrivals_ms[0]
    quantiles = [*np.quantile(first, [0.5, 0.99]), *np.quantile(between, [0.5, 0.99])]
    values = [1e3 * len(times) / took_ms, *quantiles]
    return MeasuredRun(workload, _named(values), IterationTotals.of(recorder.iterations()))


def predict(scenario: DecoderScenario, workload: DecoderWorkload) -> Mapping[str, float]:
    """Return the simulated values of :data:`FIGURES` for some requests."""
    own = summarise(simulate_decoder(scenario, workload=workload)[0])
    first, between = (
        [own.first_token_p50_ms, own.first_token_p99_ms],
        [own.between_tokens_p50_ms, own.between_tokens_p99_ms],
    )
    return _named([own.requests_per_s, *first, *between])


def prediction_rows(size: str, requests: int, repeats: int, threads: int) -> list[tuple[str, ...]]:
    """Return a line for each figure: medians over runs, and the range of the ratios."""
    runs = []
    with live_server(SIZES[size], MAX_BATCH, threads) as server:
        meter = CostMeter(server.generator, SCALE, server.send)
        meter.measure(BATCHES)
        rate_per_s = SHARE * _capacity(meter.fit())
        for seed in range(repeats):
            workload = draw_requests(load_scenario(SCALE, rate_per_s, requests, seed=seed))
            runs.append(measure_load(server, workload))
            meter.measure(BATCHES)
        costs = meter.fit()
    return _rows(size, runs, costs)


def _capacity(costs: Costs) -> float:
    """Return the requests per second at saturation."""
    scenario = _scenario(costs)
    return predict(scenario, draw_requests(scenario))["requests/s"]


def _scenario(costs: Costs) -> DecoderScenario:
    return structs.replace(load_scenario(SCALE, 1e6, _SATURATING, MAX_BATCH, costs), policies=("iteration",))


def _rows(size: str, runs: Sequence[MeasuredRun], costs: Costs) -> list[tuple[str, ...]]:
    as_measured = [predict(_scenario(costs), run.workload) for run in runs]
    slowdowns = [run.iterations.slowdown(costs) for run in runs]
    equal = [
        predict(_scenario(_slower(costs, slowdown)), run.workload)
        for run, slowdown in zip(runs, slowdowns, strict=True)
    ]
    rows = []
    for name in FIGURES:
        measured = [run.figures[name] for run in runs]
        ratios = [np.array([one[name] for one in predicted]) / measured for predicted in (as_measured, equal)]
        texts = (f"{np.median(own):.2f} [{own.min():.2f} to {own.max():.2f}]" for own in ratios)
        rows.append((size, name, f"{np.median(measured):.1f}", *texts))
    return rows


def _slower(costs: Costs, slowdown: float) -> Costs:
    """Return costs of iterations that take so many times as long."""
    own, prompt = (
        structs.replace(terms, **{name: slowdown * value for name, value in structs.asdict(terms).items()})
        for terms in costs
    )
    return own, prompt


def _named(values: Sequence[float]) -> dict[str, float]:
    return {name: float(value) for name, value in zip(FIGURES, values, strict=True)}
