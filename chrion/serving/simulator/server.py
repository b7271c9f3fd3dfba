"""Servers and their GPUs: execution slots, CPU cores and the requests that wait for them, beside their memory.

The states of a request::

    offered --weights in memory--> ready --slot and cores free--> running --latency over--> ended
       |                             ^
       +--weights missing--> cold --load done

- Ready requests start in the order of :mod:`chrion.serving.manager.ready_queue`. A request whose slot or cores are
  not free blocks the requests behind it, so no request starves.
- All requests for a model wait for the same load; see :mod:`chrion.serving.simulator.gpu_memory`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapify, heappush
from itertools import chain

from chrion.serving.manager.policies import ResidentModel, is_in_time
from chrion.serving.manager.queue_estimate import Release, Resources, expected_releases, expected_start
from chrion.serving.manager.ready_queue import ALONE, Line, ReadyQueue
from chrion.serving.simulator.cluster_state import ClusterState, Job
from chrion.serving.simulator.gpu_memory import GpuMemory, HostMemory
from chrion.serving.simulator.settings import ServerSpec

#: Records of requests whose end is not certain: the requests, the time of their start, and their kind.
Unsure = tuple[Sequence[Job], float, int]
#: A batch that runs: the number of its first request, their model, what is released at the end, and the number of
#: requests.
Execution = tuple[int, ResidentModel, Resources, int, Unsure | None]

#: The line of all requests that start alone.
_ALL = -1
_NAN, _INFINITY = float("nan"), float("inf")


class Host(HostMemory):
    """A server: the GPUs, and the CPU cores that they share.

    Cores go to the ready batches at the heads of the GPUs' queues. The batch of the highest priority that entered its
    queue first is considered first; if its slot is free and its cores are not, no other batch that needs cores starts.

    Args:
        index: The server's number.
        spec: Its resources.
        weights_mb: Weights by model, which host memory holds.
    """

    def __init__(self, index: int, spec: ServerSpec, weights_mb: Sequence[float]) -> None:
        super().__init__(spec, weights_mb)
        self.index = index
        self.gpus: list[Server] = []
        self.free_cores = spec.cpu_cores
        #: True if requests are sent to this server.
        self.available = True
        #: True if it is powered on; it may be unavailable because it starts, fails or drains.
        self.on = True
        #: The time at which it was switched on, and the time for which it was on before.
        self.on_since_ms = 0.0
        self.on_ms = 0.0

    @property
    def outstanding(self) -> int:
        """Requests on the server, waiting or running."""
        return sum(gpu.outstanding for gpu in self.gpus)

    def add(self, gpu: Server) -> None:
        """Add a GPU."""
        self.gpus.append(gpu)
        self.memories.append(gpu)

    def use_free_memory(self, now: float) -> None:
        """Use the free memory of the GPUs, as long as the link is free."""
        for gpu in self.gpus:
            if self.loading is None and not self.waiting_loads:
                gpu.use_free_memory(now)

    def start_ready(self, now: float) -> None:
        """Start batches at the heads of the queues of several GPUs while their slots and cores are free."""
        while head := self._next_head(now):
            gpu, line = head
            job = line.items[0][2]
            gpu.start(now, job, gpu.residents[job[1]], line)

    def _next_head(self, now: float) -> tuple[Server, Line[Job]] | None:
        """Return the line whose first batch can start now and comes first, and its GPU."""
        heads = [(line.order, gpu, line) for gpu in self.gpus if (line := gpu.ready.head(now))]
        awaited = False
        for _, gpu, line in sorted(heads, key=lambda head: head[0]):
            slots, cores = gpu.needs(line)
            if slots > gpu.free_slots or (cores and awaited):
                continue
            if cores <= self.free_cores:
                return gpu, line
            awaited = True
        return None


class Server(GpuMemory):
    """The state of one GPU and its event handlers; the module describes the rules.

    Args:
        index: The number of the GPU.
        host: Its server.
        load_ms: Time of a load over its link, by kind.
        cluster: What it shares with other servers.
    """

    def __init__(self, index: int, host: Host, load_ms: Sequence[float], cluster: ClusterState) -> None:
        super().__init__(index, host, load_ms, cluster)
        self.host: Host = host
        self.free_slots = host.spec.gpu_slots
        self.ready = ReadyQueue[Job](_shape, tickets=cluster.sequence)
        self._open = self.ready.open
        self._counts = self.prefetch or self._levels > 1
        self._fails = host.spec.mtbf_h > 0 or self.policies.fail_together
        #: Whether the queue is the only one of the server, and also whether requests enter it at once.
        self._is_alone = host.spec.gpus == 1
        self._is_plain = self._is_alone and not self.policies.batching
        self._deadlines = cluster.policies.deadlines
        #: Requests that run, and the number of requests from which on a limit of those that wait may be reached.
        self._running_requests = 0
        self._least_limit = min((*self.policies.max_queue, self.policies.max_waiting))
        self._service = cluster.table.service
        #: Requests that wait for a load, by model.
        self._waiters: dict[int, list[Job]] = {}
        #: Expected releases of each running batch, by the number of its first request; maintained only if admission
        #: uses deadlines.
        self._running: dict[int, deque[Release]] = {}
        #: Called with the time when a request has ended or was dropped.
        self.on_left: Callable[[float], None] | None = None
        # A reference is faster than a look-up of the method for each event.
        self._handle_end, self._handle_release = self._end, self._release
        self._start_ready = self.start_heads if self._is_alone else host.start_ready
        self._record, self._outstanding, self._priorities = cluster.record, cluster.outstanding, cluster.priorities

    @property
    def outstanding(self) -> int:
        """Requests on this GPU, waiting or running."""
        return self._outstanding[self.index]

    def offer(self, now: float, job: Job) -> None:
        """Accept or drop a request that arrives now; it may have arrived earlier at a server that has failed."""
        number, model, arrival, factor, cold = job
        resident = self.residents.get(model)
        if resident is None and not self._table.bytes[model]:
            resident = self._add_resident(0.0, model)  # a variant without GPU memory is never loaded
        self._outstanding[self.index] += 1
        if self._outstanding[self.index] > self._least_limit and self._is_full(model, resident):
            self._drop(number, model, arrival, cold=cold or resident is None)
            return
        if self._counts:
            self.count(now, model)
        if self._deadlines and not self._is_admitted(now, arrival + self._slo_ms(number, model), number, model):
            self._drop(number, model, arrival, cold=cold or resident is None)
            if resident is None:
                self._request_load(now, number, model)
        elif resident is None:
            self._request_load(now, number, model).append((number, model, arrival, factor, True))
        else:
            resident.in_use += 1
            if not self._is_plain or self._open or not self.start(now, job, resident):
                self._add_ready(now, job)
                if not self._is_plain or self._priorities:
                    self._start_ready(now)

    def _is_full(self, model: int, resident: ResidentModel | None) -> bool:
        """Return whether as many requests wait as may, of a model or of all; the one that arrives is outstanding."""
        waiting = resident.in_use - resident.running if resident else len(self._waiters.get(model, ()))
        most = self.policies.max_queue[model] if self.policies.max_queue else _INFINITY
        all_waiting = self._outstanding[self.index] - 1 - self._running_requests
        return waiting >= most or all_waiting >= self.policies.max_waiting

    def _priority(self, number: int) -> int:
        return self._priorities[number] if self._priorities else 0

    def _add_ready(self, now: float, job: Job) -> None:
        limits = self.policies.batching[job[1]] if self.policies.batching else ALONE
        self.ready.add(now, job, _ALL if limits is ALONE else job[1], self._priority(job[0]), limits)
        if limits.delay_ms:
            heappush(self._events, (now + limits.delay_ms, next(self._sequence), self._on_delay, None))

    def _on_delay(self, now: float, _: object) -> None:
        """Start batches that need not wait any longer."""
        self._start_ready(now)

    def _slo_ms(self, number: int, model: int) -> float:
        """Return the time from the arrival of a request to its deadline."""
        return self.cluster.objectives.of_request(number, model)

    def _is_admitted(self, now: float, deadline: float, number: int, model: int) -> bool:
        if deadline == _INFINITY:
            return True
        latency_ms, models = self._table.latency_ms, self._models
        for level, ready_ms in self.times_to_memory(now, model).items():
            kind = level * models + model
            wait_ms = max(self._queue_wait_ms(now, number, kind), ready_ms)
            if is_in_time(now, deadline, wait_ms, latency_ms[kind]):
                return True
        return False

    def _queue_wait_ms(self, now: float, number: int, kind: int) -> float:
        """Return the expected wait of a request that becomes ready now."""
        free = self.free_slots, self.host.free_cores
        running = chain.from_iterable(self._running.values())
        if not self._is_alone:
            others = (gpu._running.values() for gpu in self.host.gpus if gpu is not self)  # noqa: SLF001 # of this class
            cores_only = (Release(at, 0, n) for values in others for at, _, n in chain.from_iterable(values))
            running = chain(running, cores_only)
        ahead = (
            (self._service[self._kind(job[1])], job[2] + self._slo_ms(job[0], job[1]))
            for job in self.ready.ahead_of(self._priority(number))
        )
        return expected_start(now, free, running, ahead, self._service[kind][:2]) - now

    def _request_load(self, now: float, number: int, model: int) -> list[Job]:
        """Request a load, also for a request that was dropped. Return the model's waiting requests."""
        if model not in self.cold and model != self.loading:
            if model not in self.reserved:
                self.cluster.homes[model].append(self.index)
            self.host.waiting_loads += 1
        self.wait_for_load(now, model, self._table.latency_ms[model], self._priority(number))
        if self.host.loading is None:
            self.host.load_next(now)
        return self._waiters.setdefault(model, [])

    def _on_loaded(self, now: float, loaded: tuple[int, bool]) -> None:
        self.loading = self.host.loading = None
        kind, changes = loaded
        level, model = divmod(kind, self._models)
        self._log(now, "loaded", kind)
        resident = self._add_resident(now, model, level, changes=changes)
        jobs = self._waiters.pop(model, ())
        resident.in_use = len(jobs)
        for job in jobs:
            self._add_ready(now, job)
        if not jobs:
            self._expire_later(now, resident)
        self.host.load_next(now)
        self._start_ready(now)

    def needs(self, line: Line[Job]) -> tuple[int, int]:
        """Return the slots and cores of the first batch of a line."""
        return self._service[self._kind(line.items[0][2][1])][:2]

    def start_heads(self, now: float) -> None:
        """Start batches from the head of the queue while their slots and cores are free."""
        head, residents = self.ready.head, self.residents
        while line := head(now):
            job = line.items[0][2]
            if not self.start(now, job, residents[job[1]], line):
                return

    def start(self, now: float, job: Job, resident: ResidentModel, line: Line[Job] | None = None) -> bool:
        """Start a request, or the first batch of a line, or drop it if it is too late; return whether it was either."""
        number, model, arrival, factor, cold = job
        kind = model
        if self._levels > 1:
            kind += resident.level * self._models
            factor = factor[resident.level]
        slots, cores, latency_ms, early, last = self._service[kind]
        host = self.host
        if slots > self.free_slots or cores > host.free_cores:
            return False
        batch = self._take(now, job, latency_ms, resident, line) if line or self._deadlines else (job,)
        uses = len(batch)
        if not uses:
            return True
        self.free_slots -= slots
        host.free_cores -= cores
        resident.uses += uses
        resident.running += uses
        self._running_requests += uses
        if self._deadlines:
            self._running[number] = deque(expected_releases(self._service[kind], now))
        if uses > 1:
            factor *= 1 + self.policies.batch_cost[resident.level][model] * (uses - 1)
            kind += self._models * self._levels * (uses - 1)
        events, sequence = self._events, self._sequence
        for at_ms, freed in early:
            heappush(events, (now + at_ms * factor, next(sequence), self._handle_release, (number, freed)))
        end = now + latency_ms * factor
        unsure = None
        if self._fails:
            unsure = batch, now, kind
        elif uses == 1:
            self._record((number, model, self.index, arrival, now, end, cold, kind))
        else:
            self._record_all(batch, now, end, kind)
        heappush(events, (end, next(sequence), self._handle_end, (number, resident, last, uses, unsure)))
        return True

    def _record_all(self, jobs: Sequence[Job], start: float, end: float, kind: int) -> None:
        for number, model, arrival, _, cold in jobs:
            self._record((number, model, self.index, arrival, start, end, cold, kind))

    def _take(
        self, now: float, job: Job, latency_ms: float, resident: ResidentModel, line: Line[Job] | None
    ) -> Sequence[Job]:
        """Take a request, or the first batch of a line; drop what cannot end in time, and return nothing then."""
        is_late = partial(self._is_late, now, latency_ms) if self._deadlines else None
        batch, late = self.ready.take(line, is_late) if line else ((job,), self._is_late(now, latency_ms, job))
        if not late:
            return batch
        for number, model, arrival, _, cold in batch:
            self._drop(number, model, arrival, cold=cold)
        self.end_use(now, resident, len(batch))
        if self.on_left:
            self.on_left(now)
        return ()

    def _is_late(self, now: float, latency_ms: float, job: Job) -> bool:
        """Return whether a request cannot end by its deadline if it starts now."""
        return not is_in_time(now, job[2] + self._slo_ms(job[0], job[1]), 0.0, latency_ms)

    def _release(self, now: float, released: tuple[int, Resources]) -> None:
        number, (slots, cores) = released
        self.free_slots += slots
        self.host.free_cores += cores
        if self._deadlines:
            self._running[number].popleft()
        if self._open or not self._is_alone:
            self._start_ready(now)

    def _end(self, now: float, execution: Execution) -> None:
        number, resident, (slots, cores), uses, unsure = execution
        self.free_slots += slots
        self.host.free_cores += cores
        self._outstanding[self.index] -= uses
        resident.running -= uses
        self._running_requests -= uses
        if self._deadlines:
            del self._running[number]
        if unsure:
            jobs, start, kind = unsure
            self._record_all(jobs, start, now, kind)
        self.end_use(now, resident, uses)
        if self._open or not self._is_alone:
            self._start_ready(now)
        if self.on_left:
            self.on_left(now)

    def reset(self, now: float) -> list[Job]:
        """Lose all memory and requests; those that run fail. Return those that wait, in the order of their arrival."""
        waiting = self.ready.clear() + [job for jobs in self._waiters.values() for job in jobs]
        running: list[Unsure | None] = [e[3][-1] for e in self._events if e[2] == self._handle_end]
        self._events[:] = [e for e in self._events if getattr(e[2], "__self__", None) is not self]
        heapify(self._events)
        for jobs, _, kind in filter(None, running):
            self._record_all(jobs, _NAN, now, kind % (self._models * self._levels))
        self._clear_memory(now)
        self._waiters.clear()
        self._running.clear()
        self._outstanding[self.index] = self._running_requests = 0
        self.free_slots, self.host.free_cores = self.host.spec.gpu_slots, self.host.spec.cpu_cores
        return sorted(waiting, key=lambda job: job[0])

    def _kind(self, model: int) -> int:
        return self.residents[model].level * self._models + model

    def _drop(self, number: int, model: int, arrival: float, *, cold: bool) -> None:
        self._outstanding[self.index] -= 1
        self._record((number, model, self.index, arrival, _NAN, _NAN, cold, model))


def _shape(job: Job) -> tuple[int, int]:
    """Return the key and the rows of a request: all requests of a model can share a batch."""
    return job[1], 1
