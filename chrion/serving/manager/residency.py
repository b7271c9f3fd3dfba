"""Residency: which models are in memory, in which variant, within a budget of bytes for each device.

The rules of the device that variants differ in, the accelerator, or the host if there is none, are those of
:mod:`chrion.serving.manager.device_memory`, which the simulator has too. Beyond them:

- If smaller variants take more memory of the other device, models are evicted from there.
- While no request waits for a load, models that have to be tried are loaded once, one after another, and unloaded again
  if no request has come meanwhile.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from chrion.serving.manager.device_memory import DeviceMemory
from chrion.serving.manager.policies import Order, Rank, ResidentModel, choose_victims
from chrion.serving.manager.records import ACCELERATOR, Action, Load, ManagedModel, Unload
from chrion.serving.manager.shrinking import Room

#: After a failed load, the next attempt waits this long, twice as long after each further failure, up to the limit:
#: short for a passing shortage of memory, and rare enough for a damaged file that its loads do not delay others.
_FIRST_RETRY_MS, _LAST_RETRY_MS = 1000.0, 60_000.0
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
    #: Index of the first variant that may be used; above zero after the device's memory was full.
    first: int = 0
    failures: int = 0
    retry_at_ms: float = 0.0
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

    @property
    def variant(self) -> int:
        """Index of the variant in memory, or being loaded."""
        return self.resident.level


class Residency(DeviceMemory):
    """The memory of all devices; every public method that may change it returns actions, those of the base apart.

    Args:
        budgets: Bytes for models by device; devices that are not named have no limit.
        rank: The eviction policy.
        order: The load order.
        prefetch: Whether popular models are loaded in advance while memory is free.

    Attributes:
        free: Free bytes by device.
        primary: The device that variants differ in: the accelerator, or the host if there is none.
    """

    def __init__(self, budgets: Mapping[str, int], rank: Rank, order: Order, *, prefetch: bool = True) -> None:
        self.budgets = dict(budgets)
        self.free = dict(budgets)
        self.entries: dict[int, Entry] = {}
        #: Models whose trial has not started, in its order.
        self.trials: dict[int, None] = {}
        self.primary = ACCELERATOR if ACCELERATOR in budgets else next(iter(budgets))
        self._rows: list[dict[int, int]] = []
        super().__init__(budgets[self.primary], rank, order, self._rows)
        self.prefetch = prefetch
        self._actions: list[Action] = []
        #: Measured over stated time of the latest loads, and their median: the first load of a process takes long.
        self._load_factors: deque[float] = deque(maxlen=_LOADS)
        self._load_factor = 1.0

    def add(self, now: float, number: int, model: ManagedModel) -> None:
        """Add a model that is not in memory. A pinned one uses its first variant only, so that its memory is known."""
        if model.pinned:
            model = replace(model, variants=model.variants[:1])
        resident = ResidentModel(number, 0, model.variants[0].load_ms, model.weight, model.pinned, idle_since_ms=now)
        latency = [v.latency_ms for v in model.variants]
        self.entries[number] = Entry(model, resident, latency_ms=latency)
        self.popularity[number] = 0.0, now
        if model.pinned:
            self.pinned.add(number)
        self._tabulate(number)

    def remove(self, number: int) -> list[Action]:
        """Remove a model: at once if nothing uses it, else at the end of its load or of its last use."""
        entry = self.entries[number]
        entry.removed = True
        self.cold.pop(number, None)
        self.trials.pop(number, None)
        if entry.place is Place.LOADING or entry.resident.in_use:
            return []
        actions: list[Action] = []
        if entry.place is Place.RESIDENT:
            actions.append(self._unload(number, "remove"))
        elif entry.place is Place.RESERVED:
            self._reserve(entry, -1)
            del self.reserved[number]
        del self.entries[number], self.popularity[number]
        self.pinned.discard(number)
        for row in self._rows:
            del row[number]
        return actions

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

    def request(self, now: float, number: int) -> list[Action]:
        """Request the load of a model that is not resident."""
        entry = self.entries[number]
        self.wait_for_load(now, number, entry.latency_ms[entry.first], entry.model.priority)
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
        (self.pinned.add if pinned else self.pinned.discard)(number)

    def acquire(self, number: int, uses: int = 1) -> None:
        """Protect a model from eviction for some requests."""
        self.entries[number].resident.in_use += uses

    def release(self, now: float, number: int, uses: int = 1) -> list[Action]:
        """End the uses of a model; if it becomes idle, start a load that waits for memory."""
        self.end_use(now, self.entries[number].resident, uses)
        return self._take()

    def note_idle(self, now: float, resident: ResidentModel) -> None:
        """Remove a model that was to be removed, and start a load that waits for memory."""
        if self.entries[resident.key].removed:
            self._actions += self.remove(resident.key)
        if self.cold:
            self._use_link(now)

    def loaded(self, now: float, number: int) -> list[Action]:
        """Note the end of a load; the caller continues with :meth:`next_load`."""
        self.loading = None
        entry = self.entries[number]
        entry.place = Place.RESIDENT
        self.residents[number] = entry.resident
        entry.failures = 0
        if not entry.replacing:
            entry.resident.idle_since_ms = now
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
        if entry.removed:
            return self.remove(number)
        if out_of_memory and entry.variant + 1 < len(entry.model.variants):
            entry.first = entry.resident.level = entry.variant + 1
            self._tabulate(number)
            return self.request(now, number)
        entry.first = 0
        self._tabulate(number)
        entry.failures += 1
        entry.retry_at_ms = now + min(_FIRST_RETRY_MS * 2 ** min(entry.failures - 1, 30), _LAST_RETRY_MS)
        return []

    def next_load(self, now: float) -> list[Action]:
        """Start the next load if none is in progress and there is, or can be made, enough memory."""
        self._use_link(now)
        return self._take()

    def _use_link(self, now: float) -> None:
        if self.loading is None and not self.start_next(now) and self.trials and not self.cold:
            self._start_trial(now)

    def link_ms(self, now: float) -> float:
        """Return the expected time until the end of the load in progress."""
        return 0.0 if self.loading is None else max(0.0, self.loading_until_ms - now)

    def load_times(self, model: int) -> dict[int, float]:
        """Return the expected time of a load of each variant that may be used."""
        entry = self.entries[model]
        return {at: self.load_ms(entry, at) for at in range(entry.first, len(entry.model.variants))}

    def rebalance(self, now: float) -> list[Action]:
        """Load a popular model in advance, or replace one by a larger variant, if memory is free and nothing waits."""
        self.use_free_memory(now)
        return self._take()

    def larger(self, now: float, model: int) -> int | None:
        """Return the first variant for which memory is free, of a missing model or before that of an idle one."""
        entry = self.entries[model]
        if entry.place is Place.ABSENT and now >= entry.retry_at_ms and self.fits(model):
            return self._largest_fitting(entry, self.free)
        if entry.place is not Place.RESIDENT or entry.resident.in_use:
            return None
        room = {device: free + self._bytes(entry, entry.variant, device) for device, free in self.free.items()}
        level = self._largest_fitting(entry, room)
        return level if level is not None and level < entry.variant else None

    def used(self, device: str) -> int:
        """Return the bytes of a device that models hold or have reserved."""
        return sum(
            self._bytes(entry, entry.variant, device)
            for entry in self.entries.values()
            if entry.place is not Place.ABSENT
        )

    def _start_trial(self, now: float) -> None:
        """Start the first trial, if possible in free memory; without enough memory, it goes behind the others."""
        number = next(iter(self.trials))
        variant = self._largest_fitting(self.entries[number], self.free)
        room = self.make_room(now, number) if variant is None else Room(variant)
        if room is None:
            del self.trials[number]
            self.trials[number] = None
            return
        self.apply(now, room)
        self.load(now, number, room.level)
        self.entries[number].trial = True

    def load(self, now: float, model: int, level: int) -> None:
        """Start a load, for which there is memory."""
        entry = self.entries[model]
        entry.trial = False
        self.trials.pop(model, None)
        self.cold.pop(model, None)  # one whose memory is reserved does not wait for its turn
        entry.replacing = self.reserved.pop(model, None) is not None
        if not entry.replacing:
            self._take_memory(entry, level)
        entry.place = Place.LOADING
        self.loading, self.loading_level, self.loading_until_ms = model, level, now + self.load_ms(entry, level)
        self._actions.append(Load(model, level))

    def make_room(self, now: float, model: int, *, evict: bool = True) -> Room | None:
        """Choose what gives way to a model on all devices; None if one of them has not enough memory."""
        entry = self.entries[model]
        if self._fits(entry, entry.first, self.free):
            return Room(entry.first)
        self.short_at_ms = now
        room = super().make_room(now, model, evict=evict)
        if room is None:
            return None
        variant = self._clamped(model, room.level)
        steps = {resident.key: self._clamped(resident.key, level) for resident, level in room.shrunk}
        steps = {key: level for key, level in steps.items() if level != self.entries[key].variant}
        gone = [victim.key for victim in room.evicted]
        for device in self.free:
            more = self._victims_on(device, now, model, variant, steps, gone)
            if more is None:
                return None
            gone += more
        shrunk = tuple((self.residents[key], level) for key, level in steps.items())
        return Room(variant, shrunk, tuple(self.residents[key] for key in gone))

    def changes_variants(self, model: int) -> bool:
        """Return whether a model, or one in memory, has several variants."""
        return any(len(self.entries[key].model.variants) > 1 for key in (model, *self.residents))

    def _victims_on(  # noqa: PLR0913, PLR0917 - the state after the choice on the first device
        self, device: str, now: float, number: int, variant: int, steps: Mapping[int, int], gone: Sequence[int]
    ) -> list[int] | None:
        """Choose what else is evicted, because variants that leave one device may take memory of another."""
        held = {key: self._bytes(self.entries[key], self.entries[key].variant, device) for key in self.residents}
        free = self.free[device] + sum(held[key] for key in (*gone, *steps))
        free -= sum(self._bytes(self.entries[key], level, device) for key, level in steps.items())
        missing = self._bytes(self.entries[number], variant, device) - free
        if missing <= 0:
            return []
        staying = [self.residents[key] for key in self.residents if key not in gone and key not in steps]
        candidates = [replace(resident, bytes=held[resident.key]) for resident in staying]
        victims = choose_victims(candidates, missing, self._rank, now)
        return None if victims is None else [victim.key for victim in victims]

    def evict(self, now: float, resident: ResidentModel) -> None:
        """Unload a model."""
        del now
        self._actions.append(self._unload(resident.key, "evict"))

    def change(self, now: float, resident: ResidentModel, level: int) -> None:
        """Unload a model, and reserve the memory of another variant."""
        del now
        self._actions.append(self._unload(resident.key, "shrink" if level > resident.level else "grow"))
        entry = self.entries[resident.key]
        entry.place = Place.RESERVED
        self.reserved[resident.key] = level
        self._take_memory(entry, level)

    def _take_memory(self, entry: Entry, level: int) -> None:
        entry.resident.level = level
        entry.resident.bytes = self._bytes(entry, level, self.primary)
        self._reserve(entry, 1)

    def _tabulate(self, number: int) -> None:
        """Note the bytes of a model's variants by level; models with fewer variants than others keep their last."""
        entry = self.entries[number]
        while len(self._rows) < len(entry.model.variants):
            self._rows.append(dict(self._rows[-1]) if self._rows else {})
        for level, row in enumerate(self._rows):
            size = self._bytes(entry, self._clamped(number, level), self.primary)
            row[number] = size if level >= entry.first else _TOO_LARGE

    def _clamped(self, number: int, level: int) -> int:
        return min(level, len(self.entries[number].model.variants) - 1)

    def _unload(self, number: int, cause: str) -> Unload:
        entry = self.entries[number]
        del self.residents[number]
        self._reserve(entry, -1)
        entry.place = Place.ABSENT
        entry.cores = ()
        return Unload(number, entry.variant, cause)

    def _take(self) -> list[Action]:
        """Return the actions that were chosen since the last time."""
        actions, self._actions = self._actions, []
        return actions

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
        self.free_bytes = self.free[self.primary]
