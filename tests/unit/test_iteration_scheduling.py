"""The scheduler of iterations as a pure state machine: Algorithm 2 of Orca and its invariants."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from chrion.errors import OptionError
from chrion.generation.scheduling import POLICIES, IterationScheduler, Phase, PooledRequest, Share
from property_tests import examples

N_SLOTS = 20


def drain(scheduler: IterationScheduler, lengths: dict[int, int]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Run until the pool is empty; return the batches, and the requests in the order in which they left."""
    batches, order = [], []
    done: Counter[int] = Counter()
    while scheduler.pool:
        while batch := scheduler.select():
            batches.append(tuple(share.number for share in batch))
        assert scheduler.in_flight, "requests wait and no batch can run"
        ended = set()
        for share in scheduler.in_flight[0]:
            done[share.number] += share.last
            if done[share.number] == lengths[share.number]:
                ended.add(share.number)
        order += scheduler.complete(ended)
    return batches, order


def test_the_batches_of_a_pipeline_of_three_workers() -> None:
    """Figure 4.6a of the thesis: AB, CD and EF are injected, and AB is selected again when it returns."""
    scheduler = IterationScheduler(2, 100, n_workers=3)
    for number in range(6):
        scheduler.submit(number, 3, 2)
    batches, _ = drain(scheduler, dict.fromkeys(range(6), 2))
    assert batches == [(0, 1), (2, 3), (4, 5)] * 2


def test_requests_join_and_leave_between_iterations() -> None:
    """With max batch 2, a third request takes the place of one that ends early."""
    scheduler = IterationScheduler(2, 100)
    for number, count in enumerate((1, 3, 2)):
        scheduler.submit(number, 4, count)
    batches, order = drain(scheduler, {0: 1, 1: 3, 2: 2})
    assert batches == [(0, 1), (1, 2), (1, 2)]
    assert order == [0, 1, 2]


def test_request_scheduling_keeps_a_batch_until_all_of_it_have_ended() -> None:
    """The same requests by fixed batches: request 0 keeps its row until request 1 has ended; request 2 runs alone."""
    scheduler = IterationScheduler(2, 100, policy="request")
    for number, count in enumerate((1, 3, 2)):
        scheduler.submit(number, 4, count)
    batches, order = drain(scheduler, {0: 1, 1: 3, 2: 2})
    assert batches == [(0, 1), (0, 1), (0, 1), (2,), (2,)]
    assert order == [0, 1, 2]


def test_request_scheduling_reads_prompts_as_far_as_the_shortest_one() -> None:
    """Prompts of 2 and 4 tokens: 2 of each first, then one by one beside tokens that the other request generates."""
    scheduler = IterationScheduler(2, 100, policy="request")
    scheduler.submit(0, 2, 2)
    scheduler.submit(1, 4, 1)
    found = []
    for ended in ((), (0,), (1,)):
        found.append(scheduler.select())
        left = scheduler.complete(ended)
    assert found == [
        (Share(0, 2, last=True), Share(1, 2, last=False)),
        (Share(0, 1, last=True), Share(1, 1, last=False)),
        (Share(0, 1, last=False, active=False), Share(1, 1, last=True)),
    ]
    assert left == [0, 1]


def test_request_scheduling_in_chunks() -> None:
    """The common 3 tokens of prompts of 3 and 4 in chunks of 2; then one by one."""
    scheduler = IterationScheduler(2, 100, policy="request", chunk=2)
    scheduler.submit(0, 3, 9)
    scheduler.submit(1, 4, 9)
    found = []
    for _ in range(4):
        found.append(tuple(share.tokens for share in scheduler.select()))
        scheduler.complete(())
    assert found == [(2, 2), (1, 1), (1, 1), (1, 1)]


def test_slots_bound_a_batch() -> None:
    """Line 25 of Algorithm 2: a request whose reservation does not fit ends the selection, even if a later one fits."""
    scheduler = IterationScheduler(8, 10)
    scheduler.submit(0, 4, 3)  # 6 slots: the last token has no keys and values
    scheduler.submit(1, 4, 2)  # 5 slots
    scheduler.submit(2, 1, 1)  # 1 slot
    assert scheduler.select() == (Share(0, 4, last=True),)
    assert scheduler.reserved == 6
    scheduler.complete([0])
    assert [share.number for share in scheduler.select()] == [1, 2]


def test_a_request_that_never_fits_is_refused_at_the_door() -> None:
    """The published loop would wait for it for ever."""
    scheduler = IterationScheduler(8, 10)
    with pytest.raises(OptionError, match=r"needs 11 slots .* there are 10 .* at most 3\)"):
        scheduler.submit(0, 8, 4)
    scheduler.submit(1, 8, 3)
    assert len(scheduler.select()) == 1


def test_long_prompts_run_in_chunks() -> None:
    """Seven tokens in chunks of three: three iterations, of which the last one gives a token."""
    scheduler = IterationScheduler(8, 100, chunk=3)
    scheduler.submit(0, 7, 2)
    shares = []
    for _ in range(4):
        shares += scheduler.select()
        scheduler.complete([])
    assert shares == [Share(0, 3, last=False), Share(0, 3, last=False), Share(0, 1, last=True), Share(0, 1, last=True)]


def test_cancelled_requests_leave_when_no_batch_has_them() -> None:
    """A waiting request leaves at once; a running one after its iteration."""
    scheduler = IterationScheduler(1, 100)
    scheduler.submit(0, 2, 5)
    scheduler.submit(1, 2, 5)
    scheduler.select()
    assert scheduler.cancel(1) == [1]
    assert scheduler.cancel(0) == []
    assert scheduler.complete([]) == [0]
    assert scheduler.reserved == 0
    assert scheduler.cancel(0) == []


def test_an_iteration_does_not_look_at_requests_that_wait() -> None:
    """With thousands of them, selection, return and cancellation read those of the batch only."""

    class Pool(dict[int, PooledRequest]):
        """A pool that counts the requests that are looked at."""

        looked = 0

        def values(self) -> Any:
            for request in super().values():
                self.looked += 1
                yield request

        def items(self) -> Any:
            raise AssertionError("all requests are looked at")

    scheduler = IterationScheduler(2, 10)
    scheduler.pool = pool = Pool()
    for number in range(5000):
        scheduler.submit(number, 4, 2)
    assert scheduler.waiting == 5000
    for at in range(50):
        assert [share.number for share in scheduler.select()] == [at, at + 1]
        assert scheduler.complete([at]) == [at]
    assert scheduler.cancel(4000) == [4000]
    assert (scheduler.waiting, scheduler.reserved) == (5000 - 52, 5)
    assert pool.looked <= 50 * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_batch": 0}, "max_batch: expected 1 or more, found 0"),
        ({"n_slots": 0}, "n_slots: expected 1 or more, found 0"),
        ({"n_workers": 0}, "n_workers: expected 1 or more, found 0"),
        ({"policy": "other"}, "policy: expected one of iteration, request, found 'other'"),
        ({"chunk": -1}, "chunk: expected 0 or more, found -1"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, int], message: str) -> None:
    """The message names the argument."""
    with pytest.raises(OptionError, match=message):
        IterationScheduler(**{"max_batch": 1, "n_slots": 1, **arguments})  # type: ignore[arg-type]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests arrive, run, end early, and are cancelled, in any order."""

    requests = Bundle("requests")

    @initialize(
        max_batch=st.integers(1, 4),
        n_workers=st.integers(1, 3),
        policy=st.sampled_from(POLICIES),
        chunk=st.integers(0, 3),
    )
    def open(self, max_batch: int, n_workers: int, policy: str, chunk: int) -> None:
        self.scheduler = IterationScheduler(max_batch, N_SLOTS, n_workers=n_workers, policy=policy, chunk=chunk)
        self.remaining: dict[int, int] = {}
        self.needed: dict[int, int] = {}
        self.cancelled: set[int] = set()
        self.left: list[int] = []
        self.read: Counter[int] = Counter()
        self.prompts: dict[int, int] = {}

    @rule(target=requests, prompt=st.integers(1, 12), count=st.integers(1, 12))
    def submit(self, prompt: int, count: int) -> object:
        number = len(self.prompts)
        self.prompts[number] = prompt
        needed = prompt + count - 1
        if needed > N_SLOTS:
            with pytest.raises(OptionError):
                self.scheduler.submit(number, prompt, count)
            return multiple()
        self.scheduler.submit(number, prompt, count)
        self.remaining[number], self.needed[number] = count, needed
        return number

    @rule()
    def select(self) -> None:
        free = {n for n, request in self.scheduler.pool.items() if request.phase is not Phase.RUNNING}
        batch = self.scheduler.select()
        numbers = [share.number for share in batch]
        assert len(numbers) == len(set(numbers)) <= self.scheduler.max_batch
        assert free.issuperset(numbers)
        assert numbers == sorted(numbers)
        for share in batch:
            assert 1 <= share.tokens <= max(self.scheduler.chunk or 12, 1)

    @rule(early=st.booleans())
    def complete(self, *, early: bool) -> None:
        if not self.scheduler.in_flight:
            return
        ended = set()
        for share in self.scheduler.in_flight[0]:
            number = share.number
            assert share.active or self.scheduler.policy == "request"
            if not share.active:
                assert self.scheduler.pool[number].ended
                assert share == Share(number, 1, last=False, active=False)
                continue
            if self.read[number] < self.prompts[number]:
                self.read[number] += share.tokens
                assert share.last == (self.read[number] == self.prompts[number])
            else:
                assert share == Share(number, 1, last=True)
            self.remaining[number] -= share.last
            if self.remaining[number] == 0 or early:
                ended.add(number)
        self.left += self.scheduler.complete(ended)

    @rule(number=requests)
    def cancel(self, number: int) -> None:
        self.cancelled.add(number)
        self.left += self.scheduler.cancel(number)

    @invariant()
    def reservations_fit(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        pool = self.scheduler.pool
        begun = sum(self.needed[n] for n, r in pool.items() if r.phase is not Phase.INITIATION)
        assert self.scheduler.waiting == sum(r.phase is Phase.INITIATION for r in pool.values())
        assert self.scheduler.reserved == begun <= N_SLOTS

    @invariant()
    def batches_in_flight_are_bounded_and_disjoint(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        assert len(self.scheduler.in_flight) <= self.scheduler.n_workers
        running = [share.number for batch in self.scheduler.in_flight for share in batch]
        assert len(running) == len(set(running))
        assert {n for n, r in self.scheduler.pool.items() if r.phase is Phase.RUNNING} == set(running)

    @invariant()
    def earlier_requests_have_run_at_least_as_many_iterations(self) -> None:
        """Iteration-level first come, first served (section 3.3), for requests that are not about to leave."""
        if not hasattr(self, "scheduler") or self.scheduler.policy != "iteration":
            return
        counts = [r.iterations for r in self.scheduler.pool.values() if not r.ended]
        assert counts == sorted(counts, reverse=True)

    @invariant()
    def every_request_ends_once(self) -> None:
        if hasattr(self, "scheduler"):
            assert len(self.left) == len(set(self.left))
            assert {*self.left, *self.scheduler.pool} == {*self.needed}

    def teardown(self) -> None:
        """No starvation: without further arrivals every request ends, and all slots are free."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(10_000):
            if not self.scheduler.pool:
                break
            self.select()
            self.complete(early=False)
        assert not self.scheduler.pool
        assert self.scheduler.reserved == 0
        assert set(self.left) == set(self.needed)


SchedulerMachine.TestCase.settings = examples(150, stateful_step_count=40)
TestScheduler = SchedulerMachine.TestCase
