"""The memory of one device: which models are in it, which wait for a load, and what gives way to a load.

These rules are those of the model server (:mod:`chrion.serving.manager.residency`) and of the simulator
(:mod:`chrion.serving.simulator.gpu_memory`), which differ in what a load, an eviction and a change of variant do:

- Memory is reserved when a load starts. The first of the waiting loads starts as soon as there is, or can be made,
  enough memory for it; those behind it wait as well. One load is in progress at a time, while requests run.
- A model with ready or running requests does not give way, nor does one that is being loaded or is pinned. If no more
  memory is needed than a policy's candidates have, they leave in its order, and none without need; with several
  variants a model, they first change to smaller ones (:func:`chrion.serving.manager.shrinking.make_room`).
- A model changes its variant by a load: it leaves, and keeps the memory of the other variant. The loads that requests
  wait for go before those of models that have shrunk.
- The use of a model ends with its last request. Its idle time starts then, and a load that waits for memory may start.
- Every :data:`TICK_MS`, if no load is in progress or waits, the most popular model for which memory is free is replaced
  by a larger variant while it is idle, or loaded in advance; a server's pinned models are the most popular ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import inf

from chrion.serving.manager.policies import Order, Rank, ResidentModel, WaitingModel, choose_victims, order_fifo
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


class DeviceMemory(ABC):
    """The models in a device's memory, and those that wait for a load; without a clock.

    Args:
        budget_bytes: Memory for models.
        rank: The eviction policy.
        order: The load order.
        sizes: Bytes of every variant, by level and model; the caller may add models.
        next_use: Returns the number of a model's next request, for Belady's policy.
    """

    def __init__(
        self,
        budget_bytes: int,
        rank: Rank,
        order: Order,
        sizes: Sequence[Sequence[int] | Mapping[int, int]],
        next_use: Callable[[int], float] | None = None,
    ) -> None:
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
        self._rank, self._order, self._next_use = rank, order, next_use
        self._is_fifo = order is order_fifo
        #: Whether popular models are loaded in advance.
        self.prefetch = False
        #: Models that are loaded in advance in any case, and before others.
        self.pinned: set[int] = set()

    def wait_for_load(self, now: float, model: int, demand_ms: float, priority: float = 0) -> None:
        """Count a request for a model that is missing, also one that was refused: the next one may be in time."""
        if self.loading != model:
            waiting = self.cold.get(model)
            if waiting is None:
                waiting = self.cold[model] = WaitingModel(model, now, priority=priority)
            waiting.demand_ms += demand_ms
            waiting.priority = max(waiting.priority, priority)
            self._is_fifo = self._is_fifo and not priority

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
        return bool(self.cold and self.start_load(now, self.first_cold())) or self.load_reserved(now)

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
        if len(self.sizes) > 1 and self.changes_variants(model):
            return make_room(Memory(held, self.free_bytes, self.sizes), model, self._rank, now, evict=evict)
        victims = choose_victims(held, missing_bytes, self._rank, now) if evict else None
        return None if victims is None else Room(0, (), tuple(victims))

    def changes_variants(self, model: int) -> bool:
        """Return whether a model, or one that may give way to it, has several variants."""
        del model
        return True

    def apply(self, now: float, room: Room) -> None:
        """Carry out what was chosen."""
        for victim in room.evicted:
            self.evict(now, victim)
        for resident, level in room.shrunk:
            self.change(now, resident, level)

    def times_to_memory(self, now: float, model: int) -> dict[int, float]:
        """Return the levels in which a model may serve a request that arrives now, with the time until it is there."""
        resident = self.residents.get(model)
        if resident is not None:
            return {resident.level: 0.0}
        link_ms = self.link_ms(now)
        if self.loading == model:
            return {self.loading_level: link_ms}
        times = self.load_times(model)
        levels = [self.reserved[model]] if model in self.reserved else times
        return {level: link_ms + times[level] for level in levels}

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
        if self.loading is not None or self.cold or not self.is_calm(now):
            return
        models = self.popularity if self.prefetch else self.residents.keys() | self.pinned
        popular = [(-inf if model in self.pinned else -self.popularity_of(now, model), model) for model in models]
        for _, model in sorted(entry for entry in popular if entry[0] <= -_MIN_POPULARITY):
            level = self.larger(now, model)
            if level is not None:
                if model in self.residents:
                    self.change(now, self.residents[model], level)
                self.load(now, model, level)
                return

    def end_use(self, now: float, resident: ResidentModel, uses: int = 1) -> None:
        """End some uses of a model."""
        resident.in_use -= uses
        if not resident.in_use:
            resident.idle_since_ms = now
            self.note_idle(now, resident)

    @abstractmethod
    def link_ms(self, now: float) -> float:
        """Return the expected time until a further load can start."""

    @abstractmethod
    def load_times(self, model: int) -> dict[int, float]:
        """Return the levels in which a missing model may be loaded, with the expected time of the load."""

    @abstractmethod
    def larger(self, now: float, model: int) -> int | None:
        """Return the first variant for which memory is free, of a missing model or before that of an idle one."""

    @abstractmethod
    def load(self, now: float, model: int, level: int) -> None:
        """Start a load, for which there is memory, or for which it is reserved."""

    @abstractmethod
    def evict(self, now: float, resident: ResidentModel) -> None:
        """Remove a model from memory."""

    @abstractmethod
    def change(self, now: float, resident: ResidentModel, level: int) -> None:
        """Remove a model from memory, and reserve that of another variant."""

    @abstractmethod
    def note_idle(self, now: float, resident: ResidentModel) -> None:
        """Use the memory of a model that has become idle."""
