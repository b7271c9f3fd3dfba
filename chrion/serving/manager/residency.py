"""Residency: which models are in memory, in which variant, within a budget of bytes for each device.

The rules are those of :class:`chrion.serving.simulator.server.Server`, extended to several variants and devices:

- One load is in progress at a time, while requests run. Its memory is reserved when it starts.
- If a model does not fit into the free memory, :func:`chrion.serving.manager.shrinking.make_room` chooses which idle
  models are replaced by smaller variants, in which variant the new model is loaded, and which models are evicted if
  that is not enough. Variants differ in the memory of the accelerator, or of the host if there is none. If smaller
  variants take more memory of the other device, models are evicted from there.
- A model with ready or running requests is neither shrunk nor evicted; a pinned one is never.
- A model that shrinks is loaded again after the models that requests wait for; its memory stays reserved.
- While no request waits for a load, models that have to be tried are loaded once, one after another, and unloaded again
  if no request has come meanwhile.
- While nothing else is to load, popular models are loaded in advance, or replaced by a larger variant, if memory is
  free.

With one variant for each model and one device, loads and evictions equal the simulator's.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from chrion.serving.manager.policies import Order, Rank, ResidentModel, WaitingModel, choose_victims
from chrion.serving.manager.records import ACCELERATOR, Action, Load, ManagedModel, Unload
from chrion.serving.manager.shrinking import Memory, Room, make_room

#: The popularity of a model, its number of requests, halves in this time (a choice, not measured): longer than
#: most loads, and short compared with the change of traffic over a day.
_HALF_LIFE_MS = 60_000.0
#: No model is loaded in advance or grows within this time after memory was short: it would be evicted at once
#: (a choice, not measured).
_CALM_MS = 10_000.0
#: After a failed load, the next attempt waits this long, twice as long after each further failure, up to the limit:
#: short for a passing shortage of memory, and rare enough for a damaged file that its loads do not delay others.
_FIRST_RETRY_MS, _LAST_RETRY_MS = 1000.0, 60_000.0
#: Popularity, in recent requests, from which a model is loaded in advance: that of one request a half-life ago.
_MIN_POPULARITY = 0.5
_TOO_LARGE = 1 << 62
#: Weight of a new measurement in the moving average of a model's loads, as for latencies, and the minimum expected
#: time of one, since eviction policies divide by it.
_NEWEST, _MIN_LOAD_MS = 0.2, 1e-3
#: Loads of all models from which that of a model is expected that was never loaded, by their median
#: (a choice, not measured).
_LOADS = 15


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
    #: The cores that the threads of the session in memory are pinned to; empty if it runs on any.
    cores: tuple[int, ...] = ()
    #: Whether the load replaces a variant, which is no use of the model.
    replacing: bool = False
    #: Whether the load is a trial, after which the model is unloaded unless requests wait for it.
    trial: bool = False
    #: Measured times of requests by variant; expected ones before the first request.
    latency_ms: list[float] = field(default_factory=list)
    #: Moving average of the times of loads, of each variant that has been loaded.
    load_ms: dict[int, float] = field(default_factory=dict)


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
        primary: The device that variants differ in: the accelerator, or the host if there is none.
    """

    def __init__(self, budgets: Mapping[str, int], rank: Rank, order: Order, *, prefetch: bool = True) -> None:
        self.budgets = dict(budgets)
        self.free = dict(budgets)
        self.entries: dict[int, Entry] = {}
        self.cold: dict[int, WaitingModel] = {}
        #: Models in memory in the order of their loads, which decides ties.
        self.residents: dict[int, Entry] = {}
        #: Models whose trial has not started, in its order.
        self.trials: dict[int, None] = {}
        self.loading: int | None = None
        self.loading_until_ms = 0.0
        self._rank = rank
        self._order = order
        self._prefetch = prefetch
        self.primary = ACCELERATOR if ACCELERATOR in self.budgets else next(iter(self.budgets))
        self._short_at_ms = -math.inf
        #: Measured over stated time of the latest loads, and their median: the first load of a process takes long.
        self._load_factors: deque[float] = deque(maxlen=_LOADS)
        self._load_factor = 1.0

    def add(self, now: float, number: int, model: ManagedModel) -> None:
        """Add a model that is not in memory. A pinned one uses its first variant only, so that its memory is known."""
        if model.pinned:
            model = replace(model, variants=model.variants[:1])
        resident = ResidentModel(number, 0, model.variants[0].load_ms, model.weight, model.pinned, idle_since_ms=now)
        latency = [v.latency_ms for v in model.variants]
        self.entries[number] = Entry(model, resident, counted_ms=now, latency_ms=latency)

    def remove(self, number: int) -> list[Action]:
        """Remove a model: at once if nothing uses it, else at the end of its load or of its last use."""
        entry = self.entries[number]
        entry.removed = True
        self.cold.pop(number, None)
        self.trials.pop(number, None)
        if entry.place is Place.LOADING or entry.resident.in_use:
            return []
        del self.entries[number]
        if entry.place is Place.ABSENT:
            return []
        if entry.place is Place.RESIDENT:
            return [self._unload(number, "remove")]
        self._reserve(entry, -1)
        return []

    def load_ms(self, entry: Entry, variant: int) -> float:
        """Return the expected time of a load: the average of earlier ones, else as stated, corrected by the others'."""
        average_ms = entry.load_ms.get(variant)
        return entry.model.variants[variant].load_ms * self._load_factor if average_ms is None else average_ms

    def measure_load(self, entry: Entry, took_ms: float) -> None:
        """Note how long the load of a model's present variant took."""
        self._load_factors.append(took_ms / max(entry.model.variants[entry.variant].load_ms, _MIN_LOAD_MS))
        self._load_factor = statistics.median(self._load_factors)
        before = self.load_ms(entry, entry.variant)
        entry.load_ms[entry.variant] = before + _NEWEST * (took_ms - before)

    def fits(self, number: int) -> bool:
        """Return whether any variant of a model fits into the budgets beside the pinned models.

        Of pinned models, those in memory have precedence, and then those that were added first.
        """
        entry = self.entries[number]
        free = dict(self.budgets)
        pinned_models = [(e.place is Place.ABSENT, n) for n, e in self.entries.items() if e.model.pinned]
        for absent, other in sorted(pinned_models):
            if entry.model.pinned and (absent, other) >= (entry.place is Place.ABSENT, number):
                break
            pinned = self.entries[other]
            if self._fits(pinned, 0, free):
                for device in free:
                    free[device] -= self._bytes(pinned, 0, device)
        return any(self._fits(entry, at, free) for at in range(entry.first, len(entry.model.variants)))

    def forget(self, number: int) -> None:
        """Give up the load of a model, whose memory is not reserved."""
        self.cold.pop(number, None)

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

    def try_out(self, now: float, number: int) -> list[Action]:
        """Request a load of a model that only shows whether it can be loaded; a pinned one stays."""
        entry = self.entries[number]
        # One that never fits would keep the loads that requests wait for from being made.
        if entry.place is not Place.ABSENT or number in self.cold or not self.fits(number):
            return []
        if entry.model.pinned:
            return self.request(now, number)
        self.trials[number] = None
        return self.next_load(now)

    def end_trial(self, number: int) -> list[Action]:
        """Unload a model whose load was a trial."""
        entry = self.entries.get(number)
        return [self._unload(number, "trial")] if entry is not None and entry.trial else []

    def pin(self, number: int, *, pinned: bool) -> None:
        """Change whether a model may be evicted; one that is pinned has been added as such, with one variant."""
        entry = self.entries[number]
        entry.model = replace(entry.model, pinned=pinned)
        entry.resident.pinned = pinned

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
        entry.resident.load_ms = self.load_ms(entry, entry.variant)
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
            room = self._make_room(now, number)
            if room is not None:
                variant, actions = room
                return [*actions, self._start(now, number, variant)]
        for number, entry in self.entries.items():
            if entry.place is Place.RESERVED:
                return [*actions, self._start(now, number)]
        return actions + (self._start_trial(now) if self.trials and not self.cold else [])

    def rebalance(self, now: float) -> list[Action]:
        """Load a popular model in advance, or replace one by a larger variant, if memory is free and nothing waits."""
        if not self._prefetch or self.loading is not None or self.cold or now < self._short_at_ms + _CALM_MS:
            return []
        by_popularity = sorted(self.entries, key=lambda n: (-self._popularity(self.entries[n], now), n))
        for number in by_popularity:
            entry = self.entries[number]
            if self._popularity(entry, now) < _MIN_POPULARITY and not entry.model.pinned:
                return []
            if entry.place is Place.ABSENT and now >= entry.retry_at_ms and self.fits(number):
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

    def _start_trial(self, now: float) -> list[Action]:
        """Start the first trial, if possible in free memory; without enough memory, it goes behind the others."""
        number = next(iter(self.trials))
        variant = self._largest_fitting(self.entries[number], self.free)
        actions: list[Action] = []
        if variant is None:
            room = self._make_room(now, number)
            if room is None:
                del self.trials[number]
                self.trials[number] = None
                return []
            variant, actions = room
        return [*actions, self._start(now, number, variant, trial=True)]

    def _start(self, now: float, number: int, variant: int | None = None, *, trial: bool = False) -> Load:
        entry = self.entries[number]
        entry.trial = trial
        self.trials.pop(number, None)
        if variant is not None:
            entry.variant = variant
            self._reserve(entry, 1)
        self.cold.pop(number, None)
        entry.place = Place.LOADING
        self.loading = number
        self.loading_until_ms = now + self.load_ms(entry, entry.variant)
        return Load(number, entry.variant)

    def _make_room(self, now: float, number: int) -> tuple[int, list[Action]] | None:
        """Return the variant to load and what has to be unloaded before; None if there is not enough memory."""
        entry = self.entries[number]
        if self._fits(entry, entry.first, self.free):
            return entry.first, []
        self._short_at_ms = now
        room = self._room_on(self.primary, now, number)
        if room is None:
            return None
        steps = {resident.key: self._clamped(resident.key, level) for resident, level in room.shrunk}
        steps = {key: level for key, level in steps.items() if level != self.entries[key].variant}
        variant, victims = self._clamped(number, room.level), [victim.key for victim in room.evicted]
        for device in self.free:
            more = self._victims_on(device, now, number, variant, steps, victims)
            if more is None:
                return None
            victims += more
        actions: list[Action] = [self._unload(key, "evict") for key in victims]
        return variant, actions + self._apply_steps(steps)

    def _room_on(self, device: str, now: float, number: int) -> Room | None:
        """Choose what shrinks and what is evicted on the device whose memory variants differ in."""
        requested = self.entries[number]
        held = []
        for entry in self.residents.values():
            entry.resident.bytes = self._bytes(entry, entry.variant, device)
            entry.resident.level = entry.variant
            held.append(entry.resident)
        known = {resident.key: self.residents[resident.key] for resident in held} | {number: requested}
        levels = max(len(entry.model.variants) for entry in known.values())
        if levels == 1:
            missing = self._bytes(requested, 0, device) - self.free[device]
            victims = choose_victims(held, missing, self._rank, now) if missing > 0 else []
            return None if victims is None else Room(0, (), tuple(victims))
        sizes = [
            {key: self._bytes(entry, self._clamped(key, level), device) for key, entry in known.items()}
            for level in range(levels)
        ]
        for level in range(requested.first):
            sizes[level][number] = _TOO_LARGE
        return make_room(Memory(held, self.free[device], sizes), number, self._rank, now)

    def _victims_on(  # noqa: PLR0913, PLR0917 - the state after the choice on the first device
        self, device: str, now: float, number: int, variant: int, steps: Mapping[int, int], gone: Sequence[int]
    ) -> list[int] | None:
        """Choose what else is evicted, because variants that leave one device may take memory of another."""
        free = self.free[device]
        for key in gone:
            free += self._bytes(self.entries[key], self.entries[key].variant, device)
        for key, level in steps.items():
            free += self._bytes(self.entries[key], self.entries[key].variant, device)
            free -= self._bytes(self.entries[key], level, device)
        missing = self._bytes(self.entries[number], variant, device) - free
        if missing <= 0:
            return []
        candidates = []
        for key, entry in self.residents.items():
            entry.resident.bytes = self._bytes(entry, entry.variant, device)
            if key not in gone and key not in steps:
                candidates.append(entry.resident)
        victims = choose_victims(candidates, missing, self._rank, now)
        return None if victims is None else [victim.key for victim in victims]

    def _apply_steps(self, steps: Mapping[int, int]) -> list[Action]:
        actions: list[Action] = []
        for number, step in steps.items():
            actions.append(self._unload(number, "shrink"))
            entry = self.entries[number]
            entry.variant = step
            entry.place = Place.RESERVED
            self._reserve(entry, 1)
        return actions

    def _clamped(self, number: int, level: int) -> int:
        """Return the index of a model's variant of a level; models with fewer variants keep their last."""
        return min(level, len(self.entries[number].model.variants) - 1)

    def _unload(self, number: int, cause: str) -> Unload:
        entry = self.residents.pop(number)
        self._reserve(entry, -1)
        entry.place = Place.ABSENT
        entry.cores = ()
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
