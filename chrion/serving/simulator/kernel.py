"""The event loop for compilation by numba: the rules of :mod:`chrion.serving.simulator.server` on arrays.

It covers runs without deadlines, shrinking and Belady's policy; :mod:`chrion.serving.simulator.fast` decides.
Operations on floating-point numbers are in the order of the engine, so the results are equal bit by bit; tests compare
them. Without numba the functions run as plain Python, slowly; only tests do so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from chrion.serving.simulator.histograms import Counts, Floats

try:
    import numba
except ImportError:  # the extra ``fast`` is not installed
    numba = None

Small = npt.NDArray[np.int32]
Function = TypeVar("Function", bound=Callable[..., Any])

#: Compiled functions allocate nothing, and without reference counts of their arrays they take an eighth of the time.
_OPTIONS = {"_nrt": False}
#: Policies by number.
EVICTIONS = ("lru", "lfu", "cost")
ROUTINGS = ("random", "least-loaded", "resident-first")
LOAD_ORDERS = ("fifo", "demand")
#: States of a model on a server.
ABSENT, COLD, LOADING, RESIDENT = range(4)
#: Kinds of events.
_END, _RELEASE, _LOADED = range(3)
#: Positions of counters: events in the heap, the next event's number, the first free job, rows, requests, pairs, the
#: first free one of these.
EVENTS, SEQUENCE, FREE_JOB, ROWS, REQUESTS, PAIRS, FREE_PAIR = range(7)
#: More requests than a server can have.
_MANY = 1 << 62


def compiled(function: Function) -> Function:
    """Return a function compiled by numba on its first call, or the function itself without numba."""
    if not numba:
        return function
    try:
        return cast("Function", numba.njit(cache=True, **_OPTIONS)(function))
    except RuntimeError:  # no folder for the cache can be written
        return cast("Function", numba.njit(**_OPTIONS)(function))


def inlined(function: Function) -> Function:
    """Return a function for compiled ones, which contain it: a call would copy the descriptions of all arrays."""
    return cast("Function", numba.njit(forceinline=True, **_OPTIONS)(function)) if numba else function


def _layout(floats: str, integers: str, small: str) -> np.dtype[np.void]:
    """Return a kind of records, given the names of its fields of each type; small integers have 4 bytes."""
    types = (np.float64, floats), (np.int64, integers), (np.int32, small)
    return np.dtype([(name, kind) for kind, names in types for name in names.split()], align=True)


# Records are short, since most of the time goes into those that are not in a cache.
#: What requests and loads of a model take.
MODEL = _layout(
    "latency load_mb weight",
    "memory loads max_queue",
    "slots cores last_slots last_cores pinned group early_begin early_end",
)
#: GPU slots and cores that a request releases before its end, at a time since its start.
EARLY = _layout("at", "", "slots cores")
#: A server; ``width`` to ``area`` are memory over time, see :class:`chrion.serving.simulator.averages.BinnedAverage`.
SERVER = _layout(
    "loaded_mb link_busy_ms width now value peak area",
    "budget free loads evictions waiting",
    "free_slots free_cores loading ready_head ready_tail link",
)
#: A model that waits for its load on a server or is in its memory, or with the policy ``lfu`` was. ``since_ms`` is the
#: end of its last use in memory, or the arrival of the first request that waits for its load; ``value`` is the demand
#: of these, or the rank while victims are chosen, whose list ``victim`` links, as it does that of free records.
PAIR = _layout("since_ms value", "uses waiting", "model server status in_use wait_head wait_tail victim")
#: A request that waits or runs; ``next`` is the next job of its list, -1 at the end.
JOB = _layout("arrival factor", "number", "pair next cold")
EVENT = _layout("at", "sequence", "kind server a b")


class State(NamedTuple):
    """The state of a cluster; every field is an array that the kernel changes in place. S servers, M models.

    Records are in few arrays because each array costs time in every call of a compiled function.
    """

    #: eviction, routing, load order, spill, maximum requests that wait on a server.
    policy: Counts
    models: Any
    early: Any
    #: Eligible servers of group g: ``eligible[first[g]]`` to ``eligible[first[g + 1] - 1]``.
    first: Counts
    eligible: Counts
    #: Time of a load by kind of link and model.
    load_ms: Floats
    servers: Any
    #: Requests at each server, waiting or running.
    outstanding: Counts
    #: The first and the last pair of each list, -1 if it is empty: of models in memory and of models that wait for a
    #: load by server, shape [S, 2], and of the servers that hold or await a model by model, shape [M, 2].
    residents: Counts
    cold: Counts
    homes: Counts
    #: Memory over time. Shape [S, bins].
    areas: Floats
    counters: Counts


class Pools(NamedTuple):
    """What grows with requests, and is enlarged between chunks."""

    jobs: Any
    events: Any
    #: Records; see :data:`chrion.serving.simulator.metrics.COLUMNS`.
    rows: Floats
    pairs: Any
    #: The previous and the next pair in the server's list and in the model's. Shape [pairs, 2].
    in_memory: Small
    at_home: Small
    #: A hash table of pairs with open addressing, -1 where it is empty; its length is a power of two.
    table: Small


@inlined
def _first_slot(state: State, pools: Pools, server: int, model: int) -> int:
    """Return the place in the table from which on a pair is searched."""
    # The constant is 2 ** 32 / the golden ratio (Knuth's multiplicative hashing); its product's middle bits are used.
    return ((int(server) * len(state.models) + int(model)) * 2654435769 >> 12) & (len(pools.table) - 1)


@inlined
def _slot(state: State, pools: Pools, server: int, model: int) -> int:
    """Return the place of a pair in the table, or the empty place for it."""
    slot = _first_slot(state, pools, server, model)
    while pools.table[slot] >= 0:
        pair = pools.table[slot]
        if pools.pairs[pair].model == model and pools.pairs[pair].server == server:
            break
        slot = (slot + 1) & (len(pools.table) - 1)
    return slot


@inlined
def _find(state: State, pools: Pools, server: int, model: int) -> int:
    """Return a pair, a new one if the server does not know the model."""
    slot = _slot(state, pools, server, model)
    if pools.table[slot] < 0:
        new = state.counters[FREE_PAIR]
        if new < 0:
            new = state.counters[PAIRS]
            state.counters[PAIRS] += 1
        else:
            state.counters[FREE_PAIR] = pools.pairs[new].victim
        pools.table[slot] = new
        pools.pairs[new].model, pools.pairs[new].server = model, server
        pools.pairs[new].status, pools.pairs[new].in_use, pools.pairs[new].uses = ABSENT, 0, 0
        pools.pairs[new].wait_head, pools.pairs[new].waiting = -1, 0
    return int(pools.table[slot])


@inlined
def _forget(state: State, pools: Pools, pair: int) -> None:
    """Make an evicted pair free, so that few records are used again and again, which are then in a cache."""
    mask = len(pools.table) - 1
    hole = _slot(state, pools, pools.pairs[pair].server, pools.pairs[pair].model)
    slot = (hole + 1) & mask
    while pools.table[slot] >= 0:  # those that would not be found beyond the hole move into it
        other = pools.table[slot]
        first = _first_slot(state, pools, pools.pairs[other].server, pools.pairs[other].model)
        if (slot - first) & mask >= (slot - hole) & mask:
            pools.table[hole] = other
            hole = slot
        slot = (slot + 1) & mask
    pools.table[hole] = -1
    pools.pairs[pair].server, pools.pairs[pair].victim = -1, state.counters[FREE_PAIR]
    state.counters[FREE_PAIR] = pair


@inlined
def _append(links: Small, ends: Counts, row: int, pair: int) -> None:
    """Append a pair to a list; arrays without a view of a row are faster."""
    links[pair, 0], links[pair, 1] = ends[row, 1], -1
    if ends[row, 1] < 0:
        ends[row, 0] = pair
    else:
        links[ends[row, 1], 1] = pair
    ends[row, 1] = pair


@inlined
def _remove(links: Small, ends: Counts, row: int, pair: int) -> None:
    before, after = links[pair, 0], links[pair, 1]
    if before < 0:
        ends[row, 0] = after
    else:
        links[before, 1] = after
    if after < 0:
        ends[row, 1] = before
    else:
        links[after, 0] = before


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
def _rank(state: State, pools: Pools, pair: int, now: float) -> float:
    """Return the rank of a model that may be evicted, else NaN."""
    model = pools.pairs[pair].model
    if not state.models[model].memory or pools.pairs[pair].in_use or state.models[model].pinned:
        return float(np.nan)
    if state.policy[0] == 0:
        return float(pools.pairs[pair].since_ms)
    if state.policy[0] == 1:
        return float(pools.pairs[pair].uses)
    load_ms = state.load_ms[state.servers[pools.pairs[pair].server].link, model]
    return float(-(now - pools.pairs[pair].since_ms) / (load_ms * state.models[model].weight + 1e-9))


@inlined
def _first(pools: Pools, best: int, pair: int) -> int:
    """Return which of two models gives way first, the first one if ranks are equal; -1 and NaN stand for none."""
    if np.isnan(pools.pairs[pair].value) or (best >= 0 and pools.pairs[best].value <= pools.pairs[pair].value):
        return best
    return pair


@inlined
def _make_room(state: State, pools: Pools, server: int, needed: int, now: float) -> bool:
    """Evict models until ``needed`` bytes are free, without unnecessary ones; evict none if that is not possible."""
    best, last = -1, -1
    pair = state.residents[server, 0]
    while pair >= 0:
        pools.pairs[pair].value = _rank(state, pools, pair, now)
        best = _first(pools, best, pair)
        pair = pools.in_memory[pair, 1]
    while best >= 0:
        pools.pairs[best].value = np.nan
        pools.pairs[best].victim = last
        last = best
        needed -= state.models[pools.pairs[best].model].memory
        if needed <= 0:
            break
        best = -1
        pair = state.residents[server, 0]
        while pair >= 0:
            best = _first(pools, best, pair)
            pair = pools.in_memory[pair, 1]
    if needed > 0:
        return False
    spare = -needed
    while last >= 0:
        memory, following = state.models[pools.pairs[last].model].memory, pools.pairs[last].victim
        if memory <= spare:
            spare -= memory
        else:
            pools.pairs[last].status = ABSENT
            _remove(pools.in_memory, state.residents, server, last)
            _remove(pools.at_home, state.homes, pools.pairs[last].model, last)
            state.servers[server].free += memory
            state.servers[server].evictions += 1
            if state.policy[0] != 1:  # the uses of an evicted model count
                _forget(state, pools, last)
        last = following
    return True


@inlined
def _load_next(state: State, pools: Pools, server: int, now: float) -> None:
    """Start the next load if the link is free and there is, or can be made, enough memory."""
    first = state.cold[server, 0]
    if state.servers[server].loading or first < 0:
        return
    other = pools.in_memory[first, 1]
    while other >= 0:
        if state.policy[2] == 0:
            earlier = pools.pairs[other].since_ms < pools.pairs[first].since_ms
        else:
            earlier = pools.pairs[other].value > pools.pairs[first].value
        if earlier:
            first = other
        other = pools.in_memory[other, 1]
    model = pools.pairs[first].model
    missing = state.models[model].memory - state.servers[server].free
    if missing > 0 and not _make_room(state, pools, server, missing, now):
        return
    _remove(pools.in_memory, state.cold, server, first)
    pools.pairs[first].status = LOADING
    state.servers[server].free -= state.models[model].memory
    _advance(state, server, now)
    state.servers[server].value = state.servers[server].budget - state.servers[server].free
    state.servers[server].peak = max(state.servers[server].peak, state.servers[server].value)
    load_ms = state.load_ms[state.servers[server].link, model]
    state.servers[server].loading = 1
    state.servers[server].link_busy_ms += load_ms
    state.servers[server].loaded_mb += state.models[model].load_mb
    state.servers[server].loads += 1
    state.models[model].loads += 1
    _push(state, pools, now + load_ms, (_LOADED, server, first, 0))


@inlined
def _add_resident(state: State, pools: Pools, pair: int, now: float) -> None:
    pools.pairs[pair].status = RESIDENT
    pools.pairs[pair].since_ms = now
    _append(pools.in_memory, state.residents, pools.pairs[pair].server, pair)


@inlined
def _record(state: State, pools: Pools, job: int, start: float, end: float) -> None:
    """Record a request that starts or, with NaN, is dropped, and free its job."""
    pair = pools.jobs[job].pair
    server, model = pools.pairs[pair].server, pools.pairs[pair].model
    row = pools.rows[state.counters[ROWS]]
    state.counters[ROWS] += 1
    row[0], row[1], row[2], row[3] = pools.jobs[job].number, model, server, pools.jobs[job].arrival
    row[4], row[5], row[6], row[7] = start, end, pools.jobs[job].cold, model
    pools.jobs[job].next = state.counters[FREE_JOB]
    state.counters[FREE_JOB] = job


@inlined
def _start_ready(state: State, pools: Pools, server: int, now: float) -> None:
    """Start ready requests while the slots and cores of the first one are free."""
    while state.servers[server].ready_head >= 0:
        job = state.servers[server].ready_head
        pair = pools.jobs[job].pair
        model = pools.pairs[pair].model
        if (
            state.models[model].slots > state.servers[server].free_slots
            or state.models[model].cores > state.servers[server].free_cores
        ):
            return
        state.servers[server].ready_head = pools.jobs[job].next
        state.servers[server].free_slots -= state.models[model].slots
        state.servers[server].free_cores -= state.models[model].cores
        pools.pairs[pair].uses += 1
        factor = pools.jobs[job].factor
        for i in range(state.models[model].early_begin, state.models[model].early_end):
            at = now + state.early[i].at * factor
            _push(state, pools, at, (_RELEASE, server, state.early[i].slots, state.early[i].cores))
        end = now + state.models[model].latency * factor
        _push(state, pools, end, (_END, server, pair, 0))
        state.servers[server].waiting -= 1
        pools.pairs[pair].waiting -= 1
        _record(state, pools, job, now, end)


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
        state.servers[server].free_slots += state.models[pools.pairs[a].model].last_slots
        state.servers[server].free_cores += state.models[pools.pairs[a].model].last_cores
        state.outstanding[server] -= 1
        pools.pairs[a].in_use -= 1
        if pools.pairs[a].in_use == 0:
            pools.pairs[a].since_ms = now
            _load_next(state, pools, server, now)
    else:
        state.servers[server].loading = 0
        _add_resident(state, pools, a, now)
        waiting = 0
        job = pools.pairs[a].wait_head
        while job >= 0:
            waiting += 1
            job = pools.jobs[job].next
        pools.pairs[a].in_use = waiting
        if state.servers[server].ready_head < 0:
            state.servers[server].ready_head = pools.pairs[a].wait_head
        else:
            pools.jobs[state.servers[server].ready_tail].next = pools.pairs[a].wait_head
        state.servers[server].ready_tail = pools.pairs[a].wait_tail
        pools.pairs[a].wait_head = -1
        _load_next(state, pools, server, now)
    _start_ready(state, pools, server, now)
    return float(now)


@inlined
def _least_loaded(state: State, model: int) -> int:
    """Return the first of the eligible servers with the fewest requests; the search ends at an idle one."""
    group = state.models[model].group
    first, last = state.first[group], state.first[group + 1]
    best = state.eligible[first]
    for i in range(first + 1, last):
        if state.outstanding[best] == 0:
            break
        if state.outstanding[state.eligible[i]] < state.outstanding[best]:
            best = state.eligible[i]
    return int(best)


@inlined
def _route(state: State, pools: Pools, model: int, draw: float) -> int:
    """Return the pair of a request's model and server."""
    home, fewest, pair = -1, _MANY, state.homes[model, 0]
    if state.policy[1] == 0:
        group = state.models[model].group
        first, last = state.first[group], state.first[group + 1]
        return _find(state, pools, state.eligible[first + int(draw * (last - first))], model)
    if state.policy[1] == 2:
        while pair >= 0 and fewest > 0:
            outstanding = state.outstanding[pools.pairs[pair].server]
            if outstanding < fewest:
                home, fewest = pair, outstanding
            pair = pools.at_home[pair, 1]
        if home >= 0 and fewest < state.policy[3]:
            return home
    server = _least_loaded(state, model)
    if home >= 0 and fewest < state.outstanding[server] + state.policy[3]:
        return home
    return _find(state, pools, server, model)


@inlined
def _offer(state: State, pools: Pools, job: int, now: float) -> None:
    pair = pools.jobs[job].pair
    server, model = pools.pairs[pair].server, pools.pairs[pair].model
    if pools.pairs[pair].status == ABSENT and state.models[model].memory == 0:
        _add_resident(state, pools, pair, 0.0)
    pools.jobs[job].cold = 0 if pools.pairs[pair].status == RESIDENT else 1
    if pools.pairs[pair].waiting >= state.models[model].max_queue or state.servers[server].waiting >= state.policy[4]:
        _record(state, pools, job, np.nan, np.nan)
        return
    state.outstanding[server] += 1
    state.servers[server].waiting += 1
    pools.pairs[pair].waiting += 1
    pools.jobs[job].next = -1
    if pools.pairs[pair].status == RESIDENT:
        pools.pairs[pair].in_use += 1
        if state.servers[server].ready_head < 0:
            state.servers[server].ready_head = job
            state.servers[server].ready_tail = job
            _start_ready(state, pools, server, now)
        else:
            pools.jobs[state.servers[server].ready_tail].next = job
            state.servers[server].ready_tail = job
        return
    if pools.pairs[pair].status == ABSENT:
        pools.pairs[pair].status = COLD
        pools.pairs[pair].since_ms, pools.pairs[pair].value = now, 0.0
        _append(pools.at_home, state.homes, model, pair)
        _append(pools.in_memory, state.cold, server, pair)
    if pools.pairs[pair].wait_head < 0:
        pools.pairs[pair].wait_head = job
    else:
        pools.jobs[pools.pairs[pair].wait_tail].next = job
    pools.pairs[pair].wait_tail = job
    if pools.pairs[pair].status == COLD:
        pools.pairs[pair].value += state.models[model].latency
        _load_next(state, pools, server, now)


@compiled
def place_pairs(state: State, pools: Pools) -> None:
    """Enter all pairs into a new table."""
    pools.table[:] = -1
    for pair in range(state.counters[PAIRS]):
        if pools.pairs[pair].server >= 0:
            pools.table[_slot(state, pools, pools.pairs[pair].server, pools.pairs[pair].model)] = pair


@compiled
def replay(state: State, pools: Pools, requests: tuple[Floats, Counts, Floats, Floats]) -> None:
    """Serve the requests of a chunk, and the events before the last of them.

    Args:
        state: The cluster.
        pools: Enough jobs, events and pairs for the requests that wait or run and those of the chunk.
        requests: Times, models, random factors and random numbers of the routing. Each of shape [n].
    """
    times, models, factors, draws = requests
    for i in range(len(times)):
        now = times[i]
        while state.counters[EVENTS] > 0 and pools.events[0].at <= now:
            _handle(state, pools)
        job = state.counters[FREE_JOB]
        state.counters[FREE_JOB] = pools.jobs[job].next
        pools.jobs[job].number = state.counters[REQUESTS]
        pools.jobs[job].arrival, pools.jobs[job].factor = now, factors[i]
        pools.jobs[job].pair = _route(state, pools, models[i], draws[i])
        state.counters[REQUESTS] += 1
        _offer(state, pools, job, now)


@compiled
def drain(state: State, pools: Pools, events: int) -> float:
    """Carry out a number of events; return the time of the last one."""
    now = 0.0
    for _ in range(events):
        now = _handle(state, pools)
    return now
