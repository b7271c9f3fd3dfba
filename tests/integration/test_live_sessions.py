"""Sessions whose plan becomes slower than a plain session while they serve requests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from chrion import HybridSession, load
from chrion.graph.model import Graph
from chrion.runtime import live_comparison
from chrion.runtime.crowding import in_flight
from chrion.runtime.execution.engine import CutEngine, PlainEngine
from chrion.runtime.selection import decisions, tuning
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import Decision, TimedCandidate
from chrion.runtime.selection.selector import EngineSelector
from chrion.scheduler import fixed_plan
from tests.helpers import alternating_lanes, assert_equal, branches, free_branches, run_plain

X = {"x": np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)}
EXPECTED = run_plain(branches(), X)
PLAN = TimedCandidate("plan 1", plain=False, latency_ms=2.0, rounds=3)


class Plans:
    """Decisions in favour of plans, and delays of requests."""

    def __init__(self) -> None:
        #: Delays of requests on lanes, and on one-thread sessions.
        self.delay_s, self.plain_delay_s = 0.0, 0.003
        #: Number of decisions.
        self.made = 0

    def compare(self, graph: Graph) -> Decision:
        """Decide in favour of a plan of two lanes, which took 2 ms where a plain session took 3."""
        self.made += 1
        timings = (TimedCandidate("plain", plain=True, latency_ms=3.0, rounds=3), PLAN)
        return Decision("plan 1", fixed_plan(graph, alternating_lanes(graph)), "for a test", timings=timings)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plans:
    """Let plans be selected, and delay their requests by a time that the test sets."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path))  # other tests decide on the same models
    for gaps in ("_PLAIN_GAPS", "_PLAN_GAPS", "_BUSY_GAPS"):  # on a busy machine, trials may be lost
        monkeypatch.setattr(live_comparison, gaps, (16, 16))
    plans = Plans()

    def delayed(method: Any, delay: str = "delay_s") -> Any:
        def run(*arguments: Any, **keywords: Any) -> Any:
            time.sleep(getattr(plans, delay))
            return method(*arguments, **keywords)

        return run

    open_one_thread = SessionConfig.one_thread

    def one_thread(config: SessionConfig, reason: str, *, arena: bool) -> Any:
        engine = open_one_thread(config, reason, arena=arena)
        assert engine is not None
        for name in ("run", "run_with_ort_values", "run_with_iobinding"):
            monkeypatch.setattr(engine.session, name, delayed(getattr(engine.session, name), "plain_delay_s"))
        return engine

    monkeypatch.setattr(SessionConfig, "one_thread", one_thread)

    monkeypatch.setattr(EngineSelector, "_compare", plans.compare)
    for name in ("run_fast_path", "run"):
        monkeypatch.setattr(CutEngine, name, delayed(getattr(CutEngine, name)))
    return plans


def call(session: HybridSession, how: str) -> list[Any]:
    """Run one request in one of three ways; return the outputs as arrays."""
    if how == "run":
        return session.run(None, dict(X))
    if how == "ort values":
        return [o.numpy() for o in session.run_with_ort_values(None, {"x": ort.OrtValue.ortvalue_from_numpy(X["x"])})]
    binding = session.io_binding()
    binding.bind_cpu_input("x", X["x"])
    for name in ("y", "l"):
        binding.bind_output(name)
    session.run_with_iobinding(binding)
    return list(binding.copy_outputs_to_cpu())


def serve_until(session: HybridSession, *, plain: bool, how: str = "run") -> None:
    """Serve requests, whose outputs must be correct, until the plain session or the plan serves.

    Raises:
        AssertionError: It does not within a minute.
    """
    comparison = session._engines.current.comparison
    assert comparison is not None
    end = time.monotonic() + 60
    while comparison.plain_serves is not plain:
        assert_equal(call(session, how), EXPECTED)
        assert time.monotonic() < end


@pytest.mark.usefixtures("either_lanes")
@pytest.mark.parametrize("how", ["run", "ort values", "binding"])
def test_a_slow_plan_is_replaced_while_it_is_slow(plans: Plans, how: str) -> None:
    """The one-thread session serves, ``explain`` says so, and the plan serves again when it is fast again."""
    with HybridSession(branches(), tune="now") as session:
        for _ in range(100):
            assert_equal(call(session, how), EXPECTED)
        plans.delay_s = 0.01
        serve_until(session, plain=True, how=how)
        assert "at present a plain session of one thread serves" in session.explain()
        assert session.plan is not None
        plans.delay_s = 0.0
        serve_until(session, plain=False, how=how)
        assert "at present" not in session.explain()


@pytest.mark.usefixtures("plans")
def test_a_slow_session_of_several_threads_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain session of several threads suffers from other work as a plan does."""
    timings = tuple(
        TimedCandidate(name, plain=True, latency_ms=latency_ms, rounds=3)
        for name, latency_ms in (("plain", 2.0), ("plain, threads: 1", 3.0))
    )
    monkeypatch.setattr(EngineSelector, "_compare", lambda *_: Decision("plain", None, "for a test", timings=timings))
    model = branches(size=8)
    x = np.ones((2, 8), np.float32)
    with HybridSession(model, tune="now") as session:
        engine = session._engines.current
        assert isinstance(engine, PlainEngine)
        run = engine.session.run
        monkeypatch.setattr(engine.session, "run", lambda *rest: (time.sleep(0.01), run(*rest))[1])
        comparison = engine.comparison
        assert comparison is not None
        end = time.monotonic() + 20
        while not comparison.plain_serves and time.monotonic() < end:
            assert_equal(session.run(None, {"x": x}), run_plain(model, {"x": x}))
        assert "on live requests the session above takes longer" in session.explain()


def test_a_session_tuned_now_doubts_the_decision_for_later_ones(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot tune beside requests, but another session decides again."""
    monkeypatch.setattr(live_comparison, "_LOST", 1)
    monkeypatch.setattr(live_comparison, "_LOST_S", 0.0)
    with HybridSession(branches(), tune="now") as session:
        engine = session._engines.current
        assert isinstance(engine, CutEngine)
        cache = session._engines._selector.graph_cache(engine.plan.digest, free=False)
        found = cache.recall()
        assert found is not None
        assert not found.uncertain
        plans.delay_s = 0.01
        end = time.monotonic() + 20
        while (found := cache.recall()) and not found.uncertain and time.monotonic() < end:
            assert_equal(session.run(None, dict(X)), EXPECTED)
        assert found is not None
        assert found.uncertain
        assert found.plan == engine.plan


def test_shapes_are_compared_one_by_one(plans: Plans) -> None:
    """A slow plan of one shape diverts no requests of another shape."""
    model = free_branches()
    two, three = np.ones((2, 4), np.float32), np.ones((3, 4), np.float32)
    with HybridSession(model, tune="now") as session:
        for x in (two, three):
            session.run(None, {"x": x})
        session.run(None, {"x": two})
        engine = session._engines.current
        plans.delay_s = 0.01
        end = time.monotonic() + 20
        while not (engine.comparison and engine.comparison.plain_serves) and time.monotonic() < end:
            session.run(None, {"x": two})
        plans.delay_s = 0.0
        for x in (three, two, three):
            assert_equal(session.run(None, {"x": x}), run_plain(model, {"x": x}))
            other = session._engines.current.comparison
            assert other is not None
            assert other.plain_serves is (x is two)


def test_a_given_plan_is_not_compared(plans: Plans) -> None:
    """A plan that the caller gave serves in any case."""
    graph = load(branches())
    with HybridSession(graph, plan=fixed_plan(graph, alternating_lanes(graph))) as session:
        plans.delay_s = 0.01
        for _ in range(40):
            session.run(None, dict(X))
        assert session._engines.current.comparison is None
        assert not session._engines.diversion.one_thread.is_open


@pytest.mark.parametrize("free", [True, False])
def test_a_contradicted_decision_is_made_again(plans: Plans, monkeypatch: pytest.MonkeyPatch, *, free: bool) -> None:
    """After lost trials the candidates are compared again in the background, although a decision is cached."""

    def no_process(_: Any) -> Any:
        raise OSError("no process for a test")

    monkeypatch.setattr(tuning, "TuningProcess", no_process)
    monkeypatch.setattr(decisions, "_FIRST_RETRY_S", 0.1)
    monkeypatch.setattr(live_comparison, "_LOST_S", 0.0)
    for gaps in ("_PLAIN_GAPS", "_PLAN_GAPS", "_BUSY_GAPS"):
        monkeypatch.setattr(live_comparison, gaps, (1, 1))
    monkeypatch.setattr(live_comparison, "_EXCESS", 100.0)
    with HybridSession(free_branches() if free else branches(), tune="background") as session:
        session.run(None, dict(X))
        assert session.wait_until_tuned(30)
        session.run(None, dict(X))
        engine = session._engines.current
        assert isinstance(engine, CutEngine)
        made = plans.made  # none, if an earlier test has cached the decision
        plans.delay_s = 0.01
        end = time.monotonic() + 30
        while plans.made == made and time.monotonic() < end:
            assert_equal(session.run(None, dict(X)), EXPECTED)
        assert plans.made > made
        serve_until(session, plain=True)
        assert session._engines._tuner is not None
        session._engines._tuner.close(time.monotonic() + 30)  # otherwise its work may go on beside the next test


def test_models_of_free_and_of_fixed_shapes_share_no_decision(
    plans: Plans, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their graphs are equal once shapes are known, but only one of them keeps its plain session beside a plan."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path))
    for model in (free_branches(), branches(), free_branches(), branches()):
        with HybridSession(model, tune="now") as session:
            assert_equal(session.run(None, dict(X)), EXPECTED)
            assert session.plan is not None
    assert plans.made == 2


def test_requests_beside_others_are_not_recorded(plans: Plans) -> None:
    """Several clients make a plan slow for another reason, which crowding deals with."""
    with HybridSession(branches(), tune="now") as session:
        comparison = session._engines.current.comparison
        assert comparison is not None
        plans.delay_s = 0.01
        in_flight.append(None)
        try:
            for _ in range(20):
                session.run(None, dict(X))
        finally:
            in_flight.pop()
        assert comparison._count == 0
