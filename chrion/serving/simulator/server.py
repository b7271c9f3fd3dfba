"""One server: GPU execution slots, CPU cores and the requests that wait for them, beside its memory.

The states of a request::

    offered --weights in memory--> ready --slot and cores free--> running --latency over--> ended
       |                             ^
       +--weights missing--> cold --load done

- Ready requests start in the order in which they became ready. A request whose slot or cores are not free blocks the
  requests behind it, so no request starves.
- All requests for a model wait for the same load; see :mod:`chrion.serving.simulator.device_memory`.

Priorities, several GPUs, failures and the like need :class:`chrion.serving.simulator.general_server.GeneralServer`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappush
from typing import Any

from chrion.serving.manager.policies import ResidentModel, WaitingModel, rounding_ms
from chrion.serving.manager.queue_estimate import QueuedRequest, Release, expected_start
from chrion.serving.simulator.cluster_state import ClusterState, Job
from chrion.serving.simulator.device_memory import DeviceMemory
from chrion.serving.simulator.service import Resources
from chrion.serving.simulator.settings import ServerSpec

_NAN, _INFINITY = float("nan"), float("inf")


class Server(DeviceMemory):
    """The state of one server and its event handlers; the module describes the rules.

    Args:
        index: The server's number.
        spec: Its resources.
        load_ms: Time of a load over its link, by kind.
        cluster: What it shares with other servers.
    """

    def __init__(self, index: int, spec: ServerSpec, load_ms: Sequence[float], cluster: ClusterState) -> None:
        super().__init__(index, spec, load_ms, cluster)
        self.gpu_slots = self.free_slots = spec.gpu_slots
        self.cpu_cores = self.free_cores = spec.cpu_cores
        self._deadlines = cluster.policies.deadlines
        self._service = cluster.table.service
        self._ready: deque[Job] = deque()
        #: Requests that wait for a load, by model.
        self._waiters: dict[int, list[Job]] = {}
        #: Expected releases of each running request, by its number; maintained only if admission uses deadlines.
        self._running: dict[int, deque[Release]] = {}
        # A reference is faster than a look-up of the method for each event.
        self._handle_end, self._handle_release = self._end, self._release
        self._record, self._outstanding = cluster.record, cluster.outstanding

    @property
    def is_on(self) -> bool:
        """Whether the server is switched on."""
        return True

    def offer(self, now: float, number: int, model: int, factor: Any) -> None:
        """Accept or drop a request that arrives now."""
        resident = self.residents.get(model)
        if resident is None and not self._table.bytes[model]:
            resident = self._add_resident(0.0, model)  # a variant without GPU memory is never loaded
        self._outstanding[self.index] += 1
        if self._deadlines and not self._is_admitted(now, now + self._slo_ms(number, model), number, model):
            self._drop(number, model, now, cold=resident is None)
            if resident is None:
                self._request_load(now, model)
        elif resident is None:
            self._request_load(now, model).append((number, model, now, factor, True))
        else:
            resident.in_use += 1
            job = (number, model, now, factor, False)
            if self._ready or not self._start(now, job, resident):
                self._ready.append(job)

    def _slo_ms(self, number: int, model: int) -> float:
        """Return the time from the arrival of a request to its deadline."""
        return self.cluster.objectives.of_request(number, model)

    def _is_admitted(self, now: float, deadline: float, number: int, model: int) -> bool:
        if deadline == _INFINITY:
            return True
        latency_ms, admit = self._table.latency_ms, self.policies.admit
        resident = self.residents.get(model)
        if resident is not None:
            kind = resident.level * self._models + model
            return admit(now, deadline, self._queue_wait_ms(now, number, kind), latency_ms[kind])
        link_ms, loads = self._link_wait_ms(now), self._possible_loads(model)
        return any(
            admit(now, deadline, max(self._queue_wait_ms(now, number, kind), link_ms + load_ms), latency_ms[kind])
            for kind, load_ms in loads.items()
        )

    def _link_wait_ms(self, now: float) -> float:
        """Return the remaining time of the load in progress."""
        return self.loading_until_ms - now if self.loading is not None else 0.0

    def _possible_loads(self, model: int) -> dict[int, float]:
        """Return the kinds in which a missing model may be loaded next, and the time from the free link to the end."""
        if self.loading is not None and self.loading % self._models == model:
            return {self.loading: 0.0}
        return {kind: self.load_times[kind] for kind in range(model, self._levels * self._models, self._models)}

    def _queue_wait_ms(self, now: float, number: int, kind: int) -> float:
        """Return the expected wait of a request that becomes ready now."""
        free, running = self._resources()
        ahead = map(self._queued, self._jobs_ahead(number))
        return expected_start(now, free, running, ahead, self._service[kind][:2]) - now

    def _resources(self) -> tuple[tuple[int, int], list[Release]]:
        """Return the free slots and cores, and the expected releases of others."""
        running = [release for releases in self._running.values() for release in releases]
        return (self.free_slots, self.free_cores), running

    def _jobs_ahead(self, number: int) -> Iterable[Job]:
        """Return the ready requests that would start before a request."""
        del number
        return self._ready

    def _queued(self, job: Job) -> QueuedRequest:
        kind = self._kind(job[1])
        latest = job[2] + self._slo_ms(job[0], job[1]) - self._table.latency_ms[kind]
        releases = tuple(self._expected_releases(0.0, kind))
        return QueuedRequest(*self._service[kind][:2], releases, latest + rounding_ms(latest))

    def _expected_releases(self, start: float, kind: int) -> Iterator[Release]:
        _, _, latency_ms, early, last = self._service[kind]
        for at_ms, freed in early:
            yield Release(start + at_ms, *freed)
        yield Release(start + latency_ms, *last)

    def _request_load(self, now: float, model: int) -> list[Job]:
        """Request a load, even for a dropped request: the next may be in time. Return the model's waiting requests."""
        waiters = self._waiters.get(model)
        if waiters is None:
            waiters = self._waiters[model] = []
            self.cluster.homes[model].append(self.index)
            self.cold[model] = WaitingModel(model, now)
        waiting = self.cold.get(model)
        if waiting:
            waiting.demand_ms += self._table.latency_ms[model]
            if self.loading is None:
                self._load_next(now)
        return waiters

    def _on_loaded(self, now: float, kind: int) -> None:
        self.loading = None
        level, model = divmod(kind, self._models)
        self._log(now, "loaded", kind)
        resident = self.residents.get(model)
        if resident is not None:  # it has grown
            resident.level, resident.bytes, resident.load_ms = level, self._table.bytes[kind], self.load_times[kind]
            self._finish_use(now, resident)
        else:
            resident = self._add_resident(now, kind)
            jobs = self._waiters.pop(model)
            resident.in_use = len(jobs)
            self._add_waiting(now, resident, jobs)
        self._load_next(now)
        self._start_ready(now)  # a model that has grown may need fewer cores now

    def _add_waiting(self, now: float, resident: ResidentModel, jobs: Sequence[Job]) -> None:
        """Add the requests that waited for a load to those that are ready."""
        del now, resident
        self._ready.extend(jobs)

    def _start_ready(self, now: float) -> None:
        """Start ready requests while the slots and cores of the first one are free."""
        ready, residents = self._ready, self.residents
        while ready:
            job = ready[0]
            if not self._start(now, job, residents[job[1]]):
                return
            ready.popleft()

    def _start(self, now: float, job: Job, resident: ResidentModel) -> bool:
        """Start the first of the ready requests, or drop it; return false if its slot or cores are not free."""
        number, model, arrival, factor, cold = job
        kind = model
        if self._levels > 1:
            kind += resident.level * self._models
            factor = factor[resident.level]
        slots, cores, latency_ms, early, last = self._service[kind]
        if slots > self.free_slots or cores > self.free_cores:
            return False
        if self._deadlines and not self._starts_in_time(now, job, kind, resident):
            return True
        self.free_slots -= slots
        self.free_cores -= cores
        resident.uses += 1
        events, sequence = self._events, self._sequence
        for at_ms, freed in early:
            heappush(events, (now + at_ms * factor, next(sequence), self._handle_release, (number, freed)))
        end = now + latency_ms * factor
        heappush(events, (end, next(sequence), self._handle_end, (number, resident, last)))
        self._record((number, model, self.index, arrival, now, end, cold, kind))
        return True

    def _starts_in_time(self, now: float, job: Job, kind: int, resident: ResidentModel) -> bool:
        """Drop a ready request that cannot end by its deadline; return whether it was kept."""
        number, model, arrival, _, cold = job
        deadline = arrival + self._slo_ms(number, model)
        admitted = self.policies.admit(now, deadline, 0.0, self._table.latency_ms[kind])
        if admitted:
            self._running[number] = deque(self._expected_releases(now, kind))
        else:
            self._drop(number, model, arrival, cold=cold)
            self._finish_use(now, resident)
        return admitted

    def _release(self, now: float, released: tuple[int, Resources]) -> None:
        number, (slots, cores) = released
        self.free_slots += slots
        self.free_cores += cores
        if self._deadlines:
            self._running[number].popleft()
        if self._ready:
            self._start_ready(now)

    def _end(self, now: float, ended: tuple[int, ResidentModel, Resources]) -> None:
        number, resident, (slots, cores) = ended
        self.free_slots += slots
        self.free_cores += cores
        self._outstanding[self.index] -= 1
        if self._deadlines:
            del self._running[number]
        resident.in_use -= 1
        if not resident.in_use:
            resident.idle_since_ms = now
            if self.loading is None and (self.cold or resident.level):
                self._use_link(now, resident)
        if self._ready:
            self._start_ready(now)

    def _kind(self, model: int) -> int:
        return self.residents[model].level * self._models + model

    def _drop(self, number: int, model: int, arrival: float, *, cold: bool) -> None:
        self._outstanding[self.index] -= 1
        self._record((number, model, self.index, arrival, _NAN, _NAN, cold, model))
