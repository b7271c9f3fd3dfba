"""What the servers of a cluster share: policies, figures, the queue of events, inputs of routing and metrics."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from chrion.serving.manager.policy_settings import ServerPolicies
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
    #: Memory of each server that is not in use or reserved.
    free: list[int]
    #: By model: the servers that hold its weights, or have a pending load of them; all if it has no GPU memory.
    homes: list[list[int]]
    objectives: Objectives
    #: Loads by model.
    loads: list[int]
    #: Records a request; see :data:`chrion.serving.simulator.metrics.COLUMNS`.
    record: Callable[[tuple[float, ...]], None]
    #: ``journal(time_ms, event, server, kind)`` is called for ``load``, ``loaded`` and the causes of unloads.
    journal: Callable[[float, str, int, int], None] | None = None
    #: The store that servers with a limited host memory read; None if each has a disk.
    store: NetworkStore | None = None
    #: Priority by number of the request; empty if all are equal.
    priorities: array[int] = field(default_factory=partial(array, "q"))
    #: Numbers of events.
    sequence: Iterator[int] = field(default_factory=count)
