"""The manager of a model server: events in, actions out, without threads, sockets or a clock.

The states of a request::

    submitted --model in memory--> ready --cores and slot free, batch complete--> running --> finished
        |                            ^
        +--model missing--> waiting --load done

Ready requests start in the order in which they became ready, those of models with a higher priority first. Those of one
model that have a priority go before its others, and leave them their places in the order of all models. A request
whose cores or slot are not free blocks those behind it, so that none starves; one that needs neither starts at once. A
request that may share a batch waits a limited time for further requests of its model; meanwhile, requests behind it may
start.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from chrion.serving.manager.policies import EVICTION, LOAD_ORDER, is_in_time
from chrion.serving.manager.queue_estimate import (
    QueuedRequest,
    Service,
    expected_releases,
    expected_start,
    queued_request,
)
from chrion.serving.manager.records import Action, ManagedModel, Reason, Refuse, Request, Run
from chrion.serving.manager.residency import Place, Residency

#: Weight of a new measurement in the moving averages of latencies: the last ten or so decide, and one outlier changes
#: the average by a fifth.
_NEWEST = 0.2
#: Minimum time after which a refused client should try again, so that clients whose queue seems empty do not repeat
#: requests without a pause.
MIN_RETRY_MS = 100.0


@dataclass(frozen=True, slots=True)
class ManagerPolicies:
    """Names of policies in :mod:`chrion.serving.manager.policies`."""

    eviction: str = "lru"
    load_order: str = "demand"
    admission: str = "none"
    #: Whether popular models are loaded in advance, and grow, while memory is free.
    prefetch: bool = True


class ModelManager:
    """Decides which model is in memory in which variant, and which requests run on which cores.

    Args:
        budgets: Bytes for models by device.
        cores: The CPU cores to lease, the first of the machine first.
        slots: Requests that the accelerator executes at the same time.
        policies: The policies.
        max_waiting: Requests of all models that may wait at the same time.

    Attributes:
        max_waiting: The same.
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
        policies: ManagerPolicies | None = None,
        max_waiting: int = 1024,
    ) -> None:
        names = self.policies = policies or ManagerPolicies()
        self.memory = Residency(
            budgets, EVICTION[names.eviction], LOAD_ORDER[names.load_order], prefetch=names.prefetch
        )
        self.running: dict[int, Run] = {}
        self._deadlines = names.admission == "deadline"
        self._cores = list(cores)
        self._free_cores = list(cores)
        self._free_slots = slots
        self._slots = slots
        self.max_waiting = max_waiting
        self._numbers = count()
        self._runs = count()
        self._sequence = count()
        #: Requests that wait for a load, by model.
        self._waiting: dict[int, list[Request]] = {}
        #: Ready requests by model, each with its place in the order of readiness.
        self._ready: dict[int, deque[tuple[int, float, Request]]] = {}
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
        return len(self._waiting.get(number, ())) + len(self._ready.get(number, ()))

    @property
    def pending(self) -> int:
        """Number of requests that have not started."""
        return len(self._models_of)

    def submit(self, now: float, request: Request) -> list[Action]:
        """Accept or refuse a request that arrives now."""
        entry = self.memory.entries.get(request.model)
        if entry is None or entry.removed:
            return [Refuse(request, Reason.REMOVED)]
        if self.waiting(request.model) >= entry.model.max_queue or self.pending >= self.max_waiting:
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
        queue = self._ready[number]
        self._ready[number] = deque(item for item in queue if item[2].id != request)
        self._forget_if_empty(number)
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
        """Refuse requests whose deadline has passed, start batches that need not wait longer, and use free memory."""
        actions: list[Action] = []
        for number, requests in self._waiting.items():
            absent = self.memory.entries[number].place is Place.ABSENT
            if absent and not self.memory.fits(number):  # one was pinned since
                actions += [self._refuse(r, Reason.TOO_LARGE) for r in requests]
                self._waiting[number] = []
                self.memory.forget(number)
                continue
            late = [r for r in requests if r.deadline_ms <= now]
            actions += [self._refuse(r, Reason.EXPIRED) for r in late]
            if late:
                self._waiting[number] = [r for r in requests if r.deadline_ms > now]
        for number in list(self._ready):
            actions += self._drop_late(now, number)
        actions += self._start_ready(now)
        return actions + self.memory.next_load(now) + self.memory.rebalance(now)

    def next_event_ms(self, now: float) -> float:
        """Return the time after ``now`` of the next deadline or the end of a wait for a batch; infinite for none."""
        if not self._models_of:
            return math.inf
        times = [r.deadline_ms for requests in self._waiting.values() for r in requests]
        for number, queue in self._ready.items():
            times += [item[2].deadline_ms for item in queue]
            delay = self.memory.entries[number].model.max_delay_ms
            if delay:
                times.append(queue[0][1] + delay)
        return min((at for at in times if at > now), default=math.inf)

    def _add_ready(self, now: float, request: Request) -> None:
        queue = self._ready.setdefault(request.model, deque())
        queue.append((next(self._sequence), now, request))
        if len(queue) > 1 and _urgency(request) < _urgency(queue[-2][2]):
            requests = sorted((item[2] for item in queue), key=_urgency)
            self._ready[request.model] = deque((*item[:2], r) for item, r in zip(queue, requests, strict=True))

    def _start_ready(self, now: float) -> list[Action]:
        actions: list[Action] = []
        if not self._ready:
            return actions
        held: set[int] = set()
        while True:
            number = min((n for n in self._ready if n not in held), key=self._start_order, default=None)
            if number is None:
                return actions
            actions += self._drop_late(now, number)
            if number not in self._ready:
                continue
            batch = self._next_batch(now, number)
            if not batch:
                held.add(number)
                continue
            cores = self._free_lease(number)
            if cores is None:
                return actions
            late = [r for r in batch if self._deadlines and not self._in_time(now, r, 0.0, self._variant(number))]
            if late:
                actions += self._drop(now, number, [(request, Reason.NO_TIME) for request in late])
                continue
            actions.append(self._start(now, number, batch, cores))

    def _start_order(self, number: int) -> tuple[bool, int, int]:
        """Return what ready requests are sorted by: those that need no core and no slot are not behind others."""
        entry = self.memory.entries[number]
        variant = entry.model.variants[entry.variant]
        return bool(variant.cores or variant.slots), -entry.model.priority, self._ready[number][0][0]

    def _next_batch(self, now: float, number: int) -> list[Request]:
        """Return the requests of a model's next batch; empty while it waits for more."""
        model = self.memory.entries[number].model
        queue = self._ready[number]
        first = queue[0][2]
        if model.max_batch <= 1 or first.batch_key is None:
            return [first]
        batch, rows = [first], first.rows
        for _, _, request in list(queue)[1:]:
            if request.batch_key != first.batch_key or rows + request.rows > model.max_batch:
                continue
            batch.append(request)
            rows += request.rows
        until = queue[0][1] + model.max_delay_ms
        others = any(request.batch_key != first.batch_key for _, _, request in queue)
        complete = rows >= model.max_batch or len(batch) < len(queue) or others
        return batch if complete or now >= until else []

    def _start(self, now: float, number: int, batch: Sequence[Request], cores: tuple[int, ...]) -> Run:
        """Take the cores and the slot of a batch, and the batch from the queue."""
        taken = {request.id for request in batch}
        self._ready[number] = deque(item for item in self._ready[number] if item[2].id not in taken)
        self._forget_if_empty(number)
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

    def _drop_late(self, now: float, number: int) -> list[Action]:
        """Refuse the ready requests of a model whose deadline has passed."""
        late = [(r, Reason.EXPIRED) for _, _, r in self._ready[number] if r.deadline_ms <= now]
        return self._drop(now, number, late) if late else []

    def _drop(self, now: float, number: int, late: Sequence[tuple[Request, Reason]]) -> list[Action]:
        gone = {request.id for request, _ in late}
        self._ready[number] = deque(item for item in self._ready[number] if item[2].id not in gone)
        self._forget_if_empty(number)
        actions: list[Action] = [self._refuse(r, reason, self._retry_ms(now, number)) for r, reason in late]
        return actions + self.memory.release(now, number, len(late))

    def _is_admitted(self, now: float, request: Request) -> bool:
        """Return whether a new request is expected to end in time, in one of the variants that may serve it."""
        entry = self.memory.entries[request.model]
        if entry.model.slo_ms == math.inf:
            return True
        return any(
            self._in_time(now, request, max(self._queue_wait_ms(now, request.model, level), ready_ms), level)
            for level, ready_ms in self.memory.times_to_memory(now, request.model).items()
        )

    def _in_time(self, now: float, request: Request, wait_ms: float, variant: int) -> bool:
        entry = self.memory.entries[request.model]
        return is_in_time(now, request.arrival_ms + entry.model.slo_ms, wait_ms, entry.latency_ms[variant])

    def _queue_wait_ms(self, now: float, number: int, variant: int) -> float:
        """Return the expected wait of a request that becomes ready now, without batches and priorities."""
        needed = self._service(number, variant)[:2]
        if not any(needed):
            return 0.0
        starts = ((r.started_ms, self._service(r.model, r.variant)) for r in self.running.values())
        running = (release for started_ms, service in starts for release in expected_releases(service, started_ms))
        queued = sorted((item for queue in self._ready.values() for item in queue), key=lambda item: item[0])
        ahead = (self._queued(request) for _, _, request in queued)
        free = self._free_slots, len(self._free_cores)
        return expected_start(now, free, running, ahead, needed) - now

    def _queued(self, request: Request) -> QueuedRequest:
        entry = self.memory.entries[request.model]
        return queued_request(self._service(request.model, entry.variant), request.arrival_ms + entry.model.slo_ms)

    def _service(self, number: int, variant: int) -> Service:
        """Return what a request is expected to take."""
        entry = self.memory.entries[number]
        needed = entry.model.variants[variant]
        resources = needed.slots, min(needed.cores, len(self._cores))
        return *resources, entry.latency_ms[variant], (), resources

    def _retry_ms(self, now: float, number: int) -> float:
        """Return a rough estimate of the time until the present queue has been served."""
        wait = sum(self._work_ms(n) * len(queue) for n, queue in self._ready.items())
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

    def _forget_if_empty(self, number: int) -> None:
        if not self._ready[number]:
            del self._ready[number]


def _urgency(request: Request) -> tuple[bool, int]:
    """Return what the ready requests of a model are sorted by."""
    return not request.priority, request.priority
