"""Timing of candidates in rounds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from chrion import load
from chrion.profiler.synthetic_inputs import synthetic_inputs
from chrion.report.benchmark.latency import SessionFactory, hybrid_candidate, plain_baselines, time_candidates
from chrion.scheduler import fixed_plan
from helpers import FakeInterferenceMonitor, alternating_lanes, assert_equal, branches, run_plain

Log = list[tuple[str, str]]


def candidate(name: str, log: Log) -> SessionFactory:
    """Return a factory that logs when its session is opened, run and closed."""

    def run() -> Sequence[object]:
        log.append((name, "run"))
        return ()

    def open_session() -> tuple[object, object]:
        log.append((name, "opened"))
        return run, lambda: log.append((name, "closed"))

    return open_session  # type: ignore[return-value]


def test_one_candidate_is_open_at_a_time_and_rounds_start_with_different_ones() -> None:
    """Each session is closed before the next one is opened; timings keep the order of the candidates."""
    log: Log = []
    steps: list[tuple[int, int, str]] = []
    timings = time_candidates(
        {name: candidate(name, log) for name in "abc"},
        rounds=3,
        trial_s=0.0,
        progress=lambda *step: steps.append(step),
        monitor=FakeInterferenceMonitor(),
    )
    order = "abc" + "bca" + "cab"
    opened_and_closed = [(name, what) for name, what in log if what != "run"]
    assert opened_and_closed == [(name, what) for name in order for what in ("opened", "closed")]
    alive = ""
    for name, what in log:
        alive = {"opened": name, "closed": ""}.get(what, alive)
        assert what != "run" or alive == name
    assert [t.name for t in timings] == ["a", "b", "c"]
    assert all(t.runs >= 15 and t.low_ms <= t.median_ms <= t.high_ms for t in timings)
    assert all(len(t.trials_ms) == 3 for t in timings)
    assert steps == [(at + 1, 9, name) for at, name in enumerate(order)]


def test_a_trial_with_interference_is_repeated() -> None:
    """The times of the trial are discarded, and the same session is timed again at once."""
    log: Log = []
    monitor = FakeInterferenceMonitor(interference_at=[0])
    timings = time_candidates({name: candidate(name, log) for name in "ab"}, rounds=1, trial_s=0.0, monitor=monitor)
    assert [name for name, what in log if what == "opened"] == ["a", "b"]
    runs = {name: log.count((name, "run")) for name in "ab"}
    assert timings[0].runs < runs["a"] / 2 + 1
    assert timings[1].runs < runs["b"]


def test_constant_interference_does_not_prevent_timing() -> None:
    """The times of the eighth attempt are kept."""
    monitor = FakeInterferenceMonitor(interference_at=range(99))
    (timing,) = time_candidates({"a": candidate("a", [])}, rounds=2, trial_s=0.0, monitor=monitor)
    assert timing.runs >= 10
    assert monitor.checks == 2 * 8


def test_interference_is_checked_right_before_and_after_the_timed_runs() -> None:
    """The checks enclose the timed runs only, since interference may begin or end while a session is opened."""
    log: Log = []
    monitor = FakeInterferenceMonitor()
    monitor.wait = lambda: not log.append(("", "before"))  # type: ignore[method-assign, func-returns-value]
    monitor.has_interference = lambda: bool(log.append(("", "after")))  # type: ignore[method-assign, func-returns-value]
    time_candidates({"a": candidate("a", log)}, rounds=1, trial_s=0.0, monitor=monitor)
    steps = [what for what, _ in itertools.groupby(what for _, what in log)]
    assert steps == ["opened", "run", "before", "run", "after", "closed"]


def test_without_patience_a_trial_is_not_repeated() -> None:
    """If the wait before a trial ends with interference, interference after the trial is not checked."""
    monitor = FakeInterferenceMonitor(interference_at=range(99))
    monitor.wait = lambda: False  # type: ignore[method-assign]
    time_candidates({"a": candidate("a", [])}, rounds=2, trial_s=0.0, monitor=monitor)
    assert monitor.checks == 0


def test_a_candidate_that_fails_is_closed() -> None:
    """The error of the candidate reaches the caller, and the candidate is closed."""
    closed: list[int] = []

    def fail() -> Sequence[object]:
        raise KeyError("broken")

    with pytest.raises(KeyError):
        time_candidates({"a": lambda: (fail, lambda: closed.append(1))}, rounds=1)
    assert closed == [1]


def test_hybrid_and_plain_candidates_compute_the_same() -> None:
    """All candidates run the model that they are given."""
    model = branches()
    graph = load(model)
    feed = synthetic_inputs(graph)
    expected = run_plain(model, feed)
    factories = {
        "hybrid": hybrid_candidate(graph, fixed_plan(graph, alternating_lanes(graph)), feed),
        **plain_baselines(model.SerializeToString(), feed),
    }
    assert len(factories) == 4
    for factory in factories.values():
        run, close = factory()
        assert_equal(run(), expected)
        close()
