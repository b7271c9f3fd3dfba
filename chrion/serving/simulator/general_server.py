"""Servers with all options: several GPUs, priorities, batches, keep-alive, shared cores and link, and failures.

Without these options it behaves like the faster :class:`chrion.serving.simulator.server.Server`; tests compare both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappush
from typing import Any

from chrion.serving.manager.policies import ResidentModel
from chrion.serving.manager.queue_estimate import Release
from chrion.serving.simulator.cluster_state import ClusterState, Job
from chrion.serving.simulator.ready_queue import Batching, ReadyBatch, ReadyQueue
from chrion.serving.simulator.server import Server
from chrion.serving.simulator.service import Resources
from chrion.serving.simulator.settings import ServerSpec

_NAN = float("nan")


@dataclass(slots=True)
class Options:
    """What general servers do beyond others."""

    #: Priority by number of the request; empty if all are equal.
    priorities: list[int] = field(default_factory=list)
    batching: Batching | None = None
    #: Latency of each further request of a batch over that of the first, by model and level.
    batch_cost: Sequence[Sequence[float]] = ()
    #: Time for which an idle model stays in memory; infinite if only others displace it.
    keep_alive_ms: float = math.inf


@dataclass(slots=True, eq=False)
class Execution:
    """A batch that runs."""

    kind: int
    resident: ResidentModel
    jobs: list[Job]
    start_ms: float
    #: Slots and cores that it still holds.
    slots: int
    cores: int


class Host:
    """What the GPUs of one server share: CPU cores, the link, and host memory before a disk.

    - Cores go to the ready batches at the heads of the GPUs' queues. The batch of the highest priority that entered its
      queue first is considered first; if its slot is free and its cores are not, no other batch that needs cores
      starts.
    - The link carries one load at a time. Each GPU proposes the first of its waiting loads; of the proposals for which
      there is memory, or for which it can be made, the first in the load order is carried out.
    - Host memory holds weights that were loaded before. A load of others first reads them from the disk, while it
      occupies the link, and evicts the weights that no GPU of the server uses and that have been idle longest, then
      those in use.

    Args:
        index: The server's number.
        spec: Its resources.
        weights_mb: Weights by model, which host memory holds.
    """

    def __init__(self, index: int, spec: ServerSpec, weights_mb: Sequence[float]) -> None:
        self.index = index
        self.spec = spec
        self.gpus: list[GeneralServer] = []
        self.free_cores = spec.cpu_cores
        #: The GPU that is being loaded.
        self.loading: GeneralServer | None = None
        #: True if requests are sent to this server.
        self.available = True
        #: True if it is powered on; it may be unavailable because it starts, fails or drains.
        self.on = True
        #: The time at which it was switched on, and the time for which it was on before.
        self.on_since_ms = 0.0
        self.on_ms = 0.0
        self.disk_loads = 0
        #: Bytes of the weights in host memory, by model.
        self.held: dict[int, int] = {}
        self._weights_mb = weights_mb
        self._room_bytes = round(spec.host_memory_gb * 1e9)

    @property
    def outstanding(self) -> int:
        """Requests on the server, waiting or running."""
        return sum(gpu.outstanding for gpu in self.gpus)

    def start_ready(self, now: float) -> None:
        """Start batches at the heads of the queues while their slots and cores are free."""
        while gpu := self._next_gpu():
            gpu.start_head(now)

    def _next_gpu(self) -> GeneralServer | None:
        """Return the GPU whose head can start now and comes first."""
        heads = sorted((gpu.ready.head[:2], gpu.index, gpu) for gpu in self.gpus if gpu.ready)
        awaited = False
        for _, _, gpu in heads:
            slots, cores = gpu.head_needs()
            if slots > gpu.free_slots or (cores and awaited):
                continue
            if cores <= self.free_cores:
                return gpu
            awaited = True
        return None

    def load_next(self, now: float) -> None:
        """Start the next load if the link is free and a load has memory."""
        if self.loading is not None:
            return
        for _, _, gpu, model in sorted(gpu.first_cold() for gpu in self.gpus if gpu.cold):
            if gpu.start_load(now, model):
                return

    def disk_ms(self, model: int, load_mb: float) -> float:
        """Return the time of the disk in a load: zero if the weights are in host memory."""
        if not self._room_bytes or model in self.held:
            return 0.0
        return self.spec.disk_fixed_ms + load_mb / self.spec.disk_gb_per_s

    def fetch(self, model: int) -> None:
        """Put a model that is loaded into host memory, if it fits there; others leave until it does."""
        if not self._room_bytes or model in self.held:
            return
        self.disk_loads += 1
        size = round(self._weights_mb[model] * 1e6)
        if size > self._room_bytes:
            return
        free = self._room_bytes - sum(self.held.values())
        for other in sorted(self.held, key=self._last_use_ms):
            if free >= size:
                break
            free += self.held.pop(other)
        self.held[model] = size

    def fill(self, models: Sequence[int]) -> None:
        """Put models into host memory before the first request, as far as they fit."""
        free = self._room_bytes - sum(self.held.values())
        for model in models:
            size = round(self._weights_mb[model] * 1e6)
            if model not in self.held and 0 < size <= free:
                self.held[model] = size
                free -= size

    def _last_use_ms(self, model: int) -> float:
        return max(gpu.last_use_ms(model) for gpu in self.gpus)


class GeneralServer(Server):
    """One GPU of a server; see the module.

    Args:
        index: The number of the GPU.
        host: Its server.
        load_ms: Time of a load over its link, by kind.
        cluster: What it shares with other servers.
        options: What it does beyond a :class:`Server`.
    """

    def __init__(
        self, index: int, host: Host, load_ms: Sequence[float], cluster: ClusterState, options: Options
    ) -> None:
        super().__init__(index, host.spec, load_ms, cluster)
        self.host = host
        self._options = options
        self.ready = ReadyQueue(options.batching, cluster.sequence)
        self._fails = host.spec.mtbf_h > 0
        #: The highest priority of the requests that wait for a load, by model.
        self._urgency: dict[int, int] = {}
        #: The last use of each model that has left the memory, in ms.
        self._left: dict[int, float] = {}
        #: Called with the time when a request has ended or was dropped.
        self.on_left: Callable[[float], None] | None = None

    @property
    def is_on(self) -> bool:
        """Whether the server is switched on."""
        return self.host.on

    @property
    def outstanding(self) -> int:
        """Requests on this GPU, waiting or running."""
        return self._outstanding[self.index]

    def offer(self, now: float, number: int, model: int, factor: Any) -> None:
        """Accept or drop a request that arrives now."""
        self.accept(now, (number, model, now, factor, False))

    def accept(self, now: float, job: Job) -> None:
        """Accept or drop a request, which may have arrived earlier at a server that has failed."""
        number, model, arrival, factor, cold = job
        resident = self.residents.get(model)
        if resident is None and not self._table.bytes[model]:
            resident = self._add_resident(0.0, model)
        self._outstanding[self.index] += 1
        if self._deadlines and not self._is_admitted(now, arrival + self._slo_ms(number, model), number, model):
            if resident is None:
                self._request_load(now, model)
            self._drop(number, model, arrival, cold=cold or resident is None)
        elif resident is None:
            urgency = self._priority(number)
            self._urgency[model] = max(urgency, self._urgency.get(model, urgency))
            self._request_load(now, model).append((number, model, arrival, factor, True))
        else:
            resident.in_use += 1
            self._add_ready(now, job)
            self.host.start_ready(now)

    def _priority(self, number: int) -> int:
        return self._options.priorities[number] if self._options.priorities else 0

    def _add_ready(self, now: float, job: Job) -> None:
        batch = self.ready.add(job, self._priority(job[0]))
        if batch:
            until = now + self._options.batching.delay_ms[batch.model] if self._options.batching else now
            heappush(self._events, (until, next(self._sequence), self._on_delay, batch))

    def _on_delay(self, now: float, batch: ReadyBatch) -> None:
        """Let a batch start although it has room."""
        self.ready.enter(batch)
        self.host.start_ready(now)

    def head_needs(self) -> tuple[int, int]:
        """Return the slots and cores of the batch at the head of the queue."""
        return self._service[self._kind(self.ready.head[2].model)][:2]

    def start_head(self, now: float) -> None:
        """Start the batch at the head of the queue; its slot and cores are free."""
        jobs = self.ready.pop().jobs
        model, factor = jobs[0][1], jobs[0][3]
        resident = self.residents[model]
        kind = self._kind(model)
        if self._levels > 1:
            factor = factor[resident.level]
        if self._deadlines and not self._starts_in_time(now, jobs[0], kind, resident):
            return
        slots, cores, latency_ms, early, _ = self._service[kind]
        self.free_slots -= slots
        self.host.free_cores -= cores
        resident.uses += len(jobs)
        if len(jobs) > 1:
            factor *= 1 + self._options.batch_cost[resident.level][model] * (len(jobs) - 1)
        execution = Execution(kind, resident, jobs, now, slots, cores)
        for at_ms, freed in early:
            release = (now + at_ms * factor, next(self._sequence), self._handle_release, (execution, freed))
            heappush(self._events, release)
        end = now + latency_ms * factor
        heappush(self._events, (end, next(self._sequence), self._handle_end, execution))
        if not self._fails:
            self._record_all(execution, end)

    def _record_all(self, execution: Execution, end: float) -> None:
        kind = execution.kind + self._models * self._levels * (len(execution.jobs) - 1)
        for number, model, arrival, _, cold in execution.jobs:
            self._record((number, model, self.index, arrival, execution.start_ms, end, cold, kind))

    def _release(self, now: float, released: tuple[Any, Resources]) -> None:
        execution, freed = released
        self._give_back(execution, *freed)
        if self._deadlines:
            self._running[execution.jobs[0][0]].popleft()
        self.host.start_ready(now)

    def _give_back(self, execution: Execution, slots: int, cores: int) -> None:
        execution.slots -= slots
        execution.cores -= cores
        self.free_slots += slots
        self.host.free_cores += cores

    def _end(self, now: float, execution: Any) -> None:
        resident, jobs = execution.resident, execution.jobs
        self._give_back(execution, execution.slots, execution.cores)
        self._outstanding[self.index] -= len(jobs)
        if self._deadlines:
            del self._running[jobs[0][0]]
        if self._fails:
            self._record_all(execution, now)
        self._finish_use(now, resident, len(jobs))
        self.host.start_ready(now)
        if self.on_left:
            self.on_left(now)

    def _on_loaded(self, now: float, kind: int) -> None:
        self.host.loading = None
        super()._on_loaded(now, kind)

    def _add_waiting(self, now: float, resident: ResidentModel, jobs: Sequence[Job]) -> None:
        self._urgency.pop(resident.key, None)
        for job in jobs:
            self._add_ready(now, job)
        if not jobs:
            self._expire_later(now, resident)

    def _start_ready(self, now: float) -> None:
        self.host.start_ready(now)

    def _finish_use(self, now: float, resident: ResidentModel, uses: int = 1) -> None:
        resident.in_use -= uses
        if resident.in_use:
            return
        resident.idle_since_ms = now
        self._expire_later(now, resident)
        if self.host.loading is None:
            self._use_link(now, resident)

    def _use_link(self, now: float, idle: ResidentModel) -> None:
        if any(gpu.cold for gpu in self.host.gpus):
            self.host.load_next(now)
        elif idle.level:
            self._grow(now, idle)

    def _expire_later(self, now: float, resident: ResidentModel) -> None:
        """Evict a model that is idle from now on after the keep-alive time, if it stays idle."""
        if self._options.keep_alive_ms < math.inf and resident.bytes and not resident.pinned:
            at = now + self._options.keep_alive_ms
            heappush(self._events, (at, next(self._sequence), self._on_expiry, (resident, now)))

    def _on_expiry(self, now: float, expected: tuple[ResidentModel, float]) -> None:
        resident, idle_since_ms = expected
        present = self.residents.get(resident.key) is resident
        if present and not resident.in_use and resident.idle_since_ms == idle_since_ms:
            self._evict(now, (resident,))
            self._reserve(now, 0)

    def preload(self, model: int, *, now: float = 0.0, shrink: bool = False) -> bool:
        """Put a model into memory, not counted as a load; return false if it does not fit."""
        known = model in self.residents
        loaded = super().preload(model, now=now, shrink=shrink)
        if loaded and not known:
            self.host.fill([model])
            self._expire_later(now, self.residents[model])
        return loaded

    def last_use_ms(self, model: int) -> float:
        """Return the time of the last use of a model on this GPU; infinity while it is used, -1 if it never was."""
        record = self.residents.get(model)
        if model == self._loading_model() or (record and record.in_use):
            return math.inf
        return record.idle_since_ms if record else self._left.get(model, -1.0)

    def _note_departure(self, resident: ResidentModel) -> None:
        super()._note_departure(resident)
        self._left[resident.key] = resident.idle_since_ms

    def _loading_model(self) -> int | None:
        return None if self.loading is None else self.loading % self._models

    def first_cold(self) -> tuple[tuple[int, float], int, GeneralServer, int]:
        """Return the first of the waiting loads, as the numbers that order it, this GPU and the model."""

        def order(model: int) -> tuple[int, float]:
            return -self._urgency.get(model, 0), self.policies.order(self.cold[model])

        model = min(self.cold, key=order)
        return order(model), self.index, self, model

    def _load_next(self, now: float) -> None:
        self.host.load_next(now)

    def start_load(self, now: float, model: int) -> bool:
        """Start the load of a model if there is, or can be made, enough memory; return whether there is."""
        kind = self._make_room(now, model)
        if kind is None:
            return False
        del self.cold[model]
        self._load(now, kind, self._table.bytes[kind], self.load_times[kind], self._table.load_mb[kind])
        return True

    def _load(self, now: float, kind: int, size: int, load_ms: float, load_mb: float) -> None:
        load_ms += self.host.disk_ms(kind % self._models, load_mb)
        super()._load(now, kind, size, load_ms, load_mb)
        self.host.loading = self
        self.host.fetch(kind % self._models)

    def _link_wait_ms(self, now: float) -> float:
        gpu = self.host.loading
        return gpu.loading_until_ms - now if gpu else 0.0

    def _possible_loads(self, model: int) -> dict[int, float]:
        loads = super()._possible_loads(model)
        if self.loading in loads:
            return loads
        return {kind: ms + self.host.disk_ms(model, self._table.load_mb[kind]) for kind, ms in loads.items()}

    def _resources(self) -> tuple[tuple[int, int], list[Release]]:
        _, running = super()._resources()
        others = [gpu for gpu in self.host.gpus if gpu is not self]
        for gpu in others:
            running += [Release(at, 0, cores) for releases in gpu._running.values() for at, _, cores in releases]  # noqa: SLF001 # another object of this class
        return (self.free_slots, self.host.free_cores), running

    def _jobs_ahead(self, number: int) -> Iterable[Job]:
        priority = self._priority(number)
        return [batch.jobs[0] for batch in self.ready if batch.priority >= priority]

    def _starts_in_time(self, now: float, job: Job, kind: int, resident: ResidentModel) -> bool:
        starts = super()._starts_in_time(now, job, kind, resident)
        if not starts and self.on_left:
            self.on_left(now)
        return starts

    def reset(self, now: float) -> list[Job]:
        """Lose all memory and requests; those that run fail. Return those that wait, in the order of their arrival."""
        waiting = self.ready.clear() + [job for jobs in self._waiters.values() for job in jobs]
        running = [e[3] for e in self._events if e[2] == self._handle_end]
        self._events[:] = [e for e in self._events if getattr(e[2], "__self__", None) is not self]
        heapify(self._events)
        for execution in running:
            for number, model, arrival, _, cold in execution.jobs:
                self._record((number, model, self.index, arrival, _NAN, now, cold, execution.kind))
        self._clear_memory(now)
        self._waiters.clear()
        self._urgency.clear()
        self._running.clear()
        self._outstanding[self.index] = 0
        self.free_slots, self.host.free_cores = self.gpu_slots, self.host.spec.cpu_cores
        return sorted(waiting, key=lambda job: job[0])

    def _clear_memory(self, now: float) -> None:
        awaited = set(self._waiters)
        for model, resident in self.residents.items():
            self._note_departure(resident)
            if resident.bytes:
                awaited.add(model)
        for model in awaited:
            self.cluster.homes[model].remove(self.index)
        self.residents.clear()
        self.cold.clear()
        self.loading = self.host.loading = None
        self.free_bytes = self.budget_bytes
        self._reserve(now, 0)
        self._log(now, "reset", 0)
