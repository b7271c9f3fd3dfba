"""The limit of a scenario with a decoder: the highest rate, the fewest replicas, or the max batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from chrion.errors import OptionError
from chrion.serving.simulator.decoder_requests import MAX_REQUESTS, DecoderWorkload
from chrion.serving.simulator.decoder_results import METRICS, WORTHWHILE, summarise
from chrion.serving.simulator.decoder_scenario import MAX_REPLICAS, DecoderScenario, build_decoder_scenario
from chrion.serving.simulator.find import Condition, Kind, Replication, Searched
from chrion.serving.simulator.histograms import bin_index
from chrion.serving.simulator.iterations import DecoderResult, draw_requests, simulate_decoder
from chrion.serving.simulator.request_batches import RequestBatches
from chrion.serving.simulator.scenario import ScenarioSource

#: The largest max batch that is tried (a choice, not measured).
_LARGEST_BATCH = 1024
#: The ratio of two rates that are tried, and the fewest requests that are left of a trace.
_STEP, _FEWEST = 1.01, 30
#: Simulations of a search, in the order of magnitude.
_RUNS = 50
#: Figures that a larger batch makes worse: it takes longer from token to token. It shortens the wait for the first one.
_OF_BATCHES = ("between_", "gap_")


def _quantities(condition: Condition, scenario: DecoderScenario) -> Mapping[str, Searched]:
    """Return the quantities; if a larger batch makes the condition harder, the largest max batch is searched."""
    spec = scenario.requests
    rate_key, unit, rate = "rate_per_s", "requests/s", spec.rate_per_s
    lowest, highest = -900, 900
    if spec.is_replay:
        rate_key, unit, rate = "rate_scale", "requests for each of the trace", spec.rate_scale
        count = len(draw_requests(scenario).arrivals_ms)
        lowest = max(lowest, math.ceil(math.log(min(_FEWEST, count) / count, _STEP)))
        highest = min(highest, math.floor(math.log(MAX_REQUESTS / count, _STEP)))
    return {
        "rate": Searched(
            unit=unit,
            smallest=False,
            numbers=range(lowest, highest + 1),
            begin=0,
            sets=lambda n: {f"requests.{rate_key}": rate * _STEP**n},
            amount=lambda s: float(getattr(s.requests, rate_key)),
            relative=True,
        ),
        "replicas": Searched(
            unit="replicas",
            smallest=True,
            numbers=range(1, MAX_REPLICAS + 1),
            begin=1,
            sets=lambda n: {"replicas.count": n},
            amount=lambda s: s.replicas.count,
        ),
        "max_batch": Searched(
            unit="requests a batch",
            smallest=not condition.metric.startswith(_OF_BATCHES),
            numbers=range(1, _LARGEST_BATCH + 1),
            begin=1,
            sets=lambda n: {"batching.max_batch": n},
            amount=lambda s: s.batching.max_batch,
        ),
    }


def _measure(source: ScenarioSource, condition: Condition, *, keep_warm_up: bool) -> Replication:
    scenario = build_decoder_scenario(source)
    (result,) = simulate_decoder(scenario)
    removed, growth_ms = _settled(result) if scenario.is_steady else (0, math.nan)
    removed = 0 if keep_warm_up else removed
    figure = METRICS[condition.metric](summarise(_without(result, removed)))
    if math.isnan(figure) and result.served:
        raise OptionError(f"--until: no request of the scenario has a {condition.metric}")
    return Replication(
        figure=math.inf if math.isnan(figure) else figure,  # all were refused
        # An engine that is always busy may have room in its batches; growing queues are found by their times.
        offered_load=min(result.utilisation, math.nextafter(1.0, 0.0)),
        growth_ms=growth_ms,
        cost_per_hour=0.0,
        warm_up_requests=removed,
        improvable=result.most_requests > 1,
    )


def _settled(result: DecoderResult) -> tuple[int, float]:
    """Return the requests of the warm-up, and the growth of the times to the first token.

    See :class:`chrion.serving.simulator.request_batches.Settled`.
    """
    batches = RequestBatches()
    spans_ms = result.first_ms - result.workload.arrivals_ms
    numbers = np.arange(len(spans_ms))
    batches.add(numbers, np.zeros(len(numbers), bool))
    served = ~np.isnan(spans_ms)
    batches.add_responses(numbers[served], spans_ms[served], bin_index(spans_ms[served]))
    settled = batches.settled()
    return settled.removed, settled.growth_ms


def _without(result: DecoderResult, first: int) -> DecoderResult:
    """Return a result without its first requests. Times of single tokens stay those of the whole run."""
    if not first:
        return result
    columns = (getattr(result.workload, name) for name in DecoderWorkload.__dataclass_fields__)
    rows: list[Any] = [None if values is None else values[first:] for values in columns]
    workload = DecoderWorkload(*rows)
    ends_ms = result.ends_ms[first:]
    return replace(
        result,
        workload=workload,
        first_ms=result.first_ms[first:],
        ends_ms=ends_ms,
        refused=int(np.isnan(ends_ms).sum()),
    )


DECODERS = Kind(
    build=build_decoder_scenario,
    quantities=_quantities,
    metrics=METRICS,
    patterns=lambda scenario: {policy: {"policies": [policy]} for policy in scenario.policies},
    is_long=lambda scenario: _RUNS * int(draw_requests(scenario).new.sum()) >= WORTHWHILE,
    measure=_measure,
)
