"""Decisions of a model server, as pure functions of plain state.

The functions do not depend on the simulator: a real server can call them with its own figures. There are four kinds of
decision, three of them with a table from names to functions:

- eviction: which resident model is evicted first when memory is short (:data:`EVICTION`, :func:`choose_victims`);
- routing: which server receives a request (:data:`ROUTING`);
- load order: which of the waiting models is loaded next (:data:`LOAD_ORDER`);
- admission: which requests are served and which are dropped (:data:`ADMISSION`, :func:`is_in_time`).

Ties are decided by order: for the model that was loaded first, and for the server with the lowest index. Of several
servers with the weights and equally few requests, the one that received the weights first is chosen; if no server has
them, of all servers with equally few requests the one with the most free memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any

#: The default of ``spill``, see :func:`route_resident_first`: a second copy of a model takes memory and a load,
#: which only a queue of several requests is worth.
SPILL = 4


@dataclass(slots=True, eq=False)
class ResidentModel:
    """A model in the memory of one server; the server updates it."""

    key: int
    bytes: int
    #: Time to load the model again after an eviction.
    load_ms: float
    #: Importance, 1 by default; used by the cost-aware policy only.
    weight: float = 1.0
    #: A pinned model is never evicted.
    pinned: bool = False
    #: Number of its requests that run or are ready to run; the model can be evicted only if it is zero.
    in_use: int = 0
    #: Number of those that run.
    running: int = 0
    #: Number of its requests that this server has started in the run, including those before an eviction.
    uses: int = 0
    #: The end of its last request, or of its load.
    idle_since_ms: float = 0.0
    #: The number of its next request; infinity without an oracle.
    next_use: float = float("inf")
    #: The variant in memory: 0 is the preferred one, and each further one needs less memory; see
    #: :mod:`chrion.serving.manager.shrinking`.
    level: int = 0


@dataclass(slots=True)
class WaitingModel:
    """A model that waits for its load on one server."""

    key: int
    #: Arrival of the first request that waits for it.
    oldest_ms: float
    #: Total execution time of the requests that wait for it.
    demand_ms: float = 0.0
    #: Their highest priority.
    priority: float = 0


#: ``rank(resident, now_ms)``: the model with the lowest rank is evicted first.
Rank = Callable[[ResidentModel, float], float]
#: ``route(outstanding, eligible, homes, draw, free)``: the server's index; see :func:`route_random`.
Route = Callable[[Sequence[int], Sequence[int], Sequence[int], float, Sequence[float]], int]
#: ``order(waiting)``: the model with the lowest value is loaded first.
Order = Callable[[WaitingModel], float]


def rank_lru(resident: ResidentModel, now_ms: float) -> float:
    """Rank the least recently used model first."""
    del now_ms
    return resident.idle_since_ms


def rank_lfu(resident: ResidentModel, now_ms: float) -> float:
    """Rank the least frequently used model first; uses are counted over the whole run, across evictions."""
    del now_ms
    return resident.uses


def rank_cost(resident: ResidentModel, now_ms: float) -> float:
    """Rank the model with the longest idle time / (load time x weight) first."""
    return -(now_ms - resident.idle_since_ms) / (resident.load_ms * resident.weight + 1e-9)


def rank_belady(resident: ResidentModel, now_ms: float) -> float:
    """Rank the model with the furthest next use first (Belady 1966).

    It needs an oracle, and gives a bound for models of equal size.
    """
    del now_ms
    return -resident.next_use


def choose_victims(
    residents: Iterable[ResidentModel], needed: int, rank: Rank, now_ms: float
) -> list[ResidentModel] | None:
    """Choose models to evict until ``needed`` bytes are free.

    Pinned models, models in use and models without bytes are not evicted. Models are chosen in the order of their rank.
    Those that turn out to be unnecessary, because a later one is large, are kept, the one with the highest rank first.

    Args:
        residents: The models in memory.
        needed: Bytes to free, above zero.
        rank: The eviction policy.
        now_ms: The time.

    Returns:
        The models to evict, in order; None if evicting all permitted models is not enough.
    """
    candidates = [r for r in residents if not r.in_use and r.bytes and not r.pinned]
    if not candidates:
        return None
    key = _FIGURES.get(rank) or (lambda resident: rank(resident, now_ms))
    first = min(candidates, key=key)  # of equal ranks, the model that was loaded first
    if first.bytes >= needed:  # the most frequent case
        return [first]
    victims: list[ResidentModel] = []
    for victim in sorted(candidates, key=key):
        victims.append(victim)
        needed -= victim.bytes
        if needed <= 0:
            return _without_unnecessary(victims, -needed)
    return None


def _without_unnecessary(victims: list[ResidentModel], spare: int) -> list[ResidentModel]:
    """Return victims, which free ``spare`` bytes too many, in order of rank and without the unnecessary ones."""
    necessary = []
    for victim in reversed(victims):
        if victim.bytes <= spare:
            spare -= victim.bytes
        else:
            necessary.append(victim)
    necessary.reverse()
    return necessary


def route_random(
    outstanding: Sequence[int], eligible: Sequence[int], homes: Sequence[int], draw: float, free: Sequence[float] = ()
) -> int:
    """Choose any server with equal probability.

    Args:
        outstanding: Requests at each server, waiting or running.
        eligible: Servers whose memory can hold the model, in ascending order.
        homes: Servers with the model's weights in memory, or with a pending load of them.
        draw: A uniform random number in [0, 1).
        free: Memory of each server that is not in use or reserved, which decides if ``homes`` is empty; empty if all
            have the same.

    Returns:
        The index of a server.
    """
    del outstanding, homes, free
    return eligible[int(draw * len(eligible))]


def route_least_loaded(
    outstanding: Sequence[int], eligible: Sequence[int], homes: Sequence[int], draw: float, free: Sequence[float] = ()
) -> int:
    """Choose the server with the fewest outstanding requests; arguments as in :func:`route_random`."""
    del draw
    if len(eligible) == len(outstanding):  # all servers; these forms are faster
        least = outstanding.index(0) if 0 in outstanding else outstanding.index(min(outstanding))
        if free and not homes and outstanding[emptiest := free.index(max(free))] == outstanding[least]:
            return emptiest
    else:
        least = _least_loaded(outstanding, eligible)
    if homes or not free:
        return least
    fewest = outstanding[least]
    return max([i for i in eligible if outstanding[i] == fewest], key=free.__getitem__)


def _least_loaded(outstanding: Sequence[int], servers: Sequence[int]) -> int:
    """Return the first of the servers with the fewest requests; the search ends at an idle one."""
    best = servers[0]
    fewest = outstanding[best]
    for server in servers:
        number = outstanding[server]
        if number < fewest:
            best, fewest = server, number
        if not number:
            break
    return best


def route_resident_first(  # noqa: PLR0913, PLR0917 - the inputs of every policy
    outstanding: Sequence[int],
    eligible: Sequence[int],
    homes: Sequence[int],
    draw: float,
    free: Sequence[float] = (),
    spill: int = SPILL,
) -> int:
    """Choose the least loaded server that holds the weights; arguments as in :func:`route_random`.

    If that server has at least ``spill`` requests more than the least loaded server of all, choose the latter, so that
    a popular model spreads to more servers as its queue grows.
    """
    if not homes:
        return route_least_loaded(outstanding, eligible, homes, draw, free)
    home = homes[0] if len(homes) == 1 else _least_loaded(outstanding, homes)
    if outstanding[home] < spill:  # the least loaded server has at least 0
        return home
    least_loaded = route_least_loaded(outstanding, eligible, homes, draw)
    return home if outstanding[home] < outstanding[least_loaded] + spill else least_loaded


class SpeedRoute:
    """Routing that compares (requests + 1) / speed in the place of requests: the shortest expected delay.

    Args:
        speeds: The speed of each server.
        spill: As in :func:`route_resident_first`; None if it does not matter which servers hold the weights.
    """

    def __init__(self, speeds: Sequence[float], spill: float | None) -> None:
        self._speeds, self._spill = speeds, spill
        changes = [i for i in range(1, len(speeds)) if speeds[i] != speeds[i - 1]]
        #: The first server of each run of servers of one speed, and of the one after it.
        self._runs = list(pairwise([0, *changes, len(speeds)]))

    def __call__(
        self,
        outstanding: Sequence[int],
        eligible: Sequence[int],
        homes: Sequence[int],
        draw: float,
        free: Sequence[float],
    ) -> int:
        """Choose a server; arguments as in :func:`route_random`."""
        del draw

        def delay(server: int) -> float:
            return (outstanding[server] + 1) / self._speeds[server]

        runs = [eligible[bisect_left(eligible, first) : bisect_left(eligible, last)] for first, last in self._runs]
        least = [(_least_loaded(outstanding, run), run) for run in runs if run]
        best = min((server for server, _ in least), key=delay)
        if not homes:
            shortest = delay(best)
            equal = [(outstanding[server], run) for server, run in least if delay(server) == shortest]
            return max([i for fewest, run in equal for i in run if outstanding[i] == fewest], key=free.__getitem__)
        if self._spill is None:
            return best
        home = min(homes, key=delay)
        return home if delay(home) < delay(best) + self._spill else best


def order_fifo(waiting: WaitingModel) -> float:
    """Order waiting models by the arrival of their first request."""
    return waiting.oldest_ms


def order_demand(waiting: WaitingModel) -> float:
    """Order waiting models by demand, the greatest first, as Clockwork does (OSDI 2020)."""
    return -waiting.demand_ms


def is_in_time(now_ms: float, deadline_ms: float, wait_ms: float, latency_ms: float) -> bool:
    """Return whether a request can end by its deadline; those that cannot are not admitted.

    Args:
        now_ms: The time.
        deadline_ms: The time by which the request must end.
        wait_ms: Its expected wait for a load and for the requests before it, or a lower bound of it.
        latency_ms: Its expected execution time.
    """
    end_ms = now_ms + wait_ms + latency_ms
    return bool(end_ms <= deadline_ms + rounding_ms(end_ms))


def rounding_ms(time_ms: Any) -> Any:
    """Return the difference from a deadline at ``time_ms``, a number or an array, that can be due to rounding."""
    return 1e-9 + 1e-12 * time_ms


#: Ranks that do not depend on the time, as functions of the model alone, which are faster.
_FIGURES: dict[Rank, Callable[[ResidentModel], float]] = {
    rank_lru: attrgetter("idle_since_ms"),
    rank_lfu: attrgetter("uses"),
}
EVICTION: dict[str, Rank] = {"lru": rank_lru, "lfu": rank_lfu, "cost": rank_cost, "belady": rank_belady}
ROUTING: dict[str, Route] = {
    "random": route_random,
    "least-loaded": route_least_loaded,
    "resident-first": route_resident_first,
}
LOAD_ORDER: dict[str, Order] = {"fifo": order_fifo, "demand": order_demand}
ADMISSION = ("none", "deadline")
