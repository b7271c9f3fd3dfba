"""The manager of a live server or replica, whose requests and loads take as long as they take.

It decides as :mod:`chrion.serving.manager.manager` says, and returns what is to be carried out as actions. Beyond it:

- Models come and go, and loads may fail; see :mod:`chrion.serving.manager.residency`.
- Times of requests and loads are measured.
- Requests of models with a higher priority start first. One that needs neither a core nor a slot starts at once.
- Requests leave when their clients do, or when they have not started by their deadline.
- A session whose threads are pinned runs on its cores alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from chrion.serving.manager.policies import ResidentModel, is_in_time
from chrion.serving.manager.policy_settings import DEFAULT_POLICIES, PolicySpec
from chrion.serving.manager.queue_estimate import Service
from chrion.serving.manager.ready_queue import Line
from chrion.serving.manager.records import Action, Reason, Refuse, Request, Run
from chrion.serving.manager.residency import Place, Residency

#: Weight of a new measurement in the moving averages of latencies: the last ten or so decide, and one outlier changes
#: the average by a fifth.
_NEWEST = 0.2
#: Time after the last start of a model's request, after which one is admitted although the model is expected to exceed
#: its objective by itself: its latency is measured again. A server that was stalled refuses no longer than that, and
#: a model that is always too slow takes one run in that time from others (a choice, not measured).
REMEASURE_MS = 10_000.0
_NOTHING: Mapping[int, int] = MappingProxyType({})
#: Minimum time after which a refused client should try again, so that clients whose queue seems empty do not repeat
#: requests without a pause.
MIN_RETRY_MS = 100.0


class LiveManager(Residency):
    """Decides which model is in memory in which variant, and which requests run on which cores.

    Args:
        budgets: Bytes for models by device.
        cores: The CPU cores to lease, the first of the machine first.
        slots: Requests that the accelerator executes at the same time.
        policies: The policies.

    Attributes:
        running: The batches that run, by their numbers.
    """

    def __init__(
        self,
        budgets: Mapping[str, int],
        cores: Sequence[int],
        *,
        slots: int = 1,
        policies: PolicySpec = DEFAULT_POLICIES,
    ) -> None:
        super().__init__(budgets, len(cores), slots, policies)
        self.running: dict[int, Run] = {}
        self._cores = list(cores)
        self._free_cores = list(cores)

    def remove(self, now: float, number: int) -> list[Action]:
        """Remove a model: refuse the requests that wait for its load; ready and running ones are served."""
        self._drop(now, self.waiters.pop(number, []), Reason.REMOVED)
        self._forget(now, number)
        self.host.load_next(now)
        return self.taken()

    def submit(self, now: float, request: Request, queued: Mapping[int, int] = _NOTHING) -> list[Action]:
        """Accept or refuse a request that arrives now.

        Args:
            now: The time.
            request: The request.
            queued: Requests by model that have started here, and wait in a queue of the caller.
        """
        entry = self.entries.get(request.model)
        if entry is None or entry.removed:
            return [Refuse(request, Reason.REMOVED)]
        if request.model not in self.residents:
            if not self.fits(request.model):
                return [Refuse(request, Reason.TOO_LARGE)]
            if now < entry.retry_at_ms and self.place(request.model) is Place.ABSENT:
                return [Refuse(request, Reason.LOAD_FAILED, entry.retry_at_ms - now)]
        self.queued = queued
        self.offer(now, request)
        return self.taken()

    def cancel(self, now: float, request: Request) -> list[Action]:
        """Forget a request that has not started; one that runs is left to the caller."""
        waiting, resident = self.waiters.get(request.model, []), self.residents.get(request.model)
        if request in waiting:
            waiting.remove(request)
            self._outstanding[0] -= 1
        elif resident:
            line = self.ready.lines.get((request.model, self._priority_of(request, resident.level)))
            if line and request in line.requests:
                self._outstanding[0] -= 1
                self.ready.remove(line, [request])
                self.end_use(now, resident)
                self._start_ready(now)
        return self.taken()

    def loaded(
        self, now: float, number: int, took_ms: float | None = None, cores: tuple[int, ...] = ()
    ) -> list[Action]:
        """Note that a load has ended, how long it took, and which cores the session's threads are pinned to."""
        entry = self.entries[number]
        entry.cores, entry.failures = cores, 0
        if took_ms is not None:
            self._measure_load(number, took_ms)
        entry.resident.load_ms = self.load_ms_of(number, entry.variant)
        if self.waiters.get(number):
            self._trial = None
        self.end_load(now)
        return self.taken()

    def finish(self, now: float, run: int, took_ms: float | None = None) -> list[Action]:
        """Note that a batch has ended, and how long it ran."""
        ended = self.running.pop(run)
        services = self._services[ended.variant]
        slots, cores, known_ms, early, last = services[ended.model]
        if took_ms is not None:
            # An average that refuses requests is replaced, since few requests would correct it.
            weight = 1.0 if self._is_too_slow(ended.model, ended.variant) else _NEWEST
            services[ended.model] = slots, cores, known_ms + weight * (took_ms - known_ms), early, last
        self._free_cores = [core for core in self._cores if core in self._free_cores or core in ended.cores]
        self.end(now, (run, self.entries[ended.model].resident, last, len(ended.requests)))
        self._start_ready(now)  # also batches whose wait has ended since
        return self.taken()

    def advance(self, now: float) -> list[Action]:
        """Refuse requests whose deadline has passed, start batches that need not wait longer, and evict by time."""
        for number in [n for n in self.cold if self.place(n) is Place.ABSENT and not self.fits(n)]:
            self._drop(now, self.waiters.pop(number, []), Reason.TOO_LARGE)  # another one was pinned since
            self.stop_waiting(number)
        for number, requests in list(self.waiters.items()):
            if late := [r for r in requests if r.deadline_ms <= now]:
                self._drop(now, late, Reason.EXPIRED)
                self.waiters[number] = [r for r in requests if r.deadline_ms > now]
        for line in list(self.ready.lines.values()):
            if late := [request for request in line.requests if request.deadline_ms <= now]:
                self.ready.remove(line, late)
                self._drop_ready(now, late, self.residents[line.name])
        self._start_ready(now)
        for resident in list(self.residents.values()):
            self._expire(now, resident)
        self.host.load_next(now)
        return self.taken()

    def next_event_ms(self, now: float) -> float:
        """Return the time of the next deadline, or end of a wait for a batch or a keep-alive time, at least ``now``.

        :meth:`advance` handles all that has passed, so that what is overdue is due at once.
        """
        residents = self.residents.values() if self.rules.keep_alive_ms < math.inf else ()
        times = [self._leaves_ms(resident) for resident in residents]
        times += [r.deadline_ms for requests in self.waiters.values() for r in requests]
        times += [r.deadline_ms for line in self.ready.lines.values() for r in line.requests]
        return max(now, min(*times, self.ready.wait_ends_ms, math.inf))

    def start(self, now: float, job: Request, resident: ResidentModel, line: Line[Request] | None = None) -> bool:
        """Start a batch if the cores of its session are free as well."""
        return self._lease(resident) is not None and super().start(now, job, resident, line)

    def _lease(self, resident: ResidentModel) -> tuple[int, ...] | None:
        """Return the cores for the next batch of a model; None if they are not free."""
        free, pinned = self._free_cores, self.entries[resident.key].cores
        needed = self.service[resident.level][resident.key][1]
        if len(free) < needed or not set(pinned) <= set(free):
            return None
        return pinned or tuple(free[len(free) - needed :])

    def _begin(self, now: float, batch: Sequence[Request], resident: ResidentModel, service: Service) -> None:
        cores = self._lease(resident) or ()
        self._free_cores = [core for core in self._free_cores if core not in cores]
        self.entries[resident.key].started_ms = now
        run = Run(batch[0].id, resident.key, resident.level, tuple(batch), cores, service[0], now)
        self.running[run.id] = run
        self._actions.append(run)

    def _refuse(self, now: float, jobs: Sequence[Request], reason: Reason) -> None:
        if not jobs:
            return
        number, retry_ms, expected_ms = jobs[0].model, 0.0, 0.0
        if reason is Reason.NO_TIME and (expected_ms := self._too_slow_ms(now, number)):
            entry = self.entries[number]
            retry_ms = max(MIN_RETRY_MS, max(entry.started_ms, entry.measuring_ms) + REMEASURE_MS - now)
        elif reason in {Reason.QUEUE_FULL, Reason.NO_TIME}:
            retry_ms = self._retry_ms(now, number)
        elif reason is Reason.LOAD_FAILED:
            retry_ms = self.entries[number].retry_at_ms - now
        for request in jobs:
            has_expired = reason is Reason.NO_TIME and request.deadline_ms <= now
            self._actions.append(Refuse(request, Reason.EXPIRED if has_expired else reason, retry_ms, expected_ms))

    def _is_admitted(self, now: float, job: Request) -> bool:
        if super()._is_admitted(now, job):
            return True
        entry = self.entries[job.model]
        if now < max(entry.started_ms, entry.measuring_ms) + REMEASURE_MS or not self._too_slow_ms(now, job.model):
            return False
        entry.measuring_ms = now
        return True

    def _is_late(self, now: float, latency_ms: float, job: Request) -> bool:
        if job.deadline_ms <= now:
            return True
        if not self._deadlines or not super()._is_late(now, latency_ms, job):
            return False
        entry = self.entries[job.model]
        return now < entry.started_ms + REMEASURE_MS or not self._is_too_slow(job.model, entry.variant)

    def _is_too_slow(self, number: int, level: int) -> bool:
        """Return whether a variant is expected to exceed its model's objective by itself, without any wait."""
        latency_ms = self.service[level][number][2]
        return self._deadlines and not is_in_time(0.0, self.rules.slo_ms[number], 0.0, latency_ms)

    def _too_slow_ms(self, now: float, number: int) -> float:
        """Return the least expected latency of the variants that may serve a request; 0 if one is fast enough."""
        levels = self.times_to_memory(now, number)
        if not all(self._is_too_slow(number, level) for level in levels):
            return 0.0
        return min(self.service[level][number][2] for level in levels)

    def _priority_of(self, job: Request, level: int | None = None) -> float:
        waits = level is None or any(self.service[level][job.model][:2])
        return self.entries[job.model].model.priority if waits else math.inf

    def _retry_ms(self, now: float, number: int) -> float:
        """Return a rough estimate of the time until the present queue has been served."""
        wait = sum(self._work_ms(line.name) * len(line.items) for line in self.ready.lines.values())
        if number not in self.residents:
            wait += self.link_ms(now) + self.load_ms_of(number, self.entries[number].variant)
        return max(MIN_RETRY_MS, wait)

    def _work_ms(self, number: int) -> float:
        """Return the time by which a request of a model lengthens the queue."""
        slots, cores, latency_ms, *_ = self.service[self.residents[number].level][number]
        return latency_ms * max(cores / max(1, len(self._cores)), slots / max(1, self.slots))
