"""Comparison of a plan with the one-thread session, on simulated latencies."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import pytest

from chrion.machine.cpu_use import OtherWork
from chrion.runtime.live_comparison import LiveComparison

#: Latency in ms of a request by its number.
Latency = Callable[[int], float]


class OtherProcesses:
    """Other processes as the tests tell them; without a change by default."""

    def __init__(self, *, busy: bool | None = False, counted: bool = False) -> None:
        self.busy, self.eased, self.counted = busy, False, counted
        #: Number of times that a measurement was begun.
        self.begun = 0

    def __call__(self) -> OtherProcesses:
        self.begun += 1
        return self

    def has_eased(self) -> bool:
        """Return what the test has set."""
        return self.eased

    def is_busy(self) -> bool | None:
        """Return what the test has set."""
        return self.busy


def compare(latency_ms: float | None, plain_ms: float | None, others: OtherProcesses | None = None) -> LiveComparison:
    """Return a comparison that measures no real processes."""
    return LiveComparison(latency_ms, plain_ms, cast("type[OtherWork]", others or OtherProcesses()))


@dataclass
class Served:
    """Requests that were served in a simulation."""

    #: Engine of each request: True for the one-thread session.
    diverted: list[bool]
    #: End of each request in seconds.
    ends_s: list[float]
    #: Sum of the mean latencies of the engines that served, and of the faster one of each request, in ms.
    spent_ms: float
    least_ms: float

    @property
    def excess(self) -> float:
        """Time that was spent relative to the fastest possible choice."""
        return self.spent_ms / self.least_ms


def always(latency_ms: float) -> Latency:
    """Return a latency that does not change."""
    return lambda _: latency_ms


def simulate(
    comparison: LiveComparison, plan: Latency, plain: Latency, requests: int, *, seed: int | None = None
) -> Served:
    """Serve requests in turn; with a seed, latencies vary by 30 %, and one in fifty takes five times longer."""
    noise, now_s = random.Random(seed), 0.0
    served = Served([], [], 0.0, 0.0)
    for number in range(requests):
        diverted = comparison.diverts
        mean_ms = (plain if diverted else plan)(number)
        factor = 1.0
        if seed is not None:
            factor = noise.lognormvariate(-0.045, 0.3) * (5.0 if noise.random() < 0.02 else 1.0)
        end_s = now_s + mean_ms * factor / 1e3
        comparison.record(now_s, end_s, diverted=diverted)
        now_s = end_s
        served.diverted.append(diverted)
        served.ends_s.append(end_s)
        served.spent_ms += mean_ms
        served.least_ms += min(plan(number), plain(number))
    return served


@pytest.mark.parametrize("plan_ms", [0.5, 1.0, 1.4])
def test_a_plan_that_is_as_fast_as_expected_serves_all_requests(plan_ms: float) -> None:
    """As long as the plan takes no longer than the plain session did, there are no trials."""
    served = simulate(compare(1.0, 1.5), always(plan_ms), always(1.5), 20_000)
    assert not any(served.diverted)


@pytest.mark.parametrize(("plan_ms", "plain_ms"), [(2.2, 1.5), (10.0, 1.5), (1.7, 1.5), (3.0, 0.2)])
def test_the_number_of_requests_on_the_slower_plan_is_bounded(plan_ms: float, plain_ms: float) -> None:
    """Two windows of a tenth of a second and of 16 requests, and trials of 10 requests at doubling distances."""
    requests = 50_000
    served = simulate(compare(1.0, 1.5), always(plan_ms), always(plain_ms), requests)
    windows = 2 * max(16, math.ceil(100 / plan_ms))
    trials = math.log2(2048 / 64) + 1 + requests / 2048
    assert served.diverted.count(False) <= windows + 10 * trials
    assert comparison_ends_with_plain(served)


def comparison_ends_with_plain(served: Served) -> bool:
    """Return whether the one-thread session has served nearly all of the last requests."""
    return sum(served.diverted[-4000:]) > 0.99 * 4000


@pytest.mark.parametrize("latency_ms", [0.1, 1.0, 5.0, 20.0, 60.0])
@pytest.mark.parametrize("factor", [1.7, 3.0, 10.0])
def test_a_slow_plan_is_noticed_within_a_second(latency_ms: float, factor: float) -> None:
    """After a change the one-thread session serves before a second has passed, or after two windows of 3 requests."""
    before = math.ceil(2000 / latency_ms)
    comparison = compare(latency_ms, 1.5 * latency_ms)
    served = simulate(
        comparison,
        lambda number: latency_ms * (factor if number >= before else 1.0),
        always(1.5 * latency_ms),
        before + math.ceil(4000 / latency_ms),
    )
    first = served.diverted.index(True)
    limit_s = max(1.0, 7 * latency_ms * factor / 1e3)  # the change may fall into a window
    assert served.ends_s[first] - served.ends_s[before] <= limit_s


def test_a_plan_that_is_fast_again_takes_over() -> None:
    """When the disturbance has passed, the next trial is at most 2048 requests away, and the plan wins it."""
    served = simulate(compare(1.0, 1.5), lambda number: 3.0 if number < 10_000 else 1.0, always(1.5), 14_000)
    assert all(served.diverted[-100 + 10_000 : 10_000])
    again = 10_000 + served.diverted[10_000:].index(False)
    assert again <= 10_000 + 2048 + 100
    assert not any(served.diverted[again:])


def test_a_disturbance_of_both_engines_changes_nothing() -> None:
    """If both take three times as long, six trials find that the plan is still faster, and no more follow.

    A trial takes 4 requests of 4.5 ms and then 0.15 s.
    """
    served = simulate(compare(1.0, 1.5), always(3.0), always(4.5), 20_000)
    assert 0 < sum(served.diverted) <= 6 * (4 + math.ceil(150 / 4.5))


def test_a_session_that_was_slower_when_it_was_selected_is_tried_at_once() -> None:
    """Under interference the caller's own session is selected although that of one thread took half of the time."""
    served = simulate(compare(2.0, 1.0), always(2.0), always(1.0), 6000)
    assert sum(served.diverted[-5000:]) > 0.98 * 5000


def test_a_quota_that_two_threads_use_up() -> None:
    """Of each period of 100 ms, two threads run for 50 ms, and one thread all the time, once a new period has begun."""
    comparison, now_s, used_s, period = compare(1.0, 1.0), 0.0, 0.0, 0
    diverted = []
    for _ in range(4000):
        diverts = comparison.diverts
        diverted.append(diverts)
        start_s, now_s = now_s, now_s + 0.001
        used_s += 0.001 if diverts else 0.002
        if int(now_s / 0.1) > period:
            period, used_s = int(now_s / 0.1), 0.0
        if used_s >= 0.1:
            period += 1
            now_s, used_s = period * 0.1, 0.0
        comparison.record(start_s, now_s, diverted=diverts)
    assert sum(diverted[-2000:]) > 0.95 * 2000


@pytest.mark.parametrize("timed", [True, False])
def test_small_changes_cause_no_trials_once_the_one_thread_session_is_known(*, timed: bool) -> None:
    """If one thread takes 1.4 ms, a plan of 1.0 ms that sometimes takes 1.2 is still the faster one: a trial tells."""
    comparison = compare(1.0 if timed else None, None)
    served = simulate(comparison, lambda number: 1.2 if number // 1000 % 3 == 2 else 1.0, always(1.4), 60_000)
    assert sum(served.diverted) <= 4 + math.ceil(150 / 1.4)


@pytest.mark.parametrize("latency_ms", [0.5, 2.0, 8.0])
def test_a_slow_plan_is_noticed_within_a_second_of_a_lost_trial(latency_ms: float) -> None:
    """A trial that began just before a neighbour is lost, and delays the next one by less than a second."""
    comparison = compare(latency_ms, None)
    before = round(4000 / latency_ms)

    def plan(number: int) -> float:
        slightly_slow = before - round(450 / latency_ms) <= number < before
        return latency_ms * (2.5 if number >= before else 1.2 if slightly_slow else 1.0)

    plain = lambda number: latency_ms * (1.3 if number < before else 1.4)  # noqa: E731
    served = simulate(comparison, plan, plain, before + round(4000 / latency_ms))
    lost = served.diverted[:before]
    assert any(lost)
    first = before + served.diverted[before:].index(False)
    again = first + served.diverted[first:].index(True)
    assert served.ends_s[again] - served.ends_s[before] <= 1.0
    assert comparison.plain_serves


@pytest.mark.parametrize("pause_s", [0.3, 0.6, 1.2])
@pytest.mark.parametrize("busy_s", [20, 200])
def test_a_neighbour_that_comes_back_is_noticed_within_a_second(busy_s: int, pause_s: float) -> None:
    """Also soon after the plan has returned, when the last trials were lost and far apart."""
    others, now_s = OtherProcesses(counted=True, busy=True), 0.0
    comparison = compare(0.01e3, 0.015e3, others)
    returned_s = again_s = math.inf
    while now_s < busy_s + 60 and now_s < again_s + 30:
        neighbour = 2 <= now_s < busy_s or now_s >= again_s
        others.busy, others.eased = neighbour, busy_s <= now_s < again_s
        diverts = comparison.diverts
        latency_s = 0.015 if diverts else 0.03 if neighbour else 0.01
        comparison.record(now_s, now_s + latency_s, diverted=diverts)
        now_s += latency_s
        if now_s > busy_s and returned_s == math.inf and not comparison.plain_serves:
            returned_s, again_s = now_s, now_s + pause_s
        if now_s > again_s and comparison.diverts:
            break
    assert now_s - again_s <= 1.0


def test_inputs_that_take_less_time_lower_the_expectation() -> None:
    """After small inputs, a plan that takes as long as when it was selected is slow if the plain session is faster."""
    served = simulate(compare(10.0, 15.0), lambda number: 1.0 if number < 2000 else 10.0, always(1.5), 6000)
    assert sum(served.diverted[-2000:]) > 0.98 * 2000


@pytest.mark.parametrize("factor", [2, 8, 50])
def test_trials_of_a_far_slower_plain_session_cost_little(factor: int) -> None:
    """With a plan that always seems slow, trials take at most 2 % of the time, apart from the first."""
    comparison = compare(1.0, 1.0)  # any latency above 1.1 ms is suspicious
    noise = random.Random(0)
    served = simulate(comparison, lambda _: 1.05 + noise.random(), always(1.5 * factor), 40_000)
    assert sum(served.diverted) < 0.02 * 40_000
    extra_ms = sum(served.diverted) * 1.5 * factor
    assert extra_ms <= 0.02 * served.spent_ms + 104 * 1.5 * factor


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("plan", "plain_ms"),
    [
        (always(1.0), 1.5),
        (always(1.6), 1.5),
        (always(2.2), 1.5),
        (always(4.0), 1.5),
        (lambda number: 3.0 if number < 10_000 else 1.0, 1.5),
        (lambda number: 1.0 if number < 10_000 else 3.0, 1.5),
        (always(3.0), 4.5),
        (always(1.0), 8.0),
    ],
    ids=["expected", "tie", "slower", "far slower", "passes", "begins", "both", "plain far slower"],
)
def test_the_loss_under_noise_is_bounded(plan: Latency, plain_ms: float, seed: int) -> None:
    """Over 20 000 noisy requests, the loss against always using the faster engine is less than 10 %."""
    served = simulate(compare(1.0, 1.5), plan, always(plain_ms), 20_000, seed=seed)
    assert served.excess < 1.1


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("counted", "limit"), [(True, 1.1), (False, 1.2)])
def test_short_disturbances_cost_little_more_than_staying_with_one_engine(
    seed: int, limit: float, *, counted: bool
) -> None:
    """If the plan is slow for a tenth of a second in each second, changing is about as good as not changing.

    That holds best if the disturbance comes from processes whose CPU time the system counts.
    """
    others = OtherProcesses(counted=counted)

    def plan(number: int) -> float:
        disturbed = number // 100 % 10 == 0
        others.eased = counted and not disturbed
        return 3.0 if disturbed else 1.0

    served = simulate(compare(1.0, 1.5, others), plan, always(1.5), 20_000, seed=seed)
    plan_alone_ms, plain_alone_ms = 20_000 * (0.9 * 1.0 + 0.1 * 3.0), 20_000 * 1.5
    assert served.spent_ms < limit * min(plan_alone_ms, plain_alone_ms)


@pytest.mark.parametrize(("requests", "contradicted"), [(10_000, False), (60_000, True)])
def test_a_decision_is_contradicted_after_lost_trials_for_half_a_minute(requests: int, *, contradicted: bool) -> None:
    """With requests of 1.5 ms, 10 000 take 15 s, and 60 000 take 90 s."""
    comparison = compare(1.0, 1.5)
    simulate(comparison, always(2.2), always(1.5), requests)
    assert comparison.plain_serves
    assert comparison.contradicted is contradicted


def test_requests_that_began_before_a_change_are_not_recorded() -> None:
    """While the one-thread session is not open yet, the plan's requests do not count as its own."""
    comparison = compare(1.0, 1.5)
    now_s = 0.0
    while not comparison.diverts:
        comparison.record(now_s, now_s + 0.01, diverted=False)
        now_s += 0.01
    for _ in range(1000):
        comparison.record(now_s, now_s + 0.01, diverted=False)
        now_s += 0.01
    assert comparison.diverts
    assert not comparison.plain_serves


def test_the_plan_is_tried_soon_after_other_work_has_eased() -> None:
    """Otherwise up to 2048 requests pass before the next trial; then a window, or ten times the last trial's loss."""
    others = OtherProcesses(counted=True, busy=True)

    def plan(number: int) -> float:
        others.eased = number >= 10_000
        return 1.0 if others.eased else 3.0

    served = simulate(compare(1.0, 1.5, others), plan, always(1.5), 12_000)
    assert all(served.diverted[9_900:10_000])
    assert served.diverted[10_000:].index(False) <= 200
    assert not any(served.diverted[10_400:])


def test_other_work_that_comes_and_goes_does_not_multiply_the_trials() -> None:
    """If the plan loses the trials nevertheless, they become rare."""
    others = OtherProcesses()
    others.eased = True
    served = simulate(compare(1.0, 1.5, others), always(3.0), always(1.5), 50_000)
    assert served.diverted.count(False) <= 68 + 10 * (math.log2(2048 / 64) + 1 + 50_000 / 2048)


def test_a_few_fast_requests_do_not_bring_the_plan_back() -> None:
    """Beside a process that has every other time slice of 12 ms of a core, a plan of two lanes is fast for 12 ms."""
    comparison, now_s, returned = compare(1.0, 1.5), 0.0, 0
    for _ in range(40_000):
        diverts, before = comparison.diverts, comparison.plain_serves
        latency_s = 0.0015 if diverts else 0.001 if int(now_s / 0.012) % 2 else 0.004
        comparison.record(now_s, now_s + latency_s, diverted=diverts)
        now_s += latency_s
        returned += before and not comparison.plain_serves
    assert comparison.plain_serves
    assert returned == 0


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("plan_ms", [1.7, 3.0, 30.0])
def test_few_requests_are_in_a_trial_of_the_plan(plan_ms: float, *, counted: bool) -> None:
    """The 99th percentile of the latency is that of the one-thread session, after the disturbance was noticed."""
    others = OtherProcesses(counted=counted, busy=counted)
    served = simulate(compare(1.0, 1.5, others), always(plan_ms), always(1.5), 50_000)
    assert served.diverted[1000:].count(False) < (0.002 if counted else 0.01) * 49_000
    if counted:
        assert served.diverted[200:2000].count(False) == 0


def test_trials_are_rare_only_while_other_processes_use_cores() -> None:
    """Once they use none, a trial is at most 2048 requests away, although nothing has eased since the last one."""
    others = OtherProcesses(counted=True, busy=True)

    def plan(number: int) -> float:
        others.busy = number < 60_000
        return 3.0 if number < 60_500 else 1.0

    served = simulate(compare(1.0, 1.5, others), plan, always(1.5), 65_000)
    assert all(served.diverted[59_000:60_000])
    assert served.diverted[60_500:].index(False) <= 2048 + 100


def test_the_latency_of_an_engine_that_was_not_timed_is_learned() -> None:
    """Its first windows are expected if no other process is busy; later it is slow if it takes longer."""
    served = simulate(compare(None, None), lambda number: 2.0 if number < 3000 else 4.0, always(2.5), 8000)
    assert not any(served.diverted[:3000])
    assert sum(served.diverted[-3000:]) > 0.98 * 3000


def test_an_engine_that_was_not_timed_beside_other_work_is_compared_at_once() -> None:
    """If other processes are busy from the start, the first windows say nothing."""
    slow = simulate(compare(None, None, OtherProcesses(busy=True)), always(4.0), always(2.5), 4000)
    assert sum(slow.diverted[-3000:]) > 0.98 * 3000
    fast = simulate(compare(None, None, OtherProcesses(busy=True)), always(2.0), always(2.5), 20_000)
    assert sum(fast.diverted) <= 4 + math.ceil(150 / 2.5)


def test_nothing_is_concluded_before_other_work_is_known() -> None:
    """While the use by other processes is being measured, windows count neither as slow nor as expected."""
    others = OtherProcesses(busy=None)

    def plan(number: int) -> float:
        others.busy = True if number >= 500 else None
        return 4.0

    served = simulate(compare(None, None, others), plan, always(2.5), 1000)
    assert not any(served.diverted[:500])
    assert any(served.diverted[500:])


@pytest.mark.parametrize(("latency_ms", "needless"), [(0.05, True), (0.2, False)])
def test_short_requests_are_not_recorded(latency_ms: float, *, needless: bool) -> None:
    """A microsecond for each of them is not worth it, whether the engine was timed or not."""
    assert compare(latency_ms, 1.0).needless is needless
    comparison = compare(None, None)
    simulate(comparison, always(latency_ms), always(1.0), 3000)
    assert comparison.needless is needless


def test_a_window_far_above_the_expected_latency_is_slow_in_any_case() -> None:
    """The timing of a candidate that was eliminated early may be too long."""
    served = simulate(compare(1.0, 9.0), always(3.0), always(1.5), 4000)
    assert sum(served.diverted[-3000:]) > 0.98 * 3000


def test_trials_of_slow_requests_are_short() -> None:
    """A session that is slower than when it was timed tries one thread for some seconds, not for 28 requests."""
    served = simulate(compare(130.0, 130.0), always(160.0), always(270.0), 100)
    assert 0 < sum(served.diverted) <= 8
    assert served.ends_s[len(served.diverted) - served.diverted[::-1].index(True) - 1] < 4.0
