"""The manager of the models of a device: events in, effects out, without threads or a clock.

It decides for live servers, for replicas and for the simulator, which drives it with a virtual clock. The devices of a
server share its link, cores and host memory. How fast a device is, its manager knows from ``service``, the table of
what requests take there, and from the expected times of loads.

The states of a request::

    offered --model in memory--> ready --slot and cores free, batch complete--> running --> ended
       |                           ^
       +--model missing--> waiting --load done

- Ready requests start in the order of :mod:`chrion.serving.manager.ready_queue`. A request whose cores or slot are not
  free blocks those behind it, so that none starves.
- All requests for a model wait for the same load; see :mod:`chrion.serving.manager.device_memory`.

What is decided is carried out by a subclass: :class:`chrion.serving.manager.LiveManager` collects actions for a server
or a replica, and :class:`chrion.serving.simulator.server.Server` adds the events that follow to the queue of a
simulation. Effects are methods, not objects, since a simulated request takes a few microseconds in all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import inf
from typing import Any, Generic, TypeVar

from chrion.serving.manager.device_memory import DeviceMemory, Host
from chrion.serving.manager.policies import ResidentModel, is_in_time
from chrion.serving.manager.policy_settings import Figures, ServerPolicies
from chrion.serving.manager.queue_estimate import Release, Resources, Service, expected_releases, expected_start
from chrion.serving.manager.ready_queue import ALONE, Line, ReadyQueue
from chrion.serving.manager.records import Reason

#: A request: a tuple that begins with its number, its model, and its arrival in ms.
J = TypeVar("J", bound=tuple[int, int, float, *tuple[Any, ...]])
#: A batch that runs: the number of its first request, its model, what is released at its end, and its requests.
Execution = tuple[int, ResidentModel, Resources, int]

#: The line of all requests that start alone.
_ALL = -1


class ModelManager(DeviceMemory, Generic[J]):
    """The memory of a device, and the requests that wait for it or run.

    Args:
        host: What it shares with the other devices of its server.
        rules: The policies, and the figures that they need.
        budget_bytes: Memory for models.
        slots: Requests that it executes at the same time.
        sizes: Bytes of every variant, by level and model; the caller may add models, here and below.
        service: What a request of every variant takes, by level and model.
        shape: Returns the key of a request's batch, and its rows; see :class:`ReadyQueue`.
        rank: Returns the rank of a request among those of its model and priority; None if all are equal.
        tickets: Numbers that order the requests of all devices of a server.
        outstanding: Requests at each device, waiting or running.
        index: The number of this one.
        is_alone: Whether it is the only one of its server.
    """

    def __init__(  # noqa: PLR0913 - what a device is made of
        self,
        host: Host,
        rules: ServerPolicies,
        *,
        budget_bytes: int,
        slots: int,
        sizes: Sequence[Figures[int]],
        service: Sequence[Figures[Service]],
        shape: Callable[[J], tuple[Hashable, int]],
        rank: Callable[[J], Any] | None = None,
        tickets: Iterator[int] | None = None,
        outstanding: list[int],
        index: int = 0,
        is_alone: bool = True,
    ) -> None:
        super().__init__(host, rules, budget_bytes, sizes)
        self.index = index
        self.slots = self.free_slots = slots
        self.service = service
        self.ready = ReadyQueue[J](shape, rank, tickets)
        #: Requests that wait for a load, by model.
        self.waiters: dict[int, list[J]] = {}
        #: Requests by model that have started, and wait in a queue of the caller.
        self.queued: Mapping[int, int] = {}
        #: Priorities by number of the request; empty if all are equal.
        self._priorities: Sequence[int] = ()
        #: Called with the time when a request has ended or was dropped.
        self.on_left: Callable[[float], None] | None = None
        self._open = self.ready.open
        self._outstanding = outstanding
        #: Requests that run, and the number of requests from which on a limit of those that wait may be reached.
        self._running_requests = 0
        self._least_limit = min((*rules.max_queue, rules.max_waiting))
        #: Expected releases of each running batch, by the number of its first request; maintained only if admission
        #: uses deadlines.
        self._releases: dict[int, deque[Release]] = {}
        #: Whether popularity is counted, and whether requests may be late when they would start.
        self._counts = rules.prefetch or len(sizes) > 1
        self._deadlines = self._may_be_late = rules.deadlines
        self._is_alone = is_alone
        #: Whether requests start at once if they can, without having entered the queue.
        self._is_plain = is_alone and not rules.batching
        self._start_ready: Callable[[float], None] = self._start_heads if is_alone else host.start_ready

    @property
    def pending(self) -> int:
        """Number of requests that have not started."""
        return self._outstanding[self.index] - self._running_requests

    def waiting(self, model: int) -> int:
        """Return the number of a model's requests that have not started."""
        resident = self.residents.get(model)
        return resident.in_use - resident.running if resident else len(self.waiters.get(model, ()))

    def offer(self, now: float, job: J) -> None:
        """Accept or drop a request that arrives now; it may have arrived earlier at a server that has failed."""
        model = job[1]
        resident = self.residents.get(model) or self._without_load(model)
        outstanding, index = self._outstanding, self.index
        outstanding[index] += 1
        if outstanding[index] > self._least_limit and self._is_full(model):
            self._drop(now, (job,), Reason.QUEUE_FULL)
            return
        if self._counts:
            self.count(now, model)
        is_admitted = not self._deadlines or self._is_admitted(now, job)
        if not is_admitted:
            self._drop(now, (job,), Reason.NO_TIME)
        if resident is None:  # also for a request that was dropped: the next one may be in time
            if is_admitted:
                self.waiters.setdefault(model, []).append(self._waiter(job))
            self.request_load(now, model, self.service[0][model][2], self._priority_of(job))
        elif is_admitted:
            resident.in_use += 1
            if not self._is_plain or self._open or not self.start(now, job, resident):
                self._add_ready(now, job, resident)
                if not self._is_plain or self._priorities:
                    self._start_ready(now)

    def _is_full(self, model: int) -> bool:
        """Return whether as many requests wait as may, of a model or of all; the one that arrives is outstanding."""
        queued, rules = self.queued, self.rules
        most = rules.max_queue[model] if rules.max_queue else inf
        is_full = self.pending - 1 + sum(queued.values()) >= rules.max_waiting
        return is_full or self.waiting(model) + queued.get(model, 0) >= most

    def _add_ready(self, now: float, job: J, resident: ResidentModel) -> None:
        limits = self.rules.batching[job[1]] if self.rules.batching else ALONE
        name, priority = _ALL if limits is ALONE else job[1], self._priority_of(job, resident.level)
        self.ready.add(now, job, name, priority, limits)
        if limits.delay_ms:
            self._call_at(now + limits.delay_ms, self._start_delayed, None)

    def _start_delayed(self, now: float, _: object) -> None:
        self._start_ready(now)

    def _is_admitted(self, now: float, job: J) -> bool:
        """Return whether a new request is expected to end in time, in one of the variants that may serve it."""
        due_ms = self._due_ms(job)
        if due_ms == inf:
            return True
        for level, ready_ms in self.times_to_memory(now, job[1]).items():
            service = self.service[level][job[1]]
            wait_ms = max(self._queue_wait_ms(now, job, level, service[:2]), ready_ms)
            if is_in_time(now, due_ms, wait_ms, service[2]):
                return True
        return False

    def _queue_wait_ms(self, now: float, job: J, level: int, needs: Resources) -> float:
        """Return the expected wait of a request that becomes ready now, without batches."""
        running = chain.from_iterable(self._releases.values())
        if not self._is_alone:
            others = (device._releases.values() for device in self.host.devices if device is not self)  # noqa: SLF001 # of this class
            cores_only = (Release(at, 0, n) for values in others for at, _, n in chain.from_iterable(values))
            running = chain(running, cores_only)
        ahead = (
            (self.service[self.residents[other[1]].level][other[1]], self._due_ms(other))
            for other in self.ready.ahead_of(self._priority_of(job, level))
        )
        return expected_start(now, (self.free_slots, self.host.free_cores), running, ahead, needs) - now

    def end_load(self, now: float) -> None:
        """Note that the load in progress has ended."""
        assert self.loading is not None  # noqa: S101 # only then there is such an event
        model, self.loading, self.host.loading = self.loading, None, None
        resident = self.residents[model] = self._known[model]
        if not self.replaces:
            resident.idle_since_ms = now
            self.host.memory.note_use(model)
        jobs = self.waiters.pop(model, ())
        resident.in_use, resident.running = len(jobs), 0
        for job in jobs:
            self._add_ready(now, job, resident)
        if not jobs:
            self._note_idle(now, resident)
        self.host.load_next(now)
        self._start_ready(now)

    def needs(self, line: Line[J]) -> Resources:
        """Return the slots and cores of the first batch of a line."""
        model = line.items[0][2][1]
        return self.service[self.residents[model].level][model][:2]

    def _start_heads(self, now: float) -> None:
        """Start batches from the head of the queue while their slots and cores are free."""
        head, residents = self.ready.head, self.residents
        while line := head(now):
            job = line.items[0][2]
            if not self.start(now, job, residents[job[1]], line):
                return

    def start(self, now: float, job: J, resident: ResidentModel, line: Line[J] | None = None) -> bool:
        """Start a request, or the first batch of a line, or drop it if it is too late; return whether it was either."""
        service = self.service[resident.level][job[1]]
        slots, cores, latency_ms, _, _ = service
        if slots > self.free_slots or cores > self.host.free_cores:
            return False
        if self._may_be_late:
            is_late = partial(self._is_late, now, latency_ms)
            batch, late = self.ready.take(line, is_late) if line else ((job,), is_late(job))
            if late:
                self._drop_ready(now, batch, resident)
                return True
        else:
            batch = self.ready.take(line)[0] if line else (job,)
        uses = len(batch)
        self.free_slots -= slots
        self.host.free_cores -= cores
        resident.uses += uses
        resident.running += uses
        self._running_requests += uses
        if self._deadlines:
            self._releases[job[0]] = deque(expected_releases(service, now))
        self._begin(now, batch, resident, service)
        return True

    def _is_late(self, now: float, latency_ms: float, job: J) -> bool:
        """Return whether a request must not start now, since it cannot end by its deadline."""
        return not is_in_time(now, self._due_ms(job), 0.0, latency_ms)

    def _drop_ready(self, now: float, jobs: Sequence[J], resident: ResidentModel) -> None:
        """Drop requests of a model that were ready and are too late."""
        self._drop(now, jobs, Reason.NO_TIME)
        self.end_use(now, resident, len(jobs))
        if self.on_left:
            self.on_left(now)

    def _drop(self, now: float, jobs: Sequence[J], reason: Reason) -> None:
        self._outstanding[self.index] -= len(jobs)
        self._refuse(now, jobs, reason)

    def release(self, now: float, released: tuple[int, Resources]) -> None:
        """Note that a batch, given by the number of its first request, has released slots or cores before its end."""
        number, (slots, cores) = released
        self.free_slots += slots
        self.host.free_cores += cores
        if self._deadlines:
            self._releases[number].popleft()
        if self._open or not self._is_alone:
            self._start_ready(now)

    def end(self, now: float, execution: Execution) -> None:
        """Note that a batch has ended."""
        number, resident, (slots, cores), uses = execution
        self.free_slots += slots
        self.host.free_cores += cores
        self._outstanding[self.index] -= uses
        resident.running -= uses
        self._running_requests -= uses
        if self._deadlines:
            del self._releases[number]
        self.end_use(now, resident, uses)
        if self._open or not self._is_alone:
            self._start_ready(now)
        if self.on_left:
            self.on_left(now)

    def lose(self) -> list[J]:
        """Lose what is in the device and in host memory, and all requests; return those that wait."""
        waiting = self.ready.clear() + [job for jobs in self.waiters.values() for job in jobs]
        self.host.waiting_loads -= len(self.cold)
        own = self.residents, self.cold, self.reserved, self.popularity, self.waiters, self._releases
        for held in (*own, self.host.memory.held):
            held.clear()
        self.loading = self.host.loading = None
        self.free_bytes = self.budget_bytes
        self._outstanding[self.index] = self._running_requests = 0
        self.free_slots, self.host.free_cores = self.slots, self.host.cores
        return waiting

    def _due_ms(self, job: J) -> float:
        """Return the time by which a request should end."""
        return job[2] + self.rules.slo_ms[job[1]]

    def _priority_of(self, job: J, level: int | None = None) -> float:
        """Return the priority of a request in the queue, with a variant of its model, or without one for the load."""
        del level
        return self._priorities[job[0]] if self._priorities else 0

    def _without_load(self, model: int) -> ResidentModel | None:
        """Return a missing model if it needs no load."""
        del model
        return None

    def _waiter(self, job: J) -> J:
        """Return a request as it waits for a load."""
        return job

    @abstractmethod
    def _begin(self, now: float, batch: Sequence[J], resident: ResidentModel, service: Service) -> None:
        """Carry out the start of a batch."""

    @abstractmethod
    def _refuse(self, now: float, jobs: Sequence[J], reason: Reason) -> None:
        """Carry out that requests are dropped."""
