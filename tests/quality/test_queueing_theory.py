"""Long simulations compared with the formulas of queueing theory."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chrion.serving.simulator.decoder_find import DECODERS
from chrion.serving.simulator.decoder_scenario import build_decoder_scenario
from chrion.serving.simulator.find import Condition, SearchOptions, find_limits
from chrion.serving.simulator.iterations import simulate_decoder
from chrion.serving.simulator.run import simulate
from chrion.serving.simulator.scenario import ScenarioSource
from simulator_support import scenario_of

EXPONENTIAL = {"memory_mb": 100.0, "latency_ms": 10.0, "distribution": "exponential"}
ONE_CORE = {**EXPONENTIAL, "memory_mb": 0.0, "gpu_busy_ms": 0.0, "cpu_busy_ms": 10.0}
CONSTANT = {"memory_mb": 100.0, "latency_ms": 10.0}
HYBRID = {"memory_mb": 100.0, "latency_ms": 25.0, "gpu_busy_ms": 10.0, "cpu_busy_ms": 25.0}


def mean_wait_ms(variant: dict[str, Any], rate_per_s: float, requests: int, **sets: Any) -> float:
    """Return the mean wait of requests of one model that is in memory."""
    sets = {"rate_per_s": rate_per_s, "requests": requests, "preload": True, **sets}
    (found,) = simulate(scenario_of(variant, **sets))
    return found.total.mean_wait_ms


def erlang_c(servers: int, offered: float) -> float:
    """Return the probability of waiting in M/M/c."""
    blocked = offered**servers / math.factorial(servers) * servers / (servers - offered)
    return blocked / (sum(offered**k / math.factorial(k) for k in range(servers)) + blocked)


def test_mm1_mean_wait() -> None:
    """A million exponential requests wait rho / (mu - lambda) on one slot, within 2 %."""
    assert mean_wait_ms(EXPONENTIAL, 60.0, 1_000_000) == pytest.approx(1000 * 0.6 / (100 - 60), rel=0.02)


def test_mmc_mean_wait() -> None:
    """A million exponential requests on four slots wait as Erlang C predicts, within 2 %."""
    wait_ms = mean_wait_ms(EXPONENTIAL, 280.0, 1_000_000, gpu_slots=4)
    assert wait_ms == pytest.approx(1000 * erlang_c(4, 2.8) / (400 - 280), rel=0.02)


def test_cpu_only_mmc_mean_wait() -> None:
    """A variant that needs one core and no GPU queues for the cores as M/M/c."""
    wait_ms = mean_wait_ms(ONE_CORE, 200.0, 200_000, cpu_cores=3)
    assert wait_ms == pytest.approx(1000 * erlang_c(3, 2.0) / (300 - 200), rel=0.04)


@pytest.mark.parametrize("variant", [CONSTANT, HYBRID], ids=["gpu", "hybrid"])
def test_md1_mean_wait(variant: dict[str, Any]) -> None:
    """The wait is that of M/D/1 for a constant GPU busy time, since a hybrid plan releases its slot early."""
    wait_ms = mean_wait_ms(variant, 70.0, 300_000, cpu_cores=1000)
    assert wait_ms == pytest.approx(1000 * 0.7 / (2 * (100 - 70)), rel=0.03)


@pytest.mark.parametrize("most", [2, 5])
def test_bulk_service(most: int) -> None:
    """The wait with batches of up to K is that of the queue M/M(1,K)/1 (Medhi, Stochastic Models in Queueing Theory).

    With the root r in (0, 1) of mu r^(K+1) - (lambda + mu) r + lambda, the probability that n requests wait while the
    server is busy is c r^n, and lambda P(idle) = mu c.
    """
    rate, mu = 1.2, 1.0
    roots = np.roots([mu, *[0.0] * (most - 1), -(rate + mu), rate])
    r = float(next(root.real for root in roots if abs(root.imag) < 1e-9 and 1e-9 < root.real < 1 - 1e-9))
    c = 1 / (mu / rate + 1 / (1 - r))
    wait_s = c * r / (1 - r) ** 2 / rate
    variant = {**EXPONENTIAL, "latency_ms": 1000.0, "batch_cost": 0.0}
    found_ms = mean_wait_ms(variant, rate, 300_000, max_batch=most, max_delay_ms=0.0)
    assert found_ms == pytest.approx(wait_s * 1000, rel=0.04)


@pytest.mark.parametrize("variant", [CONSTANT, EXPONENTIAL], ids=["constant", "exponential"])
def test_losses_of_erlang_b(variant: dict[str, Any]) -> None:
    """Requests that may not wait are lost as Erlang B predicts, for every distribution of the service time."""
    servers, offered = 4, 3.0
    terms = [offered**k / math.factorial(k) for k in range(servers + 1)]
    sets = {"gpu_slots": servers, "admission": "deadline", "slo.latency_ms": 10.0, "preload": True}
    (found,) = simulate(scenario_of(variant, rate_per_s=100 * offered, requests=200_000, **sets))
    assert found.total.dropped / found.total.arrivals == pytest.approx(terms[-1] / sum(terms), rel=0.02)


@pytest.mark.parametrize("setup_ms", [5.0, 40.0])
def test_setup_times(setup_ms: float) -> None:
    """A model that leaves memory when it is idle queues as M/M/1 with set-up times (Welch 1964)."""
    rate, service_ms = 0.06, 10.0
    load = rate * service_ms
    setup_wait_ms = (2 * setup_ms + rate * setup_ms**2) / (2 * (1 + rate * setup_ms))
    sets = {"keep_alive_s": 1e-9, "load_fixed_ms": setup_ms, "preload": False}
    variant = {**EXPONENTIAL, "load_mb": 1e-6}
    found = mean_wait_ms(variant, 1000 * rate, 300_000, **sets)
    assert found == pytest.approx(load * service_ms / (1 - load) + setup_wait_ms, rel=0.03)


def test_failures() -> None:
    """A request succeeds if it finds a server that is up and that does not fail while the request runs."""
    mtbf_s, mttr_s, service_s = 5.0, 3.0, 0.5
    variant = {"memory_mb": 100.0, "latency_ms": 1000 * service_s}
    sets = {"mtbf_h": mtbf_s / 3600, "mttr_s": mttr_s, "gpu_slots": 1000, "pinned": True}
    (found,) = simulate(scenario_of(variant, rate_per_s=5.0, requests=200_000, **sets))
    success = mtbf_s / (mtbf_s + mttr_s) * math.exp(-service_s / mtbf_s)
    assert found.total.completed / found.total.arrivals == pytest.approx(success, rel=0.03)


@pytest.mark.parametrize("places", [10, 60])
def test_loads_of_ches_approximation(places: int) -> None:
    """LRU evicts a model that was not requested for the time in which as many others as fit are (Che et al. 2002)."""
    models, exponent = 200, 0.8
    shares = np.arange(1, models + 1) ** -exponent
    shares /= shares.sum()
    low, high = 0.0, 1e6  # requests until as many models as fit have been requested
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - np.exp(-shares * middle)).sum() < places else (low, middle)
    variant = {"memory_mb": 100.0, "latency_ms": 0.001, "load_mb": 1e-6}
    sets = {"gpu_memory_gb": places / 10 + 0.05, "zipf_exponent": exponent, "rate_per_s": 1.0, "requests": 100_000}
    (found,) = simulate(scenario_of(variant, models, **sets))
    misses = (shares * np.exp(-shares * low)).sum()
    assert found.total.loads / found.total.arrivals == pytest.approx(misses, rel=0.01)


def share_within(wait_ms: float, service_ms: float, load: float) -> float:
    """Return the share of requests of M/D/1 that wait at most some time (Erlang, 1909; Crommelin, 1932)."""
    terms = 0.0
    for k in range(int(wait_ms / service_ms) + 1):
        x = load * (k - wait_ms / service_ms)
        terms += x**k / math.factorial(k) * math.exp(-x)
    return (1 - load) * terms


def test_the_rate_that_meets_an_objective() -> None:
    """The searched rate is that at which 95 % of the requests of M/D/1 get their token within three service times."""
    service_ms, objective_ms = 10.0, 30.0
    content = {
        "decoder": {"costs": {"fixed_ms": service_ms, "token_ms": 0, "request_ms": 0, "pair_ms": 0}},
        "policies": ["iteration"],
        "batching": {"max_batch": 1},
        "requests": {
            **dict.fromkeys(("prompt_least", "prompt_most", "new_least", "new_most"), 1),
            "rate_per_s": 30.0,
            "requests": 4000,
        },
        "slo": {"first_token_ms": objective_ms},
    }
    rates = np.arange(30, 100, 0.01)
    shares = np.array([share_within(objective_ms - service_ms, service_ms, rate * service_ms / 1e3) for rate in rates])
    expected = rates[shares >= 0.95][-1]
    (limit,) = find_limits(
        DECODERS, ScenarioSource("queue", content, Path()), "rate", Condition("violations", 0.05), SearchOptions()
    )
    assert limit.possible is not None
    assert limit.certain is not None
    assert limit.best is not None
    assert limit.certain.amount <= expected * 1.02
    assert limit.possible.amount >= expected * 0.98
    assert limit.best.amount == pytest.approx(expected, rel=0.05)


def test_decoders_with_random_lengths_without_batches() -> None:
    """M/G/1: the mean wait is rate x E[service^2] / (2 (1 - load)), and independent of lengths on each of 2 replicas.

    With random routing each replica has half of the rate. A prompt of one token and n new ones take n iterations.
    """
    iteration_ms, rate_per_s = 2.0, 40.0
    content = {
        "decoder": {"costs": {"fixed_ms": iteration_ms, "token_ms": 0, "request_ms": 0, "pair_ms": 0}, "slots": 9000},
        "policies": ["iteration"],
        "batching": {"max_batch": 1},
        "replicas": {"count": 2, "routing": "random"},
        "requests": {
            "prompt_least": 1,
            "prompt_most": 1,
            "new_most": 2000,
            "new_mean": 15.0,
            "new_cv": 1.0,
            "lengths": "gamma",
            "rate_per_s": rate_per_s,
            "requests": 30_000,
        },
    }
    (result,) = simulate_decoder(build_decoder_scenario(ScenarioSource("queue", content, Path())))
    service_ms = iteration_ms * result.workload.new
    each_per_ms = rate_per_s / 2 / 1e3
    load = each_per_ms * service_ms.mean()
    wait_ms = each_per_ms * (service_ms**2).mean() / (2 * (1 - load))
    waits_ms = result.ends_ms - result.workload.arrivals_ms - service_ms
    assert waits_ms.mean() == pytest.approx(wait_ms, rel=0.08)
    assert result.utilisation == pytest.approx(load, rel=0.03)


def test_decoders_of_one_token_without_batches() -> None:
    """M/D/1: a request waits for load x service / (2 (1 - load)) on average (Pollaczek and Khinchine)."""
    service_ms, load = 10.0, 0.8
    content = {
        "decoder": {"costs": {"fixed_ms": service_ms, "token_ms": 0, "request_ms": 0, "pair_ms": 0}},
        "batching": {"max_batch": 1},
        "requests": {
            **dict.fromkeys(("prompt_least", "prompt_most", "new_least", "new_most"), 1),
            "rate_per_s": 100 * load,
            "requests": 60_000,
        },
    }
    for result in simulate_decoder(build_decoder_scenario(ScenarioSource("queue", content, Path()))):
        waits_ms = result.normalised_ms - service_ms
        assert waits_ms.mean() == pytest.approx(load * service_ms / (2 * (1 - load)), rel=0.06)
