"""The guard's choice, with contenders whose times are made up."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from chrion.runtime.selection import guard
from chrion.runtime.selection.decisions import Decision, DecisionCache
from chrion.runtime.selection.guard import Candidate, Opener, compare
from helpers import FakeInterferenceMonitor


def contender(name: str, ms: float, clock: list[float], *, resident_mb: float = 0.0, plain: bool = True) -> Candidate:
    """A way to run that takes so long on a fake clock."""

    def run() -> None:
        clock[0] += ms / 1e3

    def open_() -> tuple[object, object]:
        return run, lambda: None

    opener: Opener = open_  # type: ignore[assignment]
    return Candidate(name, opener, resident_mb, plain)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the guard sees."""
    now = [0.0]
    monkeypatch.setattr(guard.time, "perf_counter", lambda: now[0])
    return now


def test_the_fastest_wins(clock: list[float]) -> None:
    """Whoever it is."""
    rivals = [contender("plain", 5.0, clock), contender("plan", 3.0, clock, plain=False)]
    winner, trials, _ = compare(rivals, None, FakeInterferenceMonitor())
    assert winner == "plan"
    assert [round(t.median_ms, 6) for t in trials] == [5.0, 3.0]


def test_a_plan_must_beat_a_plain_session_by_more_than_noise(clock: list[float]) -> None:
    """Two percent are not enough."""
    rivals = [contender("plain", 5.0, clock), contender("plan", 4.9, clock, plain=False)]
    assert compare(rivals, None, FakeInterferenceMonitor())[0] == "plain"


def test_a_close_race_goes_on(clock: list[float]) -> None:
    """The first turns mislead; whoever is far behind by then has no further chance."""
    slow = iter([9.0, 9.0, 9.0])
    opened: list[str] = []

    def unlucky() -> tuple[object, object]:
        opened.append("unlucky")
        ms = next(slow, 7.0)
        return contender("", ms, clock).open()

    def far() -> tuple[object, object]:
        opened.append("far")
        return contender("", 20.0, clock).open()

    def behind() -> tuple[object, object]:
        opened.append("behind")
        return contender("", 10.5, clock).open()

    rivals = [
        contender("plain", 8.5, clock),
        Candidate("unlucky", unlucky, plain=False),  # type: ignore[arg-type]
        Candidate("far", far, plain=False),  # type: ignore[arg-type]
        Candidate("behind", behind, plain=False),  # type: ignore[arg-type]
    ]
    winner, trials, _ = compare(rivals, None, FakeInterferenceMonitor())
    assert winner == "unlucky"
    assert [round(t.median_ms, 6) for t in trials] == [8.5, 7.0, 20.0, 10.5]
    assert (opened.count("far"), opened.count("behind")) == (1, 3)


def test_a_lucky_turn_is_not_enough(clock: list[float]) -> None:
    """In all other turns the plan is the slower one."""
    luck = iter([9.0, 9.0, 5.0])

    def lucky() -> tuple[object, object]:
        return contender("", next(luck, 9.0), clock).open()

    rivals = [contender("plain", 8.5, clock), Candidate("lucky", lucky, plain=False)]  # type: ignore[arg-type]
    winner, trials, _ = compare(rivals, None, FakeInterferenceMonitor())
    assert winner == "plain"
    assert [round(t.median_ms, 6) for t in trials] == [8.5, 5.0]


def test_the_best_plain_session_is_never_given_up(clock: list[float]) -> None:
    """A lucky first turn of the plan makes it look far behind; it is compared in all turns that follow."""
    luck = iter([2.0])

    def lucky() -> tuple[object, object]:
        return contender("", next(luck, 9.0), clock).open()

    rivals = [contender("plain", 8.5, clock), Candidate("lucky", lucky, plain=False)]  # type: ignore[arg-type]
    assert compare(rivals, None, FakeInterferenceMonitor())[0] == "plain"


def test_the_callers_own_session_is_not_given_up_for_one_bad_turn(clock: list[float]) -> None:
    """Others used the cores in its first turn."""
    first = iter([20.0])

    def own() -> tuple[object, object]:
        return contender("", next(first, 5.0), clock).open()

    rivals = [Candidate("own", own), contender("one thread", 9.0, clock)]  # type: ignore[arg-type]
    assert compare(rivals, None, FakeInterferenceMonitor())[0] == "own"


def changing(name: str, times_ms: Sequence[float], clock: list[float], *, plain: bool = True) -> Candidate:
    """A way to run that takes these times in turn, again and again."""
    times = itertools.cycle(times_ms)

    def run() -> None:
        clock[0] += next(times) / 1e3

    return Candidate(name, lambda: (run, lambda: None), plain=plain)


def test_a_lucky_run_does_not_make_a_plain_session_the_best(clock: list[float]) -> None:
    """One of five runs is fast, in every turn; the other is faster in all others."""
    rivals = [changing("steady", [6.0], clock), changing("lucky", [9.0, 9.0, 5.0, 9.0, 9.0], clock)]
    assert compare(rivals, None, FakeInterferenceMonitor())[0] == "steady"


def test_a_plan_has_to_be_usually_faster_than_every_plain_session(clock: list[float]) -> None:
    """Not only than the one with the fastest run."""
    rivals = [
        changing("steady", [5.5], clock),
        changing("lucky", [9.0, 9.0, 5.0, 9.0, 9.0], clock),
        changing("plan", [8.0, 8.0, 4.7, 8.0, 8.0], clock, plain=False),
    ]
    assert compare(rivals, None, FakeInterferenceMonitor())[0] == "steady"


def test_one_that_fails_only_at_times_has_lost(clock: list[float]) -> None:
    """However fast it is when it does not."""
    runs = itertools.count()

    def fails_at_times() -> None:
        clock[0] += 1e-3
        if next(runs) == 40:
            raise RuntimeError("now")

    flaky = Candidate("flaky", lambda: (fails_at_times, lambda: None), plain=False)
    winner, trials, _ = compare([contender("plain", 5.0, clock), flaky], None, FakeInterferenceMonitor())
    assert (winner, trials[1].median_ms) == ("plain", float("inf"))


@pytest.mark.parametrize(("plan_ms", "rounds"), [(5.5, 6), (3.5, 6), (4.6, 12), (9.0, 1)])
def test_a_plan_that_wins_by_little_is_timed_for_longer(clock: list[float], plan_ms: float, rounds: int) -> None:
    """The plain session takes 5 ms: one that is slower, or far faster, is soon known."""
    opened = []

    def plan() -> tuple[object, object]:
        opened.append(1)
        return contender("", plan_ms, clock).open()

    rivals = [contender("plain", 5.0, clock), Candidate("plan", plan, plain=False)]  # type: ignore[arg-type]
    compare(rivals, None, FakeInterferenceMonitor())
    assert len(opened) == rounds


def test_a_slow_model_is_not_judged_by_one_turn(clock: list[float]) -> None:
    """One round takes longer than the budget, and misleads; the rounds that everyone has are run all the same."""
    luck = iter([800.0, 1000.0])

    def lucky() -> tuple[object, object]:
        return contender("", next(luck, 1000.0), clock).open()

    unlucky = iter([1000.0])

    def plain() -> tuple[object, object]:
        return contender("", next(unlucky, 780.0), clock).open()

    rivals = [
        Candidate("plain", plain),  # type: ignore[arg-type]
        Candidate("plan", lucky, plain=False),  # type: ignore[arg-type]
    ]
    assert compare(rivals, None, FakeInterferenceMonitor())[0] == "plain"


@pytest.mark.parametrize("lasting", [True, False])
def test_who_may_stay_open_is_opened_once(clock: list[float], *, lasting: bool) -> None:
    """And everyone is taken down in the end, as often as opened."""
    opened, closed = [], []

    def open_() -> tuple[object, object]:
        opened.append(1)
        return contender("", 1.0, clock).open()[0], lambda: closed.append(1)

    plan = Candidate("plan", open_, plain=False, kept_open=lasting)  # type: ignore[arg-type]
    assert compare([contender("plain", 1.1, clock), plan], None, FakeInterferenceMonitor())[0] == "plan"
    assert len(opened) == len(closed)
    assert (len(opened) == 1) is lasting


def test_one_that_may_stay_open_but_does_not_open_has_lost(clock: list[float]) -> None:
    """It is not raised."""

    def broken() -> tuple[object, object]:
        raise RuntimeError("no")

    plan = Candidate("plan", broken, plain=False, kept_open=True)  # type: ignore[arg-type]
    assert compare([contender("plain", 1.1, clock), plan], None, FakeInterferenceMonitor())[0] == "plain"


def test_within_the_slo_the_least_memory_wins(clock: list[float]) -> None:
    """And without anything within it, the fastest."""
    rivals = [
        contender("plain", 3.0, clock, resident_mb=900.0),
        contender("slow", 8.0, clock, resident_mb=0.0),
        contender("plan", 4.0, clock, resident_mb=300.0, plain=False),
    ]
    assert compare(rivals, 5.0, FakeInterferenceMonitor())[0] == "plan"
    assert compare(rivals, 10.0, FakeInterferenceMonitor())[0] == "slow"
    assert compare(rivals, 1.0, FakeInterferenceMonitor())[0] == "plain"


def test_a_contender_that_fails_has_lost(clock: list[float]) -> None:
    """In opening or in running, and nothing is raised."""

    def broken() -> tuple[object, object]:
        raise RuntimeError("no")

    def breaks() -> tuple[object, object]:
        return broken, lambda: None

    rivals = [Candidate("a", broken), Candidate("b", breaks), contender("plain", 9.0, clock)]  # type: ignore[arg-type]
    winner, trials, _ = compare(rivals, None, FakeInterferenceMonitor())
    assert winner == "plain"
    assert [t.median_ms for t in trials[:2]] == [float("inf")] * 2


def test_decisions_are_remembered_by_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was kept is recalled; another key, or a damaged file, knows nothing."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path))
    DecisionCache("machine", 1).keep(Decision("plain", None, "because"))
    assert DecisionCache("machine", 1).recall() == Decision("plain", None, "because")
    assert DecisionCache("machine", 2).recall() is None
    for file in tmp_path.rglob("*.json"):
        file.write_text('{"winner": 3')
    assert DecisionCache("machine", 1).recall() is None


def test_interference_makes_a_decision_uncertain() -> None:
    """Most rounds begin while other processes use the cores."""

    class Busy:
        def wait(self) -> bool:
            return False

        def has_interference(self) -> bool:
            return True

    def candidate(name: str, *, plain: bool) -> Candidate:
        return Candidate(name, lambda: (lambda: time.sleep(1e-4), lambda: None), plain=plain)

    candidates = [candidate("plain", plain=True), candidate("plan", plain=False)]
    assert compare(candidates, None, Busy()).interference
