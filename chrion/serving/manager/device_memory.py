"""The memory of one device: which models are in it, which wait for a load, and what gives way to a load.

These rules are those of the model server (:mod:`chrion.serving.manager.residency`) and of the simulator
(:mod:`chrion.serving.simulator.gpu_memory`), which differ in what a load, an eviction and a change of variant do:

- Memory is reserved when a load starts. The first of the waiting loads starts as soon as there is, or can be made,
  enough memory for it; those behind it wait as well. One load is in progress at a time, while requests run.
- A model with ready or running requests does not give way, nor does one that is being loaded or is pinned. If no more
  memory is needed than a policy's candidates have, they leave in its order, and none without need; with several
  variants a model, they first change to smaller ones (:func:`chrion.serving.manager.shrinking.make_room`).
- The use of a model ends with its last request. Its idle time starts then, and a load that waits for memory may start.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from chrion.serving.manager.policies import Order, Rank, ResidentModel, WaitingModel, choose_victims, order_fifo
from chrion.serving.manager.shrinking import Memory, Room, make_room

#: There is enough free memory for the first variant.
_ENOUGH = Room(0)


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
        #: The model that is being loaded, its variant, and the expected end.
        self.loading: int | None = None
        self.loading_level = 0
        self.loading_until_ms = 0.0
        self._rank, self._order, self._next_use = rank, order, next_use
        self._is_fifo = order is order_fifo

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

    def start_load(self, now: float, model: int) -> bool:
        """Start the load of a waiting model if there is, or can be made, enough memory; return whether there is."""
        room = self.make_room(now, model)
        if room is None:
            return False
        del self.cold[model]
        if room is not _ENOUGH:
            self.apply(now, room)
        self.load(now, model, room.level)
        return True

    def make_room(self, now: float, model: int, *, evict: bool = True) -> Room | None:
        """Choose what gives way to a model, and in which variant it is loaded; None if there is not enough memory."""
        missing_bytes = self.sizes[0][model] - self.free_bytes
        if missing_bytes <= 0:
            return _ENOUGH
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
            self.shrink(now, resident, level)

    def times_to_memory(self, now: float, model: int) -> dict[int, float]:
        """Return the levels in which a model may serve a request that arrives now, with the time until it is there."""
        resident = self.residents.get(model)
        if resident is not None:
            return {resident.level: 0.0}
        link_ms = self.link_ms(now)
        if self.loading == model:
            return {self.loading_level: link_ms}
        return {level: link_ms + load_ms for level, load_ms in self.load_times(model).items()}

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
    def load(self, now: float, model: int, level: int) -> None:
        """Start a load, for which there is memory."""

    @abstractmethod
    def evict(self, now: float, resident: ResidentModel) -> None:
        """Remove a model from memory."""

    @abstractmethod
    def shrink(self, now: float, resident: ResidentModel, level: int) -> None:
        """Change a model to a smaller variant."""

    @abstractmethod
    def note_idle(self, now: float, resident: ResidentModel) -> None:
        """Use the memory of a model that has become idle."""
