"""One server: GPU memory, a PCIe link, GPU execution slots, CPU cores and the requests in front of them.

A request goes through these states::

    offered --weights in memory--> ready --slot and cores free--> running --latency over--> ended
       |                             ^
       +--weights missing--> cold --load done

- Ready requests start in the order in which they became ready; one whose slot or cores are missing holds up those
  behind it, so nobody starves.
- The link carries one load at a time, while the GPU and the cores work on. All requests for a model wait for its one
  load together.
- Memory is taken when a load starts. Evicting costs nothing: weights do not change, so nothing is written back. A model
  with ready or running requests stays; a load that finds no room waits until some model falls idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from chrion.simulator.metrics import BinnedAverage
from chrion.simulator.policies import Admit, Order, Rank, ResidentModel, Waiting, choose_victims
from chrion.simulator.settings import ServerSpec
from chrion.simulator.variants import Variant

#: A request: its number, model, arrival, random factor, and whether it waited for a load.
Job = tuple[int, int, float, float, bool]
#: What a server does when an event's time comes: ``action(now_ms, payload)``.
Action = Callable[[float, Any], None]
_NAN = float("nan")


@dataclass(frozen=True, slots=True)
class ServerPolicies:
    """The policies a server follows, and the figures they need."""

    rank: Rank
    order: Order
    admit: Admit
    #: Whether ``admit`` looks at deadlines; without, asking it is saved.
    deadlines: bool
    #: Time from arrival to deadline, by model.
    slo_ms: Sequence[float]
    #: Importance by model.
    weights: Sequence[float]
    #: Whether a model may never leave, by model.
    pinned: Sequence[bool]
    #: When a model is asked for next; only Belady's policy has it.
    next_use: Callable[[int], float] | None = None


@dataclass(slots=True)
class ClusterState:
    """What the servers share: the queue of events, and what routing and statistics look at."""

    #: ``push(time_ms, action, payload)`` puts an event into the engine's queue.
    push: Callable[[float, Action, Any], None]
    #: Requests at each server, waiting or running.
    outstanding: list[int]
    #: By model: the servers that hold its weights or are about to.
    homes: list[list[int]]
    #: Loads by model.
    loads: list[int]
    #: ``record((number, model, server, arrival, start, end, cold))``; start and end are NaN for a dropped request.
    record: Callable[[tuple[float, ...]], None]
    #: ``journal(time_ms, what, server, model)`` hears of ``load``, ``loaded`` and ``evict``.
    journal: Callable[[float, str, int, int], None] | None = None


class Server:
    """The state of one server and its reactions; the module says by which rules."""

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
        #: Models that wait for their load to start.
        self.cold: dict[int, Waiting] = {}
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
        self._needs = [(int(v.gpu_busy_ms > 0), v.cores) for v in variants]
        self._early, self._last = map(list, zip(*map(releases, variants), strict=True))
        self._uses = [0] * len(variants)
        self._ready: deque[Job] = deque()
        #: Work of the ready requests; kept only where admission asks for it.
        self._ready_ms = 0.0
        #: Requests by the model whose load they wait for.
        self._waiters: dict[int, list[Job]] = {}
        for model, size in enumerate(self._bytes):
            if size == 0:
                self._settle(0.0, model)

    def preload(self, model: int) -> bool:
        """Put a model into memory before time begins, if it fits; this counts as no load."""
        if model in self.residents or self._bytes[model] > self.free_bytes:
            return model in self.residents
        self.cluster.homes[model].append(self.index)
        self._take(0.0, self._bytes[model])
        self._settle(0.0, model)
        return True

    def offer(self, now: float, number: int, model: int, factor: float) -> None:
        """Take a request that arrives now."""
        self.cluster.outstanding[self.index] += 1
        resident = self.residents.get(model)
        dropped = self.policies.deadlines and not self._worth_taking(now, model)
        if dropped:
            self._drop(number, model, now, cold=resident is None)
        if resident is None:
            waiters = self._want(now, model)
            if not dropped:
                waiters.append((number, model, now, factor, True))
        elif not dropped:
            resident.in_use += 1
            self._ready_up((number, model, now, factor, False))
            self._start_ready(now)

    def _worth_taking(self, now: float, model: int) -> bool:
        wait_ms = self._ready_ms
        if model not in self.residents:
            link_ms = self.loading_until_ms - now if self.loading is not None else 0.0
            wait_ms = max(wait_ms, link_ms if model == self.loading else link_ms + self._load_ms[model])
        return self.policies.admit(now, now + self.policies.slo_ms[model], wait_ms, self._latency_ms[model])

    def _want(self, now: float, model: int) -> list[Job]:
        """See that the model gets loaded, for a dropped request as well: the next may be in time."""
        waiters = self._waiters.get(model)
        if waiters is None:
            waiters = self._waiters[model] = []
            self.cluster.homes[model].append(self.index)
            self.cold[model] = Waiting(model, now)
        if model in self.cold:
            self.cold[model].demand_ms += self._latency_ms[model]
            self._load_next(now)
        return waiters

    def _load_next(self, now: float) -> None:
        """Start the next load if the link is free and there is, or can be, room."""
        if self.loading is not None or not self.cold:
            return
        model = min(self.cold.values(), key=self.policies.order).key
        if not self._make_room(now, self._bytes[model] - self.free_bytes):
            return
        del self.cold[model]
        self._take(now, self._bytes[model])
        self.loading = model
        self.loading_until_ms = now + self._load_ms[model]
        self.link_busy_ms += self._load_ms[model]
        self.loaded_mb += self._variants[model].load_mb
        self.loads += 1
        self.cluster.loads[model] += 1
        self._note(now, "load", model)
        self.cluster.push(self.loading_until_ms, self._loaded, model)

    def _make_room(self, now: float, short: int) -> bool:
        if short <= 0:
            return True
        if self.policies.next_use:
            for resident in self.residents.values():
                resident.next_use = self.policies.next_use(resident.key)
        victims = choose_victims(self.residents.values(), short, self.policies.rank, now)
        for victim in victims or ():
            del self.residents[victim.key]
            self._uses[victim.key] = victim.uses
            self.cluster.homes[victim.key].remove(self.index)
            self._take(now, -victim.bytes)
            self.evictions += 1
            self._note(now, "evict", victim.key)
        return victims is not None

    def _loaded(self, now: float, model: int) -> None:
        self.loading = None
        resident = self._settle(now, model)
        self._note(now, "loaded", model)
        jobs = self._waiters.pop(model)
        resident.in_use = len(jobs)
        for job in jobs:
            self._ready_up(job)
        self._load_next(now)
        self._start_ready(now)

    def _ready_up(self, job: Job) -> None:
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
            if not self.policies.deadlines or self._still_worth(now, job):
                self._start(now, job, slots, cores)

    def _still_worth(self, now: float, job: Job) -> bool:
        """Drop a ready request whose deadline has come too near."""
        number, model, arrival, _, cold = job
        self._ready_ms = self._ready_ms - self._work_ms[model] if self._ready else 0.0
        worth = self.policies.admit(now, arrival + self.policies.slo_ms[model], 0.0, self._latency_ms[model])
        if not worth:
            self._drop(number, model, arrival, cold=cold)
            self._leave(now, model)
        return worth

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
        self._leave(now, model)
        self._start_ready(now)

    def _leave(self, now: float, model: int) -> None:
        """One request less uses the model; idle now, it may make room for a load."""
        resident = self.residents[model]
        resident.in_use -= 1
        if not resident.in_use:
            resident.idle_since_ms = now
            if self.cold:
                self._load_next(now)

    def _drop(self, number: int, model: int, arrival: float, *, cold: bool) -> None:
        self.cluster.outstanding[self.index] -= 1
        self.cluster.record((number, model, self.index, arrival, _NAN, _NAN, cold))

    def _settle(self, now: float, model: int) -> ResidentModel:
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

    def _take(self, now: float, size: int) -> None:
        self.free_bytes -= size
        self.memory.step(now, self.budget_bytes - self.free_bytes)

    def _note(self, now: float, what: str, model: int) -> None:
        if self.cluster.journal:
            self.cluster.journal(now, what, self.index, model)


def releases(variant: Variant) -> tuple[tuple[tuple[float, tuple[int, int]], ...], tuple[int, int]]:
    """When a request gives back what it holds.

    Returns:
        Pairs of time since the start in ms and (GPU slots, cores), before the end; and what is given back at the end.
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
    """How much longer a queue in front of the server gets by one request."""
    return max(sum(variant.core_busy_ms) / max(1, spec.cpu_cores), variant.gpu_busy_ms / max(1, spec.gpu_slots))
