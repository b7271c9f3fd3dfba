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
from chrion.serving.simulator.find import RATE_STEP, RATES, Condition, Kind, Replication, Searched, searched_rate
from chrion.serving.simulator.histograms import bin_index
from chrion.serving.simulator.iterations import DecoderResult, draw_requests, simulate_decoder
from chrion.serving.simulator.request_batches import RequestBatches
from chrion.serving.simulator.scenario import ScenarioSource

#: The largest max batch that is tried (a choice, not measured).
_LARGEST_BATCH = 1024
#: The fewest requests that are left of a trace.
_FEWEST = 30
#: Simulations of a search, in the order of magnitude.
_RUNS = 50
#: Figures that a larger batch makes worse: it takes longer from token to token. It shortens the wait for the first one.
_OF_BATCHES = ("between_", "gap_")


def _quantities(condition: Condition, scenario: DecoderScenario) -> Mapping[str, Searched]:
    """Return the quantities; if a larger batch makes the condition harder, the largest max batch is searched."""
    spec = scenario.requests
    key, unit, numbers = "rate_per_s", "requests/s", RATES
    if spec.is_replay:
        key, unit = "rate_scale", "requests for each of the trace"
        count = len(draw_requests(scenario).arrivals_ms)
        lowest = math.ceil(math.log(min(_FEWEST, count) / count, RATE_STEP))
        highest = math.floor(math.log(MAX_REQUESTS / count, RATE_STEP))
        numbers = range(max(RATES[0], lowest), min(RATES[-1], highest) + 1)
    return {
        "rate": searched_rate(
            f"requests.{key}", unit, getattr(spec, key), lambda s: float(getattr(s.requests, key)), numbers
        ),
        "replicas": Searched(
            "replicas", range(1, MAX_REPLICAS + 1), lambda n: {"replicas.count": n}, lambda s: s.replicas.count
        ),
        "max_batch": Searched(
            "requests a batch",
            range(1, _LARGEST_BATCH + 1),
            lambda n: {"batching.max_batch": n},
            lambda s: s.batching.max_batch,
            smallest=not condition.metric.startswith(_OF_BATCHES),
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
    rows: list[Any] = [None if own is None else own[first:] for own in result.workload]
    ends_ms = result.ends_ms[first:]
    return replace(
        result,
        workload=DecoderWorkload(*rows),
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
