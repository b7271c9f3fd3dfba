"""Sessions whose plan becomes slower than a plain session while they serve requests, by scripted latencies."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from chrion import HybridSession, load, zoo
from chrion.common.files import cache_folder
from chrion.common.units import format_count
from chrion.devices.small_models import smallest_model
from chrion.graph.model import Graph
from chrion.graph.opened_model import OpenedModel
from chrion.machine.cores import physical_cores
from chrion.runtime.execution.cut_engine import CutEngine
from chrion.runtime.execution.engine import Footprint
from chrion.runtime.execution.executor import SegmentFailure
from chrion.runtime.execution.plain_engine import PlainEngine
from chrion.runtime.live_comparison import LiveComparison
from chrion.runtime.live_selection import COMPARING, LiveSelection
from chrion.runtime.process_hooks import in_flight
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import Decision, TimedCandidate
from chrion.runtime.selection.known_decisions import KnownDecisions
from chrion.runtime.selection.worker import Decider
from chrion.scheduler import fixed_plan
from helpers import alternating_lanes, assert_equal, branches, free_branches, run_plain
from seams.sessions import (
    decide_by,
    engine_of,
    engines_of,
    fail_segments,
    replace_tuning_process,
    script_latencies,
    shorten_waits,
    use_interpreter,
)

X = {"x": np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)}
EXPECTED = run_plain(branches(), X)
#: The plain session in explanations.
PLAIN_SESSION = f"plain, {format_count(len(physical_cores()), 'thread')}"


class Plans:
    """Decisions in favour of plans, and latencies of requests."""

    def __init__(self) -> None:
        #: Latency of each request on lanes, and on the one-thread session, in ms.
        self.plan_ms, self.plain_ms = 20.0, 30.0
        #: Number of decisions.
        self.made = 0

    def decide(self, graph: Graph) -> Decision:
        """Decide in favour of a plan of two lanes, which took 20 ms where a plain session took 30."""
        self.made += 1
        timings = (
            TimedCandidate("plain", plain=True, latency_ms=30.0, rounds=3),
            TimedCandidate("plan 1", plain=False, latency_ms=20.0, rounds=3),
        )
        return Decision("plan 1", fixed_plan(graph, alternating_lanes(graph)), "for a test", timings=timings)

    def decide_uncertainly(self, graph: Graph) -> Decision:
        """Decide for the plain session, since the machine was too busy to be sure."""
        self.made += 1
        candidate = fixed_plan(graph, alternating_lanes(graph))
        return Decision("plain", None, "the machine was too busy", uncertain=True, candidate=candidate)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plans:
    """Let plans be selected, and record latencies that the test sets."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path))  # other tests decide on the same models
    use_interpreter(monkeypatch, tmp_path / "python", "echo '[100.0, 1.0]'")  # measures the memory of plans
    plans = Plans()
    decide_by(monkeypatch, plans.decide)
    script_latencies(monkeypatch, lambda diverted: plans.plain_ms if diverted else plans.plan_ms)
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


def comparison_of(session: HybridSession) -> LiveComparison:
    """Return the comparison of the engine in use."""
    comparison = engine_of(session).comparison
    assert isinstance(comparison, LiveComparison)
    return comparison


def serve_until(session: HybridSession, *, plain: bool, how: str = "run") -> None:
    """Serve requests, whose outputs must be correct, until the plain session or the plan serves.

    Raises:
        AssertionError: It does not within a minute.
    """
    comparison, end_s = comparison_of(session), time.monotonic() + 60
    while comparison.plain_serves is not plain:
        assert_equal(call(session, how), EXPECTED)
        assert time.monotonic() < end_s


@pytest.mark.usefixtures("either_lanes")
@pytest.mark.parametrize("how", ["run", "ort values", "binding"])
def test_a_slow_plan_is_replaced_while_it_is_slow(plans: Plans, how: str) -> None:
    """The one-thread session serves, ``explain`` says so, and the plan serves again when it is fast again."""
    with HybridSession(branches(), tune="now") as session:
        for _ in range(50):
            assert_equal(call(session, how), EXPECTED)
        assert not engines_of(session).diversion.one_thread.is_open
        plans.plan_ms = 100.0
        serve_until(session, plain=True, how=how)
        assert (
            "a single-threaded plain session serves at present: on live requests the session above" in session.explain()
        )
        assert session.plan is not None
        plans.plan_ms = 20.0
        serve_until(session, plain=False, how=how)
        assert "at present" not in session.explain()


def test_a_slow_session_of_several_threads_is_replaced(monkeypatch: pytest.MonkeyPatch, plans: Plans) -> None:
    """A plain session of several threads suffers from other work as a plan does."""
    timings = tuple(
        TimedCandidate(name, plain=True, latency_ms=latency_ms, rounds=3)
        for name, latency_ms in (("plain", 20.0), ("plain, threads: 1", 30.0))
    )
    decide_by(monkeypatch, lambda _: Decision("plain", None, "for a test", timings=timings))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    with HybridSession(branches(), options, tune="now") as session:
        assert isinstance(engine_of(session), PlainEngine)
        plans.plan_ms = 100.0
        serve_until(session, plain=True)
        assert "on live requests the session above is slower" in session.explain()


def test_a_session_tuned_now_doubts_the_decision_for_later_ones(plans: Plans) -> None:
    """It cannot tune beside requests, but another session decides again."""
    with HybridSession(branches(), tune="now") as session:
        engine = engine_of(session)
        assert isinstance(engine, CutEngine)
        cache = KnownDecisions(engines_of(session).config).of_digest(engine.plan.digest, free=False)
        found = cache.recall()
        assert found is not None
        assert not found.uncertain
        plans.plan_ms = 100.0
        end_s = time.monotonic() + 60
        while (found := cache.recall()) and not found.uncertain and time.monotonic() < end_s:
            for _ in range(100):
                assert_equal(session.run(None, dict(X)), EXPECTED)
        assert found is not None
        assert found.uncertain
        assert found.plan == engine.plan


def test_shapes_are_compared_one_by_one(plans: Plans) -> None:
    """A slow plan of one shape diverts no requests of another shape."""
    model = free_branches()
    two, three = np.ones((2, 4), np.float32), np.ones((3, 4), np.float32)
    with HybridSession(model, tune="now") as session:
        for x in (two, three, two):
            session.run(None, {"x": x})
        plans.plan_ms, comparison, end_s = 100.0, comparison_of(session), time.monotonic() + 60
        while not comparison.plain_serves and time.monotonic() < end_s:
            session.run(None, {"x": two})
        plans.plan_ms = 20.0
        for x in (three, two, three):
            assert_equal(session.run(None, {"x": x}), run_plain(model, {"x": x}))
            assert comparison_of(session).plain_serves is (x is two)


def test_a_given_plan_is_not_compared() -> None:
    """A plan that the caller gave serves in any case."""
    graph = load(branches())
    with HybridSession(graph, plan=fixed_plan(graph, alternating_lanes(graph))) as session:
        assert engine_of(session).comparison is None


@pytest.mark.parametrize("free", [True, False])
def test_a_contradicted_decision_is_made_again(plans: Plans, monkeypatch: pytest.MonkeyPatch, *, free: bool) -> None:
    """After lost trials the candidates are compared again in the background, although a decision is cached."""
    replace_tuning_process(monkeypatch, plans.decide)
    shorten_waits(monkeypatch)
    with HybridSession(free_branches() if free else branches(), tune="background") as session:
        session.run(None, dict(X))
        assert session.wait_until_tuned(30)
        session.run(None, dict(X))
        engine = engine_of(session)
        assert isinstance(engine, CutEngine)
        assert plans.made == 1
        plans.plan_ms = 100.0
        end_s = time.monotonic() + 60
        while plans.made == 1 and time.monotonic() < end_s:
            assert_equal(session.run(None, dict(X)), EXPECTED)
        assert plans.made > 1
        serve_until(session, plain=True)
        assert engine_of(session) is engine, "the same plan is not opened again"
        engines_of(session).close_at_exit(time.monotonic() + 30)  # its work may go on beside the next test otherwise


@pytest.mark.usefixtures("either_lanes")
@pytest.mark.parametrize("how", ["run", "ort values", "binding"])
@pytest.mark.parametrize("plan_ms", [20.0, 40.0])
def test_live_requests_decide_where_timings_are_uncertain(
    plans: Plans, monkeypatch: pytest.MonkeyPatch, plan_ms: float, how: str
) -> None:
    """Both engines serve in turn, with equal outputs, until one is selected; later sessions find the decision."""
    plans.plan_ms = plan_ms
    replace_tuning_process(monkeypatch, plans.decide_uncertainly)
    with HybridSession(branches(), tune="background") as session:
        assert session.wait_until_tuned(30)
        assert session.plan is None
        assert COMPARING in session.explain()
        compared_s, end_s = time.time(), time.monotonic() + 60
        while COMPARING in session.explain() and time.monotonic() < end_s:
            assert_equal(call(session, how), EXPECTED)
        text, served_s = f"on live requests ({PLAIN_SESSION}: 30.0 ms; plan 1", time.monotonic() + 30
        while text not in session.explain() and time.monotonic() < served_s:
            time.sleep(0.01)
        assert text in session.explain()
        assert (session.plan is not None) is (plan_ms < 30)
        assert_equal(call(session, how), EXPECTED)
    stored = [json.loads(path.read_text()) for path in (cache_folder() / "decisions").glob("*.json")]
    assert all(own["made_s"] > compared_s for own in stored if text in own["why"])
    assert any(text in own["why"] for own in stored)
    made = plans.made
    for mode in ("never", "now", "background"):
        with HybridSession(branches(), tune=mode) as session:
            assert session.wait_until_tuned(30)
            assert (session.plan is not None) is (plan_ms < 30), mode
            assert text in session.explain()
    assert plans.made == made


@pytest.mark.parametrize("busy", [True, False])
def test_beside_other_work_candidates_are_left_to_live_requests(*, busy: bool) -> None:
    """Costs are measured briefly then, and a plan is made all the same; otherwise candidates are timed."""
    model = zoo.build("gru", {"layers": 4, "batch": 1, "chunk": 64, "io": 96})
    config = SessionConfig(OpenedModel(model.SerializeToString()))
    decision = Decider(config).decide({}, anew=True, busy=busy)
    assert bool(decision.timings) is not busy
    if busy:
        assert (decision.winner, decision.plan, decision.uncertain) == ("plain", None, True)
        assert decision.candidate is not None
        assert len(decision.candidate.segments) > 1


def test_a_model_without_parallel_plans_is_not_compared() -> None:
    """Beside other work, nothing is timed either; later, perhaps."""
    decision = Decider(SessionConfig(OpenedModel(smallest_model()))).decide({}, anew=True, busy=True)
    assert (decision.winner, decision.uncertain, decision.candidate) == ("plain", True, None)


def test_a_plan_that_fails_on_live_requests_is_not_selected(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain session repeats the request, and serves all later ones."""
    replace_tuning_process(monkeypatch, plans.decide_uncertainly)
    with HybridSession(branches(), tune="background") as session:
        assert session.wait_until_tuned(30)
        trial = engine_of(session).comparison
        assert isinstance(trial, LiveSelection)
        fail_segments(monkeypatch, RuntimeError("a broken segment"))
        for _ in range(100):
            assert_equal(session.run(None, dict(X)), EXPECTED)
        assert trial.plan_wins is False
        assert session.plan is None
        assert COMPARING not in session.explain()


def test_a_session_that_is_closed_ends_its_comparison(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan is closed as well."""
    replace_tuning_process(monkeypatch, plans.decide_uncertainly)
    session = HybridSession(branches(), tune="background")
    assert session.wait_until_tuned(30)
    trial = engine_of(session).comparison
    assert isinstance(trial, LiveSelection)
    session.close()
    with pytest.raises(SegmentFailure, match="closed"):
        trial.other.run(None, dict(X), None)


@pytest.mark.usefixtures("either_lanes")
def test_a_comparison_beside_many_callers(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of their outputs are right, and a single caller after them decides."""
    replace_tuning_process(monkeypatch, plans.decide_uncertainly)
    wrong, over = list[object](), threading.Event()

    def call_all_the_time() -> None:
        while not over.is_set():
            try:
                assert_equal(session.run(None, dict(X)), EXPECTED)
            except Exception as error:  # noqa: BLE001 - reported below
                wrong.append(error)

    with HybridSession(branches(), tune="background") as session:
        assert session.wait_until_tuned(60)
        callers = [threading.Thread(target=call_all_the_time) for _ in range(6)]
        for caller in callers:
            caller.start()
        time.sleep(0.5)
        over.set()
        for caller in callers:
            caller.join(30)
        trial, end_s = engines_of(session).current.comparison, time.monotonic() + 60
        while session.plan is None and time.monotonic() < end_s:
            assert_equal(session.run(None, dict(X)), EXPECTED)
        assert session.plan is not None
        assert trial is None or trial.plan_wins
    assert not wrong


@pytest.mark.parametrize("fails", [True, False])
def test_closing_while_callers_compare(plans: Plans, monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    """Each request is served or refused, also while a plan fails; all callers end, and the plan is closed."""
    replace_tuning_process(monkeypatch, plans.decide_uncertainly)
    ends = list[str]()

    def call_until_closed(session: HybridSession) -> None:
        try:
            while True:
                assert_equal(session.run(None, dict(X)), EXPECTED)
        except RuntimeError as error:
            ends.append(str(error))

    for delay_s in (0.0, 0.01, 0.05):
        session = HybridSession(branches(), tune="background")
        assert session.wait_until_tuned(60)
        trial = engine_of(session).comparison
        assert isinstance(trial, LiveSelection) or trial is None
        callers = [threading.Thread(target=call_until_closed, args=(session,)) for _ in range(3)]
        with pytest.MonkeyPatch.context() as patch:
            if fails:
                fail_segments(patch, RuntimeError("a broken segment"))
            for caller in callers:
                caller.start()
            time.sleep(delay_s)
            session.close()
            for caller in callers:
                caller.join(30)
        if isinstance(trial, LiveSelection):
            assert not trial.diverts
    assert ends == ["this session is closed"] * 9


def test_live_requests_decide_for_each_of_several_shapes(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of one shape serves in turn with the plain session; requests of other shapes stay with that."""
    plans.plan_ms = 20.0
    shorten_waits(monkeypatch)
    replace_tuning_process(monkeypatch, plans.decide_uncertainly)
    model = free_branches()
    two, three = np.ones((2, 4), np.float32), np.ones((3, 4), np.float32)
    expected = {len(x): run_plain(model, {"x": x}) for x in (two, three)}
    text = f"on live requests ({PLAIN_SESSION}: 30.0 ms; plan 1"

    def decide(x: np.ndarray[Any, Any]) -> None:
        """Serve requests of one shape, and a few of another, until the plan is selected for the first."""
        end_s = time.monotonic() + 60
        while time.monotonic() < end_s:
            assert_equal(session.run(None, {"x": x}), expected[len(x)])
            if session.plan is not None and text in session.explain():
                return
            if plans.made < 2:
                assert_equal(session.run(None, {"x": five}), run_plain(model, {"x": five}))
        raise AssertionError(session.explain())

    five = np.ones((5, 4), np.float32)
    with HybridSession(model, tune="background") as session:
        decide(two)
        decide(three)
        for x in (two, three, two):
            assert_equal(session.run(None, {"x": x}), expected[len(x)])
            assert session.plan is not None
    with HybridSession(model, tune="never") as session:
        for _ in range(2):
            session.run(None, {"x": two})
            assert session.wait_until_tuned(30)
        assert session.plan is not None


def test_a_plan_without_room_is_not_compared(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would add more than 30 % to the plain session, which serves other shapes."""
    shorten_waits(monkeypatch)
    footprint = Footprint(100.0, 90.0)
    replace_tuning_process(monkeypatch, lambda graph: replace(plans.decide_uncertainly(graph), footprint=footprint))
    with HybridSession(free_branches(), tune="background") as session:
        session.run(None, dict(X))
        assert session.wait_until_tuned(30)
        session.run(None, dict(X))
        assert engine_of(session).comparison is None
        assert "a plan would add 90.0 MB to the 100.0 MB of the plain session" in session.explain()


def test_models_of_free_and_of_fixed_shapes_share_no_decision(plans: Plans) -> None:
    """Their graphs are equal once shapes are known, but only one of them keeps its plain session beside a plan."""
    for model in (free_branches(), branches(), free_branches(), branches()):
        with HybridSession(model, tune="now") as session:
            assert_equal(session.run(None, dict(X)), EXPECTED)
            assert session.plan is not None
    assert plans.made == 2


def test_requests_beside_others_are_not_recorded(plans: Plans) -> None:
    """Several clients make a plan slow for another reason, which crowding deals with."""
    plans.plan_ms = 100.0
    with HybridSession(branches(), tune="now") as session:
        in_flight.append(None)
        try:
            for _ in range(20):
                session.run(None, dict(X))
        finally:
            in_flight.pop()
        assert not comparison_of(session).diverts
        serve_until(session, plain=True)
