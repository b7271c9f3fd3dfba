"""Sessions that tune before they serve, and have another process decide."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import filelock
import numpy as np
import onnxruntime as ort
import pytest

from chrion import HybridSession, load
from chrion.graph.model import Graph
from chrion.runtime.selection.decisions import Decision, TimedCandidate
from chrion.runtime.selection.tuning_lock import tuning_lock
from chrion.scheduler import fixed_plan
from helpers import alternating_lanes, assert_same_as_plain, branches, free_branches
from seams.sessions import (
    decide_by,
    decide_in_this_process,
    engine_of,
    fail_at,
    replace_step,
    replace_tuning_process,
    shorten_waits,
    use_interpreter,
)
from tuning_support import alternate

ONE_THREAD = "plain, threads: 1"
X = np.ones((2, 4), np.float32)


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let sessions start a process, and keep decisions in an empty cache."""
    decide_in_this_process(monkeypatch, only=False)
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "cache"))


def choose(winner: str) -> Decision:
    """Return a decision for a plain session."""
    timed = tuple(TimedCandidate(name, plain=True, latency_ms=1.0, rounds=3) for name in ("plain", ONE_THREAD))
    return Decision(winner, None, "by the test", timings=timed)


def choose_plan(graph: Graph) -> Decision:
    """Return a decision for a plan of two lanes."""
    timed = TimedCandidate("plan 1", plain=False, latency_ms=1.0, rounds=3)
    plan = fixed_plan(graph, alternating_lanes(graph))
    return Decision("plan 1", plan, "by the test", timings=(timed,))


def end(_: Graph) -> NoReturn:
    """Fail, as the request to a process that ends does."""
    raise OSError("by the test")


@pytest.mark.parametrize("writable", [True, False])
def test_a_plan_is_selected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, writable: bool) -> None:
    """It is used, also without a cache, and nothing is decided again."""
    if not writable:
        (tmp_path / "file").touch()
        monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "file" / "cache"))
    asked = replace_tuning_process(monkeypatch, choose_plan)
    decided = decide_by(monkeypatch, alternate)
    model = branches()
    with HybridSession(model.SerializeToString(), tune="now") as session:
        assert session.plan
        assert_same_as_plain(session, model, {"x": X})
    assert asked == [{}]
    assert decided == []


@pytest.mark.parametrize("winner", ["plain", ONE_THREAD])
def test_a_plain_session_is_selected(monkeypatch: pytest.MonkeyPatch, winner: str) -> None:
    """It serves with its number of threads, and later sessions find the decision."""
    asked = replace_tuning_process(monkeypatch, lambda _: choose(winner))
    model = branches()
    for mode in ("now", "now", "never"):
        with HybridSession(model.SerializeToString(), tune=mode) as session:
            assert_same_as_plain(session, model, {"x": X})
            assert session.wait_until_tuned(30)  # with ``never``, until the cache was read
            assert session.plan is None
            assert "by the test" in session.explain()
            assert engine_of(session).has_one_thread == (winner == ONE_THREAD)
    assert asked == [{}]


@pytest.mark.parametrize("reason", ["failure", "another process tunes"])
def test_this_process_decides_otherwise(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """If the other process answers that it cannot, so that its errors are raised here; the lock is waited for once."""
    asked = replace_tuning_process(monkeypatch, (lambda _: "by the test") if reason == "failure" else choose_plan)
    decided = decide_by(monkeypatch, alternate)
    shorten_waits(monkeypatch)
    waits: list[float] = []
    acquire = filelock.FileLock.acquire

    def record(lock: filelock.FileLock, timeout: float) -> Any:
        waits.append(timeout)
        return acquire(lock, timeout=timeout)

    with tuning_lock() if reason != "failure" else nullcontext():
        replace_step(monkeypatch, "lock a file", record)
        with HybridSession(branches().SerializeToString(), tune="now") as session:
            assert session.plan
    assert len(asked) == (reason == "failure")
    assert len(decided) == 1
    assert sum(timeout > 0 for timeout in waits) == (reason != "failure")


def test_a_process_that_ends_is_not_replaced_by_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has ended it could end this one, too: the session is plain, and another process is asked next time."""
    asked = replace_tuning_process(monkeypatch, end)
    decided = decide_by(monkeypatch, alternate)
    for _ in range(2):
        with HybridSession(branches().SerializeToString(), tune="now") as session:
            assert session.plan is None
            assert "by the test" in session.explain()
    assert asked == [{}, {}]
    assert decided == []


@pytest.mark.parametrize("strict", [False, True])
def test_a_model_that_cannot_be_cut_is_not_loaded(monkeypatch: pytest.MonkeyPatch, *, strict: bool) -> None:
    """The reason of the other process suffices, unless failures are to be raised."""
    asked = replace_tuning_process(monkeypatch, lambda _: Decision("plain", None, "cannot be cut"))
    decided = decide_by(monkeypatch, alternate)
    for _ in range(2):
        with HybridSession(branches().SerializeToString(), tune="now", strict=strict) as session:
            assert (session.plan is None) == (not strict)
    assert asked == [{}]
    assert len(decided) == strict


def test_errors_while_this_process_decides_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no process can be started, a failure of the profiler leaves the session plain."""
    use_interpreter(monkeypatch, "application")
    fail_at(monkeypatch, "profile", ZeroDivisionError("by the test"))
    with HybridSession(branches().SerializeToString(), tune="now") as session:
        assert session.plan is None
        assert "by the test" in session.explain()


@pytest.mark.parametrize("case", ["free dimensions", "a plan", "a graph", "options", "never"])
def test_sessions_that_start_no_process(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Those that need the graph in any case, and those that make no decision."""
    asked = replace_tuning_process(monkeypatch, choose_plan)
    decide_by(monkeypatch, alternate)
    model: Any = free_branches() if case == "free dimensions" else branches()
    graph, options = load(branches()), ort.SessionOptions()
    options.enable_profiling = case == "options"
    arguments: dict[str, Any] = {
        "a plan": {"plan": fixed_plan(graph, alternating_lanes(graph))},
        "options": {"sess_options": options},
        "never": {"tune": "never"},
    }.get(case, {"tune": "now"})
    with HybridSession(graph if case == "a graph" else model, **arguments) as session:
        assert (session.plan is None) == (case in {"free dimensions", "options", "never"})
        if case == "options":
            Path(session.end_profiling()).unlink()
    assert asked == []
