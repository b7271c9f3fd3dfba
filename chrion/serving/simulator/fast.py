"""Runs on the compiled kernel, with the results of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from chrion.serving.simulator import kernel
from chrion.serving.simulator.engine import DRAIN, Chunk, ClusterEngine
from chrion.serving.simulator.histograms import Floats
from chrion.serving.simulator.kernel import Pools, State
from chrion.serving.simulator.metrics import COLUMNS, RequestMetrics
from chrion.serving.simulator.requests import Requests
from chrion.serving.simulator.scenario import Scenario

#: Maximum pairs of a model and a server: 300 MB at about 70 bytes each.
_MAX_PAIRS = 1 << 22


def covers(scenario: Scenario, pattern: str) -> bool:
    """Return whether the kernel can run a pattern: no deadlines, no shrinking, no oracle, no options of servers."""
    return (
        scenario.policies.admission == "none"
        and scenario.is_simple
        and scenario.policies.eviction in kernel.EVICTIONS
        and len(scenario.levels(pattern)) == 1
        and len(scenario.models) * len(scenario.servers) <= _MAX_PAIRS
    )


def run_compiled(
    engine: ClusterEngine,
    scenario: Scenario,
    chunks: Iterable[Chunk],
    progress: Callable[[int], None] = lambda _: None,
    keep: Callable[[Floats], None] | None = None,
) -> RequestMetrics:
    """Serve all requests on the kernel, as :meth:`chrion.serving.simulator.engine.ClusterEngine.run` does.

    The engine provides the state before the first request, the random factors and the metrics, and has the state of its
    servers that results use after the run.
    """
    state = _state(engine, scenario)
    pools = _pools(0, 1)
    max_early = max(1, int((state.models.early_end - state.models.early_begin).max()))
    for chunk in chunks:
        requests = Requests(*chunk)
        times, models = requests.times_ms, requests.models
        factors, draws = engine.draw(requests)
        pools = _enlarged(state, pools, len(times), max_early)
        kernel.replay(state, pools, (times, models, np.array(factors), draws))
        engine.now = max([engine.now, *times[-1:].tolist()])
        _record(engine, state, pools)
        engine.flush(keep)
        progress(int(state.counters[kernel.REQUESTS]))
    while state.counters[kernel.EVENTS]:
        pools = _enlarged(state, pools, 0, max_early)
        engine.now = max(engine.now, kernel.drain(state, pools, min(DRAIN, int(state.counters[kernel.EVENTS]))))
        _record(engine, state, pools)
        engine.flush(keep)
    engine.flush(keep, force=True)
    _write_back(engine, state)
    return engine.metrics


def _record(engine: ClusterEngine, state: State, pools: Pools) -> None:
    engine.metrics.record_rows(pools.rows[: state.counters[kernel.ROWS]])
    state.counters[kernel.ROWS] = 0


def _state(engine: ClusterEngine, scenario: Scenario) -> State:
    """Return the kernel's form of an engine's state before its first request."""
    table, servers = engine.cluster.table, engine.servers
    m, s = table.models, len(servers)
    names = scenario.policies
    policy = [
        kernel.EVICTIONS.index(names.eviction),
        kernel.ROUTINGS.index(names.routing),
        kernel.LOAD_ORDERS.index(names.load_order),
        names.spill,
    ]
    groups = {id(eligible): eligible for eligible in engine.eligible}
    group_of = {key: i for i, key in enumerate(groups)}
    links = {id(server.load_ms): server.load_ms for server in servers}
    link_of = {key: i for i, key in enumerate(links)}
    m_policies = engine.config.policies
    slots, cores, _, releases, last = zip(*table.service, strict=True)
    bounds = _offsets([len(own) for own in releases])
    models = _records(kernel.MODEL, m)
    models.memory, models.latency, models.load_mb = table.bytes, table.latency_ms, table.load_mb
    models.slots, models.cores = slots, cores
    models.last_slots, models.last_cores = np.array(last).T
    models.weight, models.pinned = m_policies.weights, m_policies.pinned
    models.early_begin, models.early_end = bounds[:-1], bounds[1:]
    models.group = [group_of[id(eligible)] for eligible in engine.eligible]
    models.homes_n = [len(homes) for homes in engine.cluster.homes]
    early = [(at_ms, *freed) for own in releases for at_ms, freed in own]
    state = State(
        policy=_ints(policy),
        models=models,
        early=np.array(early, kernel.EARLY).view(np.recarray),
        first=_offsets([len(eligible) for eligible in groups.values()]),
        eligible=_ints([i for eligible in groups.values() for i in eligible]),
        load_ms=np.array(list(links.values()), np.float64),
        servers=_records(kernel.SERVER, s),
        pairs=_records(kernel.PAIR, s, m),
        residents=np.zeros((s, m), np.int64),
        cold=np.zeros((s, m), np.int64),
        homes=np.zeros((m, s), np.int64),
        areas=np.array([server.memory.areas for server in servers]),
        scratch=_records(kernel.SCRATCH, m),
        counters=_ints([0, 0, -1, 0, 0]),
    )
    state.pairs.wait_head = -1
    for i, server in enumerate(servers):
        own, average = state.servers[i], server.memory
        own.budget, own.free = server.budget_bytes, server.free_bytes
        own.free_slots, own.free_cores = server.free_slots, server.host.free_cores
        own.link = link_of[id(server.load_ms)]
        own.loading = own.ready_head = own.ready_tail = -1
        own.width, own.now, own.value = average.width_ms, average.now, average.value
        own.peak, own.area, own.residents_n = average.peak, average.area, len(server.residents)
        state.residents[i, : len(server.residents)] = list(server.residents)
        for model in server.residents:
            state.pairs[i, model].status = kernel.RESIDENT
    for model, homes in enumerate(engine.cluster.homes):
        state.homes[model, : len(homes)] = homes
    return state


def _records(kind: np.dtype[np.void], *shape: int) -> Any:
    return np.zeros(shape, kind).view(np.recarray)


def _pools(jobs: int, events: int) -> Pools:
    return Pools(_records(kernel.JOB, jobs), _records(kernel.EVENT, events), np.zeros((jobs, COLUMNS)))


def _enlarged(state: State, pools: Pools, arrivals: int, max_early: int) -> Pools:
    """Return pools for the requests that are waiting or running and for those of the next chunk."""
    waiting = int(state.servers.outstanding.sum())
    jobs, used = waiting + arrivals, len(pools.jobs)
    events = (max_early + 1) * jobs + len(state.servers) + 1
    if jobs <= used and events <= len(pools.events):
        return pools
    larger = _pools(2 * jobs, 2 * events)
    for old, new in zip(pools, larger, strict=True):
        new[: len(old)] = old
    # The new jobs are put before the free ones.
    larger.jobs.next[used:] = np.arange(used + 1, len(larger.jobs) + 1)
    larger.jobs.next[-1] = state.counters[kernel.FREE_JOB]
    state.counters[kernel.FREE_JOB] = used
    return larger


def _write_back(engine: ClusterEngine, state: State) -> None:
    """Give an engine the figures of its servers that results use."""
    engine.cluster.loads[:] = state.models.loads.tolist()
    for i, server in enumerate(engine.servers):
        own, average = state.servers[i], server.memory
        server.loads, server.evictions = int(own.loads), int(own.evictions)
        server.loaded_mb, server.link_busy_ms = float(own.loaded_mb), float(own.link_busy_ms)
        average.areas[:] = state.areas[i].tolist()
        average.width_ms, average.now = float(own.width), float(own.now)
        average.value, average.peak, average.area = float(own.value), float(own.peak), float(own.area)


def _ints(values: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def _offsets(lengths: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(_ints(lengths))])
