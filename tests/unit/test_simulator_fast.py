"""The compiled kernel compared with the engine. Without numba, the kernel runs as plain Python."""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from chrion.serving.simulator import fast, run
from chrion.serving.simulator.engine import ClusterEngine
from chrion.serving.simulator.histograms import Floats
from chrion.serving.simulator.results import PatternResult
from chrion.serving.simulator.run import simulate
from chrion.serving.simulator.scenario import Scenario, ScenarioSource
from property_tests import repetitions

REQUESTS = repetitions(500)


def scenario(models: int = 14, **sets: Any) -> Scenario:
    """Return a scenario of GPU-only, hybrid and CPU-only models on two unequal groups of servers."""
    rng = np.random.default_rng(3)
    entries = []
    for i in range(models):
        latency, memory = float(rng.uniform(20, 80)), float(rng.uniform(400, 1500))
        hybrid = {"gpu_busy_ms": latency / 2, "cpu_busy_ms": latency * 1.5, "cores": 2}
        cpu = {"memory_mb": 0.0, "latency_ms": latency, "cpu_busy_ms": latency, "gpu_busy_ms": 0.0}
        gpu = {"memory_mb": memory, "latency_ms": latency, "jitter_cv": 0.2}
        variant = cpu if i == 5 else gpu | (hybrid if i % 3 == 1 else {})
        entries.append({"name": f"m{i}", "weight": 1.0 + i % 2, "pinned": i == 2, "variants": {"mixed": variant}})
    content = {
        "policies": {"prefetch": False},
        "servers": [
            {"gpu_memory_gb": 4.0, "cpu_cores": 3, "gpu_slots": 2, "count": 2},
            {"gpu_memory_gb": 1.7, "cpu_cores": 2, "pcie_gb_per_s": 4.0},
        ],
        "workload": {"rate_per_s": 30.0, "requests": REQUESTS, "zipf_exponent": 0.6},
        "models": entries,
    }
    # A model fits on the smallest server only beside the pinned one.
    entries[2]["variants"]["mixed"]["memory_mb"] = 150.0
    return ScenarioSource("fast", content, Path()).changed(sets).build()


def records(built: Scenario, *, compiled: bool) -> tuple[tuple[PatternResult, ...], Floats]:
    """Return the results and the records of all requests."""
    rows: list[Floats] = []
    results = simulate(built, keep=lambda _, part: rows.append(part), compiled=compiled)
    return results, np.concatenate(rows)


@pytest.mark.parametrize("eviction", ["lru", "lfu", "cost"])
@pytest.mark.parametrize(
    ("routing", "load_order", "spill", "rate_per_s", "preload"),
    [
        ("resident-first", "fifo", 4, 30.0, False),
        ("resident-first", "demand", 1, 120.0, True),
        ("least-loaded", "demand", 4, 60.0, False),
        ("random", "fifo", 4, 0.7, True),
    ],
)
def test_results_are_equal(
    eviction: str, routing: str, load_order: str, spill: int, rate_per_s: float, *, preload: bool
) -> None:
    """All records, and all figures of models and servers, are those of the engine bit by bit."""
    sets = {"eviction": eviction, "routing": routing, "load_order": load_order, "spill": spill, "preload": preload}
    built = scenario(rate_per_s=rate_per_s, **sets)
    assert fast.covers(built, "mixed")
    (found,), rows = records(built, compiled=True)
    (expected,), expected_rows = records(built, compiled=False)
    assert np.array_equal(rows, expected_rows)
    assert repr(found) == repr(expected)
    assert expected.total.loads > 0.04 * REQUESTS


@pytest.mark.parametrize("limits", [{"max_queue": 2}, {"max_waiting": 5}, {"max_queue": 3, "max_waiting": 4}])
def test_requests_beyond_limits_are_dropped(limits: dict[str, int]) -> None:
    """The limits of waiting requests, of a model and of a server, drop the same requests as in the engine."""
    built = scenario(rate_per_s=150.0, preload=True, **limits)
    (found,), rows = records(built, compiled=True)
    (expected,), expected_rows = records(built, compiled=False)
    assert np.array_equal(rows, expected_rows, equal_nan=True)
    assert repr(found) == repr(expected)
    assert 0.1 * REQUESTS < expected.total.dropped < 0.9 * REQUESTS


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_requests_come_in_chunks(eviction: str) -> None:
    """The kernel's pools grow with the pairs of a model and a server that occur, and keep what they hold."""
    built = scenario(rate_per_s=40.0, routing="random", eviction=eviction, preload=True)
    (chunk,) = built.workload.chunks()
    parts = [(chunk.times_ms[i : i + 20], chunk.models[i : i + 20]) for i in range(0, REQUESTS, 20)]
    found: list[list[Floats]] = [[], []]
    engines = [ClusterEngine(built.engine_config("mixed")) for _ in range(2)]
    fast.run_compiled(engines[0], built, parts, keep=found[0].append)
    engines[1].run(parts, keep=found[1].append)
    assert np.array_equal(*(np.concatenate(rows) for rows in found))
    assert engines[0].cluster.loads == engines[1].cluster.loads
    assert len({(row[1], row[2]) for row in np.concatenate(found[0])}) > 30


def test_further_pairs_occur_after_a_long_queue() -> None:
    """Room for pairs of a model and a server grows although fewer requests wait than before."""
    built = scenario(100, routing="random")
    times = np.concatenate([np.zeros(80), 1e5 * np.arange(1, 121)])
    models = np.arange(200) % 100
    parts = [(times[:80], models[:80]), *((times[i : i + 10], models[i : i + 10]) for i in range(80, 200, 10))]
    engines = [ClusterEngine(built.engine_config("mixed")) for _ in range(2)]
    found: list[list[Floats]] = [[], []]
    fast.run_compiled(engines[0], built, parts, keep=found[0].append)
    engines[1].run(parts, keep=found[1].append)
    assert np.array_equal(*(np.concatenate(rows) for rows in found))


class CompiledRunError(Exception):
    """The compiled kernel was to be used."""


@pytest.fixture
def _no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs on the kernel fail."""
    monkeypatch.setattr(fast, "run_compiled", Mock(side_effect=CompiledRunError))


@pytest.mark.usefixtures("_no_kernel")
def test_the_kernel_is_used_for_what_it_covers() -> None:
    """Deadlines and Belady's policy run on the engine, and give its results."""
    with pytest.raises(CompiledRunError):
        simulate(scenario(), compiled=True)
    for sets in ({"admission": "deadline"}, {"eviction": "belady"}):
        built = scenario(requests=100, **sets)
        assert repr(simulate(built, compiled=True)) == repr(simulate(built, compiled=False))


@pytest.mark.usefixtures("_no_kernel")
def test_short_runs_do_not_import_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the kernel is used for long runs only, if numba is installed."""
    monkeypatch.setattr(run, "WORTHWHILE", 50)
    monkeypatch.setitem(sys.modules, "numba", None)
    simulate(scenario(requests=50))
    monkeypatch.setitem(sys.modules, "numba", sys)  # any module that has a specification
    simulate(scenario(requests=49))
    with pytest.raises(CompiledRunError):
        simulate(scenario(requests=50))
