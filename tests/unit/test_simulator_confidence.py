"""Confidence intervals and warm-up, compared with queues whose expected values are known."""

import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from chrion.serving.simulator.confidence import batch_half_width, interval, t_quantile, warm_up
from chrion.serving.simulator.histograms import Floats, bin_index, quantile
from chrion.serving.simulator.request_batches import RequestBatches
from chrion.serving.simulator.run import simulate
from simulator_support import scenario_of

#: An M/M/1 queue: response times are exponential, with rate service - arrivals (here: 1 - 0.7 in units of a service).
LOAD = 0.7
OBJECTIVE = 8.0
EXPECTED = {
    "violations": math.exp(-(1 - LOAD) * OBJECTIVE),
    "mean": 1 / (1 - LOAD),
    "p50": math.log(2) / (1 - LOAD),
    "p95": -math.log(0.05) / (1 - LOAD),
}


def mm1_responses(requests: int, seed: int, *, load: float = LOAD, stationary: bool = True) -> Floats:
    """Return response times by Lindley's recursion, whose solution is a sum minus its running minimum."""
    rng = np.random.default_rng(seed)
    service, gaps = rng.exponential(1.0, requests), rng.exponential(1 / load, requests)
    first = 0.0
    if stationary and rng.random() < load:
        first = rng.exponential(1 / (1 - load))
    walk = np.concatenate([[0.0], np.cumsum(service[:-1] - gaps[1:])])
    wait = walk - np.minimum(np.minimum.accumulate(walk), -first)
    found: Floats = wait + service
    return found


def batches_of(responses: Floats) -> RequestBatches:
    """Return the batches of requests that are recorded in chunks."""
    batches = RequestBatches()
    for part in np.array_split(np.arange(len(responses)), 3):
        batches.add(part, responses[part] > OBJECTIVE)
        batches.add_responses(part, responses[part], bin_index(responses[part]))
    return batches


def test_intervals_of_one_run_contain_the_expected_value() -> None:
    """Of 200 runs of 20 000 requests, the intervals of batch means contain the theory's value in about 95 %."""
    covered = dict.fromkeys(EXPECTED, 0)
    for seed in range(200):
        found = batches_of(mm1_responses(20_000, seed)).intervals()
        for name, value in EXPECTED.items():
            covered[name] += found[name].low <= value * 1.005 and value * 0.995 <= found[name].high
    assert all(180 <= count <= 200 for count in covered.values()), covered


def test_intervals_become_narrow_with_the_root_of_the_requests() -> None:
    """Sixteen times the requests give intervals of about a quarter of the width."""
    short, long = (
        np.mean([batches_of(mm1_responses(n, seed)).intervals()["mean"].half_width for seed in range(20)])
        for n in (10_000, 160_000)
    )
    assert short / long == pytest.approx(4.0, rel=0.25)


def test_figures_of_batches_are_those_of_the_requests() -> None:
    """Whatever the size of batches, shares, means and quantiles are exact, those of bins to half a percent."""
    for requests in (30, 5_119, 70_000):
        responses = mm1_responses(requests, requests)
        batches = batches_of(responses)
        found = batches.intervals()
        assert batches.size == max(5, 5 * 2 ** math.ceil(math.log2(requests / 5120)))
        assert found["violations"].mean == pytest.approx(np.mean(responses > OBJECTIVE))
        assert found["mean"].mean == pytest.approx(responses.mean())
        assert found["p95"].mean == quantile(np.bincount(bin_index(responses), minlength=6000), 0.95)
    assert math.isnan(RequestBatches().intervals()["p99"].mean)


def test_few_requests_have_no_interval() -> None:
    """Fewer than ten batches give no interval."""
    assert math.isnan(batch_half_width(np.ones(9)))
    assert batch_half_width(np.ones(10)) == 0.0
    assert math.isnan(batches_of(mm1_responses(40, 1)).intervals()["mean"].half_width)


def test_the_warm_up_is_found() -> None:
    """Of means that fall to their level in 100 of 1000 batches, about these are left out; of a steady run, few."""
    noise = np.random.default_rng(0).normal(0, 1, 1000)
    level = 20 * np.clip(1 - np.arange(1000) / 100, 0, None)
    assert 75 <= warm_up(noise + level) <= 105
    assert warm_up(noise) <= 150
    assert warm_up(np.arange(19.0)) == 0


def test_the_least_standard_error_is_found() -> None:
    """The rule agrees with the definition, tried for every number of removed means."""
    for seed in range(20):
        means = np.random.default_rng(seed).exponential(1, 41).cumsum()[::-1] + 1e6
        errors = [np.var(means[cut:]) / (41 - cut) for cut in range(21)]
        assert warm_up(means) == int(np.argmin(errors))


def test_the_warm_up_of_a_queue_that_begins_full_is_left_out() -> None:
    """A queue of 300 requests at the start lasts for about 1000 requests; without them, the mean is the theory's."""
    rng = np.random.default_rng(4)
    service, gaps = rng.exponential(1.0, 60_000), rng.exponential(1 / LOAD, 60_000)
    walk = np.concatenate([[0.0], np.cumsum(service[:-1] - gaps[1:])])
    responses = walk - np.minimum(np.minimum.accumulate(walk), -300.0) + service
    batches = batches_of(responses)
    settled = batches.settled()
    assert batches.intervals()["mean"].mean > 5.0
    assert 600 < settled.removed < 3000
    assert settled.figures["mean"] == pytest.approx(EXPECTED["mean"], rel=0.1)


@pytest.mark.parametrize(("load", "grows"), [(0.5, False), (0.9, False), (1.1, True), (2.0, True)])
def test_a_queue_that_grows_is_recognised(load: float, *, grows: bool) -> None:
    """Above the capacity, response times grow with the requests; below, they do not in any of five runs together."""
    growth = [batches_of(mm1_responses(20_000, s, load=load, stationary=False)).settled().growth_ms for s in range(5)]
    assert (interval(growth).low > 0) == grows


def test_a_run_has_intervals_unless_its_rate_changes(tmp_path: Any) -> None:
    """The interval of a simulated M/M/1 queue contains the theory's mean; a trace has none."""
    variant = {"memory_mb": 100.0, "latency_ms": 10.0, "distribution": "exponential"}
    (found,) = simulate(scenario_of(variant, rate_per_s=70.0, requests=20_000, preload=True, seed=3))
    assert found.intervals["mean"].mean == pytest.approx(found.total.response.mean_ms)
    assert found.intervals["p95"].mean == found.total.response.p95_ms
    assert found.intervals["mean"].low < 10 / 0.3 < found.intervals["mean"].high
    (tmp_path / "t.csv").write_text("time_s\n" + "".join(f"{i}\n" for i in range(200)))
    trace = {"kind": "csv", "path": str(tmp_path / "t.csv"), "mapping": "draw"}
    (replayed,) = simulate(scenario_of(variant, **trace))
    assert (replayed.intervals, replayed.settled) == ({}, None)


@pytest.mark.parametrize("degrees", [1, 2, 5, 12, 13, 30, 200])
def test_quantiles_of_students_distribution(degrees: int) -> None:
    """The integral of the density up to the quantile is 0.975."""
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    steps = np.linspace(0, t_quantile(degrees), 200_001)
    density = scale * (1 + steps**2 / degrees) ** (-(degrees + 1) / 2)
    assert 0.5 + np.trapezoid(density, steps) == pytest.approx(0.975, abs=5e-5)


def test_intervals_contain_the_mean_as_often_as_they_claim() -> None:
    """Of 2000 intervals of five normal values, 95 % contain the true mean."""
    values = np.random.default_rng(0).normal(3.0, 2.0, (2000, 5))
    found = [interval(row.tolist()) for row in values]
    covered = sum(abs(entry.mean - 3.0) <= entry.half_width for entry in found) / 2000
    assert covered == pytest.approx(0.95, abs=0.015)
    assert NormalDist().inv_cdf(0.975) < t_quantile(10**6) * 1.001
    assert math.isnan(interval([1.0, math.nan]).mean)
    assert interval([1.0, math.inf]).low == math.inf
