"""Rates at which policies are compared: those at which a simulation predicts certain latencies."""

from __future__ import annotations

import math
from collections.abc import Sequence

from decoding.load import Costs, load_scenario
from decoding.scheduling_gain import simulate_summary

#: Latencies relative to that of single requests; throughputs are compared at latencies between them.
RATE_FACTORS = (1.4, 2.6, 6.0, 10.0)
#: One that is nearly that of single requests.
LEAST_FACTOR = 1.1
#: Bounds of the search, in requests per second: at the lower one requests do not overlap, and the upper one exceeds any
#: capacity.
_LOWEST_PER_S, _HIGHEST_PER_S = 0.05, 1e3
#: Steps of the search for a rate, the last of which is less than 1 %.
_STEPS = 11


def choose_rates(  # noqa: PLR0913, PLR0917 - what determines the latency
    scale: int,
    costs: Costs,
    policy: str,
    max_batch: int,
    requests: int,
    factors: Sequence[float] = RATE_FACTORS,
    seed: int = 0,
) -> dict[float, float]:
    """Return rates by factor, ascending, at which the latency per token is so many times that of single requests.

    Latencies that so few requests never reach are left out.

    Args:
        scale: Divides Orca's lengths.
        costs: Costs of iterations without and with prompts.
        policy: How requests are scheduled.
        max_batch: The most requests of an iteration.
        requests: Requests of a run.
        factors: The latencies relative to that of single requests.
        seed: Determines the requests.
    """

    def latency_ms(rate_per_s: float) -> float:
        scenario = load_scenario(scale, rate_per_s, requests, max_batch, costs, seed)
        return simulate_summary(scenario, policy).normalised_p50_ms

    alone_ms = latency_ms(_LOWEST_PER_S)
    rates = {}
    highest_ms = latency_ms(_HIGHEST_PER_S)
    for factor in sorted(factors):
        if highest_ms < factor * alone_ms:
            continue
        low, high = math.log(_LOWEST_PER_S), math.log(_HIGHEST_PER_S)
        for _ in range(_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if latency_ms(math.exp(middle)) < factor * alone_ms else (low, middle)
        rates[factor] = float(f"{math.exp(low):.3g}")
    return rates
