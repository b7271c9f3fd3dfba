"""Invariants of every run, for all clusters and policies."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chrion.serving.manager.policies import ADMISSION, EVICTION, LOAD_ORDER, ROUTING
from chrion.serving.manager.policy_settings import ServerPolicies
from chrion.serving.simulator.engine import ClusterEngine, EngineConfig, NextUseOracle
from chrion.serving.simulator.settings import ServerSpec
from chrion.serving.variants import Variant
from property_tests import examples

LARGEST_MB, CORES = 900, 3


@dataclass
class Run:
    """A run that Hypothesis chose, and its records."""

    config: EngineConfig
    engine: ClusterEngine
    #: One row a request; see ``COLUMNS``.
    rows: Any
    #: (time, event, server, model) of loads and evictions.
    journal: list[tuple[float, str, int, int]]
    #: Models in memory before the first request, by server.
    before: list[set[int]]
    requests: int


@st.composite
def variants(draw: st.DrawFn) -> Variant:
    latency = float(draw(st.integers(1, 40)))
    kind = draw(st.sampled_from(["gpu", "hybrid", "cpu"]))
    memory = 0.0 if kind == "cpu" else float(draw(st.integers(1, LARGEST_MB)))
    busy = st.floats(0.05, 1.0).map(lambda share: share * latency)
    gpu_busy = 0.0 if kind == "cpu" else latency if kind == "gpu" else draw(busy)
    cores = () if kind == "gpu" else tuple(sorted(draw(st.lists(busy, min_size=1, max_size=CORES)), reverse=True))
    jitter = draw(st.sampled_from([0.0, 0.2]))
    return Variant(kind, memory, latency, gpu_busy, cores, memory, "lognormal", jitter)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    models = draw(st.lists(variants(), min_size=1, max_size=6))
    # A first server that holds every model beside a pinned one; the others may hold few.
    servers = [ServerSpec(gpu_memory_gb=2 * LARGEST_MB / 1000, cpu_cores=CORES, gpu_slots=draw(st.integers(1, 3)))]
    others = draw(st.lists(st.sampled_from([0.3, 0.9, 1.9]), max_size=2))
    servers += [ServerSpec(gpu_memory_gb=memory_gb, cpu_cores=CORES, load_fixed_ms=0.0) for memory_gb in others]
    pinned = [False] * len(models)
    if len(servers) == 1:
        pinned[draw(st.integers(0, len(models) - 1))] = draw(st.booleans())
    size = draw(st.integers(1, 120))
    picks = np.array(draw(st.lists(st.integers(0, len(models) - 1), min_size=size, max_size=size)))
    # Whole numbers of ms, so that many events occur at the same time.
    times = np.cumsum(draw(st.lists(st.integers(0, 30), min_size=size, max_size=size))).astype(float)
    admission = draw(st.sampled_from(sorted(ADMISSION)))
    policies = ServerPolicies(
        rank=EVICTION[draw(st.sampled_from(sorted(EVICTION)))],
        order=LOAD_ORDER[draw(st.sampled_from(sorted(LOAD_ORDER)))],
        deadlines=admission == "deadline",
        slo_ms=[draw(st.sampled_from([20.0, 100.0, math.inf]))] * len(models),
        weights=[1.0] * len(models),
        pinned=pinned,
    )
    route = ROUTING[draw(st.sampled_from(sorted(ROUTING)))]
    config = EngineConfig(servers, models, policies, route, 1, preload=draw(st.booleans()), oracle=NextUseOracle(picks))
    journal: list[tuple[float, str, int, int]] = []
    engine = ClusterEngine(config, lambda *note: journal.append(note))
    before = [set(server.residents) for server in engine.servers]
    rows: list[Any] = []
    engine.run([(times, picks)], keep=rows.append)
    return Run(config, engine, np.concatenate(rows), journal, before, size)


def most_at_once(intervals: Sequence[tuple[float, float]]) -> int:
    """Return the greatest number of overlapping intervals; one that ends when another begins does not overlap it."""
    steps = sorted([(begin, 1) for begin, _ in intervals] + [(end, -1) for _, end in intervals])
    return max(np.cumsum([step for _, step in steps]), default=0)


def check_every_arrival_ends_exactly_once(run: Run) -> None:
    """Each request is recorded once, as ended or as dropped, with its times in order; all resources are released."""
    assert sorted(run.rows[:, 0].tolist()) == list(range(run.requests))
    dropped = np.isnan(run.rows[:, 4])
    assert (run.rows[~dropped, 3] <= run.rows[~dropped, 4]).all()
    assert (run.rows[~dropped, 4] < run.rows[~dropped, 5]).all()
    assert run.config.policies.deadlines or not dropped.any()
    metrics = run.engine.metrics
    assert metrics.arrivals.sum() == run.requests
    assert metrics.dropped.sum() == dropped.sum()
    assert run.engine.cluster.outstanding == [0] * len(run.engine.servers)
    assert run.engine.cluster.free == [server.free_bytes for server in run.engine.servers]
    for server in run.engine.servers:
        spec = server.host.spec
        assert (server.free_slots, server.host.free_cores) == (spec.gpu_slots, spec.cpu_cores)
        assert not server.cold
        assert all(resident.in_use == 0 for resident in server.residents.values())


def check_memory_never_exceeds_the_budget(run: Run) -> None:
    """Memory rebuilt from the journal is within each server's budget, and no pinned model is evicted."""
    held = [{m: run.config.variants[m].memory_bytes for m in models} for models in run.before]
    for _, what, server, model in run.journal:
        if what == "load":
            assert model not in held[server]
            held[server][model] = run.config.variants[model].memory_bytes
        elif what == "evict":
            assert not run.config.policies.pinned[model]
            del held[server][model]
        assert sum(held[server].values()) <= run.config.servers[server].budget_bytes
    for server, models in enumerate(held):
        used = run.config.servers[server].budget_bytes - run.engine.servers[server].free_bytes
        assert used == sum(models.values())


def check_requests_run_on_resident_weights_only(run: Run) -> None:
    """Each execution lies between a load and the next eviction of its model on its server."""
    residencies: dict[tuple[int, int], list[list[float]]] = {}
    for server, models in enumerate(run.before):
        for model in models:
            residencies[server, model] = [[0.0, math.inf]]
    for time, what, server, model in run.journal:
        if what == "loaded":
            residencies.setdefault((server, model), []).append([time, math.inf])
        elif what == "evict":
            residencies[server, model][-1][1] = time
    for _, model, server, _, start, end, *_ in run.rows[~np.isnan(run.rows[:, 4])]:
        if run.config.variants[int(model)].memory_mb:
            assert any(begin <= start and end <= gone for begin, gone in residencies[int(server), int(model)])


def check_no_resource_is_used_twice_at_a_time(run: Run) -> None:
    """GPU slots, cores and the link never serve more requests at a time than there are of them."""
    for index, spec in enumerate(run.config.servers):
        slots: list[tuple[float, float]] = []
        cores: list[tuple[float, float]] = []
        for _, model, server, _, start, end, *_ in run.rows[~np.isnan(run.rows[:, 4])]:
            variant = run.config.variants[int(model)]
            if server != index:
                continue
            # Slightly shorter than computed, so that rounding does not make neighbours overlap.
            factor = (end - start) / variant.latency_ms * (1 - 1e-9)
            slots += [(start, start + variant.gpu_busy_ms * factor)] if variant.gpu_busy_ms else []
            cores += [(start, start + busy * factor) for busy in variant.core_busy_ms]
        assert most_at_once(slots) <= spec.gpu_slots
        assert most_at_once(cores) <= spec.cpu_cores
        loads = [t for t, what, server, _ in run.journal if server == index and what == "load"]
        ends = [t for t, what, server, _ in run.journal if server == index and what == "loaded"]
        assert most_at_once(list(zip(loads, ends, strict=True))) <= 1


def check_admitted_requests_without_jitter_are_in_time(run: Run) -> None:
    """With deadlines and constant latencies, no admitted request ends late."""
    if run.config.policies.deadlines and all(v.jitter_cv == 0 for v in run.config.variants):
        assert run.engine.metrics.late.sum() == 0


def check_requests_that_become_ready_together_start_in_order(run: Run) -> None:
    """On one server, warm requests that arrive later never start earlier than warm ones before them."""
    for index in range(len(run.engine.servers)):
        warm = run.rows[(run.rows[:, 2] == index) & (run.rows[:, 6] == 0) & ~np.isnan(run.rows[:, 4])]
        assert (np.diff(warm[np.argsort(warm[:, 0]), 4]) >= 0).all()


@examples(250)
@given(runs())
def test_laws_hold(run: Run) -> None:
    """Every run obeys every law."""
    check_every_arrival_ends_exactly_once(run)
    check_memory_never_exceeds_the_budget(run)
    check_requests_run_on_resident_weights_only(run)
    check_no_resource_is_used_twice_at_a_time(run)
    check_admitted_requests_without_jitter_are_in_time(run)
    check_requests_that_become_ready_together_start_in_order(run)
