"""Decisions of a model server, as pure functions of plain state.

Nothing here knows of the simulator: a real server can call the same functions with its own figures. There are four
kinds of decision, each a table from name to function:

- eviction: which resident model leaves first when memory is short (:data:`EVICTION`, :func:`choose_victims`);
- routing: which server a request goes to (:data:`ROUTING`);
- load order: which of the waiting models is loaded next (:data:`LOAD_ORDER`);
- admission: whether a request is worth starting (:data:`ADMISSION`).

Ties go to whatever comes first: the model loaded first, the server of the lowest index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

#: Requests by which a server may be ahead of the least loaded one and still be preferred for its resident weights.
SPILL = 4


@dataclass(slots=True, eq=False)
class ResidentModel:
    """A model in the memory of one server; kept up to date by whoever runs the server."""

    key: int
    bytes: int
    #: What bringing it back would cost.
    load_ms: float
    #: How much it matters, 1 by default; only the cost-aware policy asks.
    weight: float = 1.0
    #: A pinned model never leaves.
    pinned: bool = False
    #: Requests running on it, or queued with its weights in place; with any it cannot leave.
    in_use: int = 0
    #: Requests started on it here since the beginning, earlier stays in memory included.
    uses: int = 0
    #: When its last request ended, or its load did.
    idle_since_ms: float = 0.0
    #: When it will be asked for next; only an oracle knows.
    next_use: float = float("inf")


@dataclass(slots=True)
class Waiting:
    """A model that requests wait for, on one server."""

    key: int
    #: Arrival of the first of them.
    oldest_ms: float
    #: Their execution time together: the demand that stays unserved until the load.
    demand_ms: float = 0.0


#: ``rank(resident, now_ms)``: the least leaves first.
Rank = Callable[[ResidentModel, float], float]
#: ``route(outstanding, eligible, homes, draw)``: the server's index; see :func:`route_random`.
Route = Callable[[Sequence[int], Sequence[int], Sequence[int], float], int]
#: ``order(waiting)``: the least is loaded first.
Order = Callable[[Waiting], float]
#: ``admit(now_ms, deadline_ms, wait_ms, latency_ms)``: whether to serve.
Admit = Callable[[float, float, float, float], bool]


def rank_lru(resident: ResidentModel, now_ms: float) -> float:
    """Least recently used first."""
    del now_ms
    return resident.idle_since_ms


def rank_lfu(resident: ResidentModel, now_ms: float) -> float:
    """Least frequently used first; uses are counted over the whole run, so a return does not start from nothing."""
    del now_ms
    return resident.uses


def rank_cost(resident: ResidentModel, now_ms: float) -> float:
    """Longest idle time over (load time x weight) first: what is cheap to bring back leaves sooner."""
    return -(now_ms - resident.idle_since_ms) / (resident.load_ms * resident.weight + 1e-9)


def rank_belady(resident: ResidentModel, now_ms: float) -> float:
    """Furthest next use first (Belady 1966): a bound that needs the future, for models of equal size."""
    del now_ms
    return -resident.next_use


def choose_victims(
    residents: Iterable[ResidentModel], needed: int, rank: Rank, now_ms: float
) -> list[ResidentModel] | None:
    """Choose who leaves so that ``needed`` bytes become free.

    Pinned models and those in use stay.

    Args:
        residents: What is in memory.
        needed: Bytes to free, above zero.
        rank: The eviction policy.
        now_ms: The time.

    Returns:
        The models to evict, in order; None where even all that may leave are not enough.
    """
    free_to_go = [(rank(r, now_ms), i, r) for i, r in enumerate(residents) if not r.in_use and not r.pinned]
    free_to_go.sort()
    victims: list[ResidentModel] = []
    for _, _, victim in free_to_go:
        victims.append(victim)
        needed -= victim.bytes
        if needed <= 0:
            return victims
    return None


def route_random(outstanding: Sequence[int], eligible: Sequence[int], homes: Sequence[int], draw: float) -> int:
    """Any server with equal chance.

    Args:
        outstanding: Requests at each server, waiting or running.
        eligible: Servers whose memory can hold the model, in ascending order.
        homes: Servers that hold its weights, or are about to.
        draw: A uniform random number in [0, 1).
    """
    del outstanding, homes
    return eligible[int(draw * len(eligible))]


def route_least_loaded(outstanding: Sequence[int], eligible: Sequence[int], homes: Sequence[int], draw: float) -> int:
    """The server with the fewest outstanding requests; arguments as in :func:`route_random`."""
    del homes, draw
    return min(eligible, key=outstanding.__getitem__)


def route_resident_first(outstanding: Sequence[int], eligible: Sequence[int], homes: Sequence[int], draw: float) -> int:
    """The least loaded server that holds the weights, unless it is :data:`SPILL` requests ahead of the least loaded.

    Without the exception a hot model would stay on one server however long its queue grew.
    """
    del draw
    emptiest = min(eligible, key=outstanding.__getitem__)
    if not homes:
        return emptiest
    home = min(homes, key=outstanding.__getitem__)
    return home if outstanding[home] < outstanding[emptiest] + SPILL else emptiest


def order_fifo(waiting: Waiting) -> float:
    """The model whose first request waits longest."""
    return waiting.oldest_ms


def order_demand(waiting: Waiting) -> float:
    """The model with most unserved demand, as in Clockwork (OSDI 2020)."""
    return -waiting.demand_ms


def admit_all(now_ms: float, deadline_ms: float, wait_ms: float, latency_ms: float) -> bool:
    """Every request."""
    del now_ms, deadline_ms, wait_ms, latency_ms
    return True


def admit_by_deadline(now_ms: float, deadline_ms: float, wait_ms: float, latency_ms: float) -> bool:
    """Those that can still end by their deadline.

    Args:
        now_ms: The time.
        deadline_ms: When the request must have ended.
        wait_ms: The least it has to wait for a load and for the requests ahead of it.
        latency_ms: Its expected execution time.
    """
    return now_ms + wait_ms + latency_ms <= deadline_ms


EVICTION: dict[str, Rank] = {"lru": rank_lru, "lfu": rank_lfu, "cost": rank_cost, "belady": rank_belady}
ROUTING: dict[str, Route] = {
    "random": route_random,
    "least-loaded": route_least_loaded,
    "resident-first": route_resident_first,
}
LOAD_ORDER: dict[str, Order] = {"fifo": order_fifo, "demand": order_demand}
ADMISSION: dict[str, Admit] = {"none": admit_all, "deadline": admit_by_deadline}
