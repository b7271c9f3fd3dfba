"""The manager of a live server: against the simulator, and its invariants on random events."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chrion.serving.manager import (
    LiveManager,
    Load,
    ManagedModel,
    ManagedVariant,
    PolicySpec,
    Reason,
    Refuse,
    Request,
    Run,
    Unload,
)
from chrion.serving.manager.policies import EVICTION, LOAD_ORDER, ROUTING
from chrion.serving.manager.policy_settings import ServerPolicies
from chrion.serving.manager.ready_queue import BatchLimits
from chrion.serving.manager.records import ACCELERATOR, HOST
from chrion.serving.manager.residency import Place
from chrion.serving.simulator.engine import ClusterEngine, EngineConfig
from chrion.serving.simulator.requests import Details, Requests
from chrion.serving.simulator.settings import ServerSpec
from chrion.serving.variants import Variant
from property_tests import examples

MB = 1_000_000


@dataclass
class Driver:
    """Carries out the manager's actions in virtual time, and checks the invariants after each event."""

    manager: LiveManager
    load_fails: Any = lambda _: False
    pins: bool = True
    events: list[tuple[float, int, str, Any]] = field(default_factory=list)
    journal: list[tuple[float, str, int]] = field(default_factory=list)
    ended: dict[int, str] = field(default_factory=dict)
    batches: list[Run] = field(default_factory=list)
    in_memory: dict[int, int] = field(default_factory=dict)
    submitted: set[int] = field(default_factory=set)
    sequence: Any = field(default_factory=itertools.count)

    def pin(self, number: int) -> tuple[int, ...]:
        """Return the cores that a model's threads are pinned to: of every third one, as many as it takes."""
        entry = self.manager.entries[number]
        return tuple(range(entry.model.variants[entry.variant].cores)) if self.pins and number % 3 == 2 else ()

    def push(self, at: float, kind: str, payload: Any) -> None:
        heapq.heappush(self.events, (at, next(self.sequence), kind, payload))

    def run(self) -> None:
        """Handle all events, and check that every request has ended exactly once."""
        submitted = [payload.id for _, _, kind, payload in self.events if kind == "submit"]
        while self.events:
            self.handle(*heapq.heappop(self.events))
            wake = self.manager.next_event_ms(self.now)
            if wake < inf and not any(kind == "advance" and at <= wake for at, _, kind, _ in self.events):
                self.push(wake, "advance", None)
        assert sorted(self.ended) == sorted(submitted)
        assert self.manager.pending == 0
        assert not self.manager.running

    def handle(self, at: float, _: int, kind: str, payload: Any) -> None:
        self.now = at
        manager = self.manager
        if kind == "submit":
            self.submitted.add(payload.id)
            actions = manager.submit(at, payload)
        elif kind == "loaded":
            self.journal.append((at, "loaded", payload))
            actions = manager.loaded(at, payload, cores=self.pin(payload))
        elif kind == "failed":
            self.in_memory.pop(payload)
            actions = manager.load_failed(at, payload)
        elif kind == "finish":
            for request in payload.requests:
                assert request.id not in self.ended
                self.ended[request.id] = "served"
            actions = manager.finish(at, payload.id)
        elif kind == "trial":
            actions = manager.try_out(at, payload) if payload in manager.entries else []
        elif kind == "tick":
            actions = manager.rebalance(at)
        elif kind == "remove":
            actions = manager.remove(at, payload)
        elif kind == "cancel":
            started = {request.id for run in manager.running.values() for request in run.requests}
            actions = manager.cancel(at, payload)
            if payload.id in self.submitted - self.ended.keys() - started:
                self.ended[payload.id] = "cancelled"
        else:
            actions = manager.advance(at)
        for action in actions:
            self.carry_out(at, action)
        self.check()

    def carry_out(self, at: float, action: Any) -> None:
        models = self.manager.entries
        if isinstance(action, Load):
            assert action.model not in self.in_memory
            self.in_memory[action.model] = action.variant
            self.journal.append((at, "load", action.model))
            took = models[action.model].model.variants[action.variant].load_ms
            self.push(at + took, "failed" if self.load_fails(action.model) else "loaded", action.model)
        elif isinstance(action, Unload):
            assert self.in_memory.pop(action.model) == action.variant
            assert not any(run.model == action.model for run in self.manager.running.values()), "unloaded while running"
            self.journal.append((at, action.cause, action.model))
        elif isinstance(action, Refuse):
            assert action.request.id not in self.ended
            self.ended[action.request.id] = action.reason.name
        else:
            assert self.in_memory[action.model] == action.variant, "runs on a session that is not open"
            assert self.manager.place(action.model) is Place.RESIDENT
            assert action.cores == self.pin(action.model) or not self.pin(action.model)
            self.batches.append(action)
            took = models[action.model].model.variants[action.variant].latency_ms
            self.push(at + took, "finish", action)

    def check(self) -> None:
        memory = self.manager
        for device, budget in memory.budgets.items():
            assert memory.free[device] == budget - memory.used(device)
            assert 0 <= memory.free[device] <= budget
        assert memory.free_bytes == memory.free[memory.primary]
        assert memory.host.waiting_loads == len(memory.cold)
        assert memory.pending == sum(map(memory.waiting, memory.entries))
        leased = [core for run in self.manager.running.values() for core in run.cores]
        assert memory.host.free_cores == memory.host.cores - len(leased)
        assert len(leased) == len(set(leased)), "a core is leased twice"
        for run in self.manager.running.values():
            assert memory.entries[run.model].resident.in_use >= len(run.requests)


def managed(size: int, *, latency: float = 5.0, load: float = 10.0, **rest: Any) -> ManagedModel:
    """Return a model with one variant on the accelerator."""
    return ManagedModel((ManagedVariant("gpu", {ACCELERATOR: size}, latency, load, cores=0, slots=1),), **rest)


def ladder(*sizes: int, **rest: Any) -> ManagedModel:
    """Return a model with variants of the given sizes on the host."""
    variants = tuple(ManagedVariant(f"v{i}", {HOST: size}, 1.0, 2.0) for i, size in enumerate(sizes))
    return ManagedModel(variants, **rest)


def requests(*times_and_models: tuple[float, int], deadline: float = inf, key: Any = None) -> list[Request]:
    return [Request(i, m, at, deadline + at, key) for i, (at, m) in enumerate(times_and_models)]


def drive(manager: LiveManager, given_requests: Sequence[Request], **rest: Any) -> Driver:
    """Run requests through a manager."""
    driver = Driver(manager, **rest)
    for request in given_requests:
        driver.push(request.arrival_ms, "submit", request)
    driver.run()
    return driver


def noted(journal: Sequence[tuple[float, str, int]], until: float) -> list[list[tuple[float, str, int]]]:
    """Return what was noted until a time; models whose keep-alive times end together leave in any order."""
    groups = itertools.groupby([note for note in journal if note[0] <= until], lambda note: note[:2])
    return [sorted(group) if event == "expire" else list(group) for (_, event), group in groups]


@examples(100)
@given(
    seed=st.integers(0, 10**6),
    eviction=st.sampled_from(["lru", "lfu", "cost"]),
    order=st.sampled_from(["fifo", "demand"]),
    admission=st.sampled_from(["none", "deadline"]),
    slots=st.integers(1, 2),
    gap_ms=st.floats(1.0, 30.0),
    levels=st.integers(1, 3),
    batch=st.tuples(st.integers(1, 4), st.sampled_from([0.0, 6.0])),
    more=st.sets(st.sampled_from(["priorities", "prefetch", "pauses", "limits", "keep-alive"])),
)
def test_the_server_does_what_the_simulator_does(
    seed: int,
    eviction: str,
    order: str,
    admission: str,
    slots: int,
    gap_ms: float,
    levels: int,
    batch: tuple[int, float],
    more: set[str],
) -> None:
    """Loads, changes of variants, evictions, refusals and starts of requests are the same, at the same times."""
    rng, number = np.random.default_rng(seed), 150
    pauses = 12_000.0 * (np.arange(number) // 30) if "pauses" in more else 0.0
    times = np.cumsum(rng.exponential(gap_ms, number)) + pauses
    models = rng.integers(0, 6, number)
    batch = batch if batch[0] > 1 else (1, 0.0)
    keep_alive_s = 0.15 if "keep-alive" in more else 0.0
    prefetch = "prefetch" in more and not keep_alive_s
    priorities = rng.integers(0, 3, 6) if "priorities" in more else np.zeros(6, np.int64)
    max_queue, max_waiting = (int(rng.integers(1, 5)), 7) if "limits" in more else (10**6, 10**6)
    spec = ServerSpec(1, 10 / 1000, 0.0, slots, 2, 1.0, 1.0)
    sizes, latencies = np.sort(rng.integers(1, 5, (levels, 6)), axis=0)[::-1], rng.uniform(1, 12, (levels, 6))
    variants = [
        [
            Variant("v", float(mb), float(ms), float(ms), (float(ms),) * int(cores), float(mb), batch_cost=0.0)
            for mb, ms, cores in zip(sizes[level], latencies[level], rng.integers(0, 3, 6), strict=True)
        ]
        for level in range(levels)
    ]
    policies = ServerPolicies(
        EVICTION[eviction],
        LOAD_ORDER[order],
        deadlines=admission == "deadline",
        # above all latencies: a live server measures those again that are not
        slo_ms=rng.uniform(12, 60, 6).tolist() if admission == "deadline" else [inf] * 6,
        weights=rng.uniform(0.5, 2, 6).tolist(),
        pinned=[False] * 6,
        batching=[BatchLimits(*batch)] * 6 if batch[0] > 1 else (),
        batch_cost=[[0.0] * 6] * levels,
        prefetch=prefetch,
        keep_alive_ms=keep_alive_s * 1000 or inf,
        max_queue=[max_queue] * 6,
        max_waiting=max_waiting,
    )
    expected: list[tuple[float, str, int]] = []
    engine = ClusterEngine(
        EngineConfig([spec], variants[0], policies, ROUTING["random"], seed, smaller=variants[1:]),
        lambda at, event, _, kind: expected.append((at, event, kind % 6)),
    )
    rows: list[Any] = []
    unknown = np.full(number, np.nan)
    engine.run(
        [Requests(times, models, Details(unknown, unknown, priorities[models]))],
        keep=lambda found: rows.extend(found.tolist()),
    )

    names = PolicySpec(
        eviction,
        load_order=order,
        admission=admission,
        prefetch=prefetch,
        max_waiting=max_waiting,
        keep_alive_s=keep_alive_s,
    )
    manager = LiveManager({ACCELERATOR: 10 * MB}, [0, 1], slots=slots, policies=names)
    for model in range(6):
        managed_variants = tuple(
            ManagedVariant(
                v.name, {ACCELERATOR: v.memory_bytes}, v.latency_ms, v.load_ms(1.0, 1.0), len(v.core_busy_ms), 1
            )
            for v in (row[model] for row in variants)
        )
        manager.add(
            0.0,
            ManagedModel(
                managed_variants,
                policies.slo_ms[model],
                policies.weights[model],
                priority=int(priorities[model]),
                max_batch=batch[0],
                max_delay_ms=batch[1],
                max_queue=max_queue,
            ),
        )
    driver = Driver(manager, pins=False)
    for request in requests(*zip(times.tolist(), models.tolist(), strict=True), key="k"):
        driver.push(request.arrival_ms, "submit", request)
    for tick in np.arange(1000.0, times[-1], 1000.0).tolist():
        driver.push(tick, "tick", None)
    driver.run()
    until = times[-1]
    assert noted(driver.journal, until) == noted(expected, until)
    starts = {request.id: run.started_ms for run in driver.batches for request in run.requests}
    assert starts == {int(row[0]): row[4] for row in rows if not np.isnan(row[4])}


@example(seed=13_866, eviction="lru", admission="none", budgets={ACCELERATOR: 6, HOST: 9})  # a trial that never fits
@examples(150)
@given(
    seed=st.integers(0, 10**6),
    eviction=st.sampled_from(["lru", "lfu", "cost"]),
    admission=st.sampled_from(["none", "deadline"]),
    budgets=st.sampled_from([{HOST: 12}, {ACCELERATOR: 8}, {ACCELERATOR: 6, HOST: 9}]),
)
def test_invariants_on_random_events(seed: int, eviction: str, admission: str, budgets: dict[str, int]) -> None:
    """On random models and requests memory stays in the budget, cores are leased once, and each request ends once."""
    rng = random.Random(seed)
    names = PolicySpec(eviction=eviction, admission=admission, prefetch=True, max_waiting=20)
    manager = LiveManager(budgets, [0, 1, 2], policies=names)
    for number in range(6):
        variants = []
        size = rng.randint(3, 8)
        free = seed % 2 == 1 and number < 2  # its requests lease no core
        for name in range(rng.randint(1, 4)):
            memory = {ACCELERATOR: size, HOST: rng.randint(0, 3)} if ACCELERATOR in budgets else {HOST: size}
            cores = 0 if free else rng.randint(1, 3)
            variants.append(
                ManagedVariant(str(name), memory, rng.uniform(1, 9), rng.uniform(1, 9), cores, rng.randint(0, 1))
            )
            size = rng.randint(0, size)
        batching = {"max_batch": rng.choice([1, 4]), "max_delay_ms": rng.choice([0.0, 3.0])}
        manager.add(0.0, ManagedModel(tuple(variants), rng.choice([inf, 20.0]), pinned=rng.random() < 0.15, **batching))
    driver = Driver(manager, load_fails=lambda _: rng.random() < 0.1)
    at = 0.0
    for number in range(80):
        at += rng.expovariate(0.5)
        deadline = at + rng.choice([inf, 10.0, 40.0])
        key, priority = rng.choice([None, "a"]), rng.choice([0, 0, 1, 2])
        request = Request(number, rng.randrange(6), at, deadline, key, priority=priority)
        driver.push(at, "submit", request)
        if rng.random() < 0.1:
            driver.push(at + rng.uniform(0, 5), "cancel", request)
        if rng.random() < 0.1:
            driver.push(at, "trial", rng.randrange(6))
    driver.push(at / 2, "remove", 0)
    for tick in range(int(at) + 40_000, int(at) + 80_000, 4000):
        driver.push(tick, "advance", None)
        driver.push(tick, "tick", None)
    driver.run()


def test_models_shrink_before_another_is_evicted() -> None:
    """Each model makes those before it shrink, and is loaded in the largest variant that then fits."""
    manager = LiveManager({HOST: 12}, [0], policies=PolicySpec(prefetch=False))
    for _ in range(4):
        manager.add(0.0, ladder(8, 4, 3))
    found = drive(manager, requests((0, 0), (20, 1), (40, 2)))
    shrunk = [(event, model) for _, event, model in found.journal if event in {"shrink", "evict"}]
    assert shrunk == [("shrink", 0), ("shrink", 1)]  # 4 + 8, then 4 + 4 + 4
    assert [load[2] for load in found.journal if load[1] == "load"] == [0, 1, 0, 2, 1]
    assert {n: manager.entries[n].variant for n in found.in_memory} == {0: 1, 1: 1, 2: 1}


def test_all_models_shrink_to_the_smallest_before_one_is_evicted() -> None:
    """Four models fit at their smallest; the fifth evicts the least recently used one."""
    manager = LiveManager({HOST: 12}, [0], policies=PolicySpec(prefetch=False))
    for _ in range(5):
        manager.add(0.0, ladder(6, 3))
    found = drive(manager, requests((0, 0), (50, 1), (100, 2), (150, 3)))
    assert "evict" not in {event for _, event, _ in found.journal}
    assert set(found.in_memory) == {0, 1, 2, 3}
    assert manager.used(HOST) == 12
    later = Driver(manager, in_memory=found.in_memory)
    later.push(200, "submit", Request(4, 4, 200))
    later.run()
    assert [model for _, event, model in later.journal if event == "evict"] == [0]


def test_pinned_models_stay_and_a_model_that_cannot_fit_beside_them_is_refused() -> None:
    """A pinned model is neither shrunk nor evicted; what cannot fit is refused at once."""
    manager = LiveManager({HOST: 10}, [0])
    manager.add(0.0, ladder(8, 2, pinned=True))
    manager.add(0.0, ladder(5))
    found = drive(manager, requests((0, 0), (20, 1)))
    assert found.ended == {0: "served", 1: "TOO_LARGE"}


def test_requests_beyond_the_queue_are_refused_with_a_time_to_retry() -> None:
    """The queue of a model is bounded."""
    manager = LiveManager({HOST: 10}, [0])
    number = manager.add(0.0, ladder(5, max_queue=2))
    refused = [a for r in requests(*[(0.0, number)] * 5) for a in manager.submit(0.0, r) if isinstance(a, Refuse)]
    assert [r.reason for r in refused] == [Reason.QUEUE_FULL] * 3
    assert all(r.retry_ms > 0 for r in refused)


def test_the_time_to_retry_is_that_of_the_queue() -> None:
    """Two requests of 4 s that wait for two cores are served within 4 s."""
    manager = LiveManager({HOST: 10}, [0, 1])
    number = manager.add(0.0, ManagedModel((ManagedVariant("v", {HOST: 5}, 4000.0, 2.0),), max_queue=2))
    manager.submit(0.0, Request(0, number, 0.0))
    manager.loaded(2.0, number)
    for request in range(1, 4):
        manager.submit(3.0, Request(request, number, 3.0))
    (refused,) = manager.submit(3.0, Request(4, number, 3.0))
    assert isinstance(refused, Refuse)
    assert refused.retry_ms == 4000.0


def test_the_time_to_retry_includes_the_load_that_is_under_way() -> None:
    """A model that is not in memory waits for the rest of another one's load of 500 ms, and then for its own of 40."""
    manager = LiveManager({HOST: 10}, [0])
    first = manager.add(0.0, ManagedModel((ManagedVariant("v", {HOST: 5}, 1.0, 500.0),)))
    second = manager.add(0.0, ManagedModel((ManagedVariant("v", {HOST: 5}, 1.0, 40.0),), max_queue=1))
    manager.submit(0.0, Request(0, first, 0.0))
    manager.submit(100.0, Request(1, second, 100.0))
    (refused,) = manager.submit(100.0, Request(2, second, 100.0))
    assert isinstance(refused, Refuse)
    assert refused.retry_ms == 400.0 + 40.0


def test_trials_load_each_model_once_and_leave_memory_as_it_was() -> None:
    """One after another, whatever memory they share; a model that is requested during its trial stays."""
    manager = LiveManager({HOST: 10}, [0], policies=PolicySpec(prefetch=False))
    for size in (8, 3, 11, 5):
        manager.add(0.0, ladder(size))
    driver = Driver(manager)
    for number in (0, 1, 3):
        driver.push(0.0, "trial", number)
    driver.push(5.0, "submit", Request(0, 3, 5.0))
    driver.run()
    events = [(event, model) for _, event, model in driver.journal if event != "loaded"]
    assert events == [("load", 0), ("trial", 0), ("load", 1), ("trial", 1), ("load", 3)]
    assert set(driver.in_memory) == {3}


def test_requests_go_before_trials() -> None:
    """A load that a request waits for is the next one, and a trial evicts only if it has to."""
    manager = LiveManager({HOST: 10}, [0], policies=PolicySpec(prefetch=False))
    for size in (3, 3, 8, 3):
        manager.add(0.0, ladder(size))
    driver = Driver(manager)
    driver.push(0.0, "submit", Request(0, 0, 0.0))
    for number in (1, 2):
        driver.push(0.1, "trial", number)
    driver.push(0.2, "submit", Request(1, 3, 0.2))
    driver.run()
    events = [(event, model) for _, event, model in driver.journal if event != "loaded"]
    assert events == [
        ("load", 0),
        ("load", 3),
        ("load", 1),
        ("trial", 1),
        ("evict", 0),
        ("evict", 3),
        ("load", 2),
        ("trial", 2),
    ]


def test_a_request_with_a_priority_goes_before_the_others_of_its_model() -> None:
    """1 is the first, requests without one are the last, and those of equal priority keep their order."""
    manager = LiveManager({HOST: 10}, [0])
    number = manager.add(0.0, ladder(5))
    order = [0, 0, 3, 1, 2**63 - 1, 1, 0]
    found = drive(manager, [Request(i, number, i / 100, priority=p) for i, p in enumerate(order)])
    assert [run.requests[0].id for run in found.batches] == [3, 5, 2, 4, 0, 1, 6]


def test_a_priority_takes_no_time_from_other_models() -> None:
    """However many requests with a priority a model gets, the models take turns as without priorities."""
    for priority in (0, 1):
        manager = LiveManager({HOST: 10}, [0])
        one, other = manager.add(0.0, ladder(5)), manager.add(0.0, ladder(5))
        warm = [(0.0, one, 0), (0.0, other, 0)]
        arrivals = [
            *warm,
            (100.0, one, 0),
            (100.1, one, 0),
            (100.2, other, 0),
            (100.3, one, priority),
            (100.4, one, priority),
        ]
        found = drive(manager, [Request(i, m, at, priority=p) for i, (at, m, p) in enumerate(arrivals)])
        assert [run.model for run in found.batches[2:]] == [one, one, other, one, one], priority


def test_a_priority_does_not_lengthen_the_wait_for_a_batch() -> None:
    """A batch starts when its delay has passed for the oldest request, also if a later one goes before it."""
    manager = LiveManager({HOST: 10}, [0])
    number = manager.add(0.0, ladder(5, max_batch=8, max_delay_ms=3.0))
    later = [Request(1 + i, number, 100.0 + i, batch_key="k", priority=i) for i in range(2)]
    found = drive(manager, [Request(0, number, 0.0), *later])
    assert [(run.started_ms, [r.id for r in run.requests]) for run in found.batches[1:]] == [(103.0, [2, 1])]


def test_requests_without_a_key_run_alone() -> None:
    """A model that batches may have requests that cannot share a batch."""
    manager = LiveManager({HOST: 10}, [0])
    number = manager.add(0.0, ladder(5, max_batch=4, max_delay_ms=3.0))
    found = drive(manager, requests(*[(0.0, number)] * 3))
    assert [[request.id for request in run.requests] for run in found.batches] == [[0], [1], [2]]
    assert [run.started_ms for run in found.batches] == [2.0, 3.0, 4.0]


def test_batches_form_up_to_the_size_and_the_delay() -> None:
    """Requests of one key share a batch up to its size; a batch that is not full starts after the delay."""
    manager = LiveManager({HOST: 10}, [0])
    number = manager.add(0.0, ladder(5, max_batch=4, max_delay_ms=3.0))
    times = [(t, number) for t in (0, 50, 50.5, 51, 51.5, 51.6, 52)]
    found = drive(manager, requests(*times, key="k"))
    assert [[r.id for r in run.requests] for run in found.batches] == [[0], [1, 2, 3, 4], [5, 6]]
    assert found.batches[2].started_ms == pytest.approx(54.6)


def test_a_wait_that_has_ended_is_due_at_once() -> None:
    """A batch whose delay is over when the next event is asked for starts then, and so do later ones."""
    manager = LiveManager({HOST: 10}, [0, 1])
    first, second = (manager.add(0.0, ladder(5, max_batch=4, max_delay_ms=delay)) for delay in (0.05, 5.0))
    for number in (first, second):
        manager.submit(0.0, Request(number, number, 0.0, batch_key="k"))
        manager.loaded(1.0, number)
    for run in manager.advance(10.0):
        assert isinstance(run, Run)
        manager.finish(20.0, run.id)
    manager.submit(100.0, Request(2, first, 100.0, batch_key="k"))
    manager.submit(100.0, Request(3, second, 100.0, 102.0, batch_key="k"))
    assert manager.next_event_ms(100.2) == 100.2
    assert [action.requests[0].id for action in manager.advance(100.2) if isinstance(action, Run)] == [2]
    assert manager.next_event_ms(100.2) == 102.0
    assert manager.next_event_ms(103.0) == 103.0
    (expired,) = manager.advance(103.0)
    assert isinstance(expired, Refuse)
    assert manager.next_event_ms(103.0) == inf


def test_a_deadline_passes_while_the_model_loads() -> None:
    """A request whose deadline passes during the load is refused, and the load still ends."""
    manager = LiveManager({HOST: 10}, [0])
    manager.add(0.0, ladder(5))
    found = drive(manager, requests((0, 0), deadline=1.0))
    assert found.ended == {0: "EXPIRED"}
    assert found.in_memory == {0: 0}


def test_memory_full_at_load_tries_the_next_variant() -> None:
    """After a load without memory the smaller variant is loaded, and the waiting request is served."""
    manager = LiveManager({HOST: 10}, [0])
    number = manager.add(0.0, ladder(5, 3))
    assert manager.submit(0.0, Request(0, number, 0.0)) == [Load(number, 0)]
    assert manager.load_failed(1.0, number, out_of_memory=True) == [Load(number, 1)]
    (run,) = manager.loaded(2.0, number)
    assert isinstance(run, Run)
    assert run.variant == 1


def test_a_failed_load_refuses_and_is_tried_again_later() -> None:
    """Requests are refused while the next attempt is not due, and each failure doubles the time."""
    manager = LiveManager({HOST: 10}, [0])
    number = manager.add(0.0, ladder(5))
    waits = []
    now = 0.0
    for request in range(3):
        assert manager.submit(now, Request(request, number, now)) == [Load(number, 0)]
        (refused,) = manager.load_failed(now, number)
        assert isinstance(refused, Refuse)
        assert refused.reason is Reason.LOAD_FAILED
        waits.append(refused.retry_ms)
        assert [type(a) for a in manager.submit(now, Request(99, number, now))] == [Refuse]
        now += refused.retry_ms
    assert waits == [1000.0, 2000.0, 4000.0]


def test_popular_models_grow_and_are_loaded_in_advance_once_memory_is_free() -> None:
    """After a model is removed, a shrunk popular model grows, and an absent popular one is loaded."""
    manager = LiveManager({HOST: 12}, [0])
    for _ in range(3):
        manager.add(0.0, ladder(6, 4))
    driver = drive(manager, requests((0, 0), (10, 1), (20, 2)))
    assert [e.variant for e in manager.entries.values()] == [1, 1, 1]
    driver.ended.clear()
    driver.push(100, "remove", 2)
    for at in (20_000, 20_010, 20_020):
        driver.push(at, "tick", None)
    driver.run()
    assert [e.variant for e in manager.entries.values()] == [0, 0]


def test_a_missing_pinned_model_is_loaded_without_prefetch() -> None:
    """Of models without requests only a pinned one is loaded into free memory; unpinned it is as popular as used."""
    manager = LiveManager({HOST: 20}, [0], policies=PolicySpec(prefetch=False))
    memory = manager
    manager.add(0.0, ladder(5))
    number = manager.add(0.0, ladder(5, pinned=True))
    assert memory.rebalance(20_000.0) == [Load(number, 0)]
    manager.loaded(20_001.0, number)
    assert memory.rebalance(21_000.0) == []
    manager.submit(30_000.0, Request(0, number, 30_000.0))
    memory.pin(number, pinned=False)
    assert memory.popularity_of(30_000.0, number) == 1.0
    assert memory.popularity_of(90_000.0, number) == 0.5


def test_higher_priority_starts_first() -> None:
    """Of requests that are ready together, those of the model with the higher priority start first."""
    manager = LiveManager({HOST: 100}, [0])
    low, high = manager.add(0.0, ladder(5)), manager.add(0.0, ladder(5, priority=1))
    found = drive(manager, requests((0, low), (0, high), (50, low), (50, low), (50, high)))
    assert [run.requests[0].id for run in found.batches[-3:]] == [2, 4, 3]


def test_requests_that_need_no_core_do_not_wait_for_one() -> None:
    """They start at once, also behind a request that waits for a core, of whatever priority."""
    manager = LiveManager({HOST: 100}, [0])
    leasing = manager.add(0.0, ladder(5, priority=9))
    free = manager.add(0.0, ManagedModel((ManagedVariant("v", {HOST: 5}, 10.0, 1.0, cores=0),)))
    found = drive(manager, requests((0, leasing), (0, free), (50, leasing), (50, leasing), (51, free), (51, free)))
    assert [(run.started_ms, run.requests[0].id) for run in found.batches[3:5]] == [(51, 4), (51, 5)]


def test_expected_loads_follow_measured_ones() -> None:
    """A model that was never loaded is admitted as soon as other loads show that its own will end in time."""
    manager = LiveManager({HOST: 100}, (0,), policies=PolicySpec(admission="deadline", prefetch=True))
    first, second = (manager.add(0.0, managed(10, latency=1.0, load=load, slo_ms=20.0)) for load in (100.0, 50.0))
    refused, load = manager.submit(0.0, Request(0, first, 0.0))
    assert isinstance(refused, Refuse)
    assert isinstance(load, Load)
    assert manager.loaded(10.0, first, 10.0) == []
    assert manager.submit(20.0, Request(1, second, 20.0)) == [Load(second, 0)]  # 50 ms x 10 / 100 = 5 ms
    manager.loaded(40.0, second, 20.0)
    manager.remove(50.0, second)
    third = manager.add(50.0, managed(10, latency=1.0, load=100.0, slo_ms=20.0))
    assert manager.load_ms_of(third, 0) == pytest.approx(25)  # 100 ms x the median of 0.1 and 0.4


def slowed(took_ms: float = 1000.0, *, slo_ms: float = 50.0) -> tuple[LiveManager, int]:
    """Return a manager with a model whose only run has ended at 1010 ms, and took so long."""
    manager = LiveManager({HOST: 100}, (0,), policies=PolicySpec(admission="deadline"))
    number = manager.add(0.0, ManagedModel((ManagedVariant("v", {HOST: 5}, 10.0, 1.0),), slo_ms=slo_ms))
    manager.submit(0.0, Request(0, number, 0.0))
    (run,) = manager.loaded(10.0, number, 1.0)
    assert isinstance(run, Run)
    manager.finish(10.0 + took_ms, run.id, took_ms)
    return manager, number


def test_a_model_recovers_from_one_long_stall() -> None:
    """While its average exceeds its objective, one request is admitted every ten seconds; its time is the new one."""
    manager, number = slowed()
    (refused,) = manager.submit(2000.0, Request(1, number, 2000.0))
    assert isinstance(refused, Refuse)
    assert (refused.reason, refused.expected_ms) == (Reason.NO_TIME, pytest.approx(10 + 0.2 * 990))
    assert refused.retry_ms == 8010.0  # ten seconds after the start at 10 ms
    (run,) = manager.submit(10_010.0, Request(2, number, 10_010.0))
    assert isinstance(run, Run)
    (refused,) = manager.submit(10_011.0, Request(3, number, 10_011.0))
    assert isinstance(refused, Refuse)
    assert refused.retry_ms == 9999.0
    manager.finish(10_030.0, run.id, 20.0)
    (run,) = manager.submit(10_040.0, Request(4, number, 10_040.0))
    assert isinstance(run, Run)
    manager.finish(10_070.0, run.id, 30.0)
    assert manager.service[0][number][2] == pytest.approx(20 + 0.2 * 10)  # a moving average again


def test_one_request_measures_a_model_that_is_too_slow_also_after_a_wait() -> None:
    """While it waits for a core, no second one is admitted; it starts although its deadline has passed."""
    manager, number = slowed()
    other = manager.add(1500.0, ManagedModel((ManagedVariant("v", {HOST: 5}, 10.0, 1.0),)))
    manager.submit(9000.0, Request(1, other, 9000.0))
    (long,) = manager.loaded(9001.0, other, 1.0)
    assert isinstance(long, Run)
    assert manager.submit(11_000.0, Request(2, number, 11_000.0)) == []
    (refused,) = manager.submit(11_001.0, Request(3, number, 11_001.0))
    assert isinstance(refused, Refuse)
    assert refused.retry_ms == 9999.0
    (run,) = manager.finish(11_500.0, long.id, 2499.0)
    assert isinstance(run, Run)
    assert [request.id for request in run.requests] == [2]


def test_a_wait_that_is_too_long_is_not_the_latency_of_the_model() -> None:
    """A refusal because of requests before it has no expected latency, and the time of the queue."""
    manager, number = slowed(20.0)  # on average 12 ms
    (run,) = manager.submit(2000.0, Request(1, number, 2000.0))
    assert isinstance(run, Run)
    for request in (2, 3, 4):
        assert manager.submit(2000.0, Request(request, number, 2000.0)) == []  # they end at 24, 36 and 48 ms
    (refused,) = manager.submit(2000.0, Request(5, number, 2000.0))
    assert isinstance(refused, Refuse)
    assert (refused.reason, refused.expected_ms, refused.retry_ms) == (Reason.NO_TIME, 0.0, 100.0)


def test_a_queued_request_that_can_no_longer_be_in_time_delays_no_other() -> None:
    """Deadline admission expects that it will be dropped at its turn, and so it is."""
    manager = LiveManager({ACCELERATOR: 100}, (0,), slots=1, policies=PolicySpec(admission="deadline", prefetch=True))
    first, second = (manager.add(0.0, managed(10, latency=10.0, load=1.0, slo_ms=slo)) for slo in (25.0, 15.0))
    for at, number in ((0.0, first), (50.0, second)):
        manager.submit(at, Request(number, number, at))
        (warm,) = manager.loaded(at + 1.0, number, 1.0)
        assert isinstance(warm, Run)
        manager.finish(at + 11.0, warm.id)
    (run,) = manager.submit(100.0, Request(2, first, 100.0))
    assert isinstance(run, Run)
    assert manager.submit(100.0, Request(3, first, 100.0)) == []  # from 110 to 120, in time until 125
    assert manager.submit(116.0, Request(4, second, 116.0)) == []  # the first is late: 3 would end at 126
    dropped, started = manager.finish(117.0, run.id)
    assert isinstance(dropped, Refuse)
    assert isinstance(started, Run)
    assert (dropped.request.id, dropped.reason, [r.id for r in started.requests]) == (3, Reason.NO_TIME, [4])


def test_a_request_that_expires_while_another_runs_delays_no_other() -> None:
    """It is refused when a core is free, and the next request starts at once."""
    manager = LiveManager({HOST: 100}, [0])
    first, second = (manager.add(0.0, ladder(5)) for _ in range(2))
    for at, number in ((0.0, first), (50.0, second)):
        manager.submit(at, Request(number, number, at))
        (warm,) = manager.loaded(at + 1.0, number)
        assert isinstance(warm, Run)
        manager.finish(at + 2.0, warm.id)
    (run,) = manager.submit(100.0, Request(2, second, 100.0))
    assert isinstance(run, Run)
    assert manager.submit(101.0, Request(3, first, 101.0, 110.0)) == []
    assert manager.submit(102.0, Request(4, second, 102.0)) == []
    dropped, started = manager.finish(117.0, run.id)
    assert isinstance(dropped, Refuse)
    assert isinstance(started, Run)
    assert (dropped.request.id, dropped.reason, [r.id for r in started.requests]) == (3, Reason.EXPIRED, [4])


def test_a_model_that_leaves_the_accelerator_evicts_another_from_the_host() -> None:
    """Its smaller variant needs host memory that a model without accelerator memory has."""
    manager = LiveManager({ACCELERATOR: 6, HOST: 6}, [0], policies=PolicySpec(prefetch=False))
    variants = ManagedVariant("gpu", {ACCELERATOR: 6}, 1.0, 2.0, 0, 0), ManagedVariant("cpu", {HOST: 4}, 1.0, 2.0)
    host, first, second = (manager.add(0.0, ManagedModel(own)) for own in (variants[1:], variants, variants))
    found = drive(manager, requests((0, host), (20, first), (40, second)))
    assert [(event, model) for _, event, model in found.journal if event in {"shrink", "evict"}] == [
        ("evict", host),
        ("shrink", first),
    ]
    assert found.in_memory == {first: 1, second: 0}


def test_an_idle_model_leaves_after_the_keep_alive_time() -> None:
    """It counts from the end of its last request, at 3 ms and again at 41; a pinned model stays."""
    manager = LiveManager({HOST: 10}, [0], policies=PolicySpec(prefetch=False, keep_alive_s=0.05))
    first, pinned = manager.add(0.0, ladder(5)), manager.add(0.0, ladder(5, pinned=True))
    found = drive(manager, requests((0, first), (0, pinned), (40, first)))
    assert [(at, model) for at, event, model in found.journal if event == "expire"] == [(91.0, first)]
    assert found.in_memory == {pinned: 0}


def test_a_pinned_model_stays_while_another_one_is_to_replace_it() -> None:
    """Until then both may give way to requests, but the time since its last request does not count."""
    manager = LiveManager({HOST: 10}, [0], policies=PolicySpec(keep_alive_s=0.05))
    number = manager.add(0.0, ladder(5, pinned=True))
    manager.submit(0.0, Request(0, number, 0.0))
    (run,) = manager.loaded(1.0, number)
    assert isinstance(run, Run)
    manager.finish(2.0, run.id)
    manager.pin(number, pinned=False)
    assert manager.advance(1000.0) == []
    assert manager.place(number) is Place.RESIDENT


def test_a_load_that_no_request_waits_for_is_given_up_if_it_cannot_fit_any_more() -> None:
    """A pinned model takes the memory; otherwise the load would keep all later ones waiting."""

    def model(size: int, **more: Any) -> ManagedModel:
        return ManagedModel((ManagedVariant("cpu", {HOST: size}, 5.0, 10.0),), **more)

    manager = LiveManager({HOST: 10}, [0], policies=PolicySpec(prefetch=False))
    used, large = manager.add(0.0, model(5)), manager.add(0.0, model(8))
    manager.submit(0.0, Request(0, used, 0.0))
    manager.loaded(10.0, used)
    assert manager.request(11.0, large) == []
    pinned = manager.add(12.0, model(5, pinned=True, priority=1))
    (load,) = manager.request(12.0, pinned)
    assert isinstance(load, Load)
    manager.loaded(22.0, pinned)
    manager.advance(23.0)
    assert not manager.cold
