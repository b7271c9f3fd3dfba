"""Selection by the guard, among candidates with given latencies on a fake clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from chrion.runtime.selection.guard import Candidate, compare
from helpers import FakeClock, FakeInterferenceMonitor


@pytest.fixture
def clock() -> FakeClock:
    """Return the clock that the guard reads."""
    return FakeClock()


def steady(name: str, ms: float, clock: FakeClock, *, memory_mb: float = 0.0, plain: bool = True) -> Candidate:
    """Return a candidate whose runs all take equally long."""

    def run() -> None:
        clock.now_s += ms / 1e3

    return Candidate(name, lambda: (run, lambda: None), memory_mb, plain)


def alternating(name: str, times_ms: Sequence[float], clock: FakeClock, *, plain: bool = True) -> Candidate:
    """Return a candidate whose runs take these times, again and again."""
    times = itertools.cycle(times_ms)

    def run() -> None:
        clock.now_s += next(times) / 1e3

    return Candidate(name, lambda: (run, lambda: None), plain=plain)


def by_round(
    name: str, first_ms: Sequence[float], later_ms: float, clock: FakeClock, *, plain: bool = False
) -> tuple[Candidate, list[int]]:
    """Return a candidate whose runs take a given time in each of the first rounds, and another one in later rounds.

    Returns:
        The candidate, and a list with one entry for each round that it took part in.
    """
    first, rounds = iter(first_ms), list[int]()

    def open_() -> tuple[Callable[[], object], Callable[[], None]]:
        rounds.append(len(rounds))
        return steady("", next(first, later_ms), clock).open()

    return Candidate(name, open_, plain=plain), rounds


def test_the_fastest_candidate_is_selected(clock: FakeClock) -> None:
    """A plan that takes three fifths of the plain session's time replaces it."""
    candidates = [steady("plain", 5.0, clock), steady("plan", 3.0, clock, plain=False)]
    winner, results, *_ = compare(candidates, None, FakeInterferenceMonitor(), clock)
    assert winner == "plan"
    assert [round(t.latency_ms, 6) for t in results] == [5.0, 3.0]


def test_a_plan_must_beat_a_plain_session_by_more_than_noise(clock: FakeClock) -> None:
    """A plan that is two percent faster is not selected."""
    candidates = [steady("plain", 5.0, clock), steady("plan", 4.9, clock, plain=False)]
    assert compare(candidates, None, FakeInterferenceMonitor(), clock)[0] == "plain"


def test_candidates_far_behind_are_eliminated_and_close_ones_are_timed_further(clock: FakeClock) -> None:
    """A plan with three slow rounds at first is selected; slower plans are dropped after one or three rounds."""
    late, _ = by_round("late", [9.0, 9.0, 9.0], 7.0, clock)
    far, far_rounds = by_round("far", [], 20.0, clock)
    behind, behind_rounds = by_round("behind", [], 10.5, clock)
    winner, results, *_ = compare(
        [steady("plain", 8.5, clock), late, far, behind], None, FakeInterferenceMonitor(), clock
    )
    assert winner == "late"
    assert [round(t.latency_ms, 6) for t in results] == [8.5, 7.0, 20.0, 10.5]
    assert (len(far_rounds), len(behind_rounds)) == (1, 3)


def test_one_fast_round_is_not_enough(clock: FakeClock) -> None:
    """A plan that is slower than the plain session in all rounds but one is not selected."""
    plan, _ = by_round("plan", [9.0, 9.0, 5.0], 9.0, clock)
    winner, results, *_ = compare([steady("plain", 8.5, clock), plan], None, FakeInterferenceMonitor(), clock)
    assert winner == "plain"
    assert [round(t.latency_ms, 6) for t in results] == [8.5, 9.0]


def test_the_best_plain_session_is_never_eliminated(clock: FakeClock) -> None:
    """The plain session takes part in all rounds, although a fast first round of the plan makes it seem far behind."""
    plan, _ = by_round("plan", [2.0], 9.0, clock)
    assert compare([steady("plain", 8.5, clock), plan], None, FakeInterferenceMonitor(), clock)[0] == "plain"


def test_the_callers_own_session_is_not_eliminated_after_one_slow_round(clock: FakeClock) -> None:
    """The session remains, since other processes may have used the cores in its first round."""
    own, _ = by_round("own", [20.0], 5.0, clock, plain=True)
    assert compare([own, steady("one thread", 9.0, clock)], None, FakeInterferenceMonitor(), clock)[0] == "own"


def test_one_fast_run_in_each_round_does_not_make_a_plain_session_the_best(clock: FakeClock) -> None:
    """The best plain session is the one that is faster in four of five runs."""
    candidates = [steady("steady", 6.0, clock), alternating("varying", [9.0, 9.0, 5.0, 9.0, 9.0], clock)]
    assert compare(candidates, None, FakeInterferenceMonitor(), clock)[0] == "steady"


def test_the_median_of_a_plan_must_not_exceed_that_of_any_plain_session(clock: FakeClock) -> None:
    """A plan that only beats the plain session with the fastest run is not selected."""
    candidates = [
        steady("steady", 5.5, clock),
        alternating("varying", [9.0, 9.0, 5.0, 9.0, 9.0], clock),
        alternating("plan", [8.0, 8.0, 4.7, 8.0, 8.0], clock, plain=False),
    ]
    assert compare(candidates, None, FakeInterferenceMonitor(), clock)[0] == "steady"


def test_a_candidate_that_fails_once_is_not_selected(clock: FakeClock) -> None:
    """A failure in one run outweighs the candidate's latency in all others."""
    runs = itertools.count()

    def fail_once() -> None:
        clock.now_s += 1e-3
        if next(runs) == 40:
            raise RuntimeError("now")

    unreliable = Candidate("unreliable", lambda: (fail_once, lambda: None), plain=False)
    winner, results, *_ = compare([steady("plain", 5.0, clock), unreliable], None, FakeInterferenceMonitor(), clock)
    assert (winner, results[1].latency_ms) == ("plain", float("inf"))


@pytest.mark.parametrize(("plan_ms", "rounds"), [(5.5, 5), (3.5, 5), (4.6, 12), (9.0, 1)])
def test_a_plan_that_leads_by_little_is_timed_in_more_rounds(clock: FakeClock, plan_ms: float, rounds: int) -> None:
    """With a plain session of 5 ms, a plan that is slower or much faster is decided in fewer rounds."""
    plan, taken = by_round("plan", [], plan_ms, clock)
    compare([steady("plain", 5.0, clock), plan], None, FakeInterferenceMonitor(), clock)
    assert len(taken) == rounds


def test_the_least_number_of_rounds_is_run_beyond_the_time_budget(clock: FakeClock) -> None:
    """A slow model whose first round exceeds the budget and misleads is timed in further rounds."""
    plan, _ = by_round("plan", [800.0], 1000.0, clock)
    plain, _ = by_round("plain", [1000.0], 780.0, clock, plain=True)
    assert compare([plain, plan], None, FakeInterferenceMonitor(), clock)[0] == "plain"


class Memory:
    """Plans on a fake clock, and the memory that they take while they are open, in MB."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.now_mb = self.most_mb = 100.0
        #: The times that each plan was opened.
        self.opened: dict[str, int] = {}

    def __call__(self) -> float:
        """Return the memory of the process."""
        return self.now_mb

    def plan(self, name: str, ms: float, mb: float, room_mb: float) -> Candidate:
        """Return a plan that takes some memory while it is open."""

        def open_() -> tuple[Callable[[], object], Callable[[], None]]:
            self.opened[name] = self.opened.get(name, 0) + 1
            self.now_mb += mb
            self.most_mb = max(self.most_mb, self.now_mb)
            return steady("", ms, self.clock).open()[0], close

        def close() -> None:
            self.now_mb -= mb

        return Candidate(name, open_, plain=False, room_mb=room_mb)

    def compare(self, *plans: Candidate) -> str:
        """Compare plans with a plain session of 1 ms; return the winner."""
        plain = steady("plain", 1.0, self.clock)
        return compare([plain, *plans], None, FakeInterferenceMonitor(), self.clock, self).winner


@pytest.mark.parametrize(("room_mb", "opened", "most_mb"), [(60.0, 2, 160.0), (59.0, 12, 130.0), (0.0, 12, 130.0)])
def test_plans_stay_open_if_there_is_room_for_all(
    clock: FakeClock, room_mb: float, opened: int, most_mb: float
) -> None:
    """Two plans of 30 MB do so after a first round that shows what they take; all are closed in the end."""
    memory = Memory(clock)
    assert memory.compare(memory.plan("a", 0.9, 30.0, room_mb), memory.plan("b", 0.88, 30.0, room_mb)) == "b"
    assert memory.opened == {"a": opened, "b": opened}
    assert (memory.most_mb, memory.now_mb) == (most_mb, 100.0)


def test_an_eliminated_plan_leaves_room_for_others(clock: FakeClock) -> None:
    """The plan that remains stays open as soon as a larger one is eliminated, which takes no memory any more."""
    memory = Memory(clock)
    assert memory.compare(memory.plan("good", 0.9, 30.0, 60.0), memory.plan("far", 20.0, 90.0, 60.0)) == "good"
    assert memory.opened == {"good": 2, "far": 1}
    assert (memory.most_mb, memory.now_mb) == (190.0, 100.0)


def test_a_plan_that_was_kept_open_and_is_eliminated_is_closed(clock: FakeClock) -> None:
    """Its memory is free in later rounds."""
    memory = Memory(clock)
    behind = memory.plan("behind", 1.3, 30.0, 60.0)
    assert memory.compare(memory.plan("good", 0.9, 30.0, 60.0), behind) == "good"
    assert memory.opened == {"good": 2, "behind": 2}
    assert memory.now_mb == 100.0


def broken() -> tuple[Callable[[], object], Callable[[], None]]:
    """Raise instead of opening a candidate."""
    raise RuntimeError("no")


def test_a_candidate_kept_open_that_cannot_be_opened_is_not_selected(clock: FakeClock) -> None:
    """The candidate is not selected, and its error is not raised."""
    plan = Candidate("plan", broken, plain=False, room_mb=60.0)
    assert compare([steady("plain", 1.1, clock), plan], None, FakeInterferenceMonitor(), clock)[0] == "plain"


def test_the_least_memory_is_selected_among_candidates_that_meet_the_slo(clock: FakeClock) -> None:
    """If no candidate meets the SLO, the fastest one is selected."""
    candidates = [
        steady("plain", 3.0, clock, memory_mb=900.0),
        steady("slow", 8.0, clock, memory_mb=0.0),
        steady("plan", 4.0, clock, memory_mb=300.0, plain=False),
    ]
    assert compare(candidates, 5.0, FakeInterferenceMonitor(), clock)[0] == "plan"
    assert compare(candidates, 10.0, FakeInterferenceMonitor(), clock)[0] == "slow"
    assert compare(candidates, 1.0, FakeInterferenceMonitor(), clock)[0] == "plain"


def test_a_candidate_that_fails_is_not_selected(clock: FakeClock) -> None:
    """A candidate that fails when it is opened or when it runs is not selected, and its error is not raised."""
    fails_in_run = Candidate("b", lambda: (broken, lambda: None))
    winner, results, *_ = compare(
        [Candidate("a", broken), fails_in_run, steady("plain", 9.0, clock)], None, FakeInterferenceMonitor(), clock
    )
    assert winner == "plain"
    assert [t.latency_ms for t in results[:2]] == [float("inf")] * 2
    assert [t.failure for t in results] == ["RuntimeError: no", "RuntimeError: no", ""]


class BusyCores:
    """A monitor that always finds interference."""

    def wait(self) -> bool:
        """Return false, as if the interference had not ended."""
        return False

    def has_interference(self) -> bool:
        """Return true."""
        return True


#: Latencies by round of which a plan wins as many as it loses to a plain session of 5 ms.
UNDECIDED = [4.7, 4.8] * 50


@pytest.mark.parametrize("busy", [True, False])
def test_rounds_under_interference_are_reported(clock: FakeClock, *, busy: bool) -> None:
    """The result is uncertain if other processes use the cores in all rounds, of which a plan loses half."""
    plan, rounds = by_round("plan", UNDECIDED, 0.0, clock)
    monitor = BusyCores() if busy else FakeInterferenceMonitor()
    winner, _, interference, *_ = compare([steady("plain", 5.0, clock), plan], None, monitor, clock)
    assert (winner, interference, len(rounds)) == (("plain", True, 60) if busy else ("plan", False, 12))


def test_interference_at_the_end_of_a_round_counts_for_the_next_one_as_well(clock: FakeClock) -> None:
    """Three of twelve rounds without interference suffice, and two do not."""
    for first, uncertain in ((3, False), (2, True)):
        plan, _ = by_round("plan", UNDECIDED, 0.0, clock)
        monitor = FakeInterferenceMonitor(interference_at=range(first, 99))
        assert compare([steady("plain", 5.0, clock), plan], None, monitor, clock).interference is uncertain


@pytest.mark.parametrize(("plan_ms", "winner"), [(4.7, "plan"), (4.8, "plain"), (9.0, "plain")])
def test_under_interference_pairs_decide(clock: FakeClock, plan_ms: float, winner: str) -> None:
    """A plan that is faster by 5 % in all rounds is selected with certainty, the plain session beside any other."""
    plan, rounds = by_round("plan", [], plan_ms, clock)
    compared = compare([steady("plain", 5.0, clock), plan], None, BusyCores(), clock)
    assert (compared.winner, compared.interference, compared.by_pairs) == (winner, False, True)
    assert len(rounds) == 12


def test_a_plan_has_to_win_pairs_against_each_plain_session(clock: FakeClock) -> None:
    """If one of them is as fast, the comparison is uncertain, and the caller's session stays."""
    candidates = [steady("own", 5.0, clock), steady("one thread", 3.0, clock), steady("plan", 3.0, clock, plain=False)]
    compared = compare(candidates, None, BusyCores(), clock)
    assert (compared.winner, compared.interference) == ("own", True)


def test_an_eliminated_plain_session_does_not_count_against_pairs(clock: FakeClock) -> None:
    """It was timed in the one calm round alone; the plan wins every pair against the session that remains."""
    own, _ = by_round("own", [5.0], 10.0, clock, plain=True)
    other, other_rounds = by_round("one thread", [], 9.0, clock, plain=True)
    plan, _ = by_round("plan", [4.5], 9.0, clock)
    compared = compare([own, other, plan], None, FakeInterferenceMonitor(interference_at=range(1, 99)), clock)
    assert (compared.winner, compared.interference, len(other_rounds)) == ("plan", False, 1)


def test_a_plan_that_pairs_have_proven_precedes_one_that_leads_by_far(clock: FakeClock) -> None:
    """The other one is faster in half of the rounds, and as slow as the plain session in the others."""
    proven = steady("proven", 4.7, clock, plain=False)
    other, _ = by_round("other", [3.9, 4.9] * 50, 0.0, clock)
    compared = compare([steady("plain", 5.0, clock), proven, other], None, BusyCores(), clock)
    assert (compared.winner, compared.interference) == ("proven", False)


def test_with_an_slo_no_rounds_follow_for_pairs(clock: FakeClock) -> None:
    """They could not make the result certain."""
    plan, rounds = by_round("plan", UNDECIDED, 0.0, clock)
    assert compare([steady("plain", 5.0, clock), plan], 60.0, BusyCores(), clock).interference
    assert len(rounds) == 12


def test_rounds_for_pairs_follow_for_some_seconds_only(clock: FakeClock) -> None:
    """Trials of a second and a half are repeated as often as a decision needs, and no more after five seconds."""
    plan, rounds = by_round("plan", [100 * ms for ms in UNDECIDED], 0.0, clock)
    assert compare([steady("plain", 500.0, clock), plan], None, BusyCores(), clock).interference
    assert len(rounds) == 5


def test_rounds_without_interference_after_the_first_twelve_are_pairs(clock: FakeClock) -> None:
    """A plan that wins half of the twelve rounds, and all that follow, is selected after five of these."""
    plan, rounds = by_round("plan", UNDECIDED[:12], 4.5, clock)
    monitor = FakeInterferenceMonitor(interference_at=range(12))
    winner, _, interference, *_ = compare([steady("plain", 5.0, clock), plan], None, monitor, clock)
    assert (winner, interference, len(rounds)) == ("plan", False, 17)


def test_if_pairs_are_undecided_a_plan_must_lead_by_far(clock: FakeClock) -> None:
    """Its fastest rounds take less than four fifths of the plain session's, though it loses as many as it wins."""
    for fast_ms, winner in ((3.9, "plan"), (4.1, "plain")):
        plan, _ = by_round("plan", [fast_ms, 4.9] * 50, 0.0, clock)
        compared = compare([steady("plain", 5.0, clock), plan], None, BusyCores(), clock)
        assert (compared.winner, compared.interference) == (winner, True)


def test_under_interference_no_other_plain_session_replaces_the_callers_own(clock: FakeClock) -> None:
    """A session of one thread that takes half the time is selected on cores without other processes only."""
    candidates = [steady("own", 5.0, clock), steady("one thread", 2.5, clock)]
    assert compare(candidates, None, FakeInterferenceMonitor(), clock).winner == "one thread"
    assert compare(candidates, None, BusyCores(), clock).winner == "own"


def test_another_plain_session_must_be_faster_by_more_than_noise(clock: FakeClock) -> None:
    """A session of one thread that takes 2 % less time does not replace the caller's own."""
    candidates = [steady("own", 5.0, clock), steady("one thread", 4.9, clock)]
    assert compare(candidates, None, FakeInterferenceMonitor(), clock).winner == "own"


def test_rounds_with_interference_do_not_count_if_there_are_others(clock: FakeClock) -> None:
    """A plan that other processes slow down in the first four rounds is selected by the eight later ones."""
    plan, _ = by_round("plan", [7.0] * 4, 4.6, clock)
    monitor = FakeInterferenceMonitor(interference_at=range(4))
    winner, results, interference, *_ = compare([steady("plain", 5.0, clock), plan], None, monitor, clock)
    assert (winner, interference) == ("plan", False)
    assert round(results[1].latency_ms, 6) == 4.6


@pytest.mark.parametrize(("plan_ms", "selected"), [(3.9, "plan"), (4.2, "plain")])
def test_a_plan_that_costs_memory_requires_a_larger_gain(clock: FakeClock, plan_ms: float, selected: str) -> None:
    """With a share of 0.8, a plan for a plain session of 5 ms may take 4 ms at most."""
    plan = replace(steady("plan", plan_ms, clock, plain=False), share=0.8)
    assert compare([steady("plain", 5.0, clock), plan], None, FakeInterferenceMonitor(), clock).winner == selected


@pytest.mark.parametrize(
    ("share", "busy", "lead"),
    [
        (0.95, False, "by 5 % and in half of the rounds"),
        (0.8, False, "by 20 % and in half of the rounds"),
        (0.95, True, "by 5 % in 5 rounds more than not"),
    ],
)
def test_the_lead_that_a_plan_needs_is_stated(clock: FakeClock, share: float, *, busy: bool, lead: str) -> None:
    """It is the share that plans may take, and the number of rounds."""
    plan = replace(steady("plan", 4.9, clock, plain=False), share=share)
    monitor = BusyCores() if busy else FakeInterferenceMonitor()
    assert compare([steady("plain", 5.0, clock), plan], None, monitor, clock).lead == lead
