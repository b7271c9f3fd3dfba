"""What iteration-level scheduling can gain over request-level scheduling, computed for Orca's workload.

A fixed batch of B requests with prompts P and outputs N runs for max(P - min P + N) iterations: the first processes
min P tokens of each prompt, and each of the others one token of each request, whether it has ended or not. With
iteration-level scheduling a request takes N iterations, and no row is idle. So with enough requests the gain is

- E[max(P - min P + N)] / E[N] if an iteration takes the same time for any tokens;
- E[max(P + N - 1)] / E[P + N - 1] if it takes a time in proportion to its tokens.

Between both limits, with costs of iterations, it is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from chrion.simulator.decoder_results import DecoderSummary, summarise
from chrion.simulator.decoder_scenario import DecoderScenario
from chrion.simulator.iterations import simulate_decoder
from decoding.load import Costs, load_scenario, scaled_lengths
from decoding.orca_experiment import LoadPoint

#: Max batches, those of the paper.
BATCHES = (1, 2, 4, 8, 16, 32)
#: Batches that are drawn for an expected value.
_DRAWS = 20_000
#: Requests of a simulation at saturation, for each request of a batch.
_REQUESTS = 40


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


def gain_rows(scale: int, machines: Mapping[str, Sequence[DecoderScenario]]) -> list[tuple[str, ...]]:
    """Return the gain by greatest batch, and that of the best batch over the best batch.

    Args:
        scale: Divides Orca's lengths, for the columns without costs.
        machines: By title, scenarios with more requests than can be served, one for each of :data:`BATCHES`.
    """
    expected = [expected_batch(size, scale) for size in BATCHES]
    rates = {
        "equal time": (
            [size / batch.own_iterations for size, batch in zip(BATCHES, expected, strict=True)],
            [size / batch.iterations for size, batch in zip(BATCHES, expected, strict=True)],
        ),
        "time by tokens": (
            [1 / batch.own_tokens for batch in expected],
            [1 / batch.tokens for batch in expected],
        ),
    }
    for title, scenarios in machines.items():
        found = [{r.policy: r.requests_per_s for r in simulate_decoder(scenario)} for scenario in scenarios]
        rates[title] = ([one["iteration"] for one in found], [one["request"] for one in found])
    rows: list[tuple[str, ...]] = [("max batch", "iterations of a fixed batch", *rates)]
    for at, size in enumerate(BATCHES):
        gains = [f"{ours[at] / theirs[at]:.1f}" for ours, theirs in rates.values()]
        rows.append((str(size), f"{expected[at].iterations:.0f}", *gains))
    rows.append(("best", "", *(f"{max(ours) / max(theirs):.1f}" for ours, theirs in rates.values())))
    return rows


def saturated(scale: int, costs: Costs) -> list[DecoderScenario]:
    """Return scenarios with more requests than can be served, one for each of :data:`BATCHES`."""
    return [load_scenario(scale, 1e6, max(200, _REQUESTS * size), size, costs) for size in BATCHES]


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
    return summarise(simulate_decoder(replace(scenario, policies=(policy,)))[0])
