"""Servers and their GPUs, which carry out in virtual time what :mod:`chrion.serving.manager.manager` decides.

Beyond what a device decides:

- Weights that are not in host memory are read from a network store (:mod:`chrion.serving.simulator.network_store`), if
  there is one, in place of the disk. A load occupies the link meanwhile.
- Evictions take no time: weights do not change, so nothing is written back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapify, heappush
from typing import Any

from chrion.serving.manager.device_memory import Host
from chrion.serving.manager.host_memory import HostMemory
from chrion.serving.manager.manager import Execution, ModelManager
from chrion.serving.manager.policies import ResidentModel
from chrion.serving.manager.queue_estimate import Service
from chrion.serving.manager.records import Reason
from chrion.serving.simulator.averages import BinnedAverage
from chrion.serving.simulator.cluster_state import ClusterState, Job
from chrion.serving.simulator.settings import ServerSpec

#: A batch whose end is not certain: the requests, the time of their start, and their kind.
Unsure = tuple[Sequence[Job], float, int]

_NAN, _INFINITY = float("nan"), float("inf")


class SimulatedHost(Host):
    """A server: the link and the cores of its GPUs, and its host memory before a disk.

    Args:
        index: The server's number.
        spec: Its resources.
        cluster: What it shares with other servers.
    """

    def __init__(self, index: int, spec: ServerSpec, cluster: ClusterState) -> None:
        disk_gb_per_s = _INFINITY if cluster.store else spec.disk_gb_per_s
        room_bytes = round(spec.host_memory_gb * 1e9)
        memory = HostMemory(room_bytes, spec.disk_fixed_ms, disk_gb_per_s, cluster.table.load_mb)
        super().__init__(spec.cpu_cores, memory)
        self.index = index
        self.spec = spec
        #: True if requests are sent to this server.
        self.available = True
        #: True if it is powered on; it may be unavailable because it starts, fails or drains.
        self.on = True
        #: The time at which it was switched on, and the time for which it was on before.
        self.on_since_ms = 0.0
        self.on_ms = 0.0


class Server(ModelManager[Job]):
    """One GPU over time.

    Args:
        index: The number of the GPU.
        host: Its server.
        load_ms: Time of a load over its link, by level and model.
        cluster: What it shares with other servers.
    """

    def __init__(
        self, index: int, host: SimulatedHost, load_ms: Sequence[Sequence[float]], cluster: ClusterState
    ) -> None:
        policies, table, spec = cluster.policies, cluster.table, host.spec
        super().__init__(
            host,
            policies,
            budget_bytes=spec.budget_bytes,
            slots=spec.gpu_slots,
            sizes=table.sizes,
            service=table.service,
            shape=_shape,
            tickets=cluster.sequence,
            outstanding=cluster.outstanding,
            index=index,
            is_alone=spec.gpus == 1,
        )
        self.host: SimulatedHost = host
        self.cluster = cluster
        self.loaded_mb = 0.0
        self.link_busy_ms = 0.0
        self.loads = 0
        self.evictions = 0
        self.memory = BinnedAverage()
        #: Time of a load by level and model; servers with equal links share it.
        self.load_ms = load_ms
        self._models, self._levels = table.models, len(table.variants)
        self._fails = spec.mtbf_h > 0 or policies.fail_together
        self._priorities = cluster.priorities
        # A reference is faster than a look-up of the method for each event.
        self._events, self._sequence, self._record = cluster.events, cluster.sequence, cluster.record
        self._handle_end, self._handle_release = self.end, self.release

    def preload(self, model: int, *, now: float = 0.0, shrink: bool = False) -> bool:
        """Put a model into memory, not counted as a load; return false if it does not fit.

        Args:
            model: The model.
            now: The time in ms: the beginning of the run, or of this server's work.
            shrink: True if models change to smaller variants for it; false to use free memory only.
        """
        if model in self.residents:
            return True
        size = self.sizes[0][model]
        room = self.make_room(now, model, evict=False) if shrink or size <= self.free_bytes else None
        if shrink:
            self.short_at_ms = -_INFINITY  # no load has been
        if room is None:
            return False
        if size:
            self._note_wanted(model)
        for other, level in room.shrunk:
            self.free_bytes += other.bytes
            self._hold(other, level)
            other.load_ms = self.load_ms[level][other.key]
        resident = self._put(now, model, room.level)
        self._note_memory(now)
        self.host.memory.fill([model])
        self.host.memory.note_use(model)
        self._note_idle(now, resident)
        return True

    def _put(self, now: float, model: int, level: int) -> ResidentModel:
        """Put a model into memory without a load."""
        resident = self.residents[model] = self._resident_of(model)
        self._hold(resident, level)
        resident.load_ms = self.load_ms[level][model]
        resident.idle_since_ms, resident.in_use, resident.running = now, 0, 0
        return resident

    def reset(self, now: float) -> list[Job]:
        """Lose all memory and requests; return those that waited or ran, in the order of their arrival."""
        running = [job for e in self._events if e[2] == self._on_unsure_end for job in e[3][1][0]]
        self._events[:] = [e for e in self._events if getattr(e[2], "__self__", None) is not self]
        heapify(self._events)
        loading = () if self.loading is None else (self.loading,)
        for model in (*self.residents, *self.cold, *self.reserved, *loading):
            if self.sizes[0][model] and self.index in self.cluster.homes[model]:
                self.cluster.homes[model].remove(self.index)
        waiting = self.lose()
        if self.cluster.store:
            self.cluster.store.cancel(now, self.index)
        self._note_memory(now)
        self._log(now, "reset", 0)
        return sorted(running + waiting, key=lambda job: job[0])

    def _without_load(self, model: int) -> ResidentModel | None:
        return None if self.sizes[0][model] else self._put(0.0, model, 0)

    def _due_ms(self, job: Job) -> float:
        return job[2] + self.cluster.objectives.of_request(job[0], job[1])

    def _waiter(self, job: Job) -> Job:
        return *job[:4], True

    def _call_at(self, at_ms: float, handler: Callable[[float, Any], None], payload: Any) -> None:
        heappush(self._events, (at_ms, next(self._sequence), handler, payload))

    def _begin(self, now: float, batch: Sequence[Job], resident: ResidentModel, service: Service) -> None:
        number, model, arrival, factor, cold = batch[0]
        _, _, latency_ms, early, last = service
        kind, uses = model, len(batch)
        if self._levels > 1:
            kind += resident.level * self._models
            factor = factor[resident.level]
        if uses > 1:
            factor *= 1 + self.rules.batch_cost[resident.level][model] * (uses - 1)
            kind += self._models * self._levels * (uses - 1)
        events, sequence = self._events, self._sequence
        for at_ms, freed in early:
            heappush(events, (now + at_ms * factor, next(sequence), self._handle_release, (number, freed)))
        end = now + latency_ms * factor
        execution = number, resident, last, uses
        if self._fails:
            heappush(events, (end, next(sequence), self._on_unsure_end, (execution, (batch, now, kind))))
            return
        if uses == 1:
            self._record((number, model, self.index, arrival, now, end, cold, kind))
        else:
            self._record_all(batch, now, end, kind)
        heappush(events, (end, next(sequence), self._handle_end, execution))

    def _on_unsure_end(self, now: float, ended: tuple[Execution, Unsure]) -> None:
        execution, (jobs, start, kind) = ended
        self._record_all(jobs, start, now, kind)
        self.end(now, execution)

    def _record_all(self, jobs: Sequence[Job], start: float, end: float, kind: int) -> None:
        for number, model, arrival, _, cold in jobs:
            self._record((number, model, self.index, arrival, start, end, cold, kind))

    def _refuse(self, now: float, jobs: Sequence[Job], reason: Reason) -> None:
        del now, reason
        for number, model, arrival, _, cold in jobs:
            is_cold = cold or model not in self.residents
            self._record((number, model, self.index, arrival, _NAN, _NAN, is_cold, model))

    def _load_times(self, model: int) -> dict[int, float]:
        return {level: row[model] for level, row in enumerate(self.load_ms)}

    def _begin_load(self, now: float, resident: ResidentModel) -> None:
        model, level, memory = resident.key, resident.level, self.host.memory
        kind, load_mb = level * self._models + model, self.cluster.table.load_mb[level][model]
        resident.load_ms = self.load_ms[level][model]
        load_ms = resident.load_ms + memory.disk_ms(model, level)
        store = self.cluster.store if memory.misses(model) else None
        self._note_memory(now)
        self.link_busy_ms += load_ms
        self.loaded_mb += load_mb
        self.loads += 1
        self.cluster.loads[model] += 1
        self._log(now, "load", kind)
        if store:
            done = partial(self._on_read, now, kind, load_ms)
            store.begin(now, self.index, load_mb, self.host.spec.disk_gb_per_s, done)
        else:
            self._transfer(now, kind, load_ms)

    def _on_read(self, began: float, kind: int, load_ms: float, now: float) -> None:
        self.link_busy_ms += now - began
        self._transfer(now, kind, load_ms)

    def _transfer(self, now: float, kind: int, load_ms: float) -> None:
        self.loading_until_ms = now + load_ms
        heappush(self._events, (self.loading_until_ms, next(self._sequence), self._on_loaded, kind))

    def _on_loaded(self, now: float, kind: int) -> None:
        self._log(now, "loaded", kind)
        self.end_load(now)

    def _note_unload(self, now: float, resident: ResidentModel, level: int, cause: str) -> None:
        del level
        if cause in {"evict", "expire"}:
            self.cluster.homes[resident.key].remove(self.index)
            self.evictions += 1
        if cause != "evict":  # else another model takes what it frees
            self._note_memory(now)
        self._log(now, cause, resident.level * self._models + resident.key)

    def _note_wanted(self, model: int) -> None:
        self.cluster.homes[model].append(self.index)

    def _note_memory(self, now: float) -> None:
        self.cluster.free[self.index] = self.free_bytes
        self.memory.step(now, self.budget_bytes - self.free_bytes)

    def _log(self, now: float, event: str, kind: int) -> None:
        if self.cluster.journal:
            self.cluster.journal(now, event, self.index, kind)


def _shape(job: Job) -> tuple[int, int]:
    """Return the key and the rows of a request: all requests of a model can share a batch."""
    return job[1], 1
