"""The memories of a server: those of its GPUs, and the link over which models are loaded into them from the host.

The rules of one memory are those of :mod:`chrion.serving.manager.device_memory`. Beyond them:

- The link carries one load at a time, while the GPUs and the cores continue. Each GPU proposes the first of its waiting
  loads; of the proposals for which there is memory, or for which it can be made, the first in the load order is carried
  out.
- Host memory holds weights that were loaded before. A load of others first reads them from the disk, or from a network
  store (:mod:`chrion.serving.simulator.network_store`), while it occupies the link, and evicts the weights that no GPU
  of the server uses and that have been idle longest, then those in use.
- Evictions take no time: weights do not change, so nothing is written back.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from heapq import heappush

from chrion.serving.manager.device_memory import DeviceMemory
from chrion.serving.manager.policies import ResidentModel
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
        self.memories: list[GpuMemory] = []
        #: The memory that is being loaded, and the loads of all memories that have not started.
        self.loading: GpuMemory | None = None
        self.waiting_loads = 0
        self.disk_loads = 0
        #: Bytes of the weights in host memory, by model.
        self.held: dict[int, int] = {}
        self._weights_mb = weights_mb
        self._room_bytes = round(spec.host_memory_gb * 1e9)
        self.has_disk = self._room_bytes > 0

    def load_next(self, now: float) -> None:
        """Start the next load if the link is free and a load has memory."""
        if self.loading is not None:
            return
        if len(self.memories) == 1:
            self.memories[0].start_next(now)
            return
        proposals = [(memory, memory.first_cold()) for memory in self.memories if memory.cold]
        for memory, model in sorted(proposals, key=lambda proposal: proposal[0].load_order(proposal[1])):
            if memory.start_load(now, model):
                return
        any(memory.load_reserved(now) for memory in self.memories)

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


class GpuMemory(DeviceMemory):
    """The memory of one GPU, over time.

    Args:
        index: The number of the GPU.
        host: Its server.
        load_ms: Time of a load over its link, by kind.
        cluster: What it shares with other servers.
    """

    def __init__(self, index: int, host: HostMemory, load_ms: Sequence[float], cluster: ClusterState) -> None:
        policies, table = cluster.policies, cluster.table
        super().__init__(host.spec.budget_bytes, policies.rank, policies.order, table.sizes, policies.next_use)
        self.prefetch = policies.prefetch
        self.index = index
        self.host = host
        self.policies = policies
        self.cluster = cluster
        self.loaded_mb = 0.0
        self.link_busy_ms = 0.0
        self.loads = 0
        self.evictions = 0
        self.memory = BinnedAverage()
        self._table = table
        self._models = table.models
        self._levels = len(table.variants)
        #: Time of a load by kind; servers with equal links share it.
        self.load_ms = load_ms
        #: Models that have been in memory, with the requests that this GPU has started for each and its last use.
        self._known: dict[int, ResidentModel] = {}
        self._keep_alive_ms, self._expires = policies.keep_alive_ms, policies.keep_alive_ms < _INFINITY
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
        size = self.sizes[0][model]
        room = self.make_room(now, model, evict=False) if shrink or size <= self.free_bytes else None
        if shrink:
            self.short_at_ms = -_INFINITY  # no load has been
        if room is None:
            return False
        if size:
            self.cluster.homes[model].append(self.index)
        for resident, level in room.shrunk:
            self.free_bytes += resident.bytes - self.sizes[level][resident.key]
            self._set_level(resident, level)
        self._reserve(now, self.sizes[room.level][model])
        self.host.fill([model])
        self._expire_later(now, self._add_resident(now, model, room.level))
        return True

    def link_ms(self, now: float) -> float:
        """Return the time until the end of the load in progress."""
        other = self.host.loading
        return other.loading_until_ms - now if other else 0.0

    def load_times(self, model: int) -> dict[int, float]:
        """Return the time of a load of each variant."""
        load_mb, kinds = self._table.load_mb, range(model, self._levels * self._models, self._models)
        return {i: self.load_ms[kind] + self.host.disk_ms(model, load_mb[kind]) for i, kind in enumerate(kinds)}

    def load(self, now: float, model: int, level: int) -> None:
        """Start a load, for which there is memory."""
        kind = level * self._models + model
        load_ms, load_mb = self.load_ms[kind], self._table.load_mb[kind]
        self.loading, self.loading_level, self.host.loading = model, level, self
        if self.cold.pop(model, None):
            self.host.waiting_loads -= 1
        elif model not in self.reserved:
            self.cluster.homes[model].append(self.index)
        store = self.cluster.store if self.host.has_disk and model not in self.host.held else None
        if self.host.has_disk:
            load_ms += self.host.disk_ms(model, 0.0 if store else load_mb)
            self.host.fetch(model)
        changes = self.reserved.pop(model, None) is not None
        self._reserve(now, 0 if changes else self._table.bytes[kind])
        self.link_busy_ms += load_ms
        self.loaded_mb += load_mb
        self.loads += 1
        self.cluster.loads[model] += 1
        self._log(now, "load", kind)
        loaded = (kind, changes)
        if store:
            done = partial(self._on_read, now, loaded, load_ms)
            store.begin(now, self.index, load_mb, self.host.spec.disk_gb_per_s, done)
        else:
            self._transfer(now, loaded, load_ms)

    def _on_read(self, began: float, loaded: tuple[int, bool], load_ms: float, now: float) -> None:
        self.link_busy_ms += now - began
        self._transfer(now, loaded, load_ms)

    def _transfer(self, now: float, loaded: tuple[int, bool], load_ms: float) -> None:
        self.loading_until_ms = now + load_ms
        heappush(self._events, (self.loading_until_ms, next(self._sequence), self._on_loaded, loaded))

    def larger(self, now: float, model: int) -> int | None:
        """Return the first variant for which memory is free, of a missing model or before that of an idle one."""
        del now
        resident = self.residents.get(model)
        if model in self.reserved or (resident and resident.in_use):
            return None
        free = self.free_bytes + (resident.bytes if resident else 0)
        levels = range(resident.level if resident else self._levels)
        return next((level for level in levels if self.sizes[level][model] <= free), None)

    def evict(self, now: float, resident: ResidentModel) -> None:
        """Remove a model; the memory over time is updated when another one takes what it frees."""
        model = resident.key
        del self.residents[model]
        self.cluster.homes[model].remove(self.index)
        self.free_bytes += resident.bytes
        self.evictions += 1
        self._log(now, "evict", resident.level * self._models + model)

    def last_use_ms(self, model: int) -> float:
        """Return the time of the last use of a model on this GPU; infinity while it is used, -1 if it never was."""
        known = self._known.get(model)
        if self.loading == model or (known and known.in_use and model in self.residents):
            return _INFINITY
        return known.idle_since_ms if known else -1.0

    def change(self, now: float, resident: ResidentModel, level: int) -> None:
        """Remove a model from memory, and reserve that of another variant."""
        model = resident.key
        del self.residents[model]
        self.reserved[model] = level
        self._log(now, "shrink" if level > resident.level else "grow", level * self._models + model)
        self._reserve(now, self.sizes[level][model] - resident.bytes)

    def _set_level(self, resident: ResidentModel, level: int) -> None:
        kind = level * self._models + resident.key
        resident.level, resident.bytes, resident.load_ms = level, self._table.bytes[kind], self.load_ms[kind]

    @abstractmethod
    def _on_loaded(self, now: float, loaded: tuple[int, bool]) -> None:
        """Handle the end of a load."""

    def note_idle(self, now: float, resident: ResidentModel) -> None:
        """Start a load over the free link, now that a model is idle."""
        if self._expires:
            self._expire_later(now, resident)
        if self.host.waiting_loads:
            self.host.load_next(now)

    def _expire_later(self, now: float, resident: ResidentModel) -> None:
        """Evict a model that is idle after the keep-alive time, if it stays idle."""
        if self._expires and resident.bytes and not resident.pinned:
            since_ms = resident.idle_since_ms
            at = max(now, since_ms + self._keep_alive_ms)
            heappush(self._events, (at, next(self._sequence), self._on_expiry, (resident, since_ms)))

    def _on_expiry(self, now: float, expected: tuple[ResidentModel, float]) -> None:
        resident, idle_since_ms = expected
        if resident.key in self.residents and not resident.in_use and resident.idle_since_ms == idle_since_ms:
            self.evict(now, resident)
            self._reserve(now, 0)

    def _add_resident(self, now: float, model: int, level: int = 0, *, changes: bool = False) -> ResidentModel:
        resident = self._known.get(model)
        if resident is None:
            weight, pinned = self.policies.weights[model], self.policies.pinned[model]
            resident = self._known[model] = ResidentModel(model, 0, 0.0, weight, pinned)
        self._set_level(resident, level)
        if not changes:
            resident.idle_since_ms = now
        resident.in_use = resident.running = 0
        self.residents[model] = resident
        return resident

    def _reserve(self, now: float, size: int) -> None:
        self.free_bytes -= size
        self.memory.step(now, self.budget_bytes - self.free_bytes)

    def _log(self, now: float, event: str, kind: int) -> None:
        if self.cluster.journal:
            self.cluster.journal(now, event, self.index, kind)

    def _clear_memory(self, now: float) -> None:
        """Lose the content of the memory, and all loads."""
        loading = () if self.loading is None else (self.loading,)
        for model in (*self.residents, *self.cold, *self.reserved, *loading):
            if self.index in self.cluster.homes[model]:
                self.cluster.homes[model].remove(self.index)
        self.residents.clear()
        self.host.waiting_loads -= len(self.cold)
        self.cold.clear()
        self.reserved.clear()
        self.popularity.clear()
        self.loading = self.host.loading = None
        if self.cluster.store:
            self.cluster.store.cancel(now, self.index)
        self.free_bytes = self.budget_bytes
        self._reserve(now, 0)
        self._log(now, "reset", 0)
