"""The policies of a server, which are also ``[policies]`` of a scenario, with one set of defaults.

A device decides by :class:`ServerPolicies`, which name the functions and have the figures of models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from chrion.common.records import NonNegative, PositiveCount, Record
from chrion.serving.manager.policies import (
    ADMISSION,
    EVICTION,
    LOAD_ORDER,
    ROUTING,
    SPILL,
    Order,
    Rank,
    Route,
    route_resident_first,
)
from chrion.serving.manager.ready_queue import BatchLimits

T = TypeVar("T")
#: Figures by the number of the model.
Figures = Sequence[T] | Mapping[int, T]


class PolicySpec(Record, frozen=True):
    """``[policies]``: names of :mod:`chrion.serving.manager.policies`."""

    eviction: Literal[*EVICTION] = "lru"  # type: ignore[valid-type] # its keys
    routing: Literal[*ROUTING] = "resident-first"  # type: ignore[valid-type] # its keys
    #: ``resident-first``: a server with the weights is preferred while it has fewer than this many requests more than
    #: the least loaded server.
    spill: PositiveCount = SPILL
    #: Routing compares (requests + 1) / speed of the GPU instead of requests; only in the simulator.
    by_speed: bool = False
    #: In simulations of 32 models in the memory of eight, ``demand`` violates 0.01 to 11 points fewer objectives than
    #: ``fifo``, the more the higher the load.
    load_order: Literal[*LOAD_ORDER] = "demand"  # type: ignore[valid-type] # its keys
    admission: Literal[*ADMISSION] = "none"  # type: ignore[valid-type] # these names
    #: Requests of all models that may wait on a server; the limit of those of one model is its ``max_queue``.
    max_waiting: PositiveCount = 1024
    #: Time after which an idle model leaves the memory; 0 if only others displace it.
    keep_alive_s: NonNegative = 0.0
    #: Whether popular models are loaded in advance while memory is free; not with ``keep_alive_s``.
    prefetch: bool = True

    def rules(self, **figures: Any) -> ServerPolicies:
        """Return what the names stand for, with the figures of models."""
        return ServerPolicies(
            EVICTION[self.eviction],
            LOAD_ORDER[self.load_order],
            deadlines=self.admission == "deadline",
            max_waiting=self.max_waiting,
            keep_alive_ms=self.keep_alive_s * 1000 or math.inf,
            prefetch=self.prefetch and not self.keep_alive_s,
            **figures,
        )


#: The policies of servers, real and simulated ones, unless others are given.
DEFAULT_POLICIES = PolicySpec()


def route_of(policies: PolicySpec) -> Route:
    """Return the routing function of a scenario's policies."""
    if policies.routing == "resident-first" and policies.spill != SPILL:
        return partial(route_resident_first, spill=policies.spill)
    return ROUTING[policies.routing]


@dataclass(frozen=True, slots=True)
class ServerPolicies:
    """The policies of a server, and the figures that they need; by default, first come, first served."""

    rank: Rank
    order: Order
    #: True if requests that cannot be in time are dropped.
    deadlines: bool
    #: Time from arrival to deadline, by model.
    slo_ms: Figures[float]
    #: Importance by model.
    weights: Figures[float]
    #: True for models that are never evicted, by model.
    pinned: Figures[bool]
    #: The number of a model's next request; for Belady's policy only.
    next_use: Callable[[int], float] | None = None
    #: Requests that may wait on a device at the same time: by model, empty without a limit, and of all models.
    max_queue: Figures[int] = ()
    max_waiting: float = math.inf
    #: Limits of batches by model; empty if each request starts alone.
    batching: Figures[BatchLimits] = ()
    #: Latency of each further request of a batch over that of the first, by model and level; only in the simulator.
    batch_cost: Sequence[Sequence[float]] = ()
    #: Time for which an idle model stays in memory; infinite if only others displace it.
    keep_alive_ms: float = math.inf
    #: Whether there are groups of servers that fail together; only in the simulator.
    fail_together: bool = False
    #: Whether popular models are loaded in advance.
    prefetch: bool = False
