"""Searches for limits, replications and exported requests."""

import csv
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from chrion.errors import OptionError, ScenarioError
from chrion.report.capacity_tables import limit_lines
from chrion.serving.simulator.export import export_requests
from chrion.serving.simulator.find import Condition, find_limits, first_true, parse_until
from chrion.serving.simulator.replications import interval, intervals, seeds, t_quantile
from chrion.serving.simulator.results import PatternResult
from chrion.serving.simulator.run import simulate
from chrion.serving.simulator.scenario import ScenarioSource, find_scenario
from chrion.serving.simulator.sweep import run_sweep


@pytest.mark.parametrize("begin", [1, 7, 50, 100])
def test_the_search_finds_every_edge(begin: int) -> None:
    """For every edge from 1 to 101 the search returns it, from any beginning, in at most 2 log2(n) + 2 probes."""
    for edge in range(1, 102):
        probed = set()

        def holds(number: int, edge: int = edge, probed: set[int] = probed) -> bool:
            assert 1 <= number <= 100
            probed.add(number)
            return number >= edge

        assert first_true(holds, begin, 1, 100) == edge
        assert len(probed) <= 2 * math.log2(100) + 2


@pytest.mark.parametrize(
    ("text", "metric", "limit"),
    [("violations<=1%", "violations", 0.01), (" p99 <= 250ms ", "p99", 250.0), ("swapping<=0.5%", "swapping", 0.005)],
)
def test_conditions(text: str, metric: str, limit: float) -> None:
    """A condition is a figure and its limit, in percent for shares and in ms for latencies."""
    assert parse_until(text) == Condition(metric, pytest.approx(limit))


@pytest.mark.parametrize("text", ["violations", "violations<1%", "violations<=1ms", "p99<=5", "p98<=5ms", "p99<=.ms"])
def test_bad_conditions(text: str) -> None:
    """Other texts are refused with an example."""
    with pytest.raises(OptionError, match=r"expected .* \(for example violations<=1%"):
        parse_until(text)


def source(**sets: object) -> ScenarioSource:
    """Return a scenario without random execution times, in which response times are compared."""
    base = {"requests": 400, "measure": "response", "slo.factor": 3.0, "variants.gpu.jitter_cv": 0.0}
    return find_scenario("table7").changed({**base, "patterns": ["gpu"], **sets})


def test_the_least_memory_meets_the_condition_and_the_next_does_not() -> None:
    """All nine models of the GPU pattern need 13.4 GB beside 4 GB; with less, loads make requests late."""
    (limit,) = find_limits(source(), "memory", Condition("swapping", 0.0))
    total = sum(model.variants["gpu"].memory_mb for model in source().build().models)
    assert limit.found is not None
    assert limit.beyond is not None
    assert limit.found.amount == pytest.approx(math.ceil(total / 100) / 10 + 4.0)
    assert limit.found.figure == 0
    assert limit.beyond.figure > 0


@pytest.mark.parametrize(("name", "sign"), [("servers", -1), ("models", 1), ("rate", 1)])
def test_a_limit_is_a_limit(name: str, sign: int) -> None:
    """The limit meets the condition, and the next value beyond it, one step away, does not."""
    (limit,) = find_limits(source(rate_per_s=40.0, cost_per_hour=2.0), name, Condition("p99", 400.0))
    assert limit.beyond is not None
    assert not limit.beyond.figure <= 400.0
    if limit.found is not None:
        assert limit.found.figure <= 400.0
        assert (limit.beyond.amount - limit.found.amount) * sign > 0
    if name == "servers":
        assert limit.found is not None
        assert limit.found.cost_per_hour == 2.0 * limit.found.amount


class Sawtooth(Condition):
    """A figure that is low for some numbers of servers below others for which it is high."""

    def figure(self, result: PatternResult) -> float:
        """Return 0 or 1."""
        return float(len(result.servers) not in {*range(28, 32), *range(34, 100)})


def test_a_limit_is_none_if_a_value_close_beyond_it_meets_the_condition() -> None:
    """Doubling and halving alone would find 34, since 32 and 33 do not meet the condition."""
    (limit,) = find_limits(source(requests=300, rate_per_s=100.0), "servers", Sawtooth("p99", 0.5))
    assert limit.found is not None
    assert limit.beyond is not None
    assert (limit.found.amount, limit.beyond.amount) == (28, 27)
    assert limit.worse is not None
    assert limit.worse.amount in {32, 33}


def test_a_rate_above_the_capacity_is_no_limit() -> None:
    """Few requests end soon even if they arrive faster than they can be served; the limit is the GPU's capacity."""
    alone = source(use=["baseline"], kind="uniform", preload=True)
    latency_ms = alone.build().models[0].variants["gpu"].latency_ms
    (limit,) = find_limits(alone, "rate", Condition("p99", 1e5))
    assert limit.found is not None
    assert limit.beyond is not None
    assert limit.beyond.figure < 1e5
    assert limit.found.amount * latency_ms / 1000 == pytest.approx(limit.found.offered_load, rel=0.01)
    assert limit.found.offered_load < 1 <= limit.beyond.offered_load < 1.02
    (line,) = limit_lines("rate", Condition("p99", 1e5), [limit], smallest=False)
    assert "queues would grow" in line


def test_the_number_of_models_is_found_between_copies() -> None:
    """The search counts single models, not copies of all nine; more models include fewer, in the given proportion."""
    (limit,) = find_limits(source(rate_per_s=10.0), "models", Condition("swapping", 0.02))
    assert limit.found is not None
    assert limit.beyond is not None
    assert limit.beyond.amount == limit.found.amount + 1
    mixed = source(**{"models.baseline.copies": 3})
    names = [{model.name for model in mixed.changed({"total_models": n}).build().models} for n in (1, 4, 11, 22)]
    assert [len(found) for found in names] == [1, 4, 11, 22]
    assert sum("baseline" in name for name in names[3]) == 6
    families = [{name.split("#")[0] for name in found} for found in names]
    assert all(fewer <= more for fewer, more in itertools.pairwise(families))
    with pytest.raises(ScenarioError, match="total_models: expected a whole number"):
        source(total_models=-1).build()


def test_the_rate_of_a_trace_is_its_scale(tmp_path: Path) -> None:
    """A workload that a change made a trace is searched by its scale, which begins at the changed value."""
    (tmp_path / "trace.csv").write_text("time_s,model\n" + "".join(f"{i}.0,baseline\n" for i in range(60)))
    replayed = source(kind="csv", path=str(tmp_path / "trace.csv"), rate_scale=3.0)
    (limit,) = find_limits(replayed, "rate", Condition("p99", 150.0))
    assert limit.found is not None
    steps = math.log(limit.found.amount / 3.0) / math.log(1.01)
    assert steps == pytest.approx(round(steps), abs=1e-6)
    with pytest.raises(ScenarioError, match="rate_per_s"):
        find_limits(source(**{"workload.rate_per_s": "fast"}), "rate", Condition("p99", 150.0))


@pytest.mark.parametrize("name", ["servers", "memory"])
def test_a_search_that_cannot_succeed_ends_when_no_request_waits(name: str) -> None:
    """Execution alone takes longer than the limit: what is beyond the last value is the first one without waits."""
    amounts = []

    class Counted(ScenarioSource):
        """A source that counts the scenarios of the search."""

        def changed(self, sets: Mapping[str, Any]) -> ScenarioSource:
            amounts.append(sets)
            return super().changed(sets)

    slow = source(rate_per_s=1.0, preload=True)
    (limit,) = find_limits(Counted(slow.name, slow.content, slow.folder, slow.sets), name, Condition("p50", 10.0))
    assert limit.found is None
    assert limit.beyond is not None
    assert limit.beyond.amount < 40
    assert limit.beyond.figure > 10.0
    assert 0 < len(amounts) < 16


def test_memory_for_faster_variants_is_searched_although_no_request_waits() -> None:
    """With little memory the planner chooses slow variants, all of which fit; the limit is that of the fast ones."""
    alone: dict[str, object] = {"rate_per_s": 0.001, "requests": 90, "preload": True, "patterns": ["planned"]}
    alone |= {"slo.of": "gpu", "variants.latency-optimal.jitter_cv": 0.0, "variants.memory-optimal.jitter_cv": 0.0}
    means = {}
    for memory in (10.5, 100.0):
        (result,) = simulate(source(**alone, gpu_memory_gb=memory).build())
        assert (result.total.loads, result.total.mean_wait_ms) == (0, 0.0)
        means[memory] = result.total.response.mean_ms
    assert means[100.0] < means[10.5]
    (limit,) = find_limits(source(**alone), "memory", Condition("mean", means[100.0] * (1 + 1e-9)))
    assert limit.found is not None
    assert limit.beyond is not None
    assert limit.found.amount == pytest.approx(limit.beyond.amount + 0.1)
    assert limit.beyond.amount > 10.5


def test_an_unknown_quantity_is_refused() -> None:
    """The message lists the quantities."""
    with pytest.raises(OptionError, match="expected one of servers, memory, models, rate"):
        find_limits(source(), "cores", Condition("p99", 1.0))


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


def test_replications_are_the_scenario_with_other_seeds() -> None:
    """The interval of a figure is that of the figures of single runs."""
    points = run_sweep(source(), seeds(7, 3))
    found = intervals(points)["gpu"]["swapping"]
    alone = [simulate(source(seed=7 + i).build())[0].total.swapping_rate for i in range(3)]
    assert found == interval(alone)
    assert found.half_width > 0
    with pytest.raises(OptionError, match="--replications: expected 2 or more, found 1"):
        seeds(0, 1)


def test_every_request_is_exported(tmp_path: Path) -> None:
    """The file has one line for each request, which agree with the results; it appears when it is complete."""
    scenario = source(
        admission="deadline", rate_per_s=25.0, shrink=["gpu", "memory-optimal"], patterns=["shrink"]
    ).build()
    with export_requests(tmp_path / "r.csv", scenario) as keep:
        (result,) = simulate(scenario, keep=keep)
        assert not (tmp_path / "r.csv").exists()
    rows = list(csv.DictReader((tmp_path / "r.csv").read_text().splitlines()))
    outcomes = [row["outcome"] for row in rows]
    total = result.total
    assert len(rows) == total.arrivals == 400
    assert (outcomes.count("dropped"), outcomes.count("late")) == (total.dropped, total.late)
    assert sum(int(row["waited_for_load"]) for row in rows if row["outcome"] != "dropped") == total.cold
    assert {row["variant"] for row in rows} <= {"", "gpu", "memory-optimal"}
    served = [row for row in rows if row["end_ms"]]
    mean_ms = sum(float(row["end_ms"]) - float(row["arrival_ms"]) for row in served) / len(served)
    assert mean_ms == pytest.approx(total.response.mean_ms, abs=1e-5)
    assert sorted(int(row["number"]) for row in rows) == list(range(400))
    assert [path.name for path in tmp_path.iterdir()] == ["r.csv"]
