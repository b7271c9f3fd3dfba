"""Rates that change over time, classes of requests, figures of functions, and cells of a cluster."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chrion.errors import InputError, OptionError, ScenarioError, TraceError
from chrion.serving.simulator.cells import build_cell, divide, sample_cells
from chrion.serving.simulator.function_durations import FunctionDurations
from chrion.serving.simulator.rate_curve import RateCurve
from chrion.serving.simulator.run import simulate
from chrion.serving.simulator.scenario import Scenario, ScenarioSource, find_scenario
from chrion.serving.simulator.traces import read_durations

#: A quiet night, a rise, a step up, a flash crowd and its end; an hour.
CURVE = [[0, 0.2], [900, 0.2], [1800, 1.0], [1800, 2.0], [2400, 2.0], [2430, 8.0], [2700, 2.0], [3600, 0.2]]
EXPONENTIAL = {"memory_mb": 100.0, "latency_ms": 10.0, "distribution": "exponential"}


def exponential(models: int = 1, **sets: Any) -> ScenarioSource:
    """Return a scenario of exponential models that are in memory."""
    entries = [{"name": f"m{i}", "variants": {"gpu": EXPONENTIAL}} for i in range(models)]
    content = {"models": entries, "slo": {"latency_ms": 50.0}}
    return ScenarioSource("exponential", content, Path()).changed({"preload": True, **sets})


def arrivals(scenario: Scenario) -> Any:
    """Return the times of all requests in s."""
    return np.concatenate([chunk.times_ms for chunk in scenario.workload.chunks()]) / 1000


def factor_at(times: Any) -> Any:
    """Return the factor of the curve, by interpolation; at a step, the one after it."""
    points = np.array(CURVE)
    return np.interp(times % 3600, points[:, 0] + np.arange(len(points)) * 1e-9, points[:, 1])


def mean_requests(edges: Any) -> Any:
    """Return the expected requests of intervals within an hour at 1/s, by the trapezoidal rule."""
    steps = np.linspace(0, 3600, 720_001)
    sums = np.concatenate([[0], np.cumsum(np.diff(steps) * factor_at((steps[1:] + steps[:-1]) / 2))])
    return np.diff(np.interp(edges, steps, sums))


def by_thinning(rng: np.random.Generator, hours: int) -> Any:
    """Return times of the Poisson process of the curve by thinning (Lewis and Shedler, 1979)."""
    number = rng.poisson(8.0 * 3600 * hours)
    times = np.sort(rng.uniform(0, 3600.0 * hours, number))
    return times[rng.random(number) < factor_at(times) / 8.0]


def test_arrivals_are_those_of_thinning() -> None:
    """Counts by minute have the mean and the variance of the Poisson process of the curve, as those of thinning do."""
    hours = 60
    edges = np.arange(0, 3601, 60.0)
    expected = mean_requests(edges)
    total = round(expected.sum() * hours)
    scenario = exponential(rate_per_s=1.0, requests=total, curve=CURVE).build()
    for times in (arrivals(scenario), by_thinning(np.random.default_rng(1), hours)):
        whole = times[times < 3600 * hours]
        counts = np.histogram2d(whole // 3600, whole % 3600, bins=[np.arange(hours + 1), edges])[0]
        deviations = (counts.mean(axis=0) - expected) / np.sqrt(expected / hours)
        assert np.abs(deviations).max() < 4.5
        assert np.mean(deviations**2) == pytest.approx(1.0, abs=0.6)
        dispersion = counts.var(axis=0, ddof=1) / expected
        assert dispersion.mean() == pytest.approx(1.0, abs=0.12)
    assert not scenario.is_steady


def test_even_gaps_follow_the_curve() -> None:
    """Without chance, requests come when the integral of the rate is a whole number; then the curve begins again."""
    curve = [[0, 1], [10, 1], [10, 3], [20, 3], [20, 0], [30, 0]]
    times = arrivals(exponential(kind="uniform", rate_per_s=1.0, requests=50, curve=curve).build())
    assert times[:10] == pytest.approx(np.arange(1, 11))
    assert times[10:39] == pytest.approx(10 + np.arange(1, 30) / 3)
    assert times[40:] == pytest.approx(np.arange(31, 41))
    assert (np.diff(times) > 0).all()


def test_times_are_the_inverse_of_the_integral() -> None:
    """The integral of the factor up to the returned times is what was given, also over many rounds."""
    integrals = np.sort(np.random.default_rng(0).uniform(0, 20_000, 5000))
    times = RateCurve([(float(a), float(b)) for a, b in CURVE]).times_s(integrals)
    fine = np.linspace(0, 3600, 360_001)
    sums = np.concatenate([[0], np.cumsum(0.01 * factor_at((fine[1:] + fine[:-1]) / 2))])
    assert times // 3600 * sums[-1] + np.interp(times % 3600, fine, sums) == pytest.approx(
        integrals, rel=1e-6, abs=0.02
    )


@pytest.mark.parametrize(
    "curve",
    [[[0, 1]], [[1, 1], [2, 1]], [[0, 1], [5, 1], [4, 1]], [[0, 1], [0, 2]], [[0, 0], [5, 0]], [[0, -1], [5, 1]]],
)
def test_curves_that_are_none_are_refused(curve: list[list[float]]) -> None:
    """The message names the key."""
    with pytest.raises(ScenarioError, match=r"workload\.curve"):
        exponential(curve=curve).build()


def test_classes_have_objectives_of_their_own() -> None:
    """In an M/M/1 queue, the share of late requests of each class is the theory's for its objective."""
    classes = [{"name": "interactive", "share": 3.0, "slo_ms": 20.0}, {"name": "batch", "slo_ms": 120.0}]
    built = exponential(rate_per_s=60.0, requests=60_000).changed({}).build()
    source = ScenarioSource("classes", {**built.content, "classes": classes}, Path())
    (result,) = simulate(source.changed({"preload": True}).build())
    interactive, batch = result.classes
    assert (interactive.name, batch.name) == ("interactive", "batch")
    assert interactive.arrivals + batch.arrivals == 60_000
    assert interactive.arrivals == pytest.approx(45_000, abs=500)
    assert interactive.violation_rate == pytest.approx(math.exp(-0.04 * 20), abs=0.03)
    assert batch.violation_rate == pytest.approx(math.exp(-0.04 * 120), abs=0.006)
    assert interactive.p50_ms == pytest.approx(math.log(2) / 0.04, rel=0.08)
    late = interactive.violation_rate * interactive.arrivals + batch.violation_rate * batch.arrivals
    assert late == pytest.approx(result.total.late)
    prior = [{**classes[0], "priority": 1}, classes[1]]
    (ordered,) = simulate(ScenarioSource("classes", {**source.content, "classes": prior}, Path()).build())
    assert ordered.classes[0].violation_rate < interactive.violation_rate
    assert ordered.classes[1].violation_rate > batch.violation_rate
    twice = {**built.content, "classes": [classes[0], classes[0]]}
    with pytest.raises(ScenarioError, match="classes: duplicate name 'interactive'"):
        ScenarioSource("classes", twice, Path()).build()


def test_a_key_of_models_is_not_one_of_classes() -> None:
    """A bare key that models and classes have is that of models; a path names the class."""
    classes = [{"name": "interactive", "slo_ms": 20.0}]
    source = ScenarioSource("classes", {**exponential().content, "classes": classes}, Path())
    changed = source.changed({"slo_ms": 70.0, "classes.interactive.slo_ms": 30.0}).build().content
    assert (changed["models"][0]["slo_ms"], changed["classes"][0]["slo_ms"]) == (70.0, 30.0)


COUNTS = "HashOwner,HashApp,HashFunction,Trigger,1,2\no,a,f,http,6000,6000\no,a,g,http,2000,2000\no,a,h,http,10,0\n"
TIMES = (
    "HashFunction,Average,Count,"
    + ",".join(f"percentile_Average_{share}" for share in (0, 50, 99, 100))
    + """
f,30,9,10,20,50,900
g,5,9,0,1,8,400
"""
)
MEMORY = "HashFunction,SampleCount,AverageAllocatedMb,AverageAllocatedMb_pct50\nf,9,200,1\ng,9,600,1\n"


def functions(folder: Path, **sets: Any) -> ScenarioSource:
    """Return a scenario with a trace of three functions and their figures."""
    for name, text in (("counts", COUNTS), ("times", TIMES), ("memory", MEMORY)):
        (folder / f"{name}.csv").write_text(text)
    files = {"path": str(folder / "counts.csv"), "durations_path": str(folder / "times.csv")}
    return exponential(models=2).changed({"kind": "azure-functions-2019", "mapping": "round-robin", **files, **sets})


def test_durations_of_functions_have_the_given_quantiles_and_average(tmp_path: Path) -> None:
    """The drawn execution times of a function have its quantiles, and its average although the maximum is far above."""
    (tmp_path / "times.csv").write_text(TIMES)
    drawn = FunctionDurations(read_durations(tmp_path / "times.csv"), ["f", "g", "unknown"])
    uniform = (np.arange(200_000) + 0.5) / 200_000
    times = drawn.draw(np.zeros(200_000, np.int64), uniform)
    assert times.mean() == pytest.approx(30.0, rel=0.002)
    assert np.quantile(times, [0, 0.5, 0.99, 1]) == pytest.approx([10, 20, 50, 900], rel=0.02)
    assert drawn.draw(np.ones(200_000, np.int64), uniform).min() == 1.0
    assert np.isnan(drawn.draw(np.full(5, 2), uniform[:5])).all()


def test_requests_of_a_trace_have_the_durations_of_their_functions(tmp_path: Path) -> None:
    """The mean execution time of a model is that of its functions; a function without figures has its model's."""
    scenario = functions(tmp_path, gpu_slots=100).build()
    (result,) = simulate(scenario)
    first, second = result.models
    assert first.execution.mean_ms == pytest.approx(30.0, rel=0.05)
    assert second.execution.mean_ms == pytest.approx(5.0, abs=1.5)  # four standard errors; no time is below 1 ms
    assert first.arrivals == 12_010
    details = [chunk.details for chunk in scenario.workload.chunks() if chunk.details]
    assert sum(int(np.isnan(own.duration_ms).sum()) for own in details) == 10


def test_models_have_the_memory_of_their_functions(tmp_path: Path) -> None:
    """The reference variant has the mean memory of the model's functions, weighted by requests."""
    paths = {"memory_path": str(tmp_path / "memory.csv"), "durations_path": ""}
    scenario = functions(tmp_path, **paths).build()
    assert [model.variants["gpu"].memory_mb for model in scenario.models] == pytest.approx([200.0, 600.0])
    assert [model.variants["gpu"].load_mb for model in scenario.models] == pytest.approx([200.0, 600.0])
    (mixed,) = functions(tmp_path, **paths, total_models=1).build().models
    assert mixed.variants["gpu"].memory_mb == pytest.approx((200 * 12_000 + 600 * 4000) / 16_000)
    with pytest.raises(ScenarioError, match="needs 600 MB, the largest server has 500 MB"):
        functions(tmp_path, **paths, gpu_memory_gb=0.5).build()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("Average,", "Mean,"), "expected a header with HashFunction and Average"),
        (lambda text: text.replace("_100", "_101"), "percentile_Average_N up to 100"),
        (lambda text: text.replace(",20,50", ",60,50"), "function f: expected percentiles that do not fall"),
        (lambda text: text.replace("g,5", "f,5"), "line 3, column HashFunction"),
        (lambda text: text.replace("f,30", "f,-1"), "line 2, column Average: expected a number from 0"),
    ],
)
def test_damaged_durations_are_refused(tmp_path: Path, change: Callable[[str], str], message: str) -> None:
    """The message says what is wrong, and where."""
    source = functions(tmp_path)
    (tmp_path / "times.csv").write_text(change(TIMES))
    with pytest.raises(TraceError, match=message):
        source.build()


def test_figures_of_functions_need_functions(tmp_path: Path) -> None:
    """Another trace has no functions whose execution times a file could give."""
    (tmp_path / "t.csv").write_text("time_s,model\n0,m0\n")
    source = functions(tmp_path, kind="csv", mapping="name", path=str(tmp_path / "t.csv"))
    with pytest.raises(ScenarioError, match=r"workload\.durations_path: only for kind 'azure-functions-2019'"):
        source.build()


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.2, 3.0])
def test_cells_have_equal_loads(exponent: float) -> None:
    """Every request is in one cell, and the loads of cells differ by at most a quarter, whatever the popularity is."""
    weights = (np.arange(1, 401) ** -exponent).tolist()
    cells = divide(weights, 8)
    parts = [sum(cell.get(model, 0.0) for cell in cells) for model in range(400)]
    assert parts == pytest.approx([1.0] * 400)
    loads = [sum(weights[model] * part for model, part in cell.items()) for cell in cells]
    assert max(loads) - min(loads) <= 0.25 * sum(weights) / 8 * (1 + 1e-9)
    popular = [model for model in range(400) if weights[model] > 0.25 * sum(weights) / 8]
    assert all(sum(model in cell for cell in cells) == 1 for model in range(400) if model not in popular)


def test_equal_models_are_divided_in_turn() -> None:
    """As many models as cells have parts in each, if they have more than a quarter of its requests; more go in turn."""
    assert divide([1.0] * 2, 2) == [{0: 0.5, 1: 0.5}] * 2
    assert divide([1.0] * 5, 2, [3])[0] == {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5, 4: 0.5}
    assert [sorted(cell) for cell in divide([1.0] * 18, 2, [0, 17])] == [
        [0, *range(1, 17, 2), 17],
        [0, *range(2, 17, 2), 17],
    ]
    assert [list(cell) for cell in divide([1.0] * 16, 4)] == [[at, at + 4, at + 8, at + 12] for at in range(4)]


def fleet(**sets: Any) -> ScenarioSource:
    """Return 40 servers with 200 models of equal popularity, each server at 60 % of its capacity."""
    return exponential(
        200, **{"servers.count": 40, "requests": 120_000, "rate_per_s": 2400.0, "routing": "random", **sets}
    )


@pytest.mark.parametrize("exponent", [0.0, 1.5])
def test_the_cells_of_a_cluster_are_a_sample_of_it(exponent: float) -> None:
    """With random routing every server is an M/M/1 queue, in cells and in the cluster: its rate is in the interval."""
    expected = math.exp(-0.04 * 50)
    found = sample_cells(fleet(cost_per_hour=2.0, zipf_exponent=exponent), 20, 5)["gpu"]
    assert abs(found["violations"].mean - expected) < 2 * found["violations"].half_width
    assert found["violations"].half_width < 0.04
    assert found["cost_per_hour"].mean == pytest.approx(80.0)


def test_cells_divide_all_requests() -> None:
    """All cells together have the servers, models and requests of the cluster; each is one random run."""
    found = sample_cells(fleet(requests=4000), 4, 4)["gpu"]
    assert found["violations"].half_width > 0.0
    sizes = [build_cell(fleet(), 4, index) for index in range(4)]
    assert [len(cell.servers) for cell in sizes] == [10] * 4
    assert sum(len(cell.models) for cell in sizes) == 200
    store = fleet(host_memory_gb=9.0).content | {"store": {"gb_per_s": 8.0}, "domains": [{"size": 5, "mtbf_h": 9.0}]}
    shared = build_cell(ScenarioSource("fleet", store, Path(), fleet(host_memory_gb=9.0).sets), 4, 1)
    assert shared.store is not None
    assert (shared.store.gb_per_s, shared.domains[0].size) == (2.0, 5)
    with pytest.raises(ScenarioError, match="--cells: expected cells of whole domains of 5 servers, found 20"):
        build_cell(ScenarioSource("fleet", store, Path(), fleet(host_memory_gb=9.0).sets), 20, 1)
    assert sum(cell.workload.requests for cell in sizes) == 120_000


def test_functions_are_divided_with_their_models(tmp_path: Path) -> None:
    """The cells of a trace have all of its requests."""
    source = functions(tmp_path, **{"servers.count": 2})
    cells = [build_cell(source, 2, index) for index in range(2)]
    assert sum(cell.workload.requests for cell in cells) == pytest.approx(16_010, abs=1)
    assert [len(cell.models) for cell in cells] == [2, 2]
    (result,) = simulate(cells[0])
    assert result.total.arrivals == pytest.approx(cells[0].workload.requests, abs=100)


@pytest.mark.parametrize(
    ("sets", "cells", "number", "message"),
    [
        ({}, 3, 2, "--cells: expected a divisor of the number of servers of each group, 40, found 3"),
        ({}, 4, 5, "--replications: expected cells to simulate, from 2 to 4, found 5"),
        ({"servers.count": 400}, 400, 2, "--cells: expected at most the number of models, 200"),
    ],
)
def test_what_cannot_be_divided_is_refused(sets: dict[str, Any], cells: int, number: int, message: str) -> None:
    """The message says into how many cells it can be divided."""
    with pytest.raises(InputError, match=message) as caught:
        sample_cells(fleet(**sets), cells, number)
    assert isinstance(caught.value, OptionError | ScenarioError)


def test_the_bundled_table_has_classes(tmp_path: Path) -> None:
    """Classes are drawn also for the requests of a trace, whose own deadlines take precedence."""
    rows: Sequence[str] = [f"{i},baseline,{'5' if i % 2 else ''}" for i in range(200)]
    (tmp_path / "t.csv").write_text("time_s,model,deadline_ms\n" + "\n".join(rows) + "\n")
    source = find_scenario("table7").changed({"kind": "csv", "path": str(tmp_path / "t.csv"), "patterns": ["gpu"]})
    content = {**source.content, "classes": [{"name": "slow", "slo_ms": 1e6}]}
    classified = ScenarioSource(source.name, content, source.folder, source.sets)
    (result,) = simulate(classified.build())
    assert result.classes[0].violation_rate == result.total.violation_rate == 0.5
