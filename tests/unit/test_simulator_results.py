"""Results: their figures agree with each other and with a calculation by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from chrion.report.simulation_tables import simulation_tables
from chrion.serving.simulator.results import PatternResult, to_json
from chrion.serving.simulator.run import simulate
from chrion.serving.simulator.scenario import Scenario, find_scenario

#: Two models of 600 MB on one server of 1 GB, requested alternately: every request loads, 3 + 600 / 6 = 103 ms.
ALTERNATING = """
[[servers]]
gpu_memory_gb = 1.0
cpu_cores = 4
pcie_gb_per_s = 6.0
load_fixed_ms = 3.0
[workload]
kind = "csv"
path = "t.csv"
[slo]
latency_ms = 150.0
[[models]]
name = "a"
variants.gpu = {memory_mb = 600.0, latency_ms = 40.0, gpu_busy_ms = 30.0, cpu_busy_ms = 20.0}
[[models]]
name = "b"
variants.gpu = {memory_mb = 600.0, latency_ms = 50.0}
"""


def alternating(folder: Path, **sets: Any) -> tuple[Scenario, PatternResult]:
    rows = "".join(f"{i},{'ab'[i % 2]}\n" for i in range(10))
    (folder / "t.csv").write_text("time_s,model\n" + rows)
    (folder / "s.toml").write_text(ALTERNATING)
    built = find_scenario(str(folder / "s.toml")).changed(sets).build()
    return built, simulate(built)[0]


def test_figures_equal_a_calculation_by_hand(tmp_path: Path) -> None:
    """Ten requests, one a second, that all load have counts, rates, latencies and busy shares as by hand."""
    _, result = alternating(tmp_path)
    total = result.total
    assert (total.arrivals, total.completed, total.cold, total.loads) == (10, 10, 10, 10)
    assert total.swapping_rate == 1.0
    assert total.violation_rate == 0.5
    assert total.response.mean_ms == pytest.approx(103 + 45)
    assert total.execution.mean_ms == pytest.approx(45)
    assert total.mean_wait_ms == pytest.approx(103)
    assert [model.late for model in result.models] == [0, 5]
    assert result.models_missing == 1
    assert result.duration_ms == pytest.approx(9153)
    server = result.servers[0]
    assert server.gpu_busy == pytest.approx(5 * (30 + 50) / 9153)
    assert server.cpu_busy == pytest.approx(5 * 20 / 9153 / 4)
    assert server.link_busy == pytest.approx(1030 / 9153)
    assert (server.evictions, server.loaded_mb) == (9, 6000.0)
    assert server.memory_peak_mb == server.memory_mean_mb == pytest.approx(600)
    assert result.loaded_mb_per_s == pytest.approx(6000 / 9.153)


def test_drops_are_violations(tmp_path: Path) -> None:
    """Admission by deadline drops requests that a load alone makes late; their models are loaded nevertheless."""
    _, result = alternating(tmp_path, admission="deadline")
    assert (result.total.dropped, result.total.late, result.total.completed) == (5, 0, 5)
    assert result.total.violation_rate == 0.5
    assert result.total.loads == 10


def test_pinned_models_are_loaded_before_the_run(tmp_path: Path) -> None:
    """Pinned models count no loads, and with enough memory for both models none is evicted."""
    _, result = alternating(tmp_path, pinned=True, gpu_memory_gb=1.2)
    assert result.total.loads == 0
    assert result.servers[0].memory_mean_mb == pytest.approx(1200)


def test_parts_add_up() -> None:
    """Figures of models and servers add up to the totals, and histograms count every request."""
    built = (
        find_scenario("table7")
        .changed({"requests": 3000, "kind": "gamma", "servers.count": 2, "gpu_memory_gb": 8.5})
        .build()
    )
    for result in simulate(built):
        assert sum(m.arrivals for m in result.models) == result.total.arrivals == 3000
        assert sum(m.loads for m in result.models) == sum(s.loads for s in result.servers) == result.total.loads
        assert sum(s.arrivals for s in result.servers) == 3000
        assert result.responses.sum() == sum(counts.sum() for counts in result.executions.values()) == 3000


def test_json_is_plain(tmp_path: Path) -> None:
    """The object is strict JSON, and a pattern without loads has null for its cold latencies."""
    built, result = alternating(tmp_path, pinned=True, gpu_memory_gb=1.2)
    body = json.loads(json.dumps(to_json(built, (result,)), allow_nan=False))
    assert body["schema"] == "chrion.simulation/1"
    pattern = body["patterns"][0]
    assert pattern["cold_response"]["p95_ms"] is None
    assert sum(count for _, _, count in pattern["response_histogram"]) == 10
    assert [model["name"] for model in pattern["per_model"]] == ["a", "b"]


def test_there_is_a_table_of_each_level(tmp_path: Path) -> None:
    """The tables are by pattern, by model and by server."""
    built, result = alternating(tmp_path)
    console = Console(width=160)
    with console.capture() as capture:
        console.print(simulation_tables(built, (result,)))
    text = capture.get()
    for word in ("2 models on 1 server", "By model", "By server", "100.00%", "50.00%"):
        assert word in text


def test_a_run_in_which_all_is_dropped_has_a_duration() -> None:
    """If every request is dropped, the run lasts until its last event, and loads and memory are counted over it."""
    sets = {"requests": 50, "admission": "deadline", "measure": "response", "factor": 0.5, "preload": False}
    (result, *_) = simulate(find_scenario("table7").changed(sets).build())
    assert result.total.dropped == result.total.arrivals == 50
    assert result.duration_ms >= 49 * 200
    assert result.loads_per_s > 0
    assert result.servers[0].memory_mean_mb > 0
    assert result.servers[0].link_busy > 0


def test_many_copies_take_little_memory() -> None:
    """Two thousand models and few requests are simulated; histograms have as many entries as latencies."""
    sets = {"copies": 2000, "requests": 300, "patterns": ["gpu"], "use": ["baseline"], "preload": False}
    (result,) = simulate(find_scenario("table7").changed(sets).build())
    assert len(result.models) == 2000
    assert result.total.completed == 300


def test_series_over_time() -> None:
    """Rates, queues and violations over time agree with the records of requests and with the totals."""
    rows: list[Any] = []
    sets = {"requests": 900, "kind": "poisson", "rate_per_s": 9.0, "measure": "response", "patterns": ["gpu"]}
    scenario = find_scenario("table7").changed(sets).build()
    (result,) = simulate(scenario, keep=lambda _, part: rows.append(part))
    series, records = result.series, np.concatenate(rows)
    assert series.bin_ms == 1000.0
    for i in range(len(series.waiting) - 1):
        end = (i + 1) * 1000.0
        arrived = (records[:, 3] >= end - 1000.0) & (records[:, 3] < end)
        assert series.arrivals_per_s[i] == pytest.approx(arrived.sum())
        assert series.waiting[i] == ((records[:, 3] < end) & (records[:, 4] >= end)).sum()
    assert series.waiting[-1] == 0
    assert max(series.waiting) > 2
    weights = np.array(series.arrivals_per_s[:-1])
    violations = np.nansum(np.array(series.violation_rate[:-1]) * weights)
    assert violations == pytest.approx(result.total.late, abs=10)
    assert json.dumps(to_json(scenario, (result,))["patterns"][0]["series"])
