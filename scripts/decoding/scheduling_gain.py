"""What iteration-level scheduling can gain over request-level scheduling, computed for Orca's workload.

A fixed batch of B requests with prompts P and outputs N runs for max(P - min P + N) iterations: the first processes
min P tokens of each prompt, and each of the others one token of each request, whether it has ended or not. With
iteration-level scheduling a request takes N iterations, and no row is idle. So with enough requests the gain is

- E[max(P - min P + N)] / E[N] if an iteration takes the same time for any tokens;
- E[max(P + N - 1)] / E[P + N - 1] if it takes a time in proportion to its tokens.

If the time is a sum of both, the gain lies between these limits. With costs of iterations, which have further terms, it
is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from chrion.serving.simulator.decoder_results import DecoderSummary, summarise
from chrion.serving.simulator.decoder_scenario import DecoderScenario
from chrion.serving.simulator.iterations import simulate_decoder
from decoding.load import Costs, load_scenario, scaled_lengths
from decoding.orca_experiment import LoadPoint, format_lengths

#: Max batches, those of the paper.
BATCHES = (1, 2, 4, 8, 16, 32)
#: Batches that are drawn for an expected value.
_DRAWS = 20_000
#: Requests of a simulation at saturation, for each request of a batch, and the fewest of any.
_REQUESTS, _FEWEST_REQUESTS = 40, 1500
#: Requests per second of both policies, by max batch.
Rates = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True, slots=True)
class ExpectedBatch:
    """Expected values of a batch of random requests."""

    #: Iterations of one request, and of a fixed batch.
    own_iterations: float
    iterations: float
    #: Tokens that one request needs, and that a fixed batch processes for each of its requests.
    own_tokens: float
    tokens: float


def expected_batch(size: int, scale: int) -> ExpectedBatch:
    """Return the expected values of a batch, from many draws.

    Args:
        size: Its requests.
        scale: Divides Orca's lengths.
    """
    lengths, rng = scaled_lengths(scale), np.random.default_rng(0)
    prompts, new = (
        rng.integers(lengths[f"{name}_least"], lengths[f"{name}_most"], (_DRAWS, size), endpoint=True)
        for name in ("prompt", "new")
    )
    shortest = prompts.min(axis=1)
    iterations = (prompts - shortest[:, None] + new).max(axis=1)
    return ExpectedBatch(
        own_iterations=float(new.mean()),
        iterations=float(iterations.mean()),
        own_tokens=float((prompts + new - 1).mean()),
        tokens=float((shortest + iterations - 1).mean()),
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """Requests that always wait for a decoder."""

    title: str
    #: Divides Orca's lengths.
    scale: int
    #: One scenario for each of :data:`BATCHES`.
    scenarios: Sequence[DecoderScenario]


def gain_rows(machines: Sequence[Machine]) -> list[tuple[str, ...]]:
    """Return the gain by max batch, and that of the best batch over the best batch: for lengths, limits and machines.

    The rows of each scale are the iterations of a fixed batch, the gain if all iterations take an equal time, those of
    the machines with this scale, and the gain if the time is in proportion to the tokens.
    """
    rows: list[tuple[str, ...]] = [("tokens", "costs", *(f"max batch {size}" for size in BATCHES), "best")]
    for scale in sorted({machine.scale for machine in machines}):
        expected = [expected_batch(size, scale) for size in BATCHES]
        equal_time, by_tokens = _limits(expected)
        found = [(one.title, _simulated_rates(one.scenarios)) for one in machines if one.scale == scale]
        lengths = format_lengths(scale)
        rows.append((lengths, "iterations of a fixed batch", *(f"{batch.iterations:.0f}" for batch in expected), ""))
        for title, rates in (("equal time", equal_time), *found, ("time by tokens", by_tokens)):
            rows.append((lengths, title, *_gains(rates)))
    return rows


def _limits(expected: Sequence[ExpectedBatch]) -> tuple[Rates, Rates]:
    """Return the rates of both policies if all iterations take one unit of time, and if all tokens do."""
    pairs = list(zip(BATCHES, expected, strict=True))
    equal_time = [size / one.own_iterations for size, one in pairs], [size / one.iterations for size, one in pairs]
    return equal_time, ([1 / one.own_tokens for one in expected], [1 / one.tokens for one in expected])


def _simulated_rates(scenarios: Sequence[DecoderScenario]) -> Rates:
    found = [{r.policy: r.requests_per_s for r in simulate_decoder(scenario)} for scenario in scenarios]
    return [one["iteration"] for one in found], [one["request"] for one in found]


def _gains(rates: Rates) -> list[str]:
    """Return the gain of each max batch, and that of the best one over the best one."""
    ours, theirs = rates
    return [f"{one / other:.1f}" for one, other in (*zip(ours, theirs, strict=True), (max(ours), max(theirs)))]


def saturated(scale: int, costs: Costs) -> list[DecoderScenario]:
    """Return scenarios with more requests than can be served, one for each of :data:`BATCHES`."""
    return [load_scenario(scale, 1e6, saturating_requests(size), size, costs) for size in BATCHES]


def saturating_requests(size: int) -> int:
    """Return how many requests a simulation at saturation has, so that its gain varies by few per cent."""
    return max(_FEWEST_REQUESTS, _REQUESTS * size)


def simulate_points(runs: Sequence[LoadPoint], costs: Mapping[tuple[str, int], Costs]) -> list[LoadPoint]:
    """Return what the simulation predicts for the requests of measured runs; those without costs are left out."""
    found = []
    for run in runs:
        if run.workload in costs:
            load = (run.scale, run.offered_per_s, run.requests, run.max_batch)
            summary = simulate_summary(load_scenario(*load, costs[run.workload], run.seed), run.policy)
            throughput, latency = summary.requests_per_s, summary.normalised_p50_ms
            found.append(replace(run, requests_per_s=throughput, ms_per_token=latency, iterations=None))
    return found


def simulate_summary(scenario: DecoderScenario, policy: str) -> DecoderSummary:
    """Return the figures of a simulation with one policy."""
    return summarise(simulate_decoder(structs.replace(scenario, policies=(policy,)))[0])
