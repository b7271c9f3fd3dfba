"""The limit of a scenario with a decoder: the highest rate, the fewest replicas, or the max batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from chrion.common.wrong_values import wrong_value
from chrion.errors import OptionError
from chrion.serving.simulator.decoder_requests import MAX_REQUESTS, DecoderWorkload
from chrion.serving.simulator.decoder_results import METRICS, WORTHWHILE, summarise
from chrion.serving.simulator.decoder_scenario import MAX_REPLICAS, DecoderScenario, build_decoder_scenario
from chrion.serving.simulator.find import Condition, Limit, Replication, Search, Searched, SearchOptions
from chrion.serving.simulator.histograms import bin_index
from chrion.serving.simulator.iterations import DecoderResult, draw_requests, simulate_decoder
from chrion.serving.simulator.request_batches import RequestBatches
from chrion.serving.simulator.scenario import ScenarioSource
from chrion.serving.simulator.sweep import worker_pool

#: The largest max batch that is tried (a choice, not measured).
_LARGEST_BATCH = 1024
#: The ratio of two rates that are tried, and the fewest requests that are left of a trace.
_STEP, _FEWEST = 1.01, 30
#: Simulations of a search, in the order of magnitude.
_RUNS = 50
#: Figures that a larger batch makes worse: it takes longer from token to token. It shortens the wait for the first one.
_OF_BATCHES = ("between_", "gap_")


def searched_of_decoder(name: str, condition: Condition, scenario: DecoderScenario) -> Searched:
    """Return a quantity by its name: ``rate``, ``replicas`` or ``max_batch``.

    Args:
        name: The name.
        condition: What has to hold. If a larger batch makes it harder, the largest max batch is searched.
        scenario: The scenario.

    Raises:
        OptionError: There is no such quantity.
    """
    spec = scenario.requests
    rate_key, unit, rate = "rate_per_s", "requests/s", spec.rate_per_s
    lowest, highest = -900, 900
    if spec.is_replay:
        rate_key, unit, rate = "rate_scale", "requests for each of the trace", spec.rate_scale
        count = len(draw_requests(scenario).arrivals_ms)
        lowest = max(lowest, math.ceil(math.log(min(_FEWEST, count) / count, _STEP)))
        highest = min(highest, math.floor(math.log(MAX_REQUESTS / count, _STEP)))
    known = {
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
    if name not in known:
        raise wrong_value("--find", f"one of {', '.join(known)}", name)
    return known[name]


def find_decoder_limits(
    source: ScenarioSource,
    name: str,
    condition: Condition,
    options: SearchOptions,
    progress: Callable[[int, str], None] = lambda _done, _name: None,
) -> tuple[Limit, ...]:
    """Return the limit of every policy of a scenario, as :func:`chrion.serving.simulator.find.find_limits` does."""
    scenario = build_decoder_scenario(source)
    quantity = searched_of_decoder(name, condition, scenario)
    tokens = _RUNS * int(draw_requests(scenario).new.sum())
    limits: list[Limit] = []
    with worker_pool(options.workers) if options.workers > 1 and tokens >= WORTHWHILE else nullcontext() as pool:
        for policy in scenario.policies:
            changed = source.changed({"policies": [policy]})
            search = _DecoderSearch(changed, quantity, condition, options, pool.map if pool else map)
            search.ends_early = quantity.smallest
            search.note = lambda number, text: progress(sum(len(known.curve) for known in limits) + number, text)
            limits.append(search.limit(policy))
    return tuple(limits)


class _DecoderSearch(Search):
    """The search of one policy."""

    def build(self, source: ScenarioSource) -> DecoderScenario:
        """Return the scenario of a source."""
        return build_decoder_scenario(source)

    @property
    def measure(self) -> Callable[..., Replication]:
        """The function that simulates a source, also in another process."""
        return _measure


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
