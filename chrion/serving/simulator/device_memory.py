"""The memories of a server: those of its GPUs, and the link over which models are loaded into them from the host.

- The link carries one load at a time, while the GPUs and the cores continue. Each GPU proposes the first of its waiting
  loads; of the proposals for which there is memory, or for which it can be made, the first in the load order is carried
  out.
- Host memory holds weights that were loaded before. A load of others first reads them from the disk, while it occupies
  the link, and evicts the weights that no GPU of the server uses and that have been idle longest, then those in use.
- GPU memory is reserved when a load starts. Evictions take no time: weights do not change, so nothing is written back.
  A model with ready or running requests is not evicted; a load without enough memory waits until a model becomes idle,
  and the loads behind it wait as well.
- With several variants a model (shrinking), a model changes to a smaller variant at once. It changes to the next larger
  one by a load, which starts when a request for it ends, if the link is idle and the memory is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappush

from chrion.serving.manager.policies import ResidentModel, WaitingModel, choose_victims, order_fifo
from chrion.serving.manager.shrinking import Memory, make_room
from chrion.serving.simulator.averages import BinnedAverage
from chrion.serving.simulator.cluster_state import ClusterState
from chrion.serving.simulator.settings import ServerSpec

_INFINITY = float("inf")


class HostMemory:
    """The link of a server and its host memory before a disk.

    Args:
        spec: The server's resources.
        weights_mb: Weights by model, which host memory holds.
    """

    def __init__(self, spec: ServerSpec, weights_mb: Sequence[float]) -> None:
        self.spec = spec
        self.memories: list[DeviceMemory] = []
        #: The memory that is being loaded, and the loads of all memories that have not started.
        self.loading: DeviceMemory | None = None
        self.waiting_loads = 0
        self.disk_loads = 0
        #: Bytes of the weights in host memory, by model.
        self.held: dict[int, int] = {}
        self._weights_mb = weights_mb
        self._room_bytes = round(spec.host_memory_gb * 1e9)
        self.has_disk = self._room_bytes > 0

    def load_next(self, now: float) -> None:
        """Start the next load if the link is free and a load has memory."""
        if self.loading is not None or not self.waiting_loads:
            return
        if len(self.memories) == 1:
            self.memories[0].start_load(now, self.memories[0].first_cold())
            return
        proposals = [(memory, memory.first_cold()) for memory in self.memories if memory.cold]
        for memory, model in sorted(proposals, key=lambda proposal: proposal[0].load_order(proposal[1])):
            if memory.start_load(now, model):
                return

    def disk_ms(self, model: int, load_mb: float) -> float:
        """Return the time of the disk in a load: zero if the weights are in host memory."""
        if not self.has_disk or model in self.held:
            return 0.0
        return self.spec.disk_fixed_ms + load_mb / self.spec.disk_gb_per_s

    def fetch(self, model: int) -> None:
        """Put a model that is read from the disk into host memory, if it fits there; others leave until it does."""
        if model in self.held:
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
        for model in models if free else ():
            size = round(self._weights_mb[model] * 1e6)
            if model not in self.held and 0 < size <= free:
                self.held[model] = size
                free -= size

    def _last_use_ms(self, model: int) -> float:
        return max(memory.last_use_ms(model) for memory in self.memories)


class DeviceMemory:
    """The models in the memory of one GPU, those that wait for a load, and the load in progress.

    Args:
        index: The number of the GPU.
        host: Its server.
        load_ms: Time of a load over its link, by kind.
        cluster: What it shares with other servers.
    """

    def __init__(self, index: int, host: HostMemory, load_ms: Sequence[float], cluster: ClusterState) -> None:
        self.index = index
        self.host = host
        self.budget_bytes = host.spec.budget_bytes
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
        #: Models that have left the memory: the requests that this GPU has started for each, and its last use in ms.
        self._former: dict[int, tuple[int, float]] = {}
        self._is_fifo = cluster.policies.order is order_fifo
        #: The highest priority of the requests that wait for a load, by model, if requests have priorities.
        self._urgency: dict[int, int] = {}
        self._keep_alive_ms, self._expires = cluster.options.keep_alive_ms, cluster.options.keep_alive_ms < _INFINITY
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
        self.host.fill([model])
        self._expire_later(now, self._add_resident(now, kind))
        return True

    def _fits(self, model: int) -> bool:
        return self._table.bytes[model] <= self.free_bytes

    def first_cold(self) -> int:
        """Return the first model of those that wait for a load."""
        if self._urgency:
            return min(self.cold, key=self.load_order)
        if self._is_fifo or len(self.cold) == 1:
            return next(iter(self.cold))  # they are in the order of their first requests
        return min(self.cold.values(), key=self.policies.order).key

    def load_order(self, model: int) -> tuple[int, float]:
        """Return the numbers that order a waiting load."""
        return -self._urgency.get(model, 0), self.policies.order(self.cold[model])

    def start_load(self, now: float, model: int) -> bool:
        """Start the load of a model if there is, or can be made, enough memory; return whether there is."""
        kind = self._make_room(now, model)
        if kind is None:
            return False
        del self.cold[model]
        self.host.waiting_loads -= 1
        self._load(now, kind, self._table.bytes[kind], self.load_times[kind], self._table.load_mb[kind])
        return True

    def _load(self, now: float, kind: int, size: int, load_ms: float, load_mb: float) -> None:
        model = kind % self._models
        self.host.loading = self
        if self.host.has_disk:
            load_ms += self.host.disk_ms(model, load_mb)
            self.host.fetch(model)
        self._reserve(now, size)
        self.loading = kind
        self.loading_until_ms = now + load_ms
        self.link_busy_ms += load_ms
        self.loaded_mb += load_mb
        self.loads += 1
        self.cluster.loads[model] += 1
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
        self._former[resident.key] = resident.uses, resident.idle_since_ms

    def last_use_ms(self, model: int) -> float:
        """Return the time of the last use of a model on this GPU; infinity while it is used, -1 if it never was."""
        record = self.residents.get(model)
        loading = self.loading is not None and self.loading % self._models == model
        if loading or (record and record.in_use):
            return _INFINITY
        return record.idle_since_ms if record else self._former.get(model, (0, -1.0))[1]

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
            self._load(now, kind, missing, self.host.spec.load_fixed_ms + max(0.0, shorter_ms), load_mb)

    def _on_loaded(self, now: float, kind: int) -> None:
        """Handle the end of a load."""
        raise NotImplementedError

    def _finish_use(self, now: float, resident: ResidentModel) -> None:
        """End one use of a model."""
        resident.in_use -= 1
        if not resident.in_use:
            self._note_idle(now, resident)

    def _note_idle(self, now: float, resident: ResidentModel) -> None:
        """Start a load over the free link, now that a model is idle."""
        resident.idle_since_ms = now
        if self._expires:
            self._expire_later(now, resident)
        if self.host.loading is not None:
            return
        if self.host.waiting_loads:
            self.host.load_next(now)
        elif resident.level:
            self._grow(now, resident)

    def _expire_later(self, now: float, resident: ResidentModel) -> None:
        """Evict a model that is idle from now on after the keep-alive time, if it stays idle."""
        if self._expires and resident.bytes and not resident.pinned:
            at = now + self._keep_alive_ms
            heappush(self._events, (at, next(self._sequence), self._on_expiry, (resident, now)))

    def _on_expiry(self, now: float, expected: tuple[ResidentModel, float]) -> None:
        resident, idle_since_ms = expected
        present = self.residents.get(resident.key) is resident
        if present and not resident.in_use and resident.idle_since_ms == idle_since_ms:
            self._evict(now, (resident,))
            self._reserve(now, 0)

    def _add_resident(self, now: float, kind: int) -> ResidentModel:
        level, model = divmod(kind, self._models)
        size, load_ms = self._table.bytes[kind], self.load_times[kind]
        weight, pinned = self.policies.weights[model], self.policies.pinned[model]
        uses, _ = self._former.pop(model, (0, 0.0))
        resident = ResidentModel(model, size, load_ms, weight, pinned, 0, uses, now, _INFINITY, level)
        self.residents[model] = resident
        return resident

    def _reserve(self, now: float, size: int) -> None:
        self.free_bytes -= size
        self.memory.step(now, self.budget_bytes - self.free_bytes)

    def _log(self, now: float, event: str, kind: int) -> None:
        if self.cluster.journal:
            self.cluster.journal(now, event, self.index, kind)

    def _clear_memory(self, now: float, awaited: Iterable[int]) -> None:
        """Lose the content of the memory, and the loads of models that requests await."""
        for resident in self.residents.values():
            self._note_departure(resident)
        for model in {*awaited, *(model for model, resident in self.residents.items() if resident.bytes)}:
            self.cluster.homes[model].remove(self.index)
        self.residents.clear()
        self.host.waiting_loads -= len(self.cold)
        self.cold.clear()
        self._urgency.clear()
        self.loading = self.host.loading = None
        self.free_bytes = self.budget_bytes
        self._reserve(now, 0)
        self._log(now, "reset", 0)
