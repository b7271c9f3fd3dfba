"""The memory of one GPU, and the link over which models are loaded into it.

- The link carries one load at a time, while the GPU and the cores continue.
- Memory is reserved when a load starts. Evictions take no time: weights do not change, so nothing is written back. A
  model with ready or running requests is not evicted; a load without enough memory waits until a model becomes idle,
  and the loads behind it wait as well.
- With several variants a model (shrinking), a model changes to a smaller variant at once. It changes to the next larger
  one by a load, which starts when a request for it ends, if the link is idle and the memory is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappush

from chrion.serving.manager.policies import ResidentModel, WaitingModel, choose_victims
from chrion.serving.manager.shrinking import Memory, make_room
from chrion.serving.simulator.averages import BinnedAverage
from chrion.serving.simulator.cluster_state import ClusterState
from chrion.serving.simulator.settings import ServerSpec

_INFINITY = float("inf")


class DeviceMemory:
    """The models in the memory of one GPU, those that wait for a load, and the load in progress.

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
        self._models = cluster.table.models
        self._levels = len(cluster.table.variants)
        #: Time of a load by kind; servers with equal links share it.
        self.load_times = load_ms
        self._fixed_ms = spec.load_fixed_ms
        #: Requests that this server has started for models that have left the memory.
        self._former_uses: dict[int, int] = {}
        self._events, self._sequence = cluster.events, cluster.sequence

    def preload(self, model: int, *, now: float = 0.0, shrink: bool = False) -> bool:
        """Put a model into memory, not counted as a load; return false if it does not fit.

        Args:
            model: The model.
            now: The time in ms: the beginning of the run, or of this server's work.
            shrink: True if models change to smaller variants for it; false to use free memory only.
        """
        if model in self.residents:
            return True
        kind = self._make_room(now, model, evict=False) if shrink or self._fits(model) else None
        if kind is None:
            return False
        if self._table.bytes[model]:
            self.cluster.homes[model].append(self.index)
        self._reserve(now, self._table.bytes[kind])
        self._add_resident(now, kind)
        return True

    def _fits(self, model: int) -> bool:
        return self._table.bytes[model] <= self.free_bytes

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
        heappush(self._events, (self.loading_until_ms, next(self._sequence), self._on_loaded, kind))

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
            del self.residents[model]
            self._note_departure(victim)
            self.cluster.homes[model].remove(self.index)
            self.free_bytes += victim.bytes
            self.evictions += 1
            self._log(now, "evict", victim.level * self._models + model)

    def _note_departure(self, resident: ResidentModel) -> None:
        """Keep what outlasts the eviction of a model."""
        self._former_uses[resident.key] = resident.uses

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

    def _on_loaded(self, now: float, kind: int) -> None:
        """Handle the end of a load."""
        raise NotImplementedError

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

    def _add_resident(self, now: float, kind: int) -> ResidentModel:
        level, model = divmod(kind, self._models)
        size, load_ms = self._table.bytes[kind], self.load_times[kind]
        weight, pinned = self.policies.weights[model], self.policies.pinned[model]
        uses = self._former_uses.pop(model, 0)
        resident = ResidentModel(model, size, load_ms, weight, pinned, 0, uses, now, _INFINITY, level)
        self.residents[model] = resident
        return resident

    def _reserve(self, now: float, size: int) -> None:
        self.free_bytes -= size
        self.memory.step(now, self.budget_bytes - self.free_bytes)

    def _log(self, now: float, event: str, kind: int) -> None:
        if self.cluster.journal:
            self.cluster.journal(now, event, self.index, kind)
