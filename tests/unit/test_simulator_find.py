"""Searches for limits, replications and exported requests."""

import csv
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chrion.errors import OptionError, ScenarioError
from chrion.report.capacity_tables import limit_lines
from chrion.serving.simulator.confidence import Interval, interval
from chrion.serving.simulator.export import export_requests, write_curve
from chrion.serving.simulator.find import (
    GROWS,
    MET,
    MISSED,
    OPEN,
    SERVERS,
    Condition,
    Kind,
    Limit,
    Replication,
    Searched,
    SearchOptions,
    find_limits,
    first_true,
    parse_until,
)
from chrion.serving.simulator.results import PatternResult
from chrion.serving.simulator.run import simulate
from chrion.serving.simulator.scenario import ScenarioSource, find_scenario
from chrion.serving.simulator.sweep import intervals, run_sweep, seeds


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
    [
        ("violations<=1%", "violations", 0.01),
        (" p99 <= 250ms ", "p99", 250.0),
        ("p99<=.25s", "p99", 250.0),
        ("p99<=250", "p99", 250.0),
        ("swapping<=0.5%", "swapping", 0.005),
    ],
)
def test_conditions(text: str, metric: str, limit: float) -> None:
    """A condition is a figure and its limit, in percent for shares, and of time for latencies."""
    assert parse_until(text) == Condition(metric, pytest.approx(limit))


@pytest.mark.parametrize(
    "text",
    [
        "violations",
        "violations<1%",
        "violations<=1ms",
        "violations<=1",
        "p98<=5ms",
        "p99<=.ms",
        "p99<=1%",
        "violations<=1s",
    ],
)
def test_bad_conditions(text: str) -> None:
    """Other texts are refused with an example."""
    with pytest.raises(OptionError, match=r"expected .* \(for example violations<=1%"):
        parse_until(text)


def source(**sets: object) -> ScenarioSource:
    """Return a scenario without random execution times, in which response times are compared."""
    base = {"requests": 400, "measure": "response", "slo.factor": 3.0, "variants.gpu.jitter_cv": 0.0}
    return find_scenario("table7").changed({**base, "patterns": ["gpu"], **sets})


def search(name: str, condition: Condition, scenario: ScenarioSource | None = None, **options: Any) -> Limit:
    """Return the limit of a scenario with one pattern."""
    (limit,) = find_limits(SERVERS, scenario or source(), name, condition, SearchOptions(**options))
    return limit


def amounts(limit: Limit) -> tuple[float | None, ...]:
    """Return the first value that may meet a condition, and the first one that clearly does."""
    return tuple(probe and probe.amount for probe in (limit.possible, limit.certain))


def test_the_least_memory_meets_the_condition_and_the_next_does_not() -> None:
    """All nine models of the GPU pattern need 13.4 GB beside 4 GB; with less, loads make requests late."""
    limit = search("memory", Condition("swapping", 0.0))
    total = sum(model.variants["gpu"].memory_mb for model in source().build().models)
    assert amounts(limit) == (pytest.approx(math.ceil(total / 100) / 10 + 4.0),) * 2
    assert limit.best is limit.possible
    assert limit.best is not None
    assert limit.best.figure == Interval(0.0, 0.0)
    assert limit.beyond is not None
    assert limit.beyond.figure.low > 0


@pytest.mark.parametrize(("name", "sign", "rate_per_s"), [("servers", -1, 40.0), ("models", 1, 10.0), ("rate", 1, 6.0)])
def test_a_limit_is_a_limit(name: str, sign: int, rate_per_s: float) -> None:
    """Every value that was tried beyond the bracket fails, and every one before it meets the condition."""
    limit = search(name, Condition("p99", 400.0), source(rate_per_s=rate_per_s, cost_per_hour=2.0))
    assert limit.possible is not None
    assert limit.certain is not None
    for probe in limit.curve:
        if (probe.amount - limit.possible.amount) * sign > 0:
            assert probe.met in {MISSED, GROWS}
        if (probe.amount - limit.certain.amount) * sign <= 0:
            assert probe.met == MET
            assert probe.figure.high <= 400.0
    assert [probe.amount for probe in limit.curve] == sorted(probe.amount for probe in limit.curve)
    if name == "servers":
        assert limit.certain.cost_per_hour == pytest.approx(2.0 * limit.certain.amount)


class Sawtooth(Condition):
    """A figure that is low for some numbers of servers below others for which it is high."""

    def figure(self, result: PatternResult, *, keep_warm_up: bool = False) -> float:
        """Return 0 or 1."""
        del keep_warm_up
        return float(len(result.servers) not in {*range(28, 32), *range(34, 100)})


def test_a_bracket_contains_values_that_fail_between_those_that_meet_the_condition() -> None:
    """Doubling and halving alone would find 34, since 32 and 33 do not meet the condition, and would not say so."""
    limit = search("servers", Sawtooth("p99", 0.5), source(requests=100, rate_per_s=100.0))
    assert amounts(limit) == (28, 34)
    assert limit.beyond is not None
    assert limit.beyond.amount == 27
    assert limit.exception is not None
    assert limit.exception.amount in {32, 33}


#: One model, of exponential execution times with a mean of 10 ms, that is in memory.
EXPONENTIAL = {"memory_mb": 100.0, "latency_ms": 10.0, "distribution": "exponential"}


def exponential(**sets: Any) -> ScenarioSource:
    """Return a scenario of one exponential model."""
    content = {"models": [{"name": "m", "variants": {"gpu": EXPONENTIAL}}], "slo": {"latency_ms": 50.0}}
    return ScenarioSource("exponential", content, Path()).changed({"preload": True, "patterns": ["gpu"], **sets})


def late_of_mm1(rate_per_s: float) -> float:
    """Return the share of requests of an M/M/1 queue that take longer than 50 ms."""
    return math.exp(-(0.1 - rate_per_s / 1000) * 50) if rate_per_s < 100 else 1.0


def late_of_mmc(rate_per_s: float, servers: int) -> float:
    """Return the share of requests of an M/M/c queue that take longer than 50 ms (Gross and Harris, section 2.3)."""
    offered, own = rate_per_s / 100, math.exp(-5.0)
    if offered >= servers:
        return 1.0
    blocked = offered**servers / math.factorial(servers) * servers / (servers - offered)
    waits = blocked / (sum(offered**k / math.factorial(k) for k in range(servers)) + blocked)
    free = servers - offered  # a wait has the rate free x mu; free is not 1 at any rate that is tried
    return own + waits * (math.exp(-5.0 * free) - own) / (1 - free)


@pytest.mark.parametrize("load", [2.3, 5.6])
def test_the_number_of_servers_is_that_of_theory(load: float) -> None:
    """With random routing every server is an M/M/1 queue: the bracket contains the fewest with 5 % late requests."""
    fewest = next(n for n in itertools.count(1) if late_of_mm1(100 * load / n) <= 0.05)
    scenario = exponential(rate_per_s=100 * load, requests=6000, routing="random")
    limit = search("servers", Condition("violations", 0.05), scenario)
    possible, certain = amounts(limit)
    assert possible is not None
    assert certain is not None
    assert possible <= fewest <= certain <= possible + 4
    for probe in limit.curve:
        if probe.amount > load:
            expected = late_of_mm1(100 * load / probe.amount)
            assert abs(probe.figure.mean - expected) < 4 * probe.figure.half_width + 0.01
            assert probe.offered_load == pytest.approx(load / probe.amount, rel=0.05)
        else:
            assert probe.met == GROWS


def test_the_rate_is_that_of_theory() -> None:
    """The bracket contains the rate at which 5 % of the requests of an M/M/3 queue take longer than 50 ms."""
    rates = np.linspace(1.05, 298.95, 2980)
    highest = max(rate for rate in rates if late_of_mmc(rate, 3) <= 0.05)
    scenario = exponential(rate_per_s=200.0, requests=8000, gpu_slots=3)
    possible, certain = amounts(search("rate", Condition("violations", 0.05), scenario))
    assert certain is not None
    assert possible is not None
    assert certain <= highest <= possible < 1.25 * certain


def test_more_replications_narrow_the_bracket() -> None:
    """A value whose interval contains the limit is tried up to the number of replications; clear ones need three."""
    scenario = exponential(rate_per_s=560.0, requests=1000, routing="random")
    widths = []
    for replications in (3, 12):
        limit = search("servers", Condition("violations", 0.05), scenario, replications=replications)
        assert {probe.replications for probe in limit.curve} <= {3, replications}
        assert all(probe.replications == replications for probe in limit.curve if probe.met == OPEN)
        possible, certain = amounts(limit)
        widths.append((certain or 100) - (possible or 0))
    assert widths[1] < widths[0]


def test_the_warm_up_is_left_out_unless_it_is_kept() -> None:
    """Loads at the start make requests late; they count in a search only on request."""
    slow = exponential(rate_per_s=50.0, requests=2000, **{"servers.load_fixed_ms": 2000.0, "preload": False})
    condition = Condition("violations", 0.5)
    curves = [search("servers", condition, slow, keep_warm_up=keep, replications=3).curve for keep in (True, False)]
    kept, settled = (next(probe for probe in curve if probe.amount == 1) for curve in curves)
    assert settled.warm_up_requests >= 100
    assert kept.warm_up_requests == 0
    assert settled.figure.mean == pytest.approx(late_of_mm1(50.0), abs=0.03)
    assert kept.figure.mean > settled.figure.mean + 0.04


def test_a_rate_above_the_capacity_is_no_limit() -> None:
    """Few requests end soon even if they arrive faster than they can be served; the limit is the GPU's capacity."""
    alone = source(use=["baseline"], kind="uniform", preload=True)
    latency_ms = alone.build().models[0].variants["gpu"].latency_ms
    condition = Condition("p99", 1e5)
    limit = search("rate", condition, alone)
    assert limit.certain is not None
    assert limit.beyond is not None
    assert (limit.beyond.met, limit.beyond.figure.high < 1e5) == (GROWS, True)
    assert limit.certain.amount * latency_ms / 1000 == pytest.approx(limit.certain.offered_load, rel=0.01)
    assert limit.certain.offered_load < 1 <= limit.beyond.offered_load < 1.02
    bracket, line = limit_lines(SERVERS.searched("rate", condition, alone.build()), condition, [limit])
    assert "requests/s; " in bracket
    assert "queues grow" in line


def test_requests_beyond_a_limit_of_those_that_wait_meet_no_condition() -> None:
    """A short queue keeps response times low above capacity, by dropping requests: what is found is the capacity."""
    models = [{"name": "m", "max_queue": 4, "variants": {"gpu": {"memory_mb": 600.0, "latency_ms": 100.0}}}]
    sets = {"requests": 3000, "rate_per_s": 15.0, "preload": True}
    short = ScenarioSource("short", {"models": models}, Path()).changed(sets)
    (result,) = simulate(short.build())
    assert result.total.dropped > 0.2 * result.total.arrivals
    assert result.usage.offered_load == pytest.approx(1.5, rel=0.05)
    assert result.total.response.p99_ms < 1000
    limit = search("rate", Condition("p99", 1000.0), short)
    assert limit.certain is not None
    assert limit.certain.amount < 10.0


def test_queues_that_grow_for_another_reason_than_work_are_no_capacity() -> None:
    """Half of the cluster is idle, since the model fits one of two servers: the capacity is that of one."""
    models = [{"name": "m", "variants": {"gpu": {"memory_mb": 600.0, "latency_ms": 10.0}}}]
    content = {"models": models, "servers": [{"gpu_memory_gb": 1.0}, {"gpu_memory_gb": 0.1}]}
    sets = {"requests": 2000, "rate_per_s": 80.0, "kind": "uniform", "preload": True}
    scenario = ScenarioSource("half", content, Path()).changed(sets)
    limit = search("rate", Condition("p99", 1e7), scenario)
    assert limit.beyond is not None
    assert limit.beyond.met == GROWS
    assert 100.0 < limit.beyond.amount < 102.0
    assert limit.beyond.offered_load == pytest.approx(0.5, rel=0.02)


def test_values_that_are_not_clear_do_not_end_a_search() -> None:
    """With few requests many neighbours may meet a condition; a bracket has a value beyond that clearly does not."""
    servers = [{"count": 2, "hardware": "l4+epyc-16", "gpu_memory_gb": 12}]
    content = {"catalogue": "table6", "patterns": ["memory-optimal"], "servers": servers}
    scenario = ScenarioSource("few", content | {"workload": {"requests": 500, "rate_per_s": 5}}, Path())
    limit = search("rate", Condition("violations", 0.01), scenario)
    assert limit.beyond is not None
    assert limit.beyond.met in {MISSED, GROWS}


class Numbered:
    """A scenario of so many servers, and its source."""

    def __init__(self, sets: dict[str, Any]) -> None:
        self.sets, self.seed = sets, sets.get("seed", 0)

    def changed(self, sets: Any) -> "Numbered":
        return Numbered(self.sets | dict(sets))


def test_a_search_ends_where_a_smaller_value_turns_out_to_be_enough() -> None:
    """5 servers meet the condition and more change nothing, although 8, tried before, were not clear."""

    def measure(source: Numbered, **_: Any) -> Replication:
        number = source.sets["servers.count"]
        figure = 0.0 if number >= 5 else 1.0
        figure = 0.9 * (source.seed % 2) if number == 8 else figure
        return Replication(figure, 0.5, -1.0, 0.0, 0, improvable=number != 5)

    servers = Searched("servers", range(1, 1000), lambda n: {"servers.count": n}, lambda s: s.sets["servers.count"])
    kind: Any = Kind(
        build=lambda source: source,
        quantities=lambda _condition, _scenario: {"servers": servers},
        metrics=("violations",),
        patterns=lambda _: {"gpu": {}},
        is_long=lambda _: False,
        measure=measure,
    )
    source: Any = Numbered({})
    (limit,) = find_limits(kind, source, "servers", Condition("violations", 0.5))
    assert amounts(limit) == (5, None)  # 8 is larger and not clear


def test_the_number_of_models_is_found_between_copies() -> None:
    """The search counts single models, not copies of all nine; more models include fewer, in the given proportion."""
    limit = search("models", Condition("swapping", 0.02), source(rate_per_s=10.0))
    assert limit.possible is not None
    assert limit.beyond is not None
    assert limit.beyond.amount == limit.possible.amount + 1
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
    condition = Condition("p99", 150.0)
    limit = search("rate", condition, replayed)
    assert SERVERS.searched("rate", condition, replayed.build()).unit == "requests for each of the trace"
    assert limit.best is not None
    steps = math.log(limit.best.amount / 3.0) / math.log(1.01)
    assert steps == pytest.approx(round(steps), abs=1e-6)
    with pytest.raises(ScenarioError, match="rate_per_s"):
        find_limits(SERVERS, source(**{"workload.rate_per_s": "fast"}), "rate", condition)


@pytest.mark.parametrize("metric", ["violations", "swapping"])
def test_a_rate_without_requests_meets_no_condition(tmp_path: Path, metric: str) -> None:
    """The first request of a trace waits for a load, however few are left: only runs without one have no violation."""
    (tmp_path / "trace.csv").write_text("time_s,model\n" + "".join(f"{i}.0,{'ab'[i % 2]}\n" for i in range(60)))
    variants = {"gpu": {"memory_mb": 1500.0, "latency_ms": 50.0}}
    content = {
        "patterns": ["gpu"],
        "slo": {"latency_ms": 60.0},
        "servers": [{"gpu_memory_gb": 2.0}],
        "models": [{"name": name, "variants": variants} for name in "ab"],
        "workload": {"kind": "csv", "path": str(tmp_path / "trace.csv")},
    }
    limit = search("rate", Condition(metric, 0.01), ScenarioSource("alternating", content, tmp_path))
    assert limit.possible is None
    assert math.isinf(limit.curve[0].figure.mean)


@pytest.mark.parametrize("name", ["servers", "memory"])
def test_a_search_that_cannot_succeed_ends_when_no_request_waits(name: str) -> None:
    """Execution alone takes longer than the limit: what is beyond the last value is the first one without waits."""
    slow = source(rate_per_s=1.0, preload=True)
    limit = search(name, Condition("p50", 10.0), slow)
    assert limit.possible is limit.best is limit.certain is None
    assert limit.curve[-1].amount < 40
    assert limit.curve[-1].figure.low > 10.0
    assert 0 < len(limit.curve) < 20


@pytest.mark.parametrize("name", ["servers", "memory"])
@pytest.mark.parametrize("pattern", ["shrink", "planned"])
def test_a_search_among_variants_ends_where_each_model_has_its_largest(name: str, pattern: str) -> None:
    """Execution alone takes longer than the limit in all variants, and more room cannot change them any more."""
    own = {"shrink": ["gpu", "memory-optimal"], "patterns": [pattern], "slo.of": "gpu", "rate_per_s": 1.0}
    slow = source(**own)
    limit = search(name, Condition("p50", 10.0), slow)
    assert limit.possible is None
    assert limit.exhausted
    largest_gb = sum(max(v.memory_mb for v in model.variants.values()) for model in slow.build().models) / 1000
    room = len(slow.build().models) if name == "servers" else largest_gb + slow.build().servers[0].reserved_gb
    assert room <= limit.curve[-1].amount <= 8 * room


def test_equal_figures_that_may_meet_a_condition_end_the_search() -> None:
    """The interval of the figure that many servers have contains the limit, so that more of them decide nothing."""
    many = [simulate(source(rate_per_s=20.0, seed=seed, **{"servers.count": 64}).build())[0] for seed in range(5)]
    mean_ms = sum(result.total.response.mean_ms for result in many) / len(many)
    limit = search("servers", Condition("mean", mean_ms), source(rate_per_s=20.0))
    assert limit.curve[-1].met == OPEN
    assert limit.exhausted
    assert limit.curve[-1].amount <= 64


def test_memory_for_a_single_model_is_no_plateau() -> None:
    """1.0 to 1.7 GB hold one of 12 models of 0.9 GB; all fit into 10.8 GB, where each is loaded once: 3 % of requests.

    With memory for 11, at least every 12th request loads a model.
    """
    models = [{"name": "m", "copies": 12, "variants": {"v": {"memory_mb": 900.0, "latency_ms": 30.0}}}]
    sets = {"rate_per_s": 10.0, "requests": 400, "prefetch": False}
    limit = search("memory", Condition("swapping", 0.05), ScenarioSource("m", {"models": models}, Path()).changed(sets))
    assert limit.possible is not None
    assert limit.possible.amount == pytest.approx(10.8)


def test_memory_for_faster_variants_is_searched_although_no_request_waits(tmp_path: Path) -> None:
    """With little memory the planner chooses slow variants, all of which fit; the limit is that of the fast ones."""
    names = [model.name for model in source().build().models]
    rows = [f"{i * 1000},{names[i % len(names)]}" for i in range(90)]
    (tmp_path / "t.csv").write_text("\n".join(["time_s,model", *rows]) + "\n")
    alone: dict[str, object] = {"kind": "csv", "path": str(tmp_path / "t.csv"), "preload": True}
    alone |= {"patterns": ["planned"], "slo.of": "gpu"}
    alone |= {"variants.latency-optimal.jitter_cv": 0.0, "variants.memory-optimal.jitter_cv": 0.0}
    means = {}
    for memory in (10.5, 100.0):
        (result,) = simulate(source(**alone, gpu_memory_gb=memory).build())
        assert (result.total.loads, result.total.mean_wait_ms) == (0, 0.0)
        means[memory] = result.total.response.mean_ms
    assert means[100.0] < means[10.5]
    condition = Condition("mean", means[100.0] * (1 + 1e-9))
    limit = search("memory", condition, source(**alone))
    assert limit.possible is not None
    assert limit.beyond is not None
    assert limit.possible.amount == pytest.approx(limit.beyond.amount + 0.1)
    assert limit.beyond.amount > 10.5


def test_a_faster_variant_may_need_more_than_twice_the_memory() -> None:
    """The planner chooses it once it fits, far above what the slow one needs."""
    variants = {"slow": {"memory_mb": 1000.0, "latency_ms": 100.0}, "fast": {"memory_mb": 30000.0, "latency_ms": 10.0}}
    models = [{"name": "m", "variants": variants}]
    sets = {"patterns": ["planned"], "preload": True, "kind": "uniform", "rate_per_s": 1.0, "requests": 100}
    limit = search("memory", Condition("p99", 50.0), ScenarioSource("steps", {"models": models}, Path()).changed(sets))
    assert limit.possible is not None
    assert 30.0 <= limit.possible.amount <= 36.0


def test_an_unknown_quantity_is_refused() -> None:
    """The message lists the quantities."""
    with pytest.raises(OptionError, match="expected one of servers, memory, models, rate"):
        find_limits(SERVERS, source(), "cores", Condition("p99", 1.0))


def test_replications_are_the_scenario_with_other_seeds() -> None:
    """The interval of a figure is that of the figures of single runs."""
    runs = [point.results for point in run_sweep(source(), seeds(7, 3))]
    found = intervals(runs)["gpu"]["swapping"]
    alone = [simulate(source(seed=7 + i).build())[0].total.swapping_rate for i in range(3)]
    assert found == interval(alone)
    assert found.half_width > 0
    with pytest.raises(OptionError, match="--replications: expected 2 or more, found 1"):
        seeds(0, 1)
    runs = [point.results for point in run_sweep(source(cost_per_hour=3.0), seeds(7, 2))]
    priced = intervals(runs)["gpu"]
    assert priced["cost_per_hour"].mean == pytest.approx(3.0)


def test_every_value_that_was_tried_is_written(tmp_path: Path) -> None:
    """The file of a search has a line for each value, with its interval."""
    limit = search("servers", Condition("violations", 0.1), source(rate_per_s=40.0))
    write_curve(tmp_path / "curve.csv", "servers", "violations", [limit])
    rows = list(csv.DictReader((tmp_path / "curve.csv").read_text().splitlines()))
    assert [float(row["servers"]) for row in rows] == [probe.amount for probe in limit.curve]
    assert [float(row["low"]) for row in rows] == [probe.figure.low for probe in limit.curve]
    assert {row["meets"] for row in rows} <= {MET, OPEN, MISSED, GROWS}


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


def test_intervals_of_shares_end_at_all_requests() -> None:
    """Of few replications an interval is wider than 0 to 100 %; loads of a request have no such end."""
    assert Condition("violations", 0.01).interval_text(Interval(0.7667, 2.9647)) == "0.00% to 100.00%"
    assert Condition("swapping", 0.01).interval_text(Interval(1.5, 0.5)) == "100.00% to 200.00%"
