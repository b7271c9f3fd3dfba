"""The gain of iteration-level scheduling: expected values with closed forms, and limits that the simulation reaches."""

from __future__ import annotations

import numpy as np
import pytest
from decoding.gpu_estimate import gpu_scenario
from decoding.load import load_scenario, scaled_lengths
from decoding.load_rates import choose_rates
from decoding.scheduling_gain import BATCHES, Machine, expected_batch, gain_rows, simulate_summary

from chrion.serving.simulator.decoder_costs import IterationCosts
from chrion.serving.simulator.iterations import simulate_decoder

#: Limits, and the direction from a machine's row in which they are.
LIMITS = ((-1, "equal time"), (1, "time by tokens"))


def largest_of(size: int, least: int, most: int) -> float:
    """Return the expected value of the largest of some uniformly distributed integers."""
    values = np.arange(least, most + 1)
    below = (values - least + 1) / len(values)
    return float((values * np.diff(below**size, prepend=0.0)).sum())


def test_expected_values_of_one_request() -> None:
    """A batch of one wastes nothing."""
    alone = expected_batch(1, 1)
    assert alone.iterations == alone.own_iterations == pytest.approx((1 + 128) / 2, rel=0.01)
    assert alone.tokens == alone.own_tokens == pytest.approx((32 + 512) / 2 + (1 + 128) / 2 - 1, rel=0.01)


def test_expected_values_of_a_batch_lie_between_those_of_its_parts() -> None:
    """The longest P + N of 32 requests has at least the longest prompt, and at most that and the longest output."""
    found, longest = expected_batch(32, 1), largest_of(32, 32, 512)
    assert longest < found.tokens < longest + largest_of(32, 1, 128)
    shortest = 32 + 512 - longest  # by symmetry
    assert found.iterations == pytest.approx(found.tokens + 1 - shortest, rel=0.01)


@pytest.mark.parametrize("size", [1, 8])
def test_the_simulation_reaches_both_limits(size: int) -> None:
    """With only fixed costs the gain is that of iterations, with only costs of tokens that of tokens."""
    expected = expected_batch(size, 4)
    limits = (expected.iterations / expected.own_iterations, expected.tokens / expected.own_tokens)
    for costs, limit in zip((IterationCosts(5, 0, 0, 0), IterationCosts(0, 5, 0, 0)), limits, strict=True):
        ours, theirs = simulate_decoder(load_scenario(4, 1e6, 100 * size, size, (costs, costs)))
        assert ours.requests_per_s / theirs.requests_per_s == pytest.approx(limit, rel=0.08)


def test_a_gain_has_limits_for_the_lengths_of_its_machine() -> None:
    """Without batches nothing is gained; a machine whose time is a sum of both limits' times is between them."""
    costs = IterationCosts(3.0, 0.1, 0.0, 0.0)
    machines = [
        Machine(title, scale, [load_scenario(scale, 1e6, 40 * size, size, (costs, costs)) for size in BATCHES])
        for title, scale in (("small", 16), ("large", 8), ("other", 16))
    ]
    head, *rows = gain_rows(machines)
    assert head == ("tokens", "costs", *(f"max batch {size}" for size in (1, 2, 4, 8, 16, 32)), "best")
    own = {"4 to 64, 1 to 16": ["large"], "2 to 32, 1 to 8": ["small", "other"]}
    titles = ["iterations of a fixed batch", "equal time", "time by tokens"]
    assert [row[:2] for row in rows] == [
        (lengths, title) for lengths, found in own.items() for title in (*titles[:2], *found, titles[2])
    ]
    for at, row in enumerate(rows):
        if row[1] in ("small", "large", "other"):
            equal_time, by_tokens = (next(r for r in rows[at::step] if r[1] == title) for step, title in LIMITS)
            assert row[2] == "1.0"
            for low, gain, high in zip(by_tokens[3:], row[3:], equal_time[3:], strict=True):
                assert float(low) - 0.2 <= float(gain) <= float(high) + 0.2


def test_costs_on_a_gpu_follow_from_its_datasheet() -> None:
    """1.24 billion weights of two bytes at 300 GB/s take 8.2 ms, and 400 kernels of 3.8 us 1.5 ms.

    A prompt of 1000 tokens takes 20.4 ms, for 2 operations a weight, and 0.54 ms for 131 072 a pair of tokens.
    """
    scenario = gpu_scenario(1.0, 10, 8)
    assert scenario.iteration_ms([1], [0]) == pytest.approx(2 * 1.2358 / 0.3 + 400 * 0.0038, rel=0.001)
    pairs_ms = 1000 * 1001 / 2 * 2 * (32_768 / 2) * 4 / 121e9
    expected_ms = 400 * 0.0038 + 1000 * 2 * 1.2358 / 121 + pairs_ms
    assert scenario.iteration_ms([1000], [0]) == pytest.approx(expected_ms, rel=0.001)
    assert scaled_lengths(4) == {"prompt_least": 8, "prompt_most": 128, "new_least": 1, "new_most": 32}


@pytest.mark.parametrize("policy", ["iteration", "request"])
def test_rates_are_chosen_for_latencies(policy: str) -> None:
    """At the rates, the simulated latencies are those asked for; a latency that few requests never reach has none."""
    costs = IterationCosts(fixed_ms=4.0, token_ms=0.2), IterationCosts(fixed_ms=8.0, token_ms=0.2)

    def latency_ms(rate_per_s: float) -> float:
        return simulate_summary(load_scenario(4, rate_per_s, 60, 8, costs), policy).normalised_p50_ms

    rates = choose_rates(4, costs, policy, 8, 60, (3.0, 1.5, 1e6))
    assert list(rates) == [1.5, 3.0]
    low, high = (latency_ms(rate) / latency_ms(1e-3) for rate in rates.values())
    assert 1.0 < low <= 1.5 * 1.02
    assert low < high <= 3.0 * 1.02
    above = [latency_ms(rate * 1.02) / latency_ms(1e-3) for rate in rates.values()]
    assert above[0] >= 1.5 * 0.98
    assert above[1] >= 3.0 * 0.98
