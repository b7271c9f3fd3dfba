"""Residency: which models are in memory, in which variant, within a budget of bytes for each device.

The rules of the device that variants differ in, the accelerator, or the host if there is none, are those of
:mod:`chrion.serving.manager.device_memory`. Beyond them, a server measures loads, which may fail, and:

- If smaller variants take more memory of the other device, models are evicted from there.
- While no request waits for a load, models that have to be tried are loaded once, one after another, and unloaded again
  if no request has come meanwhile.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count
from math import inf
from typing import Any

from chrion.serving.manager.device_memory import Host
from chrion.serving.manager.manager import ModelManager
from chrion.serving.manager.policies import ResidentModel, choose_victims
from chrion.serving.manager.policy_settings import PolicySpec
from chrion.serving.manager.queue_estimate import Service
from chrion.serving.manager.ready_queue import BatchLimits
from chrion.serving.manager.records import ACCELERATOR, Action, Load, ManagedModel, Reason, Request, Unload
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
    #: Index of the first variant that may be used; above zero after the device's memory was full.
    first: int = 0
    failures: int = 0
    retry_at_ms: float = 0.0
    removed: bool = False
    #: The cores that the threads of the session in memory are pinned to; empty if it runs on any.
    cores: tuple[int, ...] = ()
    #: Moving average of the times of loads, of each variant that has been loaded.
    load_ms: dict[int, float] = field(default_factory=dict)
    #: When the last of its requests started, and when the last one was admitted that only measures its latency.
    started_ms: float = -inf
    measuring_ms: float = -inf

    @property
    def variant(self) -> int:
        """Index of the variant in memory, or being loaded."""
        return self.resident.level


class Residency(ModelManager[Request]):
    """A device whose models come and go, with the memory of all devices of its server.

    Args:
        budgets: Bytes for models by device; devices that are not named have no limit.
        cores: CPU cores.
        slots: Requests that the accelerator executes at the same time.
        policies: The policies.

    Attributes:
        free: Free bytes by device.
        primary: The device that variants differ in: the accelerator, or the host if there is none.
    """

    def __init__(self, budgets: Mapping[str, int], cores: int, slots: int, policies: PolicySpec) -> None:
        self.policies = policies
        self.budgets = dict(budgets)
        self.free = dict(budgets)
        self.entries: dict[int, Entry] = {}
        #: Models whose trial has not started, in its order, and the one whose load in progress is one: it is unloaded
        #: afterwards unless requests wait for it.
        self.trials: dict[int, None] = {}
        self._trial: int | None = None
        self.primary = ACCELERATOR if ACCELERATOR in budgets else next(iter(budgets))
        self._numbers = count()
        self._actions: list[Action] = []
        #: By level, then by model.
        self._sizes: list[dict[int, int]] = []
        self._services: list[dict[int, Service]] = []
        self._figures: dict[str, Any] = {key: {} for key in ("slo_ms", "weights", "pinned", "max_queue", "batching")}
        rules = policies.rules(**self._figures)
        super().__init__(
            Host(cores),
            rules,
            budget_bytes=budgets[self.primary],
            slots=slots,
            sizes=self._sizes,
            service=self._services,
            shape=lambda request: (request.batch_key, request.rows),
            rank=lambda request: (not request.priority, request.priority),
            outstanding=[0],
        )
        self._least_limit = 0  # models are added later, and requests may wait in a queue of the caller
        self._counts = self._may_be_late = self._notes_idle = True
        self._is_plain = False
        #: Measured over stated time of the latest loads, and their median: the first load of a process takes long.
        self._load_factors: deque[float] = deque(maxlen=_LOADS)
        self._load_factor = 1.0

    def add(self, now: float, model: ManagedModel) -> int:
        """Add a model that is not in memory, and return its number.

        A pinned one uses its first variant only, so that its memory is known.
        """
        if model.pinned:
            model = replace(model, variants=model.variants[:1])
        number = next(self._numbers)
        limits = BatchLimits(model.max_batch, model.max_delay_ms)
        own = model.slo_ms, model.weight, model.pinned, model.max_queue, limits
        for figures, figure in zip(self._figures.values(), own, strict=True):
            figures[number] = figure
        self.entries[number] = Entry(model, self._resident_of(number))
        self.popularity[number] = 0.0, now
        if model.pinned:
            self.pinned.add(number)
        self._tabulate(number)
        for variant, services in zip(model.variants, self._services, strict=False):
            needs = variant.slots, min(variant.cores, self.host.cores)
            services[number] = *needs, variant.latency_ms, (), needs
        return number

    def _forget(self, now: float, number: int) -> None:
        """Forget a model that was removed: at once if nothing uses it, else at the end of its load or last use."""
        entry = self.entries[number]
        entry.removed = True
        self.stop_waiting(number)
        self.trials.pop(number, None)
        if self.loading == number or entry.resident.in_use:
            return
        if number in self.residents:
            self.evict(now, entry.resident, "remove")
        elif number in self.reserved:
            self._give_back(entry.resident)
            del self.reserved[number]
        self.pinned.discard(number)
        by_number: list[dict[int, Any]] = [self.entries, self.popularity, self._known, *self._sizes, *self._services]
        for table in (*by_number, *self._figures.values()):
            table.pop(number, None)

    def place(self, number: int) -> Place:
        """Return the state of a model."""
        if number in self.residents:
            return Place.RESIDENT
        if number == self.loading:
            return Place.LOADING
        return Place.RESERVED if number in self.reserved else Place.ABSENT

    def load_ms_of(self, model: int, level: int) -> float:
        """Return the expected time of a load: the average of earlier ones, else as stated, corrected by the others'."""
        entry = self.entries[model]
        average_ms = entry.load_ms.get(level)
        return entry.model.variants[level].load_ms * self._load_factor if average_ms is None else average_ms

    def _measure_load(self, number: int, took_ms: float) -> None:
        entry = self.entries[number]
        self._load_factors.append(took_ms / max(entry.model.variants[entry.variant].load_ms, _MIN_LOAD_MS))
        self._load_factor = statistics.median(self._load_factors)
        before = self.load_ms_of(number, entry.variant)
        entry.load_ms[entry.variant] = before + _NEWEST * (took_ms - before)

    def fits(self, number: int) -> bool:
        """Return whether any variant of a model fits into the budgets beside the pinned models."""
        return bool(self.fitting([number]))

    def fitting(self, numbers: Collection[int]) -> set[int]:
        """Return the models of which any variant fits into the budgets beside the pinned models.

        Of pinned models, those in memory have precedence, and then those that were added first.
        """
        free, pinned = dict(self.budgets), set()
        for number in sorted(self.pinned, key=lambda own: (self.place(own) is Place.ABSENT, own)):
            entry = self.entries[number]
            if self._fits(entry, 0, free):
                pinned.add(number)
                for device in free:
                    free[device] -= self._bytes(entry, 0, device)

        def is_possible(entry: Entry) -> bool:
            return any(self._fits(entry, at, free) for at in range(entry.first, len(entry.model.variants)))

        others = {number for number in numbers if number not in self.pinned and is_possible(self.entries[number])}
        return others | pinned.intersection(numbers)

    def request(self, now: float, number: int) -> list[Action]:
        """Request the load of a model that is not resident."""
        self.request_load(now, number, self.service[0][number][2], self.entries[number].model.priority)
        return self.taken()

    def try_out(self, now: float, number: int) -> list[Action]:
        """Request a load of a model that only shows whether it can be loaded; a pinned one stays."""
        entry = self.entries[number]
        # One that never fits would keep the loads that requests wait for from being made.
        if self.place(number) is not Place.ABSENT or number in self.cold or not self.fits(number):
            return []
        if entry.model.pinned:
            return self.request(now, number)
        self.trials[number] = None
        self.host.load_next(now)
        return self.taken()

    def pin(self, number: int, *, pinned: bool) -> None:
        """Change whether a model may be evicted; one that is pinned has been added as such, with one variant."""
        entry = self.entries[number]
        entry.model = replace(entry.model, pinned=pinned)
        entry.resident.pinned = pinned
        (self.pinned.add if pinned else self.pinned.discard)(number)

    def _note_idle(self, now: float, resident: ResidentModel) -> None:
        if self.entries[resident.key].removed:
            self._forget(now, resident.key)
        elif self._trial == resident.key:
            self.evict(now, resident, "trial")

    def load_failed(self, now: float, number: int, *, out_of_memory: bool = False) -> list[Action]:
        """Note a failed load: if memory was short, try the next smaller variant, else refuse the requests that wait."""
        self.loading = self.host.loading = None
        entry = self.entries[number]
        self._give_back(entry.resident)
        is_next = out_of_memory and entry.variant + 1 < len(entry.model.variants)
        entry.first = entry.variant + 1 if is_next else 0
        self._tabulate(number)
        if entry.removed:
            self._forget(now, number)
        elif is_next:
            entry.resident.level = entry.first
            self.request_load(now, number, self.service[0][number][2], entry.model.priority)
        else:
            entry.failures += 1
            entry.retry_at_ms = now + min(_FIRST_RETRY_MS * 2 ** min(entry.failures - 1, 30), _LAST_RETRY_MS)
            self._drop(now, self.waiters.pop(number, []), Reason.LOAD_FAILED)
        self.host.load_next(now)
        return self.taken()

    def start_next(self, now: float) -> bool:
        """Start the next load over the free link, or a trial if no model waits; return whether there is one."""
        return super().start_next(now) or (bool(self.trials) and not self.cold and self._start_trial(now))

    def _load_times(self, model: int) -> dict[int, float]:
        entry = self.entries[model]
        return {at: self.load_ms_of(model, at) for at in range(entry.first, len(entry.model.variants))}

    def rebalance(self, now: float) -> list[Action]:
        """Load a popular model in advance, or replace one by a larger variant, if memory is free and nothing waits."""
        self.use_free_memory(now)
        return self.taken()

    def _larger(self, now: float, model: int) -> int | None:
        entry = self.entries[model]
        if model not in self.residents and (now < entry.retry_at_ms or not self.fits(model)):
            return None
        return super()._larger(now, model)

    def _has_room(self, model: int, level: int, instead: ResidentModel | None) -> bool:
        entry = self.entries[model]
        held = {device: self._bytes(entry, instead.level, device) if instead else 0 for device in self.free}
        room = {device: free + held[device] for device, free in self.free.items()}
        return level >= entry.first and self._fits(entry, self._clamped(model, level), room)

    def used(self, device: str) -> int:
        """Return the bytes of a device that models hold or have reserved."""
        return sum(
            self._bytes(entry, entry.variant, device)
            for number, entry in self.entries.items()
            if self.place(number) is not Place.ABSENT
        )

    def _start_trial(self, now: float) -> bool:
        """Start the first trial, if possible in free memory; without enough memory, it goes behind the others."""
        number = next(iter(self.trials))
        variant = super()._larger(now, number)
        room = self.make_room(now, number) if variant is None else Room(variant)
        if room is None:
            del self.trials[number]
            self.trials[number] = None
            return False
        self.apply(now, room)
        self.load(now, number, room.level)
        self._trial = number
        return True

    def _begin_load(self, now: float, resident: ResidentModel) -> None:
        self._trial = None
        self.trials.pop(resident.key, None)
        resident.load_ms = self.load_ms_of(resident.key, resident.level)
        self.loading_until_ms = now + resident.load_ms
        self._actions.append(Load(resident.key, resident.level))

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

    def _changes_variants(self, model: int) -> bool:
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

    def _note_unload(self, now: float, resident: ResidentModel, level: int, cause: str) -> None:
        del now
        self.entries[resident.key].cores = ()
        self._count_bytes(resident.key, level, -1)
        self._actions.append(Unload(resident.key, level, cause))

    def _hold(self, resident: ResidentModel, level: int) -> None:
        super()._hold(resident, level)
        self._count_bytes(resident.key, level, 1)

    def _give_back(self, resident: ResidentModel) -> None:
        """Release the memory of a variant that was reserved and is not in memory."""
        self.free_bytes += resident.bytes
        self._count_bytes(resident.key, resident.level, -1)

    def _count_bytes(self, number: int, level: int, sign: int) -> None:
        for device in self.free:
            self.free[device] -= sign * self._bytes(self.entries[number], level, device)

    def _tabulate(self, number: int) -> None:
        """Note the bytes of a model's variants by level; models with fewer variants than others keep their last."""
        entry = self.entries[number]
        while len(self._sizes) < len(entry.model.variants):
            self._sizes.append(dict(self._sizes[-1]) if self._sizes else {})
            self._services.append({})
        for level, row in enumerate(self._sizes):
            size = self._bytes(entry, self._clamped(number, level), self.primary)
            row[number] = size if level >= entry.first else _TOO_LARGE

    def _clamped(self, number: int, level: int) -> int:
        return min(level, len(self.entries[number].model.variants) - 1)

    def taken(self) -> list[Action]:
        """Return the actions that were chosen since the last time."""
        actions, self._actions = self._actions, []
        return actions

    def _fits(self, entry: Entry, variant: int, free: Mapping[str, int]) -> bool:
        return all(self._bytes(entry, variant, device) <= size for device, size in free.items())

    def _takes_memory(self, resident: ResidentModel) -> bool:
        entry = self.entries[resident.key]
        return any(self._bytes(entry, resident.level, device) for device in self.free)

    def _bytes(self, entry: Entry, variant: int, device: str) -> int:
        return entry.model.variants[variant].bytes.get(device, 0)
