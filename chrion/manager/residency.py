"""Residency: which models are in memory, in which variant, within a budget of bytes for each device.

The rules are those of :class:`chrion.simulator.server.Server`, extended to several variants and devices:

- One load is in progress at a time, while requests run. Its memory is reserved when it starts.
- A model whose load is next takes its first variant that fits into the free memory. If none fits, idle models shrink:
  in the order of the eviction policy, each is replaced by its next smaller variant, again and again until the new
  model fits. Only if that is not enough are models evicted.
- A model with ready or running requests is neither shrunk nor evicted; a pinned one is never.
- A model that shrinks is loaded again after the models that requests wait for; its memory stays reserved.
- While nothing else is to load, popular models are loaded in advance, or replaced by a larger variant, if memory is
  free.

With one variant for each model and one device, loads and evictions equal the simulator's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from chrion.manager.policies import Order, Rank, ResidentModel, WaitingModel, choose_victims
from chrion.manager.records import Action, Load, ManagedModel, Unload

#: The popularity of a model, its number of requests, halves in this time.
_HALF_LIFE_MS = 60_000.0
#: No model is loaded in advance or grows within this time after memory was short.
_CALM_MS = 10_000.0
#: After a failed load, the next attempt waits this long, twice as long after each further failure, up to the limit.
_FIRST_RETRY_MS, _LAST_RETRY_MS = 1000.0, 60_000.0
#: Popularity, in recent requests, from which a model is loaded in advance.
_LEAST_POPULARITY = 0.5


class Place(Enum):
    """States of a model."""

    ABSENT = "absent"
    #: Its memory is reserved, and its load has not started.
    RESERVED = "reserved"
    LOADING = "loading"
    RESIDENT = "resident"


@dataclass(slots=True)
class Entry:
    """A model's state."""

    model: ManagedModel
    resident: ResidentModel
    place: Place = Place.ABSENT
    #: Index of the variant in memory, or being loaded.
    variant: int = 0
    #: Index of the first variant that may be used; above zero after the device's memory was full.
    first: int = 0
    failures: int = 0
    retry_at_ms: float = 0.0
    popularity: float = 0.0
    counted_ms: float = 0.0
    removed: bool = False
    #: Whether the load replaces a variant, which is no use of the model.
    replacing: bool = False
    #: Measured times of requests and loads by variant.
    latency_ms: list[float] = field(default_factory=list)
    load_ms: list[float] = field(default_factory=list)


class Residency:
    """The memory of all devices; every method that may change it returns actions.

    Args:
        budgets: Bytes for models by device; devices that are not named have no limit.
        rank: The eviction policy.
        order: The load order.
        prefetch: Whether popular models are loaded in advance, and grow, while memory is free.

    Attributes:
        free: Free bytes by device.
        cold: Models that requests wait for, and whose load has not started.
        loading: The model that is being loaded.
    """

    def __init__(self, budgets: Mapping[str, int], rank: Rank, order: Order, *, prefetch: bool = True) -> None:
        self.budgets = dict(budgets)
        self.free = dict(budgets)
        self.entries: dict[int, Entry] = {}
        self.cold: dict[int, WaitingModel] = {}
        #: Models in memory in the order of their loads, which decides ties.
        self.residents: dict[int, Entry] = {}
        self.loading: int | None = None
        self.loading_until_ms = 0.0
        self._rank = rank
        self._order = order
        self._prefetch = prefetch
        self._short_at_ms = -math.inf

    def add(self, now: float, number: int, model: ManagedModel) -> None:
        """Add a model that is not in memory. A pinned one uses its first variant only, so that its memory is known."""
        if model.pinned:
            model = replace(model, variants=model.variants[:1])
        resident = ResidentModel(number, 0, model.variants[0].load_ms, model.weight, model.pinned, idle_since_ms=now)
        latency, load = [v.latency_ms for v in model.variants], [v.load_ms for v in model.variants]
        self.entries[number] = Entry(model, resident, counted_ms=now, latency_ms=latency, load_ms=load)

    def remove(self, number: int) -> list[Action]:
        """Remove a model: at once if nothing uses it, else at the end of its load or of its last use."""
        entry = self.entries[number]
        entry.removed = True
        self.cold.pop(number, None)
        if entry.place is Place.LOADING or entry.resident.in_use:
            return []
        del self.entries[number]
        if entry.place is Place.ABSENT:
            return []
        if entry.place is Place.RESIDENT:
            return [self._unload(number, "remove")]
        self._reserve(entry, -1)
        return []

    def fits(self, number: int) -> bool:
        """Return whether any variant of a model fits into the budgets beside the pinned models.

        Of pinned models, those that were added first have precedence.
        """
        entry = self.entries[number]
        free = dict(self.budgets)
        for other, pinned in self.entries.items():
            if other == number or not pinned.model.pinned or (entry.model.pinned and other > number):
                continue
            if self._fits(pinned, 0, free):
                for device in free:
                    free[device] -= self._bytes(pinned, 0, device)
        return any(self._fits(entry, at, free) for at in range(entry.first, len(entry.model.variants)))

    def forget(self, number: int) -> None:
        """Give up the load of a model, whose memory is not reserved."""
        self.cold.pop(number, None)

    def is_resident(self, number: int) -> bool:
        """Return whether a model can run."""
        return self.entries[number].place is Place.RESIDENT

    def count(self, now: float, number: int) -> None:
        """Count a request in a model's popularity."""
        entry = self.entries[number]
        entry.popularity = self._popularity(entry, now) + 1.0
        entry.counted_ms = now

    def request(self, now: float, number: int) -> list[Action]:
        """Request the load of a model that is not resident."""
        entry = self.entries[number]
        if entry.place is Place.LOADING:
            return []
        waiting = self.cold.setdefault(number, WaitingModel(number, now))
        waiting.demand_ms += entry.latency_ms[entry.variant]
        return self.next_load(now)

    def acquire(self, number: int, uses: int = 1) -> None:
        """Protect a model from eviction for some requests."""
        self.entries[number].resident.in_use += uses

    def release(self, now: float, number: int, uses: int = 1) -> list[Action]:
        """End the uses of a model; if it becomes idle, start a load that waits for memory."""
        entry = self.entries[number]
        entry.resident.in_use -= uses
        if entry.resident.in_use:
            return []
        entry.resident.idle_since_ms = now
        actions = self.remove(number) if entry.removed else []
        return actions + (self.next_load(now) if self.cold else [])

    def loaded(self, now: float, number: int) -> list[Action]:
        """Note the end of a load; the caller continues with :meth:`next_load`."""
        self.loading = None
        entry = self.entries[number]
        entry.place = Place.RESIDENT
        self.residents[number] = entry
        entry.failures = 0
        if not entry.replacing:
            entry.resident.idle_since_ms = now
        entry.replacing = False
        entry.resident.load_ms = entry.load_ms[entry.variant]
        return self.remove(number) if entry.removed else []

    def load_failed(self, now: float, number: int, *, out_of_memory: bool) -> list[Action]:
        """Note a failed load; out of memory, try the next smaller variant, if there is one.

        Returns:
            Actions; none of them loads this model if its waiting requests have to be refused.
        """
        self.loading = None
        entry = self.entries[number]
        self._reserve(entry, -1)
        entry.place = Place.ABSENT
        entry.replacing = False
        if entry.removed:
            return self.remove(number)
        if out_of_memory and entry.variant + 1 < len(entry.model.variants):
            entry.first = entry.variant = entry.variant + 1
            return self.request(now, number)
        entry.first = 0
        entry.failures += 1
        entry.retry_at_ms = now + min(_FIRST_RETRY_MS * 2 ** min(entry.failures - 1, 30), _LAST_RETRY_MS)
        return []

    def next_load(self, now: float) -> list[Action]:
        """Start the next load if none is in progress and there is, or can be made, enough memory."""
        if self.loading is not None:
            return []
        actions: list[Action] = []
        if self.cold:
            number = min(self.cold.values(), key=self._order).key
            if self.entries[number].place is Place.RESERVED:
                return [self._start(now, number)]
            found = self._make_room(now, number)
            if found is not None:
                variant, actions = found
                return [*actions, self._start(now, number, variant)]
        for number, entry in self.entries.items():
            if entry.place is Place.RESERVED:
                return [*actions, self._start(now, number)]
        return actions

    def rebalance(self, now: float) -> list[Action]:
        """Load a popular model in advance, or replace one by a larger variant, if memory is free and nothing waits."""
        if not self._prefetch or self.loading is not None or self.cold or now < self._short_at_ms + _CALM_MS:
            return []
        by_popularity = sorted(self.entries, key=lambda n: (-self._popularity(self.entries[n], now), n))
        for number in by_popularity:
            entry = self.entries[number]
            if self._popularity(entry, now) < _LEAST_POPULARITY and not entry.model.pinned:
                return []
            if entry.place is Place.ABSENT and now >= entry.retry_at_ms and not entry.removed:
                variant = self._largest_fitting(entry, self.free)
                if variant is not None:
                    return [self._start(now, number, variant)]
            if entry.place is Place.RESIDENT and not entry.resident.in_use and entry.variant > entry.first:
                room = {d: free + self._bytes(entry, entry.variant, d) for d, free in self.free.items()}
                larger = self._largest_fitting(entry, room)
                if larger is not None and larger < entry.variant:
                    return [self._unload(number, "grow"), self._start(now, number, larger)]
        return []

    def used(self, device: str) -> int:
        """Return the bytes of a device that models hold or have reserved."""
        return sum(
            self._bytes(entry, entry.variant, device)
            for entry in self.entries.values()
            if entry.place is not Place.ABSENT
        )

    def _start(self, now: float, number: int, variant: int | None = None) -> Load:
        entry = self.entries[number]
        if variant is not None:
            entry.variant = variant
            self._reserve(entry, 1)
        self.cold.pop(number, None)
        entry.place = Place.LOADING
        self.loading = number
        self.loading_until_ms = now + entry.load_ms[entry.variant]
        return Load(number, entry.variant)

    def _make_room(self, now: float, number: int) -> tuple[int, list[Action]] | None:
        """Return the variant to load and what has to be unloaded before; None if there is not enough memory."""
        entry = self.entries[number]
        variant = self._largest_fitting(entry, self.free)
        if variant is not None:
            return variant, []
        self._short_at_ms = now
        return self._shrink(now, entry) or self._evict(now, entry)

    def _shrink(self, now: float, wanted: Entry) -> tuple[int, list[Action]] | None:
        """Choose models to shrink until the wanted one fits; change nothing if that is not enough."""
        free = dict(self.free)
        steps: dict[int, int] = {}
        smallest = len(wanted.model.variants) - 1
        changed = True
        while changed:
            changed = False
            for number, entry in self._idle(now):
                at = steps.get(number, entry.variant)
                step = self._smaller(entry, at, free, wanted, smallest)
                if step is None:
                    continue
                for device in free:
                    free[device] += self._bytes(entry, at, device) - self._bytes(entry, step, device)
                steps[number] = step
                changed = True
                if self._fits(wanted, smallest, free):
                    actions = self._apply_steps(steps)
                    variant = self._largest_fitting(wanted, self.free)
                    return (smallest if variant is None else variant), actions
        return None

    def _smaller(self, entry: Entry, at: int, free: Mapping[str, int], wanted: Entry, smallest: int) -> int | None:
        """Return the next variant that frees memory where it is short, and fits where it takes more."""
        short = [device for device in free if self._bytes(wanted, smallest, device) > free[device]]
        for step in range(at + 1, len(entry.model.variants)):
            gains = {d: self._bytes(entry, at, d) - self._bytes(entry, step, d) for d in free}
            if any(gains[d] > 0 for d in short) and all(free[d] + gains[d] >= 0 or gains[d] >= 0 for d in free):
                return step
        return None

    def _apply_steps(self, steps: Mapping[int, int]) -> list[Action]:
        actions: list[Action] = []
        for number, step in steps.items():
            entry = self.entries[number]
            actions.append(self._unload(number, "shrink"))
            entry.variant = step
            entry.place = Place.RESERVED
            self._reserve(entry, 1)
        return actions

    def _evict(self, now: float, wanted: Entry) -> tuple[int, list[Action]] | None:
        smallest = len(wanted.model.variants) - 1
        victims: dict[int, ResidentModel] = {}
        for device, free in self.free.items():
            freed = sum(self._bytes(self.entries[n], self.entries[n].variant, device) for n in victims)
            missing = self._bytes(wanted, smallest, device) - free - freed
            if missing <= 0:
                continue
            candidates = []
            for number, entry in self.residents.items():
                entry.resident.bytes = self._bytes(entry, entry.variant, device)
                if entry.resident.bytes and number not in victims:
                    candidates.append(entry.resident)
            chosen = choose_victims(candidates, missing, self._rank, now)
            if chosen is None:
                return None
            victims |= {victim.key: victim for victim in chosen}
        actions: list[Action] = [self._unload(number, "evict") for number in victims]
        variant = self._largest_fitting(wanted, self.free)
        return (smallest if variant is None else variant), actions

    def _idle(self, now: float) -> Iterator[tuple[int, Entry]]:
        """Yield the models that may shrink, in the order of the eviction policy."""
        idle = [n for n, e in self.residents.items() if not e.resident.in_use and not e.model.pinned]
        for number in sorted(idle, key=lambda n: self._rank(self.residents[n].resident, now)):
            yield number, self.residents[number]

    def _unload(self, number: int, cause: str) -> Unload:
        entry = self.residents.pop(number)
        self._reserve(entry, -1)
        entry.place = Place.ABSENT
        entry.replacing = cause in {"shrink", "grow"}
        return Unload(number, entry.variant, cause)

    def _largest_fitting(self, entry: Entry, free: Mapping[str, int]) -> int | None:
        """Return the first variant that fits into free memory."""
        for at in range(entry.first, len(entry.model.variants)):
            if self._fits(entry, at, free):
                return at
        return None

    def _fits(self, entry: Entry, variant: int, free: Mapping[str, int]) -> bool:
        return all(self._bytes(entry, variant, device) <= size for device, size in free.items())

    def _bytes(self, entry: Entry, variant: int, device: str) -> int:
        return entry.model.variants[variant].bytes.get(device, 0)

    def _reserve(self, entry: Entry, sign: int) -> None:
        for device in self.free:
            self.free[device] -= sign * self._bytes(entry, entry.variant, device)

    def _popularity(self, entry: Entry, now: float) -> float:
        return float(entry.popularity * 0.5 ** ((now - entry.counted_ms) / _HALF_LIFE_MS))
