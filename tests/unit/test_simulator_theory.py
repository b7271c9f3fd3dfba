"""The engine compared with recursions of queueing theory, cache theory and exhaustive search."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from chrion.serving.manager.policies import EVICTION, ROUTING
from chrion.serving.simulator.engine import ClusterEngine, EngineConfig, NextUseOracle
from chrion.serving.simulator.histograms import SparseHistograms
from chrion.serving.simulator.settings import ServerSpec
from chrion.serving.simulator.workload import SyntheticWorkload
from chrion.serving.variants import Variant
from simulator_support import engine_of

GPU_MODEL = Variant("gpu", 100.0, 10.0, 10.0, load_mb=100.0)


def poisson(rate_per_s: float, requests: int, seed: int = 3) -> SyntheticWorkload:
    return SyntheticWorkload("poisson", requests, rate_per_s, 1.0, np.ones(1), seed)


def records(engine: ClusterEngine, workload: SyntheticWorkload) -> Any:
    """Return the records of all requests in the order of their arrivals."""
    rows: list[Any] = []
    engine.run(workload.chunks(), keep=rows.append)
    found = np.concatenate(rows)
    return found[np.argsort(found[:, 0])]


@pytest.mark.parametrize(
    ("places", "spec", "variant"),
    [
        (1, ServerSpec(), Variant("gpu", 100.0, 10.0, 10.0, distribution="exponential")),
        (4, ServerSpec(gpu_slots=4), Variant("gpu", 100.0, 10.0, 10.0, distribution="exponential")),
        (1, ServerSpec(cpu_cores=1000), Variant("hybrid", 100.0, 25.0, 10.0, (25.0,))),
        (3, ServerSpec(cpu_cores=3), Variant("cpu", 0.0, 10.0, 0.0, (10.0,), distribution="exponential")),
    ],
    ids=["gpu", "slots", "hybrid", "cores"],
)
def test_requests_start_by_the_recursion_of_kiefer_and_wolfowitz(
    places: int, spec: ServerSpec, variant: Variant
) -> None:
    """A request starts when it has arrived and the first of the slots or cores is free; hybrids release them early."""
    share = (variant.gpu_busy_ms or variant.latency_ms) / variant.latency_ms
    free = [0.0] * places
    waited = 0
    for row in records(engine_of([variant], spec=spec, preload=True), poisson(90.0 * places, 2000)):
        arrival, start, end = row[3:6]
        assert start == pytest.approx(max(arrival, free[0]))
        waited += start > arrival
        free = sorted([start + share * (end - start), *free[1:]])
    assert waited > 1000


@pytest.mark.parametrize(("distribution", "cv"), [("lognormal", 0.3), ("exponential", 1.0)])
def test_moments_of_execution_times(distribution: str, cv: float) -> None:
    """Execution times have the mean of the variant and its coefficient of variation."""
    variant = Variant("gpu", 100.0, 50.0, 50.0, distribution=distribution, jitter_cv=0.3)
    rows = records(engine_of([variant], preload=True), poisson(1.0, 20_000))
    times = rows[:, 5] - rows[:, 4]
    assert times.mean() == pytest.approx(50.0, rel=cv * 0.025)
    assert times.std() / times.mean() == pytest.approx(cv, rel=0.04)


def serial(models: Sequence[int]) -> list[tuple[Any, Any]]:
    """Return requests with gaps in which each of them ends before the next arrives."""
    return [(np.arange(len(models)) * 1000.0, np.array(models))]


def lru_misses_by_reuse_distance(models: Sequence[int], capacity: int) -> int:
    """Count LRU misses (Mattson 1970): first requests, and those after ``capacity`` or more other models."""
    misses = 0
    for i, model in enumerate(models):
        before = [j for j in range(i) if models[j] == model]
        misses += not before or len(set(models[before[-1] + 1 : i])) >= capacity
    return misses


@pytest.mark.parametrize("capacity", [1, 2, 5, 9, 10])
def test_lru_loads_are_mattsons_misses(capacity: int) -> None:
    """The loads of requests that do not overlap are the LRU misses that follow from reuse distances."""
    models = np.random.default_rng(capacity).zipf(1.3, 600).clip(max=10) - 1
    engine = engine_of([GPU_MODEL] * 10, spec=ServerSpec(gpu_memory_gb=0.1 * capacity + 0.05))
    engine.run(serial(models.tolist()))
    assert sum(engine.cluster.loads) == lru_misses_by_reuse_distance(models.tolist(), capacity)


def test_cyclic_requests_defeat_lru() -> None:
    """For a cycle of one model more than fits, LRU loads for every request and Belady's policy for one in four."""
    models = list(range(5)) * 40
    spec = ServerSpec(gpu_memory_gb=0.45)
    lru = engine_of([GPU_MODEL] * 5, spec=spec)
    lru.run(serial(models))
    belady = engine_of([GPU_MODEL] * 5, spec=spec, eviction="belady", oracle=NextUseOracle(np.array(models)))
    belady.run(serial(models))
    assert sum(lru.cluster.loads) == 200
    assert sum(belady.cluster.loads) == pytest.approx(200 / 4, abs=5)


def fewest_misses(models: Sequence[int], capacity: int) -> int:
    """Return the fewest possible misses, by exhaustive search over all evictions."""

    @cache
    def best(i: int, held: frozenset[int]) -> int:
        if i == len(models):
            return 0
        model = models[i]
        if model in held:
            return best(i + 1, held)
        if len(held) < capacity:
            return 1 + best(i + 1, held | {model})
        return 1 + min(best(i + 1, held - {out} | {model}) for out in held)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(8))
def test_belady_is_the_bound(seed: int) -> None:
    """For equal sizes the loads of Belady's policy are the optimum, and no policy has fewer."""
    models = np.random.default_rng(seed).integers(0, 6, 60).tolist()
    spec = ServerSpec(gpu_memory_gb=0.35)
    loads = {}
    for eviction in EVICTION:
        engine = engine_of([GPU_MODEL] * 6, spec=spec, eviction=eviction, oracle=NextUseOracle(np.array(models)))
        engine.run(serial(models))
        loads[eviction] = sum(engine.cluster.loads)
    assert loads["belady"] == fewest_misses(models, 3)
    assert min(loads.values()) == loads["belady"]


def test_load_time_is_bytes_over_bandwidth() -> None:
    """A cold request waits for the fixed cost and its bytes over PCIe, then executes."""
    rows: list[Any] = []
    spec = ServerSpec(pcie_gb_per_s=8.0, load_fixed_ms=3.0)
    engine_of([GPU_MODEL], spec=spec).run(serial([0, 0]), keep=rows.append)
    first, second = rows[0]
    assert first[4] == pytest.approx(3.0 + 100 / 8)
    assert first[5] - first[4] == pytest.approx(10.0)
    assert second[4] == second[3]


def test_execution_continues_during_a_load() -> None:
    """A request on resident weights does not wait for another model's load."""
    rows: list[Any] = []
    chunks = [(np.array([0.0, 100.0, 100.5]), np.array([0, 1, 0]))]
    engine_of([GPU_MODEL] * 2).run(chunks, keep=rows.append)
    by_number = {int(row[0]): row for row in rows[0]}
    assert by_number[2][4] == 100.5
    assert by_number[1][4] == pytest.approx(by_number[2][5])


def test_a_dropped_request_loads_its_model_for_the_next() -> None:
    """If a load takes longer than the objective, the first request is dropped and the second finds the weights."""
    rows: list[Any] = []
    engine = engine_of([GPU_MODEL], spec=ServerSpec(pcie_gb_per_s=1.0), admission="deadline", slo_ms=50.0)
    engine.run(serial([0, 0]), keep=rows.append)
    first, second = rows[0]
    assert math.isnan(first[4])
    assert second[4:6].tolist() == [1000.0, 1010.0]


def test_a_request_that_cannot_be_in_time_is_dropped_on_arrival() -> None:
    """The pending load, its own load and its execution take 11 + 11 + 10 ms, more than 25."""
    engine = engine_of([GPU_MODEL] * 2, spec=ServerSpec(pcie_gb_per_s=10.0), admission="deadline", slo_ms=25.0)
    for model in (0, 1):
        engine.servers[0].offer(0.0, (model, model, 0.0, 1.0, False))
    assert engine.cluster.outstanding == [1]


def test_an_end_comes_before_an_arrival_at_the_same_time() -> None:
    """A server whose request ends when another one arrives counts as idle."""
    rows: list[Any] = []
    config = replace(engine_of([GPU_MODEL], preload=True).config, servers=[ServerSpec()] * 2)
    ClusterEngine(config).run([(np.array([0.0, 10.0]), np.array([0, 0]))], keep=rows.append)
    assert rows[0][:, 2].tolist() == [0, 0]


def test_a_slow_request_keeps_its_slot_longer() -> None:
    """The random factor of a request multiplies its GPU time and its latency."""
    rows: list[Any] = []
    variant = Variant("v", 100.0, 20.0, 10.0, (20.0,), 100.0, "lognormal", 0.5)
    engine_of([variant], preload=True).run([(np.zeros(2), np.zeros(2, np.int64))], keep=rows.append)
    first, second = rows[0]
    assert first[5] != pytest.approx(20.0)
    assert second[4] == pytest.approx(first[5] / 2)


def test_equal_seeds_give_equal_runs() -> None:
    """The same seed gives the same records, and another seed gives others."""

    def records(seed: int) -> Any:
        rows: list[Any] = []
        variants = [Variant("v", 400.0, 10.0 + i, 10.0, (2.0,), 400.0, "lognormal", 0.2) for i in range(6)]
        engine = engine_of(variants, spec=ServerSpec(gpu_memory_gb=1.0), seed=seed)
        engine.run(SyntheticWorkload("gamma", 3000, 40.0, 3.0, np.ones(6) / 6, seed).chunks(), keep=rows.append)
        return np.concatenate(rows)

    assert np.array_equal(records(5), records(5))
    assert not np.array_equal(records(5), records(6))


def test_memory_does_not_grow_with_requests() -> None:
    """The state of a run has the same size after 2000 and after 20 000 requests."""
    sizes = []
    for requests in (2_000, 20_000):
        engine = engine_of([GPU_MODEL] * 3, preload=True)
        metrics = engine.run(SyntheticWorkload("poisson", requests, 50.0, 1.0, np.ones(3) / 3, 1).chunks())
        held = itertools.chain(vars(metrics).values(), vars(engine).values())
        sizes.append(sum(len(v) for v in held if hasattr(v, "__len__") and not isinstance(v, SparseHistograms)))
        assert len(metrics.responses) < 1000
    assert sizes[0] == sizes[1]


def test_a_request_that_would_be_in_time_is_not_dropped() -> None:
    """Two slots, 100 ms, objective 120 ms: requests at 0, 0, 95 and 96 ms are all in time."""
    variant = Variant("gpu", 10.0, 100.0, 100.0)
    engine = engine_of([variant], spec=ServerSpec(gpu_slots=2), admission="deadline", slo_ms=120.0, preload=True)
    metrics = engine.run([(np.array([0.0, 0.0, 95.0, 96.0]), np.zeros(4, np.int64))])
    assert (metrics.dropped.sum(), metrics.late.sum()) == (0, 0)


@pytest.mark.parametrize("servers", [1, 3])
def test_preload_fills_all_servers(servers: int) -> None:
    """Each model is loaded once, and memory that is left is filled with further copies on every server."""
    variants = [Variant("gpu", size, 10.0, 10.0) for size in (300.0, 400.0, 200.0)]
    policies = engine_of(variants).config.policies
    spec = ServerSpec(gpu_memory_gb=0.95)
    config = EngineConfig([spec] * servers, variants, policies, ROUTING["least-loaded"], 1, preload=True)
    engine = ClusterEngine(config)
    assert all(engine.cluster.homes)
    for server in engine.servers:
        missing = [v.memory_bytes for i, v in enumerate(variants) if i not in server.residents]
        assert all(size > server.free_bytes for size in missing)


def test_servers_share_the_figures_of_models() -> None:
    """A server that is added does not copy the figures of all models."""
    variants = [GPU_MODEL] * 500
    config = EngineConfig([ServerSpec()] * 40, variants, engine_of(variants).config.policies, ROUTING["random"], 1)
    engine = ClusterEngine(config)
    for server in engine.servers:
        own = [value for value in vars(server).values() if isinstance(value, list | dict)]
        shared = vars(engine.servers[0]).values()
        assert all(len(value) < 500 or any(value is other for other in shared) for value in own)
    assert len({id(eligible) for eligible in engine.eligible}) == 1
