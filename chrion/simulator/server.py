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
  model with ready or running requests is not evicted; a load without enough memory waits until a model becomes idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chrion.manager.policies import Admit, Order, Rank, ResidentModel, WaitingModel, choose_victims
from chrion.simulator.metrics import BinnedAverage
from chrion.simulator.settings import ServerSpec
from chrion.simulator.variants import Variant

#: A request: its number, model, arrival in ms, random factor, and true if it waited for a load.
Job = tuple[int, int, float, float, bool]
#: The handler of an event: ``action(now_ms, payload)``.
Action = Callable[[float, Any], None]
_NAN = float("nan")


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
    """State that the servers share: the queue of events, and the inputs of routing and metrics."""

    #: ``push(time_ms, action, payload)`` adds an event to the engine's queue.
    push: Callable[[float, Action, Any], None]
    #: Requests at each server, waiting or running.
    outstanding: list[int]
    #: By model: the servers that hold its weights, or have a pending load of them.
    homes: list[list[int]]
    #: Loads by model.
    loads: list[int]
    #: ``record((number, model, server, arrival, start, end, cold))``; start and end are NaN for a dropped request.
    record: Callable[[tuple[float, ...]], None]
    #: ``journal(time_ms, event, server, model)`` is called for the events ``load``, ``loaded`` and ``evict``.
    journal: Callable[[float, str, int, int], None] | None = None


class Server:
    """The state of one server and its event handlers; the module describes the rules."""

    def __init__(
        self, index: int, spec: ServerSpec, variants: Sequence[Variant], policies: ServerPolicies, cluster: ClusterState
    ) -> None:
        self.index = index
        self.budget_bytes = spec.budget_bytes
        self.policies = policies
        self.cluster = cluster
        self.free_bytes = self.budget_bytes
        self.gpu_slots = self.free_slots = spec.gpu_slots
        self.cpu_cores = self.free_cores = spec.cpu_cores
        self.residents: dict[int, ResidentModel] = {}
        #: Models whose load has not started.
        self.cold: dict[int, WaitingModel] = {}
        self.loading: int | None = None
        self.loading_until_ms = 0.0
        self.loaded_mb = 0.0
        self.link_busy_ms = 0.0
        self.loads = 0
        self.evictions = 0
        self.memory = BinnedAverage()
        self._variants = variants
        self._bytes = [v.memory_bytes for v in variants]
        self._load_ms = [v.load_ms(spec.pcie_gb_per_s, spec.load_fixed_ms) for v in variants]
        self._latency_ms = [v.latency_ms for v in variants]
        self._work_ms = [_work_ms(v, spec) for v in variants]
        #: By model: GPU slots and cores that a request takes when it starts.
        self._needs = [(int(v.gpu_busy_ms > 0), v.cores) for v in variants]
        #: By model: slots and cores that a request releases before its end, and at its end; see :func:`releases`.
        self._early, self._last = map(list, zip(*map(releases, variants), strict=True))
        #: Uses of models before their last eviction.
        self._uses = [0] * len(variants)
        self._ready: deque[Job] = deque()
        #: Work of the ready requests; maintained only if admission uses deadlines.
        self._ready_ms = 0.0
        #: Requests that wait for a load, by model.
        self._waiters: dict[int, list[Job]] = {}
        for model, size in enumerate(self._bytes):
            if size == 0:
                self._add_resident(0.0, model)

    def preload(self, model: int) -> bool:
        """Put a model into memory before the run, not counted as a load; return false if it does not fit."""
        if model in self.residents or self._bytes[model] > self.free_bytes:
            return model in self.residents
        self.cluster.homes[model].append(self.index)
        self._reserve(0.0, self._bytes[model])
        self._add_resident(0.0, model)
        return True

    def offer(self, now: float, number: int, model: int, factor: float) -> None:
        """Accept or drop a request that arrives now."""
        self.cluster.outstanding[self.index] += 1
        resident = self.residents.get(model)
        dropped = self.policies.deadlines and not self._is_admitted(now, model)
        if dropped:
            self._drop(number, model, now, cold=resident is None)
        if resident is None:
            waiters = self._request_load(now, model)
            if not dropped:
                waiters.append((number, model, now, factor, True))
        elif not dropped:
            resident.in_use += 1
            self._add_ready((number, model, now, factor, False))
            self._start_ready(now)

    def _is_admitted(self, now: float, model: int) -> bool:
        wait_ms = self._ready_ms
        if model not in self.residents:
            link_ms = self.loading_until_ms - now if self.loading is not None else 0.0
            wait_ms = max(wait_ms, link_ms if model == self.loading else link_ms + self._load_ms[model])
        return self.policies.admit(now, now + self.policies.slo_ms[model], wait_ms, self._latency_ms[model])

    def _request_load(self, now: float, model: int) -> list[Job]:
        """Request a load, even for a dropped request: the next may be in time. Return the model's waiting requests."""
        waiters = self._waiters.get(model)
        if waiters is None:
            waiters = self._waiters[model] = []
            self.cluster.homes[model].append(self.index)
            self.cold[model] = WaitingModel(model, now)
        if model in self.cold:
            self.cold[model].demand_ms += self._latency_ms[model]
            self._load_next(now)
        return waiters

    def _load_next(self, now: float) -> None:
        """Start the next load if the link is free and there is, or can be made, enough memory."""
        if self.loading is not None or not self.cold:
            return
        model = min(self.cold.values(), key=self.policies.order).key
        if not self._free_memory(now, self._bytes[model] - self.free_bytes):
            return
        del self.cold[model]
        self._reserve(now, self._bytes[model])
        self.loading = model
        self.loading_until_ms = now + self._load_ms[model]
        self.link_busy_ms += self._load_ms[model]
        self.loaded_mb += self._variants[model].load_mb
        self.loads += 1
        self.cluster.loads[model] += 1
        self._log(now, "load", model)
        self.cluster.push(self.loading_until_ms, self._loaded, model)

    def _free_memory(self, now: float, missing_bytes: int) -> bool:
        if missing_bytes <= 0:
            return True
        if self.policies.next_use:
            for resident in self.residents.values():
                resident.next_use = self.policies.next_use(resident.key)
        victims = choose_victims(self.residents.values(), missing_bytes, self.policies.rank, now)
        for victim in victims or ():
            del self.residents[victim.key]
            self._uses[victim.key] = victim.uses
            self.cluster.homes[victim.key].remove(self.index)
            self._reserve(now, -victim.bytes)
            self.evictions += 1
            self._log(now, "evict", victim.key)
        return victims is not None

    def _loaded(self, now: float, model: int) -> None:
        self.loading = None
        resident = self._add_resident(now, model)
        self._log(now, "loaded", model)
        jobs = self._waiters.pop(model)
        resident.in_use = len(jobs)
        for job in jobs:
            self._add_ready(job)
        self._load_next(now)
        self._start_ready(now)

    def _add_ready(self, job: Job) -> None:
        self._ready.append(job)
        if self.policies.deadlines:
            self._ready_ms += self._work_ms[job[1]]

    def _start_ready(self, now: float) -> None:
        ready = self._ready
        while ready:
            slots, cores = self._needs[ready[0][1]]
            if slots > self.free_slots or cores > self.free_cores:
                return
            job = ready.popleft()
            if not self.policies.deadlines or self._starts_in_time(now, job):
                self._start(now, job, slots, cores)

    def _starts_in_time(self, now: float, job: Job) -> bool:
        """Drop a ready request that cannot end by its deadline; return whether it was kept."""
        number, model, arrival, _, cold = job
        self._ready_ms = self._ready_ms - self._work_ms[model] if self._ready else 0.0
        admitted = self.policies.admit(now, arrival + self.policies.slo_ms[model], 0.0, self._latency_ms[model])
        if not admitted:
            self._drop(number, model, arrival, cold=cold)
            self._finish_use(now, model)
        return admitted

    def _start(self, now: float, job: Job, slots: int, cores: int) -> None:
        number, model, arrival, factor, cold = job
        self.free_slots -= slots
        self.free_cores -= cores
        self.residents[model].uses += 1
        push = self.cluster.push
        for at_ms, freed in self._early[model]:
            push(now + at_ms * factor, self._release, freed)
        end = now + self._latency_ms[model] * factor
        push(end, self._end, model)
        self.cluster.record((number, model, self.index, arrival, now, end, cold))

    def _release(self, now: float, freed: tuple[int, int]) -> None:
        self.free_slots += freed[0]
        self.free_cores += freed[1]
        self._start_ready(now)

    def _end(self, now: float, model: int) -> None:
        slots, cores = self._last[model]
        self.free_slots += slots
        self.free_cores += cores
        self.cluster.outstanding[self.index] -= 1
        self._finish_use(now, model)
        self._start_ready(now)

    def _finish_use(self, now: float, model: int) -> None:
        """End a request's use of a model; if it becomes idle, start a load that waits for memory."""
        resident = self.residents[model]
        resident.in_use -= 1
        if not resident.in_use:
            resident.idle_since_ms = now
            if self.cold:
                self._load_next(now)

    def _drop(self, number: int, model: int, arrival: float, *, cold: bool) -> None:
        self.cluster.outstanding[self.index] -= 1
        self.cluster.record((number, model, self.index, arrival, _NAN, _NAN, cold))

    def _add_resident(self, now: float, model: int) -> ResidentModel:
        resident = self.residents[model] = ResidentModel(
            key=model,
            bytes=self._bytes[model],
            load_ms=self._load_ms[model],
            weight=self.policies.weights[model],
            pinned=self.policies.pinned[model] or self._bytes[model] == 0,
            uses=self._uses[model],
            idle_since_ms=now,
        )
        return resident

    def _reserve(self, now: float, size: int) -> None:
        self.free_bytes -= size
        self.memory.step(now, self.budget_bytes - self.free_bytes)

    def _log(self, now: float, event: str, model: int) -> None:
        if self.cluster.journal:
            self.cluster.journal(now, event, self.index, model)


def releases(variant: Variant) -> tuple[tuple[tuple[float, tuple[int, int]], ...], tuple[int, int]]:
    """Return the times at which a request releases its GPU slot and its cores.

    Returns:
        The releases before the end, as pairs of the time since the start in ms and (GPU slots, cores); and the GPU
        slots and cores that are released at the end.
    """
    end_ms = variant.latency_ms * (1 - 1e-9)
    freed: dict[float, list[int]] = {}
    if variant.gpu_busy_ms > 0:
        freed.setdefault(variant.gpu_busy_ms, [0, 0])[0] += 1
    for busy_ms in variant.core_busy_ms:
        freed.setdefault(busy_ms, [0, 0])[1] += 1
    early = tuple((at_ms, (slots, cores)) for at_ms, (slots, cores) in sorted(freed.items()) if at_ms < end_ms)
    late = [pair for at_ms, pair in freed.items() if at_ms >= end_ms]
    return early, (sum(slots for slots, _ in late), sum(cores for _, cores in late))


def _work_ms(variant: Variant, spec: ServerSpec) -> float:
    """Return the time in ms by which a request lengthens the queue of a server."""
    return max(sum(variant.core_busy_ms) / max(1, spec.cpu_cores), variant.gpu_busy_ms / max(1, spec.gpu_slots))
