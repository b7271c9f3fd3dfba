"""Runs on the compiled kernel, with the results of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from chrion.serving.simulator import kernel
from chrion.serving.simulator.engine import DRAIN, Chunk, ClusterEngine
from chrion.serving.simulator.histograms import Counts, Floats
from chrion.serving.simulator.kernel import Pools, State
from chrion.serving.simulator.metrics import COLUMNS, RequestMetrics
from chrion.serving.simulator.requests import Requests
from chrion.serving.simulator.scenario import Scenario

#: Fields of a server's memory over time, and the attributes of its average.
_AVERAGE = {name: name for name in ("now", "value", "peak", "area")} | {"width": "width_ms"}


def covers(scenario: Scenario, pattern: str) -> bool:
    """Return whether the kernel can run a pattern: no deadlines, no shrinking, no oracle, no options of servers."""
    return (
        scenario.policies.admission == "none"
        and scenario.is_simple
        and scenario.policies.eviction in kernel.EVICTIONS
        and len(scenario.levels(pattern)) == 1
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
    pools = _place(engine, state)
    max_early = max(1, int((state.models.early_end - state.models.early_begin).max()))
    for chunk in chunks:
        requests = Requests(*chunk)
        times, models = requests.times_ms, requests.models
        (factors,), draws = engine.draw(requests)
        pools = _enlarged(state, pools, len(times), max_early)
        kernel.replay(state, pools, (times, models, factors, draws))
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
        names.max_waiting,
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
    models.weight, models.pinned, models.max_queue = m_policies.weights, m_policies.pinned, m_policies.max_queue
    models.early_begin, models.early_end = bounds[:-1], bounds[1:]
    models.group = [group_of[id(eligible)] for eligible in engine.eligible]
    early = [(at_ms, *freed) for own in releases for at_ms, freed in own]
    state = State(
        policy=_ints(policy),
        models=models,
        early=np.array(early, kernel.EARLY).view(np.recarray),
        first=_offsets([len(eligible) for eligible in groups.values()]),
        eligible=_ints([i for eligible in groups.values() for i in eligible]),
        load_ms=np.array(list(links.values()), np.float64),
        servers=_records(kernel.SERVER, s),
        outstanding=np.zeros(s, np.int64),
        residents=np.full((s, 2), -1),
        cold=np.full((s, 2), -1),
        homes=np.full((m, 2), -1),
        areas=np.array([server.memory.areas for server in servers]),
        counters=_ints([0, 0, -1, 0, 0, 0, -1]),
    )
    own, averages = state.servers, [server.memory for server in servers]
    own.budget, own.free = zip(*((server.budget_bytes, server.free_bytes) for server in servers), strict=True)
    own.free_slots, own.free_cores = zip(
        *((server.free_slots, server.host.free_cores) for server in servers), strict=True
    )
    own.link = [link_of[id(server.load_ms)] for server in servers]
    own.ready_head = own.ready_tail = -1
    for field, name in _AVERAGE.items():
        own[field] = [getattr(average, name) for average in averages]
    return state


def _place(engine: ClusterEngine, state: State) -> Pools:
    """Return pools with the models that are in memory before the first request."""
    held = [(server.index, model) for server in engine.servers for model in server.residents]
    pair_of = {at: pair for pair, at in enumerate(held)}
    pools = _pools(0, 1, len(held))
    pools.pairs.server, pools.pairs.model = np.array(held, np.int64).reshape(-1, 2).T
    pools.pairs.status, pools.pairs.wait_head = kernel.RESIDENT, -1
    for i, server in enumerate(engine.servers):
        _chain(pools.in_memory, state.residents[i], [pair_of[i, model] for model in server.residents])
    for model, homes in enumerate(engine.cluster.homes):
        _chain(pools.at_home, state.homes[model], [pair_of[i, model] for i in homes])
    state.counters[kernel.PAIRS] = len(held)
    kernel.place_pairs(state, pools)
    return pools


def _chain(links: kernel.Small, ends: Counts, pairs: Sequence[int]) -> None:
    """Make a list of pairs."""
    for before, after in pairwise([-1, *pairs, -1]):
        if before >= 0:
            links[before, 1] = after
        if after >= 0:
            links[after, 0] = before
    if pairs:
        ends[:] = pairs[0], pairs[-1]


def _records(kind: np.dtype[np.void], *shape: int) -> Any:
    return np.zeros(shape, kind).view(np.recarray)


def _pools(jobs: int, events: int, pairs: int) -> Pools:
    in_memory, at_home = np.zeros((2, pairs, 2), np.int32)
    records = _records(kernel.JOB, jobs), _records(kernel.EVENT, events)
    return Pools(*records, np.zeros((jobs, COLUMNS)), _records(kernel.PAIR, pairs), in_memory, at_home, _table(pairs))


def _table(pairs: int) -> kernel.Small:
    return np.full(1 << (2 * pairs).bit_length(), -1, np.int32)


def _enlarged(state: State, pools: Pools, arrivals: int, max_early: int) -> Pools:
    """Return pools for the requests that are waiting or running and for those of the next chunk."""
    jobs, used = int(state.outstanding.sum()) + arrivals, len(pools.jobs)
    if jobs > used:
        longer = _longer(pools.jobs, jobs + jobs // 2)
        pools = pools._replace(jobs=longer, rows=np.zeros((len(longer), COLUMNS)))
        # The new jobs are put before the free ones.
        pools.jobs.next[used:] = np.arange(used + 1, len(pools.jobs) + 1)
        pools.jobs.next[-1] = state.counters[kernel.FREE_JOB]
        state.counters[kernel.FREE_JOB] = used
    events = (max_early + 1) * jobs + len(state.servers) + 1
    if events > len(pools.events):
        pools = pools._replace(events=_longer(pools.events, events + events // 2))
    possible = len(state.servers) * len(state.models)
    pairs = min(int(state.counters[kernel.PAIRS]) + arrivals, possible)
    if pairs > len(pools.pairs):
        size = min(pairs + pairs // 2, possible)
        by_pair = {name: _longer(getattr(pools, name), size) for name in ("pairs", "in_memory", "at_home")}
        pools = pools._replace(**by_pair, table=_table(size))
        kernel.place_pairs(state, pools)
    return pools


def _longer(records: Any, size: int) -> Any:
    longer = np.zeros_like(records, shape=(size, *records.shape[1:]))
    longer[: len(records)] = records
    return longer


def _write_back(engine: ClusterEngine, state: State) -> None:
    """Give an engine the figures of its servers that results use."""
    engine.cluster.loads[:] = state.models.loads.tolist()
    own = state.servers
    figures = {name: own[name].tolist() for name in ("loads", "evictions", "loaded_mb", "link_busy_ms")}
    averages = {name: own[field].tolist() for field, name in _AVERAGE.items()}
    for i, (server, areas) in enumerate(zip(engine.servers, state.areas.tolist(), strict=True)):
        server.memory.areas[:] = areas
        for target, columns in ((server, figures), (server.memory, averages)):
            for name, values in columns.items():
                setattr(target, name, values[i])


def _ints(values: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def _offsets(lengths: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(_ints(lengths))])
