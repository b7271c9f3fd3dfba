"""The manager of a model server: events in, actions out, without threads, sockets or a clock.

The states of a request::

    submitted --model in memory--> ready --cores and slot free, batch complete--> running --> finished
        |                            ^
        +--model missing--> waiting --load done

Ready requests start in the order of :mod:`chrion.serving.manager.ready_queue`, those of models with a higher priority
first. A request whose cores or slot are not free blocks those behind it, so that none starves; one that needs neither
starts at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from types import MappingProxyType

from chrion.serving.manager.policies import EVICTION, LOAD_ORDER, is_in_time
from chrion.serving.manager.policy_settings import DEFAULT_POLICIES, PolicySpec
from chrion.serving.manager.queue_estimate import Service, expected_releases, expected_start
from chrion.serving.manager.ready_queue import BatchLimits, Line, ReadyQueue
from chrion.serving.manager.records import Action, ManagedModel, Reason, Refuse, Request, Run
from chrion.serving.manager.residency import Place, Residency

#: Weight of a new measurement in the moving averages of latencies: the last ten or so decide, and one outlier changes
#: the average by a fifth.
_NEWEST = 0.2
_NOTHING: Mapping[int, int] = MappingProxyType({})
#: Minimum time after which a refused client should try again, so that clients whose queue seems empty do not repeat
#: requests without a pause.
MIN_RETRY_MS = 100.0


class ModelManager:
    """Decides which model is in memory in which variant, and which requests run on which cores.

    Args:
        budgets: Bytes for models by device.
        cores: The CPU cores to lease, the first of the machine first.
        slots: Requests that the accelerator executes at the same time.
        policies: The policies.

    Attributes:
        memory: Which models are in memory.
        running: The batches that run, by their numbers.
        policies: The policies.
    """

    def __init__(
        self,
        budgets: Mapping[str, int],
        cores: Sequence[int],
        *,
        slots: int = 1,
        policies: PolicySpec = DEFAULT_POLICIES,
    ) -> None:
        self.policies = policies
        self.memory = Residency(
            budgets, EVICTION[policies.eviction], LOAD_ORDER[policies.load_order], prefetch=policies.prefetch
        )
        self.running: dict[int, Run] = {}
        self._deadlines = policies.admission == "deadline"
        self._cores = list(cores)
        self._free_cores = list(cores)
        self._free_slots = slots
        self._slots = slots
        self._numbers = count()
        self._runs = count()
        #: Requests that wait for a load, by model.
        self._waiting: dict[int, list[Request]] = {}
        self._ready = ReadyQueue[Request](lambda request: (request.batch_key, request.rows), _urgency)
        self._models_of: dict[int, int] = {}

    def add(self, now: float, model: ManagedModel) -> int:
        """Add a model and return its number."""
        number = next(self._numbers)
        self.memory.add(now, number, model)
        return number

    def remove(self, now: float, number: int) -> list[Action]:
        """Remove a model: refuse the requests that wait for its load; ready and running ones are served."""
        actions: list[Action] = [self._refuse(r, Reason.REMOVED) for r in self._waiting.pop(number, ())]
        actions += self.memory.remove(number)
        return actions + self.memory.next_load(now)

    def waiting(self, number: int) -> int:
        """Return the number of a model's requests that have not started."""
        line = self._line(number)
        return len(self._waiting.get(number, ())) + (len(line.items) if line else 0)

    @property
    def pending(self) -> int:
        """Number of requests that have not started."""
        return len(self._models_of)

    def submit(self, now: float, request: Request, queued: Mapping[int, int] = _NOTHING) -> list[Action]:
        """Accept or refuse a request that arrives now.

        Args:
            now: The time.
            request: The request.
            queued: Requests by model that have started here, and wait in a queue of the caller.
        """
        entry = self.memory.entries.get(request.model)
        if entry is None or entry.removed:
            return [Refuse(request, Reason.REMOVED)]
        of_model = self.waiting(request.model) + queued.get(request.model, 0)
        if of_model >= entry.model.max_queue or self.pending + sum(queued.values()) >= self.policies.max_waiting:
            return [Refuse(request, Reason.QUEUE_FULL, self._retry_ms(now, request.model))]
        resident = entry.place is Place.RESIDENT
        if not resident:
            if not self.memory.fits(request.model):
                return [Refuse(request, Reason.TOO_LARGE)]
            if entry.place is Place.ABSENT and now < entry.retry_at_ms:
                return [Refuse(request, Reason.LOAD_FAILED, entry.retry_at_ms - now)]
        self.memory.count(now, request.model)
        admitted = not self._deadlines or self._is_admitted(now, request)
        actions: list[Action] = []
        if not admitted:
            actions.append(Refuse(request, Reason.NO_TIME, self._retry_ms(now, request.model)))
        if not resident:
            if admitted:
                self._models_of[request.id] = request.model
                self._waiting.setdefault(request.model, []).append(request)
            # A refused request starts a load too: the next one may be in time.
            return actions + self.memory.request(now, request.model)
        if admitted:
            self._models_of[request.id] = request.model
            self.memory.acquire(request.model)
            self._add_ready(now, request)
        return actions + self._start_ready(now)

    def cancel(self, now: float, request: int) -> list[Action]:
        """Forget a request that has not started; one that runs is left to the caller."""
        number = self._models_of.pop(request, None)
        if number is None:
            return []
        if number in self._waiting:
            self._waiting[number] = [r for r in self._waiting[number] if r.id != request]
            return []
        line = self._line(number)
        assert line  # noqa: S101 # a request that neither waits for a load nor has started is ready
        self._ready.remove(line, [r for r in line.requests if r.id == request])
        return self.memory.release(now, number) + self._start_ready(now)

    def loaded(
        self, now: float, number: int, took_ms: float | None = None, cores: tuple[int, ...] = ()
    ) -> list[Action]:
        """Note that a load has ended, how long it took, and which cores the session's threads are pinned to."""
        entry = self.memory.entries[number]
        entry.cores = cores
        if took_ms is not None:
            self.memory.measure_load(entry, took_ms)
        actions = self.memory.loaded(now, number)
        requests = self._waiting.pop(number, [])
        if requests:
            self.memory.acquire(number, len(requests))
            for request in requests:
                self._add_ready(now, request)
        else:
            actions += self.memory.end_trial(number)
        actions += self.memory.next_load(now)
        return actions + self._start_ready(now)

    def load_failed(self, now: float, number: int, *, out_of_memory: bool = False) -> list[Action]:
        """Note that a load has failed: refuse the requests that wait for it, unless a smaller variant is tried."""
        actions = self.memory.load_failed(now, number, out_of_memory=out_of_memory)
        entry = self.memory.entries.get(number)
        if entry is None or (number not in self.memory.cold and entry.place is Place.ABSENT):
            retry_ms = entry.retry_at_ms - now if entry else 0.0
            for request in self._waiting.pop(number, []):
                actions.append(self._refuse(request, Reason.LOAD_FAILED, retry_ms))
        return actions + self.memory.next_load(now)

    def finish(self, now: float, run: int, took_ms: float | None = None) -> list[Action]:
        """Note that a batch has ended, and how long it ran."""
        ended = self.running.pop(run)
        entry = self.memory.entries[ended.model]
        if took_ms is not None:
            known = entry.latency_ms[ended.variant]
            entry.latency_ms[ended.variant] = known + _NEWEST * (took_ms - known)
        self._free_cores = [core for core in self._cores if core in self._free_cores or core in ended.cores]
        self._free_slots += ended.slots
        actions = self.memory.release(now, ended.model, len(ended.requests))
        return actions + self._start_ready(now)

    def advance(self, now: float) -> list[Action]:
        """Refuse requests whose deadline has passed, and start batches that need not wait longer."""
        actions: list[Action] = []
        for number, requests in self._waiting.items():
            absent = self.memory.entries[number].place is Place.ABSENT
            if absent and not self.memory.fits(number):  # one was pinned since
                actions += [self._refuse(r, Reason.TOO_LARGE) for r in requests]
                self._waiting[number] = []
                self.memory.cold.pop(number, None)
                continue
            late = [r for r in requests if r.deadline_ms <= now]
            actions += [self._refuse(r, Reason.EXPIRED) for r in late]
            if late:
                self._waiting[number] = [r for r in requests if r.deadline_ms > now]
        for line in list(self._ready.lines.values()):
            late = [request for request in line.requests if request.deadline_ms <= now]
            self._ready.remove(line, late)
            actions += self._drop(now, line.name, late)
        actions += self._start_ready(now)
        return actions + self.memory.next_load(now)

    def next_event_ms(self, now: float) -> float:
        """Return the time of the next deadline or end of a wait for a batch, at least ``now``; infinite for none.

        :meth:`advance` handles all that has passed, so that what is overdue is due at once.
        """
        if not self._models_of:
            return math.inf
        times = [r.deadline_ms for requests in self._waiting.values() for r in requests]
        times += [r.deadline_ms for line in self._ready.lines.values() for r in line.requests]
        return max(now, min(*times, self._ready.wait_ends_ms, math.inf))

    def _line(self, number: int) -> Line[Request] | None:
        """Return the ready requests of a model; None if there are none."""
        return self._ready.lines.get((number, self._priority(number))) if number in self.memory.entries else None

    def _priority(self, number: int) -> float:
        """Return the priority of a model; what needs no core and no slot waits for nothing."""
        entry = self.memory.entries[number]
        variant = entry.model.variants[entry.variant]
        return entry.model.priority if variant.cores or variant.slots else math.inf

    def _add_ready(self, now: float, request: Request) -> None:
        model = self.memory.entries[request.model].model
        limits = BatchLimits(model.max_batch, model.max_delay_ms)
        self._ready.add(now, request, request.model, self._priority(request.model), limits)

    def _start_ready(self, now: float) -> list[Action]:
        actions: list[Action] = []
        while (line := self._ready.head(now)) and (cores := self._free_lease(line.name)) is not None:
            batch, is_late = self._ready.take(line, partial(self._is_late, now))
            actions += self._drop(now, line.name, batch) if is_late else [self._start(now, line.name, batch, cores)]
        return actions

    def _start(self, now: float, number: int, batch: Sequence[Request], cores: tuple[int, ...]) -> Run:
        """Take the cores and the slot of a batch."""
        for request in batch:
            self._models_of.pop(request.id, None)
        entry = self.memory.entries[number]
        entry.resident.uses += len(batch)
        slots = entry.model.variants[entry.variant].slots
        self._free_cores = [core for core in self._free_cores if core not in cores]
        self._free_slots -= slots
        run_id = next(self._runs)
        run = self.running[run_id] = Run(run_id, number, entry.variant, tuple(batch), cores, slots, now)
        return run

    def _free_lease(self, number: int) -> tuple[int, ...] | None:
        """Return the cores for the next batch of a model; None if they, or the slot, are not free."""
        entry = self.memory.entries[number]
        variant = entry.model.variants[entry.variant]
        need = min(variant.cores, len(self._cores))
        if variant.slots > self._free_slots or need > len(self._free_cores):
            return None
        cores = entry.cores or tuple(self._free_cores[len(self._free_cores) - need :])
        return None if any(core not in self._free_cores for core in cores) else cores

    def _variant(self, number: int) -> int:
        return self.memory.entries[number].variant

    def _is_late(self, now: float, request: Request) -> bool:
        """Return whether a ready request must not start any more."""
        late = self._deadlines and not self._in_time(now, request, 0.0, self._variant(request.model))
        return late or request.deadline_ms <= now

    def _drop(self, now: float, number: int, late: Sequence[Request]) -> list[Action]:
        """Refuse requests of a model that were ready."""
        if not late:
            return []
        retry_ms = self._retry_ms(now, number)
        reasons = [Reason.EXPIRED if request.deadline_ms <= now else Reason.NO_TIME for request in late]
        actions: list[Action] = [self._refuse(*dropped, retry_ms) for dropped in zip(late, reasons, strict=True)]
        return actions + self.memory.release(now, number, len(late))

    def _is_admitted(self, now: float, request: Request) -> bool:
        """Return whether a new request is expected to end in time, in one of the variants that may serve it."""
        if self._objective_ms(request) == math.inf:
            return True
        return any(
            self._in_time(now, request, max(self._queue_wait_ms(now, request.model, level), ready_ms), level)
            for level, ready_ms in self.memory.times_to_memory(now, request.model).items()
        )

    def _in_time(self, now: float, request: Request, wait_ms: float, variant: int) -> bool:
        latency_ms = self.memory.entries[request.model].latency_ms[variant]
        return is_in_time(now, self._objective_ms(request), wait_ms, latency_ms)

    def _objective_ms(self, request: Request) -> float:
        """Return the time by which a request should end."""
        return request.arrival_ms + self.memory.entries[request.model].model.slo_ms

    def _queue_wait_ms(self, now: float, number: int, variant: int) -> float:
        """Return the expected wait of a request that becomes ready now, without batches."""
        needed = self._service(number, variant)[:2]
        if not any(needed):
            return 0.0
        starts = ((r.started_ms, self._service(r.model, r.variant)) for r in self.running.values())
        running = (release for started_ms, service in starts for release in expected_releases(service, started_ms))
        ahead = (
            (self._service(r.model, self._variant(r.model)), self._objective_ms(r))
            for r in self._ready.ahead_of(self._priority(number))
        )
        free = self._free_slots, len(self._free_cores)
        return expected_start(now, free, running, ahead, needed) - now

    def _service(self, number: int, variant: int) -> Service:
        """Return what a request is expected to take."""
        entry = self.memory.entries[number]
        needed = entry.model.variants[variant]
        resources = needed.slots, min(needed.cores, len(self._cores))
        return *resources, entry.latency_ms[variant], (), resources

    def _retry_ms(self, now: float, number: int) -> float:
        """Return a rough estimate of the time until the present queue has been served."""
        wait = sum(self._work_ms(line.name) * len(line.items) for line in self._ready.lines.values())
        entry = self.memory.entries[number]
        if entry.place is not Place.RESIDENT:
            wait += self.memory.link_ms(now) + self.memory.load_ms(entry, entry.variant)
        return max(MIN_RETRY_MS, wait)

    def _work_ms(self, number: int) -> float:
        """Return the time by which a request of a model lengthens the queue."""
        entry = self.memory.entries[number]
        slots, cores, latency_ms, *_ = self._service(number, entry.variant)
        return latency_ms * max(cores / max(1, len(self._cores)), slots / max(1, self._slots))

    def _refuse(self, request: Request, reason: Reason, retry_ms: float = 0.0) -> Refuse:
        self._models_of.pop(request.id, None)
        return Refuse(request, reason, retry_ms)


def _urgency(request: Request) -> tuple[bool, int]:
    """Return what the ready requests of a model are sorted by."""
    return not request.priority, request.priority
