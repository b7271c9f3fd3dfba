"""Models, requests and actions of the manager."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import NamedTuple

#: Devices with a memory budget.
ACCELERATOR, HOST = "accelerator", "host"
#: The default of ``max_queue``, the requests of a model that may wait (a choice, not measured).
MAX_QUEUE = 256
#: The default of ``max_delay``, the time for which a request waits to share its batch (a choice, not measured).
MAX_DELAY_MS = 1.0
#: Servers that a request is sent to at most: two losses may be chance, a third one is the request's fault.
MAX_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class ManagedVariant:
    """One way to serve a model: its memory on each device, and what a request takes."""

    name: str
    #: Bytes of memory by device, while it is loaded.
    bytes: Mapping[str, int]
    #: Expected time of a request, and of a load; both are replaced by measurements.
    latency_ms: float = 1.0
    load_ms: float = 1.0
    #: CPU cores that a request leases.
    cores: int = 1
    #: Accelerator slots that a request takes.
    slots: int = 0


@dataclass(frozen=True, slots=True)
class ManagedModel:
    """A model, with its variants from the preferred one to the smallest."""

    variants: tuple[ManagedVariant, ...]
    #: Latency objective; infinite for none.
    slo_ms: float = inf
    #: Importance for the cost-aware eviction policy.
    weight: float = 1.0
    pinned: bool = False
    #: Requests of models with a higher priority start first.
    priority: int = 0
    #: Maximum rows of a batch; 1 for no dynamic batching.
    max_batch: int = 1
    #: Time for which a request waits for others to share its batch.
    max_delay_ms: float = 0.0
    #: Requests that may wait at the same time.
    max_queue: int = MAX_QUEUE


class Request(NamedTuple):
    """A request, as the manager sees it."""

    id: int
    #: The number of its model; see :meth:`chrion.serving.manager.LiveManager.add`.
    model: int
    arrival_ms: float
    #: Time by which it must have started; it is refused otherwise.
    deadline_ms: float = inf
    #: Requests with equal keys can share a batch; None for a request that runs alone.
    batch_key: Hashable = None
    #: Rows of its inputs.
    rows: int = 1
    #: Its place among the ready requests of its model: 1 is the first, and 0, for none, the last.
    priority: int = 0


class Reason(Enum):
    """Reasons for which a request is refused."""

    QUEUE_FULL = "too many requests wait (limits: max_queue of the model, --max-waiting of the server)"
    NO_TIME = "the latency objective cannot be met"
    EXPIRED = "the deadline passed before the request could start"
    LOAD_FAILED = "the model cannot be loaded"
    TOO_LARGE = "the model does not fit into the memory budget"
    REMOVED = "the model was unloaded"


@dataclass(frozen=True, slots=True)
class Load:
    """Open a session of a variant; answer with ``loaded`` or ``load_failed``."""

    model: int
    variant: int


@dataclass(frozen=True, slots=True)
class Unload:
    """Close a model's session; nothing runs on it."""

    model: int
    variant: int
    #: ``evict``, ``expire`` (the keep-alive time), ``shrink``, ``grow``, ``trial`` or ``remove``.
    cause: str


@dataclass(frozen=True, slots=True)
class Run:
    """Run requests as one batch on leased cores; answer with ``finish``."""

    id: int
    model: int
    variant: int
    requests: tuple[Request, ...]
    cores: tuple[int, ...] = field(default=())
    slots: int = 0
    started_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer a request with an error."""

    request: Request
    reason: Reason
    #: Time after which a repetition may succeed.
    retry_ms: float = 0.0
    #: The model's expected latency, if that alone exceeds its objective; else 0.
    expected_ms: float = 0.0


Action = Load | Unload | Run | Refuse
