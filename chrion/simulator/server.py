"""One server: GPU memory, a PCIe link, GPU execution slots, CPU cores and the requests that wait for them.

The states of a request::

    offered --weights in memory--> ready --slot and cores free--> running --latency over--> ended
       |                             ^
       +--weights missing--> cold --load done

- Ready requests start in the order in which they became ready. A request whose slot or cores are not free blocks the
  requests behind it, so no request starves.
- The link carries one load at a time, while the GPU and the cores continue. All requests for a model wait for the same
  load.
- Memory is reserved when a load starts. Evictions take no time: weights do not change, so nothing is written back. A
  model with ready or running requests is not evicted; a load without enough memory waits until a model becomes idle,
  and the loads behind it wait as well.
- With several variants a model (shrinking), a model changes to a smaller variant at once. It changes to the next larger
  one by a load, which starts when a request for it ends, if the link is idle and the memory is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappush
from itertools import count
from typing import Any

from chrion.manager.policies import Admit, Order, Rank, ResidentModel, WaitingModel, choose_victims, rounding_ms
from chrion.manager.queue_estimate import QueuedRequest, Release, expected_start
from chrion.manager.shrinking import Memory, make_room
from chrion.simulator.averages import BinnedAverage
from chrion.simulator.service import ServiceTable
from chrion.simulator.settings import ServerSpec

#: A request: its number, model, arrival in ms, random factor (with shrinking: one for each level), and true if it
#: waited for a load.
Job = tuple[int, int, float, Any, bool]
#: The handler of an event: ``action(now_ms, payload)``.
Action = Callable[[float, Any], None]
#: An event: its time in ms, a number that orders events of one time, its handler, and the handler's payload.
Event = tuple[float, int, Action, Any]
_NAN, _INFINITY = float("nan"), float("inf")


@dataclass(frozen=True, slots=True)
class ServerPolicies:
    """The policies of a server, and the figures that they need."""

    rank: Rank
    order: Order
    admit: Admit
    #: True if ``admit`` uses deadlines; otherwise it is not called.
    deadlines: bool
    #: Time from arrival to deadline, by model.
    slo_ms: Sequence[float]
    #: Importance by model.
    weights: Sequence[float]
    #: True for models that are never evicted, by model.
    pinned: Sequence[bool]
    #: The number of a model's next request; for Belady's policy only.
    next_use: Callable[[int], float] | None = None


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
    #: Loads by model.
    loads: list[int]
    #: Records a request; see :data:`chrion.simulator.metrics.COLUMNS`.
    record: Callable[[tuple[float, ...]], None]
    #: ``journal(time_ms, event, server, kind)`` is called for ``load``, ``loaded``, ``shrink`` and ``evict``.
    journal: Callable[[float, str, int, int], None] | None = None
    #: Numbers of events.
    sequence: Iterator[int] = field(default_factory=count)


class Server:
    """The state of one server and its event handlers; the module describes the rules.

    Args:
        index: The server's number.
        spec: Its resources.
        load_ms: Time of a load over its link, by kind.
        cluster: What it shares with other servers.
    """

    def __init__(self, index: int, spec: ServerSpec, load_ms: Sequence[float], cluster: ClusterState) -> None:
        self.index = index
        self.budget_bytes = spec.budget_bytes
        self.policies = cluster.policies
        self.cluster = cluster
        self.free_bytes = self.budget_bytes
        self.gpu_slots = self.free_slots = spec.gpu_slots
        self.cpu_cores = self.free_cores = spec.cpu_cores
        self.residents: dict[int, ResidentModel] = {}
        #: Models whose load has not started.
        self.cold: dict[int, WaitingModel] = {}
        #: The kind that is being loaded.
        self.loading: int | None = None
        self.loading_until_ms = 0.0
        self.loaded_mb = 0.0
        self.link_busy_ms = 0.0
        self.loads = 0
        self.evictions = 0
        self.memory = BinnedAverage()
        self._table = cluster.table
        self._deadlines = cluster.policies.deadlines
        self._models = cluster.table.models
        self._levels = len(cluster.table.variants)
        #: Time of a load by kind; servers with equal links share it.
        self.load_times = load_ms
        self._fixed_ms = spec.load_fixed_ms
        #: Records of models that were evicted, with their uses.
        self._former: dict[int, ResidentModel] = {}
        self._ready: deque[Job] = deque()
        #: Requests that wait for a load, by model.
        self._waiters: dict[int, list[Job]] = {}
        #: Expected releases of each running request, by its number; maintained only if admission uses deadlines.
        self._running: dict[int, deque[Release]] = {}
        # A reference is faster than a look-up of the method for each event.
        self._on_end, self._on_release = self._end, self._release
        self._events, self._sequence, self._record = cluster.events, cluster.sequence, cluster.record
        self._outstanding = cluster.outstanding

    def preload(self, model: int, *, shrink: bool = False) -> bool:
        """Put a model into memory before the run, not counted as a load; return false if it does not fit.

        Args:
            model: The model.
            shrink: True if models change to smaller variants for it; false to use free memory only.
        """
        if model in self.residents:
            return True
        kind = self._make_room(0.0, model, evict=False) if shrink or self._fits(model) else None
        if kind is None:
            return False
        if self._table.bytes[model]:
            self.cluster.homes[model].append(self.index)
        self._reserve(0.0, self._table.bytes[kind])
        self._add_resident(0.0, kind)
        return True

    def _fits(self, model: int) -> bool:
        return self._table.bytes[model] <= self.free_bytes

    def offer(self, now: float, number: int, model: int, factor: Any) -> None:
        """Accept or drop a request that arrives now."""
        resident = self.residents.get(model)
        if resident is None and not self._table.bytes[model]:
            resident = self._add_resident(0.0, model)  # a variant without GPU memory is never loaded
        self._outstanding[self.index] += 1
        if self._deadlines and not self._is_admitted(now, model, resident):
            self._drop(number, model, now, cold=resident is None)
            if resident is None:
                self._request_load(now, model)
        elif resident is None:
            self._request_load(now, model).append((number, model, now, factor, True))
        else:
            resident.in_use += 1
            self._ready.append((number, model, now, factor, False))
            if len(self._ready) == 1:
                self._start_ready(now)

    def _is_admitted(self, now: float, model: int, resident: ResidentModel | None) -> bool:
        deadline = now + self.policies.slo_ms[model]
        if deadline == _INFINITY:
            return True
        latency_ms, admit = self._table.latency_ms, self.policies.admit
        if resident is not None:
            kind = resident.level * self._models + model
            return admit(now, deadline, self._queue_wait_ms(now, kind), latency_ms[kind])
        link_ms = self.loading_until_ms - now if self.loading is not None else 0.0
        if self.loading is not None and self.loading % self._models == model:
            loads = {self.loading: 0.0}
        else:
            kinds = range(model, self._levels * self._models, self._models)
            loads = {kind: self.load_times[kind] for kind in kinds}
        return any(
            admit(now, deadline, max(self._queue_wait_ms(now, kind), link_ms + load_ms), latency_ms[kind])
            for kind, load_ms in loads.items()
        )

    def _queue_wait_ms(self, now: float, kind: int) -> float:
        """Return the expected wait of a request that becomes ready now."""
        running = [release for releases in self._running.values() for release in releases]
        ahead = map(self._queued, self._ready)
        free = self.free_slots, self.free_cores
        return expected_start(now, free, running, ahead, self._table.needs[kind]) - now

    def _queued(self, job: Job) -> QueuedRequest:
        kind = self._kind(job[1])
        latest = job[2] + self.policies.slo_ms[job[1]] - self._table.latency_ms[kind]
        releases = tuple(self._expected_releases(0.0, kind))
        return QueuedRequest(*self._table.needs[kind], releases, latest + rounding_ms(latest))

    def _expected_releases(self, start: float, kind: int) -> Iterator[Release]:
        for at_ms, slots, cores in self._table.early[kind]:
            yield Release(start + at_ms, slots, cores)
        yield Release(start + self._table.latency_ms[kind], *self._table.last[kind])

    def _request_load(self, now: float, model: int) -> list[Job]:
        """Request a load, even for a dropped request: the next may be in time. Return the model's waiting requests."""
        waiters = self._waiters.get(model)
        if waiters is None:
            waiters = self._waiters[model] = []
            self.cluster.homes[model].append(self.index)
            self.cold[model] = WaitingModel(model, now)
        if model in self.cold:
            self.cold[model].demand_ms += self._table.latency_ms[model]
            self._load_next(now)
        return waiters

    def _load_next(self, now: float) -> None:
        """Start the next load if the link is free and there is, or can be made, enough memory."""
        cold = self.cold
        if self.loading is not None or not cold:
            return
        model = next(iter(cold)) if len(cold) == 1 else min(cold.values(), key=self.policies.order).key
        kind = model if self._table.bytes[model] <= self.free_bytes else self._make_room(now, model)
        if kind is not None:
            del cold[model]
            self._load(now, kind, self._table.bytes[kind], self.load_times[kind], self._table.load_mb[kind])

    def _load(self, now: float, kind: int, size: int, load_ms: float, load_mb: float) -> None:
        self._reserve(now, size)
        self.loading = kind
        self.loading_until_ms = now + load_ms
        self.link_busy_ms += load_ms
        self.loaded_mb += load_mb
        self.loads += 1
        self.cluster.loads[kind % self._models] += 1
        self._log(now, "load", kind)
        heappush(self._events, (self.loading_until_ms, next(self._sequence), self._loaded, kind))

    def _make_room(self, now: float, model: int, *, evict: bool = True) -> int | None:
        """Free memory for a model; return the kind that then fits, or None if there is not enough.

        The memory over time is updated when the model takes the memory that is freed.
        """
        missing_bytes = self._table.bytes[model] - self.free_bytes
        if missing_bytes <= 0:
            return model
        if self.policies.next_use:
            for resident in self.residents.values():
                resident.next_use = self.policies.next_use(resident.key)
        held = self.residents.values()
        if self._levels > 1:
            memory = Memory(held, self.free_bytes, self._table.sizes)
            room = make_room(memory, model, self.policies.rank, now, evict=evict)
            if room is None:
                return None
            self._evict(now, room.evicted)
            for resident, level in room.shrunk:
                self._shrink(now, resident, level)
            return room.level * self._models + model
        victims = choose_victims(held, missing_bytes, self.policies.rank, now) if evict else None
        self._evict(now, victims or ())
        return None if victims is None else model

    def _evict(self, now: float, victims: Sequence[ResidentModel]) -> None:
        for victim in victims:
            model = victim.key
            self._former[model] = self.residents.pop(model)
            self.cluster.homes[model].remove(self.index)
            self.free_bytes += victim.bytes
            self.evictions += 1
            self._log(now, "evict", victim.level * self._models + model)

    def _shrink(self, now: float, resident: ResidentModel, level: int) -> None:
        kind = level * self._models + resident.key
        self.free_bytes += resident.bytes - self._table.bytes[kind]
        resident.level, resident.bytes, resident.load_ms = level, self._table.bytes[kind], self.load_times[kind]
        self._log(now, "shrink", kind)

    def _grow(self, now: float, resident: ResidentModel) -> None:
        """Start a load of the next larger variant, if the memory for it is free."""
        kind = (resident.level - 1) * self._models + resident.key
        missing = self._table.bytes[kind] - resident.bytes
        if missing <= self.free_bytes:
            resident.in_use += 1
            load_mb = max(0.0, self._table.load_mb[kind] - self._table.load_mb[kind + self._models])
            shorter_ms = self.load_times[kind] - self.load_times[kind + self._models]
            self._load(now, kind, missing, self._fixed_ms + max(0.0, shorter_ms), load_mb)

    def _loaded(self, now: float, kind: int) -> None:
        self.loading = None
        level, model = divmod(kind, self._models)
        self._log(now, "loaded", kind)
        resident = self.residents.get(model)
        if resident is not None:  # it has grown
            resident.level, resident.bytes, resident.load_ms = level, self._table.bytes[kind], self.load_times[kind]
            self._finish_use(now, resident)
            self._load_next(now)
            return
        resident = self._add_resident(now, kind)
        jobs = self._waiters.pop(model)
        resident.in_use = len(jobs)
        self._ready.extend(jobs)
        if self.cold:
            self._load_next(now)
        self._start_ready(now)

    def _start_ready(self, now: float) -> None:
        """Start ready requests while the slots and cores of the first one are free."""
        ready, table, events, sequence = self._ready, self._table, self._events, self._sequence
        while ready:
            number, model, arrival, factor, cold = job = ready[0]
            resident = self.residents[model]
            kind = model
            if self._levels > 1:
                kind += resident.level * self._models
                factor = factor[resident.level]
            slots, cores = table.needs[kind]
            if slots > self.free_slots or cores > self.free_cores:
                return
            ready.popleft()
            if self._deadlines and not self._starts_in_time(now, job, kind, resident):
                continue
            self.free_slots -= slots
            self.free_cores -= cores
            resident.uses += 1
            for at_ms, *freed in table.early[kind]:
                heappush(events, (now + at_ms * factor, next(sequence), self._on_release, (number, *freed)))
            end = now + table.latency_ms[kind] * factor
            heappush(events, (end, next(sequence), self._on_end, (number, kind, resident)))
            self._record((number, model, self.index, arrival, now, end, cold, kind))

    def _starts_in_time(self, now: float, job: Job, kind: int, resident: ResidentModel) -> bool:
        """Drop a ready request that cannot end by its deadline; return whether it was kept."""
        number, model, arrival, _, cold = job
        admitted = self.policies.admit(now, arrival + self.policies.slo_ms[model], 0.0, self._table.latency_ms[kind])
        if admitted:
            self._running[number] = deque(self._expected_releases(now, kind))
        else:
            self._drop(number, model, arrival, cold=cold)
            self._finish_use(now, resident)
        return admitted

    def _release(self, now: float, freed: tuple[int, int, int]) -> None:
        number, slots, cores = freed
        self.free_slots += slots
        self.free_cores += cores
        if self._deadlines:
            self._running[number].popleft()
        if self._ready:
            self._start_ready(now)

    def _end(self, now: float, ended: tuple[int, int, ResidentModel]) -> None:
        number, kind, resident = ended
        slots, cores = self._table.last[kind]
        self.free_slots += slots
        self.free_cores += cores
        self._outstanding[self.index] -= 1
        if self._deadlines:
            del self._running[number]
        resident.in_use -= 1
        if not resident.in_use:
            resident.idle_since_ms = now
            if self.loading is None:
                self._use_link(now, resident)
        if self._ready:
            self._start_ready(now)

    def _finish_use(self, now: float, resident: ResidentModel) -> None:
        """End a request's use of a model; if it becomes idle, start a load that waits for memory."""
        resident.in_use -= 1
        if not resident.in_use:
            resident.idle_since_ms = now
            if self.loading is None:
                self._use_link(now, resident)

    def _use_link(self, now: float, idle: ResidentModel) -> None:
        """Start a load over the free link, now that a model is idle."""
        if self.cold:
            self._load_next(now)
        elif idle.level:
            self._grow(now, idle)

    def _kind(self, model: int) -> int:
        return self.residents[model].level * self._models + model

    def _drop(self, number: int, model: int, arrival: float, *, cold: bool) -> None:
        self._outstanding[self.index] -= 1
        self._record((number, model, self.index, arrival, _NAN, _NAN, cold, model))

    def _add_resident(self, now: float, kind: int) -> ResidentModel:
        level, model = divmod(kind, self._models)
        size, load_ms = self._table.bytes[kind], self.load_times[kind]
        resident = self._former.pop(model, None)
        if resident is None:
            weight, pinned = self.policies.weights[model], self.policies.pinned[model]
            resident = ResidentModel(model, size, load_ms, weight, pinned)
        resident.level, resident.bytes, resident.load_ms = level, size, load_ms
        resident.idle_since_ms = now
        self.residents[model] = resident
        return resident

    def _reserve(self, now: float, size: int) -> None:
        self.free_bytes -= size
        self.memory.step(now, self.budget_bytes - self.free_bytes)

    def _log(self, now: float, event: str, kind: int) -> None:
        if self.cluster.journal:
            self.cluster.journal(now, event, self.index, kind)
