"""The event loop for compilation by numba: the rules of :mod:`chrion.serving.simulator.server` on arrays.

It covers runs without deadlines, shrinking and Belady's policy; :mod:`chrion.serving.simulator.fast` decides.
Operations on floating-point numbers are in the order of the engine, so the results are equal bit by bit; tests compare
them. Without numba the functions run as plain Python, slowly; only tests do so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from chrion.serving.simulator.histograms import Counts, Floats

try:
    import numba
except ImportError:  # the extra ``fast`` is not installed
    numba = None

Function = TypeVar("Function", bound=Callable[..., Any])

#: Policies by number.
EVICTIONS = ("lru", "lfu", "cost")
ROUTINGS = ("random", "least-loaded", "resident-first")
LOAD_ORDERS = ("fifo", "demand")
#: States of a model on a server.
ABSENT, COLD, LOADING, RESIDENT = range(4)
#: Kinds of events.
_END, _RELEASE, _LOADED = range(3)
#: Positions of counters: events in the heap, the next event's number, the first free job, rows, requests.
EVENTS, SEQUENCE, FREE_JOB, ROWS, REQUESTS = range(5)


def compiled(function: Function) -> Function:
    """Return a function compiled by numba on its first call, or the function itself without numba."""
    if not numba:
        return function
    try:
        return cast("Function", numba.njit(cache=True)(function))
    except RuntimeError:  # no folder for the cache can be written
        return cast("Function", numba.njit(function))


def inlined(function: Function) -> Function:
    """Return a function for compiled ones, which contain it: a call would copy the descriptions of all arrays."""
    return cast("Function", numba.njit(forceinline=True)(function)) if numba else function


_INT, _FLOAT = np.int64, np.float64
#: What requests and loads of a model take.
MODEL = np.dtype(
    [(name, _INT) for name in ("memory", "slots", "cores", "last_slots", "last_cores", "pinned", "group")]
    + [(name, _INT) for name in ("early_begin", "early_end", "homes_n", "loads")]
    + [(name, _FLOAT) for name in ("latency", "load_mb", "weight")]
)
#: GPU slots and cores that a request releases before its end, at a time since its start.
EARLY = np.dtype([("at", _FLOAT), ("slots", _INT), ("cores", _INT)])
#: A server; ``width`` to ``area`` are memory over time, see :class:`chrion.serving.simulator.averages.BinnedAverage`.
SERVER = np.dtype(
    [(name, _INT) for name in ("budget", "free", "free_slots", "free_cores", "outstanding", "loading", "loads")]
    + [(name, _INT) for name in ("evictions", "ready_head", "ready_tail", "residents_n", "cold_n", "link")]
    + [(name, _FLOAT) for name in ("loaded_mb", "link_busy_ms", "width", "now", "value", "peak", "area")]
)
#: A model on a server.
PAIR = np.dtype(
    [(name, _INT) for name in ("status", "in_use", "uses", "wait_head", "wait_tail")]
    + [(name, _FLOAT) for name in ("idle_ms", "oldest_ms", "demand_ms")]
)
#: A request that waits or runs; ``next`` is the next job of its list, -1 at the end.
JOB = np.dtype(
    [(name, _INT) for name in ("number", "model", "cold", "next")] + [("arrival", _FLOAT), ("factor", _FLOAT)]
)
EVENT = np.dtype([("at", _FLOAT), *((name, _INT) for name in ("sequence", "kind", "server", "a", "b"))])
SCRATCH = np.dtype([("rank", _FLOAT), ("chosen", _INT)])


class State(NamedTuple):
    """The state of a cluster; every field is an array that the kernel changes in place. S servers, M models.

    Records are in few arrays because each array costs time in every call of a compiled function.
    """

    #: eviction, routing, load order, spill.
    policy: Counts
    models: Any
    early: Any
    #: Eligible servers of group g: ``eligible[first[g]]`` to ``eligible[first[g + 1] - 1]``.
    first: Counts
    eligible: Counts
    #: Time of a load by kind of link and model.
    load_ms: Floats
    servers: Any
    #: Shape [S, M].
    pairs: Any
    #: Models in memory, and models that wait for a load, in order. Shape [S, M].
    residents: Counts
    cold: Counts
    #: Servers that hold or await a model, in order. Shape [M, S].
    homes: Counts
    #: Memory over time. Shape [S, bins].
    areas: Floats
    #: Shape [M].
    scratch: Any
    counters: Counts


class Pools(NamedTuple):
    """Jobs and events, which are enlarged between chunks."""

    jobs: Any
    events: Any
    #: Records; see :data:`chrion.serving.simulator.metrics.COLUMNS`.
    rows: Floats


@inlined
def _push(state: State, pools: Pools, at: float, event: tuple[int, int, int, int]) -> None:
    kind, server, a, b = event
    i = state.counters[EVENTS]
    number = state.counters[SEQUENCE]
    state.counters[EVENTS] += 1
    state.counters[SEQUENCE] += 1
    while i > 0:
        parent = (i - 1) // 2
        if pools.events[parent].at <= at:  # of events of one time, those in the heap are older
            break
        _move(pools, parent, i)
        i = parent
    pools.events[i].at, pools.events[i].sequence, pools.events[i].kind = at, number, kind
    pools.events[i].server, pools.events[i].a, pools.events[i].b = server, a, b


@inlined
def _move(pools: Pools, source: int, target: int) -> None:
    old, new = pools.events[source], pools.events[target]
    new.at, new.sequence, new.kind = old.at, old.sequence, old.kind
    new.server, new.a, new.b = old.server, old.a, old.b


@inlined
def _precedes(pools: Pools, i: int, j: int) -> bool:
    if pools.events[i].at != pools.events[j].at:
        return bool(pools.events[i].at < pools.events[j].at)
    return bool(pools.events[i].sequence < pools.events[j].sequence)


@inlined
def _pop(state: State, pools: Pools) -> None:
    """Remove the first event of the heap."""
    state.counters[EVENTS] -= 1
    last = state.counters[EVENTS]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= last:
            break
        if child + 1 < last and _precedes(pools, child + 1, child):
            child += 1
        if _precedes(pools, last, child):
            break
        _move(pools, child, i)
        i = child
    _move(pools, last, i)


@inlined
def _advance(state: State, server: int, now: float) -> None:
    bins = state.areas.shape[1]
    while now >= state.servers[server].width * bins:
        for i in range(bins // 2):
            state.areas[server, i] = state.areas[server, 2 * i] + state.areas[server, 2 * i + 1]
        state.areas[server, bins // 2 :] = 0.0
        state.servers[server].width *= 2
    width, before, value = state.servers[server].width, state.servers[server].now, state.servers[server].value
    state.servers[server].area += value * (now - before)
    index = int(before / width)
    while before < now:
        until = min(now, (index + 1) * width)
        state.areas[server, index] += value * (until - before)
        before = until
        index += 1
    state.servers[server].now = before


@inlined
def _remove(items: Counts, number: int, item: int) -> None:
    """Remove an item from the first ``number`` entries of a list, and keep the order of the others."""
    seen = False
    for i in range(number):
        if seen:
            items[i - 1] = items[i]
        elif items[i] == item:
            seen = True


@inlined
def _rank(state: State, server: int, model: int, now: float) -> float:
    if state.policy[0] == 0:
        return float(state.pairs[server, model].idle_ms)
    if state.policy[0] == 1:
        return float(state.pairs[server, model].uses)
    load_ms = state.load_ms[state.servers[server].link, model]
    return float(-(now - state.pairs[server, model].idle_ms) / (load_ms * state.models[model].weight + 1e-9))


@inlined
def _make_room(state: State, server: int, needed: int, now: float) -> bool:
    """Evict models until ``needed`` bytes are free, without unnecessary ones; evict none if that is not possible."""
    residents, number = state.residents[server], state.servers[server].residents_n
    for i in range(number):
        model = residents[i]
        possible = (
            state.models[model].memory and not state.pairs[server, model].in_use and not state.models[model].pinned
        )
        state.scratch[i].rank = _rank(state, server, model, now) if possible else np.nan
    victims = 0
    while needed > 0:
        best = -1
        for i in range(number):
            if not np.isnan(state.scratch[i].rank) and (best < 0 or state.scratch[i].rank < state.scratch[best].rank):
                best = i
        if best < 0:
            return False
        state.scratch[best].rank = np.nan
        state.scratch[victims].chosen = residents[best]
        needed -= state.models[residents[best]].memory
        victims += 1
    spare = -needed
    for i in range(victims - 1, -1, -1):
        model = state.scratch[i].chosen
        if state.models[model].memory <= spare:
            spare -= state.models[model].memory
        else:
            _evict(state, server, model)
    return True


@inlined
def _evict(state: State, server: int, model: int) -> None:
    state.pairs[server, model].status = ABSENT
    _remove(state.residents[server], state.servers[server].residents_n, model)
    state.servers[server].residents_n -= 1
    _remove(state.homes[model], state.models[model].homes_n, server)
    state.models[model].homes_n -= 1
    state.servers[server].free += state.models[model].memory
    state.servers[server].evictions += 1


@inlined
def _load_next(state: State, pools: Pools, server: int, now: float) -> None:
    """Start the next load if the link is free and there is, or can be made, enough memory."""
    if state.servers[server].loading >= 0 or state.servers[server].cold_n == 0:
        return
    cold = state.cold[server]
    model = cold[0]
    for i in range(1, state.servers[server].cold_n):
        other = cold[i]
        if state.policy[2] == 0:
            earlier = state.pairs[server, other].oldest_ms < state.pairs[server, model].oldest_ms
        else:
            earlier = state.pairs[server, other].demand_ms > state.pairs[server, model].demand_ms
        if earlier:
            model = other
    missing = state.models[model].memory - state.servers[server].free
    if missing > 0 and not _make_room(state, server, missing, now):
        return
    _remove(cold, state.servers[server].cold_n, model)
    state.servers[server].cold_n -= 1
    state.pairs[server, model].status = LOADING
    state.servers[server].free -= state.models[model].memory
    _advance(state, server, now)
    state.servers[server].value = state.servers[server].budget - state.servers[server].free
    state.servers[server].peak = max(state.servers[server].peak, state.servers[server].value)
    load_ms = state.load_ms[state.servers[server].link, model]
    state.servers[server].loading = model
    state.servers[server].link_busy_ms += load_ms
    state.servers[server].loaded_mb += state.models[model].load_mb
    state.servers[server].loads += 1
    state.models[model].loads += 1
    _push(state, pools, now + load_ms, (_LOADED, server, model, 0))


@inlined
def _add_resident(state: State, server: int, model: int, now: float) -> None:
    state.pairs[server, model].status = RESIDENT
    state.pairs[server, model].idle_ms = now
    state.residents[server, state.servers[server].residents_n] = model
    state.servers[server].residents_n += 1


@inlined
def _start_ready(state: State, pools: Pools, server: int, now: float) -> None:
    """Start ready requests while the slots and cores of the first one are free."""
    while state.servers[server].ready_head >= 0:
        job = state.servers[server].ready_head
        model = pools.jobs[job].model
        if (
            state.models[model].slots > state.servers[server].free_slots
            or state.models[model].cores > state.servers[server].free_cores
        ):
            return
        state.servers[server].ready_head = pools.jobs[job].next
        state.servers[server].free_slots -= state.models[model].slots
        state.servers[server].free_cores -= state.models[model].cores
        state.pairs[server, model].uses += 1
        factor = pools.jobs[job].factor
        for i in range(state.models[model].early_begin, state.models[model].early_end):
            at = now + state.early[i].at * factor
            _push(state, pools, at, (_RELEASE, server, state.early[i].slots, state.early[i].cores))
        end = now + state.models[model].latency * factor
        _push(state, pools, end, (_END, server, model, 0))
        row = pools.rows[state.counters[ROWS]]
        state.counters[ROWS] += 1
        row[0], row[1], row[2], row[3] = pools.jobs[job].number, model, server, pools.jobs[job].arrival
        row[4], row[5], row[6], row[7] = now, end, pools.jobs[job].cold, model
        pools.jobs[job].next = state.counters[FREE_JOB]
        state.counters[FREE_JOB] = job


@inlined
def _handle(state: State, pools: Pools) -> float:
    """Remove the first event, carry it out, and return its time."""
    now, kind, server = pools.events[0].at, pools.events[0].kind, pools.events[0].server
    a, b = pools.events[0].a, pools.events[0].b
    _pop(state, pools)
    if kind == _RELEASE:
        state.servers[server].free_slots += a
        state.servers[server].free_cores += b
    elif kind == _END:
        state.servers[server].free_slots += state.models[a].last_slots
        state.servers[server].free_cores += state.models[a].last_cores
        state.servers[server].outstanding -= 1
        state.pairs[server, a].in_use -= 1
        if state.pairs[server, a].in_use == 0:
            state.pairs[server, a].idle_ms = now
            _load_next(state, pools, server, now)
    else:
        state.servers[server].loading = -1
        _add_resident(state, server, a, now)
        waiting = 0
        job = state.pairs[server, a].wait_head
        while job >= 0:
            waiting += 1
            job = pools.jobs[job].next
        state.pairs[server, a].in_use = waiting
        if state.servers[server].ready_head < 0:
            state.servers[server].ready_head = state.pairs[server, a].wait_head
        else:
            pools.jobs[state.servers[server].ready_tail].next = state.pairs[server, a].wait_head
        state.servers[server].ready_tail = state.pairs[server, a].wait_tail
        state.pairs[server, a].wait_head = -1
        _load_next(state, pools, server, now)
    _start_ready(state, pools, server, now)
    return float(now)


@inlined
def _least_loaded(state: State, model: int) -> int:
    group = state.models[model].group
    first, last = state.first[group], state.first[group + 1]
    best = state.eligible[first]
    for i in range(first + 1, last):
        if state.servers[state.eligible[i]].outstanding < state.servers[best].outstanding:
            best = state.eligible[i]
    return int(best)


@inlined
def _route(state: State, model: int, draw: float) -> int:
    if state.policy[1] == 0:
        group = state.models[model].group
        first, last = state.first[group], state.first[group + 1]
        return int(state.eligible[first + int(draw * (last - first))])
    if state.policy[1] == 1 or state.models[model].homes_n == 0:
        return _least_loaded(state, model)
    home = state.homes[model, 0]
    for i in range(1, state.models[model].homes_n):
        if state.servers[state.homes[model, i]].outstanding < state.servers[home].outstanding:
            home = state.homes[model, i]
    if state.servers[home].outstanding < state.policy[3]:
        return int(home)
    least_loaded = _least_loaded(state, model)
    return (
        int(home)
        if state.servers[home].outstanding < state.servers[least_loaded].outstanding + state.policy[3]
        else least_loaded
    )


@inlined
def _offer(state: State, pools: Pools, server: int, job: int, now: float) -> None:
    model = pools.jobs[job].model
    status = state.pairs[server, model].status
    if status == ABSENT and state.models[model].memory == 0:
        _add_resident(state, server, model, 0.0)
        status = RESIDENT
    state.servers[server].outstanding += 1
    pools.jobs[job].next = -1
    if status == RESIDENT:
        pools.jobs[job].cold = 0
        state.pairs[server, model].in_use += 1
        if state.servers[server].ready_head < 0:
            state.servers[server].ready_head = job
            state.servers[server].ready_tail = job
            _start_ready(state, pools, server, now)
        else:
            pools.jobs[state.servers[server].ready_tail].next = job
            state.servers[server].ready_tail = job
        return
    pools.jobs[job].cold = 1
    if status == ABSENT:
        state.homes[model, state.models[model].homes_n] = server
        state.models[model].homes_n += 1
        state.pairs[server, model].status = COLD
        state.cold[server, state.servers[server].cold_n] = model
        state.servers[server].cold_n += 1
        state.pairs[server, model].oldest_ms = now
        state.pairs[server, model].demand_ms = 0.0
        state.pairs[server, model].wait_head = -1
    if state.pairs[server, model].wait_head < 0:
        state.pairs[server, model].wait_head = job
    else:
        pools.jobs[state.pairs[server, model].wait_tail].next = job
    state.pairs[server, model].wait_tail = job
    if state.pairs[server, model].status == COLD:
        state.pairs[server, model].demand_ms += state.models[model].latency
        _load_next(state, pools, server, now)


@compiled
def replay(state: State, pools: Pools, requests: tuple[Floats, Counts, Floats, Floats]) -> None:
    """Serve the requests of a chunk, and the events before the last of them.

    Args:
        state: The cluster.
        pools: Jobs and events, enough for those that wait or run and those of the chunk.
        requests: Times, models, random factors and random numbers of the routing. Each of shape [n].
    """
    times, models, factors, draws = requests
    for i in range(len(times)):
        now = times[i]
        while state.counters[EVENTS] > 0 and pools.events[0].at <= now:
            _handle(state, pools)
        job = state.counters[FREE_JOB]
        state.counters[FREE_JOB] = pools.jobs[job].next
        pools.jobs[job].number, pools.jobs[job].model = state.counters[REQUESTS], models[i]
        pools.jobs[job].arrival, pools.jobs[job].factor = now, factors[i]
        state.counters[REQUESTS] += 1
        _offer(state, pools, _route(state, models[i], draws[i]), job, now)


@compiled
def drain(state: State, pools: Pools, events: int) -> float:
    """Carry out a number of events; return the time of the last one."""
    now = 0.0
    for _ in range(events):
        now = _handle(state, pools)
    return now
