"""Servers with options: compared with servers without them, with an independent model, and with theory."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from chrion.serving.manager.policies import EVICTION, LOAD_ORDER, ROUTING
from chrion.serving.manager.policy_settings import ServerPolicies
from chrion.serving.manager.ready_queue import BatchLimits
from chrion.serving.simulator.engine import ClusterEngine, EngineConfig, NextUseOracle
from chrion.serving.simulator.requests import Details, Requests
from chrion.serving.simulator.settings import ServerSpec
from chrion.serving.variants import Variant
from general_oracle import Cluster, Request, Rules
from property_tests import repetitions


def policies(models: int, **names: Any) -> ServerPolicies:
    """Return policies of equal models."""
    admission = names.get("admission", "none")
    return ServerPolicies(
        rank=EVICTION[names.get("eviction", "lru")],
        order=LOAD_ORDER[names.get("load_order", "fifo")],
        deadlines=admission == "deadline",
        slo_ms=[names.get("slo_ms", 250.0)] * models,
        weights=[1.0] * models,
        pinned=[i == 0 for i in range(models)] if names.get("pinned") else [False] * models,
    )


def random_variants(rng: np.random.Generator, number: int, batch_cost: float = 1.0) -> list[Variant]:
    """Return variants on the GPU, and on the GPU and up to two cores."""
    found = []
    for i in range(number):
        latency, memory = float(rng.uniform(20, 80)), float(rng.integers(300, 1200))
        cores = tuple(sorted((latency * rng.uniform(0.2, 0.95, i % 3)).tolist(), reverse=True))
        gpu_ms = latency * float(rng.uniform(0.1, 0.9)) if cores else latency
        found.append(Variant("v", memory, latency, gpu_ms, cores, memory, batch_cost=batch_cost))
    return found


def needing_a_core_more(variant: Variant) -> Variant:
    """Return a variant with half of the memory and up to two cores."""
    cores = (variant.latency_ms, *variant.core_busy_ms)[:2]
    return replace(variant, memory_mb=variant.memory_mb / 2, load_mb=variant.load_mb / 2, core_busy_ms=cores)


def records(engine: ClusterEngine, chunk: Requests | tuple[Any, Any]) -> np.ndarray:
    """Return the records of all requests in the order of their numbers."""
    rows: list[Any] = []
    engine.run([chunk], keep=rows.append)
    found = np.concatenate(rows)
    return found[np.argsort(found[:, 0])]


@pytest.mark.parametrize("eviction", ["lru", "lfu", "cost", "belady"])
@pytest.mark.parametrize("admission", ["none", "deadline"])
@pytest.mark.parametrize("routing", ["random", "resident-first"])
@pytest.mark.parametrize("shrink", [False, True])
def test_batches_of_one_request_are_requests(eviction: str, admission: str, routing: str, *, shrink: bool) -> None:
    """A server with batches of at most one request records what one without does, bit by bit, with all policies."""
    requests = repetitions(1500)
    rng = np.random.default_rng(4)
    variants = [replace(v, jitter_cv=0.2) for v in random_variants(rng, 12)]
    smaller = [[needing_a_core_more(v) for v in variants]] if shrink else []
    specs = [ServerSpec(gpu_memory_gb=3.0, cpu_cores=3, gpu_slots=2), ServerSpec(gpu_memory_gb=2.0, cpu_cores=2)]
    times, models = np.cumsum(rng.exponential(25.0, requests)), rng.integers(0, 12, requests)
    own = policies(12, eviction=eviction, admission=admission, load_order="demand", pinned=True)
    oracle = NextUseOracle(models) if eviction == "belady" else None
    found = []
    for rules in (own, replace(own, batching=[BatchLimits()] * 12)):
        config = EngineConfig(specs, variants, rules, ROUTING[routing], 3, preload=True, oracle=oracle, smaller=smaller)
        journal: list[Any] = []
        engine = ClusterEngine(config, lambda *note, journal=journal: journal.append(note))
        found.append((records(engine, (times, models)), journal, engine.now, engine.metrics.gpu_ms.tolist()))
    assert np.array_equal(found[0][0], found[1][0], equal_nan=True)
    assert found[0][1:] == found[1][1:]
    assert len(found[0][1]) > requests / 5


def compare(
    specs: Sequence[ServerSpec],
    rules: Rules,
    *,
    rate_per_s: float,
    priorities: int = 1,
    batch_cost: float = 1.0,
) -> tuple[ClusterEngine, np.ndarray, Cluster]:
    """Check that requests are served at the times of the independent model; return the engine and the records."""
    requests = repetitions(3000)
    rng = np.random.default_rng(requests)
    variants = random_variants(rng, 12, batch_cost)
    times, models = np.cumsum(rng.exponential(1000 / rate_per_s, requests)), rng.integers(0, 12, requests)
    durations = np.array([variants[m].latency_ms for m in models]) * rng.uniform(0.5, 1.5, requests)
    given = rng.random(requests) < 0.5
    details = Details(
        np.where(given, durations, np.nan), np.full(requests, np.nan), rng.integers(0, priorities, requests)
    )
    own = replace(
        policies(12),
        batching=[BatchLimits(rules.max_batch, rules.max_delay_ms)] * 12 if rules.max_batch > 1 else (),
        batch_cost=[[batch_cost] * 12],
        keep_alive_ms=rules.keep_alive_ms or math.inf,
    )
    config = EngineConfig(specs, variants, own, ROUTING["resident-first"], 1)
    notes: list[Any] = []
    engine = ClusterEngine(config, lambda *note: notes.append(note))
    rows = records(engine, Requests(times, models, details))
    rules.down = downtimes(notes)
    factors = np.where(given, durations / np.array([variants[m].latency_ms for m in models]), 1.0)
    cluster = Cluster(specs, variants, rules)
    columns = zip(models.tolist(), times.tolist(), factors.tolist(), details.priority.tolist(), strict=True)
    cluster.run([Request(i, *row) for i, row in enumerate(columns)])

    assert engine.cluster.free == [server.free_bytes for server in engine.servers]
    served = ~np.isnan(rows[:, 4])
    numbers = rows[served, 0].astype(int).tolist()
    assert len(rows) == requests
    assert set(numbers) == set(cluster.log)
    assert set(rows[~served, 0].astype(int).tolist()) == cluster.failed
    expected = np.array([cluster.log[n] for n in numbers])
    assert rows[served, 2].tolist() == expected[:, 0].tolist()
    assert rows[served, 4] == pytest.approx(expected[:, 1], rel=1e-9)
    assert rows[served, 5] == pytest.approx(expected[:, 2], rel=1e-9)
    assert sum(engine.cluster.loads) == cluster.loads > requests / 30
    return engine, rows, cluster


def downtimes(notes: Sequence[tuple[float, str, int, int]]) -> list[tuple[int, float, float]]:
    """Return the servers and times of failures and repairs."""
    found = []
    for time, what, server, _ in notes:
        if what == "fail":
            repair = next((t for t, w, s, _ in notes if w == "repair" and s == server and t > time), math.inf)
            found.append((server, time, min(repair, 1e9)))
    return found


@pytest.mark.parametrize("rate_per_s", [8.0, 30.0])
def test_priorities(rate_per_s: float) -> None:
    """Requests of a higher priority start first, and so do the loads that they wait for."""
    _, rows, _ = compare([ServerSpec(gpu_memory_gb=4.0, cpu_cores=3)], Rules(), rate_per_s=rate_per_s, priorities=3)
    assert (rows[:, 5] - rows[:, 3]).max() > 100


@pytest.mark.parametrize("rate_per_s", [8.0, 40.0])
@pytest.mark.parametrize("slots", [1, 2])
def test_several_gpus(rate_per_s: float, slots: int) -> None:
    """Three GPUs share cores and a link; a second server has one GPU of another speed."""
    shared = ServerSpec(gpus=3, gpu_memory_gb=1.3, cpu_cores=3, gpu_slots=slots)
    compare([shared, ServerSpec(gpu_memory_gb=2.0, cpu_cores=3, gpu_speed=1.7)], Rules(), rate_per_s=rate_per_s)


@pytest.mark.parametrize("rate_per_s", [4.0, 15.0])
def test_a_disk(rate_per_s: float) -> None:
    """Weights that are not in host memory are read from the disk."""
    spec = ServerSpec(gpus=2, gpu_memory_gb=2.5, cpu_cores=3, host_memory_gb=5.0, disk_gb_per_s=3.0, disk_fixed_ms=2.0)
    engine, rows, _ = compare([spec], Rules(), rate_per_s=rate_per_s)
    assert len(rows) / 30 < engine.hosts[0].memory.disk_loads < sum(engine.cluster.loads)


@pytest.mark.parametrize("rate_per_s", [4.0, 15.0])
def test_keep_alive(rate_per_s: float) -> None:
    """Idle models leave the memory after a time."""
    compare([ServerSpec(gpu_memory_gb=6.0, cpu_cores=3)] * 2, Rules(keep_alive_ms=900.0), rate_per_s=rate_per_s)


@pytest.mark.parametrize("delay_ms", [0.0, 40.0])
@pytest.mark.parametrize("rate_per_s", [10.0, 60.0])
def test_batches(delay_ms: float, rate_per_s: float) -> None:
    """Requests of one model and priority start together."""
    rules = Rules(max_batch=4, max_delay_ms=delay_ms)
    _, rows, _ = compare(
        [ServerSpec(gpu_memory_gb=5.0, cpu_cores=3, gpu_slots=2)],
        rules,
        rate_per_s=rate_per_s,
        priorities=2,
        batch_cost=0.3,
    )
    assert rows[:, 7].max() >= 12  # a batch of two or more


@pytest.mark.parametrize("rate_per_s", [8.0, 40.0])
def test_failures(rate_per_s: float) -> None:
    """Requests of a server that fails are served elsewhere, if there is another one."""
    spec = ServerSpec(gpus=2, gpu_memory_gb=3.0, cpu_cores=3, mtbf_h=0.005, mttr_s=6.0)
    engine, rows, cluster = compare([spec, spec], Rules(), rate_per_s=rate_per_s)
    assert len(cluster.failed) > len(rows) / 300
    assert engine.metrics.failed.sum() == len(cluster.failed)
    assert (rows[:, -1] == 3).sum() == len(cluster.failed)


def test_everything_together() -> None:
    """All options at once agree with the independent model."""
    spec = ServerSpec(
        gpus=2, gpu_memory_gb=3.0, cpu_cores=3, host_memory_gb=6.0, mtbf_h=0.01, mttr_s=6.0, gpu_speed=0.8, gpu_slots=2
    )
    rules = Rules(keep_alive_ms=2000.0, max_batch=3, max_delay_ms=15.0)
    compare([spec, structs.replace(spec, gpu_speed=1.3)], rules, rate_per_s=50.0, priorities=3, batch_cost=0.4)
