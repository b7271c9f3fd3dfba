"""Latencies of tokens that a simulation predicts, beside those of a Generator at a share of its capacity."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs

import chrion
from chrion.generation import Generator, Stream
from chrion.generation.streams import Token
from chrion.serving.simulator.decoder_requests import DecoderWorkload
from chrion.serving.simulator.decoder_results import summarise
from chrion.serving.simulator.decoder_scenario import DecoderScenario
from chrion.serving.simulator.iterations import draw_requests, simulate_decoder
from chrion.zoo.cached_decoder import build_llama_decoder
from decoding.costs import CostMeter
from decoding.load import SIZES, Costs, IterationTotals, load_scenario, submitted
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
    """One load of a Generator."""

    workload: DecoderWorkload
    #: Values of :data:`FIGURES`.
    figures: Mapping[str, float]
    iterations: IterationTotals


@contextlib.contextmanager
def noted_tokens() -> Iterator[dict[int, list[float]]]:
    """Note when streams get their tokens, by their identity, while they exist."""
    usual, times = Stream.put, dict[int, list[float]]()

    def put(stream: Stream, token: Token) -> None:
        times.setdefault(id(stream), []).append(time.perf_counter())
        usual(stream, token)

    Stream.put = put  # type: ignore[method-assign, assignment]
    try:
        yield times
    finally:
        Stream.put = usual  # type: ignore[method-assign]


def run_tokens(generator: Generator, workload: DecoderWorkload) -> MeasuredRun:
    """Submit requests at their times of arrival, and return the latencies that their clients see."""
    with recorded(generator) as recorder, noted_tokens() as times:
        began = time.perf_counter()
        streams = list(submitted(generator, workload, began))
        for stream in streams:
            stream.result()
    tokens_ms = [(np.array(times[id(stream)]) - began) * 1e3 for stream in streams]
    first = np.array([own[0] for own in tokens_ms]) - workload.arrivals_ms
    between = [(own[-1] - own[0]) / (len(own) - 1) for own in tokens_ms if len(own) > 1]
    took_ms = max(own[-1] for own in tokens_ms) - workload.arrivals_ms[0]
    quantiles = [*np.quantile(first, [0.5, 0.99]), *np.quantile(between, [0.5, 0.99])]
    values = [1e3 * len(streams) / took_ms, *quantiles]
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
    with Generator(chrion.load(build_llama_decoder(SIZES[size])), max_batch=MAX_BATCH, threads=threads) as generator:
        meter = CostMeter(generator, SCALE)
        meter.measure(BATCHES)
        rate_per_s = SHARE * _capacity(meter.fit())
        for seed in range(repeats):
            workload = draw_requests(load_scenario(SCALE, rate_per_s, requests, seed=seed))
            runs.append(run_tokens(generator, workload))
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
