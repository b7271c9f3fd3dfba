"""What the servers of a cluster share: policies, figures, the queue of events, inputs of routing and metrics."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from chrion.serving.manager.policies import Order, Rank
from chrion.serving.manager.ready_queue import BatchLimits
from chrion.serving.simulator.network_store import NetworkStore
from chrion.serving.simulator.requests import Objectives
from chrion.serving.simulator.service import ServiceTable

#: A request: its number, model, arrival in ms, random factor (with shrinking: one for each level), and true if it
#: waited for a load.
Job = tuple[int, int, float, Any, bool]
#: The handler of an event: ``action(now_ms, payload)``.
Action = Callable[[float, Any], None]
#: An event: its time in ms, a number that orders events of one time, its handler, and the handler's payload.
Event = tuple[float, int, Action, Any]


@dataclass(frozen=True, slots=True)
class ServerPolicies:
    """The policies of a server, and the figures that they need; by default, first come, first served."""

    rank: Rank
    order: Order
    #: True if requests that cannot be in time are dropped.
    deadlines: bool
    #: Time from arrival to deadline, by model.
    slo_ms: Sequence[float]
    #: Importance by model.
    weights: Sequence[float]
    #: True for models that are never evicted, by model.
    pinned: Sequence[bool]
    #: The number of a model's next request; for Belady's policy only.
    next_use: Callable[[int], float] | None = None
    #: Requests that may wait on a GPU at the same time: by model, empty without a limit, and of all models.
    max_queue: Sequence[int] = ()
    max_waiting: float = math.inf
    #: Limits of batches by model; empty if each request starts alone.
    batching: Sequence[BatchLimits] = ()
    #: Latency of each further request of a batch over that of the first, by model and level.
    batch_cost: Sequence[Sequence[float]] = ()
    #: Time for which an idle model stays in memory; infinite if only others displace it.
    keep_alive_ms: float = math.inf
    #: Whether there are groups of servers that fail together.
    fail_together: bool = False
    #: Whether popular models are loaded in advance.
    prefetch: bool = False


@dataclass(slots=True)
class ClusterState:
    """What the servers share: figures, policies, the queue of events, and the inputs of routing and metrics."""

    #: What requests and loads take.
    table: ServiceTable
    policies: ServerPolicies
    #: The queue of events, a heap.
    events: list[Event]
    #: Requests at each server, waiting or running.
    outstanding: list[int]
    #: By model: the servers that hold its weights, or have a pending load of them.
    homes: list[list[int]]
    objectives: Objectives
    #: Loads by model.
    loads: list[int]
    #: Records a request; see :data:`chrion.serving.simulator.metrics.COLUMNS`.
    record: Callable[[tuple[float, ...]], None]
    #: ``journal(time_ms, event, server, kind)`` is called for ``load``, ``loaded``, ``shrink``, ``grow``, ``evict``.
    journal: Callable[[float, str, int, int], None] | None = None
    #: The store that servers with a limited host memory read; None if each has a disk.
    store: NetworkStore | None = None
    #: Priority by number of the request; empty if all are equal.
    priorities: array[int] = field(default_factory=partial(array, "q"))
    #: Numbers of events.
    sequence: Iterator[int] = field(default_factory=count)
