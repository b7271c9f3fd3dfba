"""The memory of one device: which models are in it, which wait for a load, and what gives way to a load.

:mod:`chrion.serving.manager.manager` has the other rules.

- Memory is reserved when a load starts. The first of the waiting loads starts as soon as there is, or can be made,
  enough memory for it; those behind it wait as well. One load is in progress at a time, while requests run.
- A model with ready or running requests does not give way, nor does one that is being loaded or is pinned. If no more
  memory is needed than a policy's candidates have, they leave in its order, and none without need; with several
  variants a model, they first change to smaller ones (:func:`chrion.serving.manager.shrinking.make_room`).
- A load of weights that are not in host memory, if a server has such, first reads them from its disk; see
  :mod:`chrion.serving.manager.host_memory`.
- A model changes its variant by a load: it leaves, and keeps the memory of the other variant. The loads that requests
  wait for go before those of models that have shrunk.
- The use of a model ends with its last request. Its idle time starts then, and a load that waits for memory may start.
- With a keep-alive time, a model that has been idle for so long leaves, unless it is pinned.
- Every :data:`TICK_MS`, if no load is in progress or waits, the most popular model for which memory is free is replaced
  by a larger variant while it is idle, or loaded in advance; a server's pinned models are the most popular ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import inf
from operator import itemgetter
from typing import Any

from chrion.serving.manager.host_memory import HostMemory
from chrion.serving.manager.policies import ResidentModel, WaitingModel, choose_victims, order_fifo
from chrion.serving.manager.policy_settings import Figures, ServerPolicies
from chrion.serving.manager.shrinking import Memory, Room, make_room

#: Interval at which free memory is used: the work is proportional to the models (a choice, not measured).
TICK_MS = 1000.0
#: The popularity of a model, its number of requests, halves in this time (a choice, not measured): longer than
#: most loads, and short compared with the change of traffic over a day.
_HALF_LIFE_MS = 60_000.0
#: No model is loaded in advance or grows within this time after memory was short: it would be evicted at once
#: (a choice, not measured).
_CALM_MS = 10_000.0
#: Popularity, in recent requests, from which a model is loaded in advance: that of one request a half-life ago.
_MIN_POPULARITY = 0.5


class Host:
    """What the devices of a server share: the link, over which one model at a time is loaded, host memory, and cores.

    - Each device proposes the first of its waiting loads; of the proposals for which there is memory, or for which it
      can be made, the first in the load order is carried out.
    - Cores go to the ready batches at the heads of the queues. The batch of the highest priority that entered its queue
      first is considered first; if its slot is free and its cores are not, no other batch that needs cores starts.

    Args:
        cores: The CPU cores.
        memory: The host memory, from which models are loaded; by default it holds all of them.
    """

    def __init__(self, cores: int, memory: HostMemory | None = None) -> None:
        self.cores = self.free_cores = cores
        self.memory = memory or HostMemory()
        #: The devices (:class:`chrion.serving.manager.manager.ModelManager`), which add themselves.
        self.devices: list[Any] = []
        #: The device that is being loaded, and the number of loads of all devices that have not started.
        self.loading: DeviceMemory | None = None
        self.waiting_loads = 0

    def load_next(self, now: float) -> None:
        """Start the next load if the link is free and a load has memory."""
        if self.loading is not None:
            return
        if len(self.devices) == 1:
            self.devices[0].start_next(now)
            return
        proposals = [(device, device.first_cold()) for device in self.devices if device.cold]
        for device, model in sorted(proposals, key=lambda proposal: proposal[0].load_order(proposal[1])):
            if device.start_load(now, model):
                return
        any(device.load_reserved(now) for device in self.devices)

    def uses(self, model: int) -> bool:
        """Return whether a device uses or loads a model."""
        return any(device.uses(model) for device in self.devices)

    def start_ready(self, now: float) -> None:
        """Start batches at the heads of the queues of several devices while their slots and cores are free."""
        while heads := [(line.order, device, line) for device in self.devices if (line := device.ready.head(now))]:
            awaited = False
            for _, device, line in sorted(heads, key=itemgetter(0)):
                slots, cores = device.needs(line)
                if slots > device.free_slots or (cores and awaited):
                    continue
                if cores <= self.free_cores:
                    job = line.items[0][2]
                    device.start(now, job, device.residents[job[1]], line)
                    break
                awaited = True
            else:
                return


class DeviceMemory(ABC):
    """The models in a device's memory, and those that wait for a load; without a clock.

    Args:
        host: What it shares with the other devices of its server.
        rules: The policies, and the figures that they need.
        budget_bytes: Memory for models.
        sizes: Bytes of every variant, by level and model; the caller may add models.
    """

    def __init__(self, host: Host, rules: ServerPolicies, budget_bytes: int, sizes: Sequence[Figures[int]]) -> None:
        self.host, self.rules = host, rules
        host.devices.append(self)
        self.budget_bytes = self.free_bytes = budget_bytes
        self.sizes = sizes
        #: Models in memory in the order of their loads, which decides ties.
        self.residents: dict[int, ResidentModel] = {}
        #: Models that requests wait for and whose load has not started, in the order of their first requests.
        self.cold: dict[int, WaitingModel] = {}
        #: Models that have left for another variant, and its level; its memory is reserved, and its load follows.
        self.reserved: dict[int, int] = {}
        #: The popularity of each model that was requested, and its time.
        self.popularity: dict[int, tuple[float, float]] = {}
        #: When memory was short for the last time.
        self.short_at_ms = -inf
        #: The model that is being loaded, its variant, and the expected end.
        self.loading: int | None = None
        self.loading_level = 0
        self.loading_until_ms = 0.0
        #: Whether that load replaces a variant, which is no use of the model.
        self.replaces = False
        self._rank, self._order, self._next_use = rules.rank, rules.order, rules.next_use
        self._is_fifo = rules.order is order_fifo
        #: Whether :meth:`_note_idle` is called.
        self._notes_idle = rules.keep_alive_ms < inf
        #: Models that have been in memory, or may be, with what policies need to know of them.
        self._known: dict[int, ResidentModel] = {}
        #: Models that are loaded in advance in any case, and before others.
        self.pinned: set[int] = set()

    def request_load(self, now: float, model: int, demand_ms: float, priority: float) -> None:
        """Load a missing model for a request that takes ``demand_ms`` once it is there."""
        if self.loading != model:
            waiting = self.cold.get(model)
            if waiting is None:
                waiting = self.cold[model] = WaitingModel(model, now, priority=priority)
                self.host.waiting_loads += 1
                if model not in self.reserved:
                    self._note_wanted(model)
            waiting.demand_ms += demand_ms
            waiting.priority = max(waiting.priority, priority)
            self._is_fifo = self._is_fifo and not priority
        self.host.load_next(now)

    def stop_waiting(self, model: int) -> bool:
        """Remove a model from those that wait for a load; return whether it was one."""
        if self.cold.pop(model, None) is None:
            return False
        self.host.waiting_loads -= 1
        return True

    def first_cold(self) -> int:
        """Return the first model of those that wait for a load."""
        if self._is_fifo or len(self.cold) == 1:
            return next(iter(self.cold))
        return min(self.cold, key=self.load_order)

    def load_order(self, model: int) -> tuple[float, float]:
        """Return the numbers that order a waiting load."""
        waiting = self.cold[model]
        return -waiting.priority, self._order(waiting)

    def start_next(self, now: float) -> bool:
        """Start the next load over the free link, if there is one for which there is memory; return whether."""
        if self.cold and self.start_load(now, self.first_cold()):
            return True
        return bool(self.reserved) and self.load_reserved(now)

    def load_reserved(self, now: float) -> bool:
        """Load the first model that has changed its variant; return whether there is one."""
        for model, level in self.reserved.items():
            self.load(now, model, level)
            return True
        return False

    def start_load(self, now: float, model: int) -> bool:
        """Start the load of a waiting model if there is, or can be made, enough memory; return whether there is."""
        room = Room(self.reserved[model]) if model in self.reserved else self.make_room(now, model)
        if room is None:
            return False
        self.apply(now, room)
        self.load(now, model, room.level)
        return True

    def load(self, now: float, model: int, level: int) -> None:
        """Start a load, for which there is memory, or for which it is reserved."""
        if not self.stop_waiting(model) and model not in self.reserved:
            self._note_wanted(model)
        self.loading, self.loading_level, self.host.loading = model, level, self
        self.replaces = self.reserved.pop(model, None) is not None
        resident = self._resident_of(model)
        if not self.replaces:
            self._hold(resident, level)
        self._begin_load(now, resident)
        if self.host.memory.misses(model):
            self.host.memory.fetch(model, self.host.uses)

    def _resident_of(self, model: int) -> ResidentModel:
        """Return what policies need to know of a model."""
        resident = self._known.get(model)
        if resident is None:
            weight, pinned = self.rules.weights[model], self.rules.pinned[model]
            resident = self._known[model] = ResidentModel(model, 0, 0.0, weight, pinned, idle_since_ms=-1.0)
        return resident

    def _hold(self, resident: ResidentModel, level: int) -> None:
        """Reserve the memory of a model's variant."""
        resident.level, resident.bytes = level, self.sizes[level][resident.key]
        self.free_bytes -= resident.bytes

    def make_room(self, now: float, model: int, *, evict: bool = True) -> Room | None:
        """Choose what gives way to a model, and in which variant it is loaded; None if there is not enough memory."""
        missing_bytes = self.sizes[0][model] - self.free_bytes
        if missing_bytes <= 0:
            return Room(0)
        self.short_at_ms = now
        held = self.residents.values()
        if self._next_use:
            for resident in held:
                resident.next_use = self._next_use(resident.key)
        if len(self.sizes) > 1 and self._changes_variants(model):
            return make_room(Memory(held, self.free_bytes, self.sizes), model, self._rank, now, evict=evict)
        victims = choose_victims(held, missing_bytes, self._rank, now) if evict else None
        return None if victims is None else Room(0, (), tuple(victims))

    def _changes_variants(self, model: int) -> bool:
        """Return whether a model, or one that may give way to it, has several variants."""
        del model
        return True

    def apply(self, now: float, room: Room) -> None:
        """Carry out what was chosen."""
        for victim in room.evicted:
            self.evict(now, victim)
        for resident, level in room.shrunk:
            self.change(now, resident, level)

    def evict(self, now: float, resident: ResidentModel, cause: str = "evict") -> None:
        """Remove a model from memory."""
        del self.residents[resident.key]
        self.free_bytes += resident.bytes
        self._note_unload(now, resident, resident.level, cause)

    def change(self, now: float, resident: ResidentModel, level: int) -> None:
        """Remove a model from memory, and reserve that of another variant."""
        before = resident.level
        del self.residents[resident.key]
        self.free_bytes += resident.bytes
        self._hold(resident, level)
        self.reserved[resident.key] = level
        self._note_unload(now, resident, before, "shrink" if level > before else "grow")

    def times_to_memory(self, now: float, model: int) -> dict[int, float]:
        """Return the levels in which a model may serve a request that arrives now, with the time until it is there."""
        resident = self.residents.get(model)
        if resident is not None:
            return {resident.level: 0.0}
        link_ms = self.link_ms(now)
        if self.loading == model:
            return {self.loading_level: link_ms}
        times = self._load_times(model)
        levels = [self.reserved[model]] if model in self.reserved else times
        disk_ms = self.host.memory.disk_ms
        return {level: link_ms + (times[level] + disk_ms(model, level)) for level in levels}

    def uses(self, model: int) -> bool:
        """Return whether requests use a model in memory, or it is being loaded."""
        resident = self.residents.get(model)
        return self.loading == model or (resident is not None and resident.in_use > 0)

    def count(self, now: float, model: int) -> None:
        """Count a request in a model's popularity."""
        self.popularity[model] = self.popularity_of(now, model) + 1.0, now

    def popularity_of(self, now: float, model: int) -> float:
        """Return the popularity of a model."""
        value, counted_ms = self.popularity.get(model, (0.0, now))
        return float(value * 0.5 ** ((now - counted_ms) / _HALF_LIFE_MS))

    def is_calm(self, now: float) -> bool:
        """Return whether memory has been sufficient for so long that models may be loaded in advance."""
        return now >= self.short_at_ms + _CALM_MS

    def use_free_memory(self, now: float) -> None:
        """Load a popular model in advance, or replace one by a larger variant, if memory is free and nothing waits."""
        if self.host.loading is not None or self.host.waiting_loads or not self.is_calm(now):
            return
        models = self.popularity if self.rules.prefetch else self.residents.keys() | self.pinned
        popular = [(-inf if model in self.pinned else -self.popularity_of(now, model), model) for model in models]
        for _, model in sorted(entry for entry in popular if entry[0] <= -_MIN_POPULARITY):
            level = self._larger(now, model)
            if level is not None:
                if model in self.residents:
                    self.change(now, self.residents[model], level)
                self.load(now, model, level)
                return

    def _larger(self, now: float, model: int) -> int | None:
        """Return the first variant for which memory is free, of a missing model or before that of an idle one."""
        del now
        resident = self.residents.get(model)
        if model in self.reserved or (resident and resident.in_use):
            return None
        levels = range(resident.level if resident else len(self.sizes))
        return next((level for level in levels if self._has_room(model, level, resident)), None)

    def _has_room(self, model: int, level: int, instead: ResidentModel | None) -> bool:
        """Return whether memory is free for a variant, in addition or instead of the one in memory."""
        return self.sizes[level][model] <= self.free_bytes + (instead.bytes if instead else 0)

    def end_use(self, now: float, resident: ResidentModel, uses: int = 1) -> None:
        """End some uses of a model; if it becomes idle, start a load that waits for memory."""
        resident.in_use -= uses
        if not resident.in_use:
            resident.idle_since_ms = now
            self.host.memory.note_use(resident.key)
            if self._notes_idle:
                self._note_idle(now, resident)
            if self.host.waiting_loads:
                self.host.load_next(now)

    def _note_idle(self, now: float, resident: ResidentModel) -> None:
        """Evict a model that is idle, after its last request or its load, if it stays so for the keep-alive time."""
        if (leaves_ms := self._leaves_ms(resident)) < inf:
            self._call_at(max(now, leaves_ms), self._expire, resident)

    def _leaves_ms(self, resident: ResidentModel) -> float:
        """Return the end of a model's keep-alive time; infinity if it is used, or stays in any case."""
        stays = resident.in_use or self.rules.pinned[resident.key] or not self._takes_memory(resident)
        return inf if stays else resident.idle_since_ms + self.rules.keep_alive_ms

    def _takes_memory(self, resident: ResidentModel) -> bool:
        """Return whether a model in memory takes any of it."""
        return resident.bytes > 0

    def _expire(self, now: float, resident: ResidentModel) -> None:
        if resident.key in self.residents and self._leaves_ms(resident) <= now:
            self.evict(now, resident, "expire")

    def link_ms(self, now: float) -> float:
        """Return the expected time until a further load can start."""
        other = self.host.loading
        return max(0.0, other.loading_until_ms - now) if other else 0.0

    @abstractmethod
    def _load_times(self, model: int) -> dict[int, float]:
        """Return the levels in which a missing model may be loaded, with the expected time from host memory."""

    @abstractmethod
    def _begin_load(self, now: float, resident: ResidentModel) -> None:
        """Carry out a load, and note what it is expected to take, and when it ends."""

    @abstractmethod
    def _note_unload(self, now: float, resident: ResidentModel, level: int, cause: str) -> None:
        """Carry out that a variant of a model leaves memory, for the next one if the model has changed."""

    def _note_wanted(self, model: int) -> None:
        """Note that a model will be in memory."""
        del model

    def _call_at(self, at_ms: float, handler: Callable[[float, Any], None], payload: Any) -> None:
        """Call a handler at a time; only a simulation knows times before they have come."""
        del at_ms, handler, payload
