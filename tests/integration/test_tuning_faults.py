"""Tuning in the background under faults and races: requests are served and no thread, process or session is left."""

from __future__ import annotations

import errno
import gc
import logging
import sys
import threading
import time
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import filelock
import numpy as np
import onnxruntime as ort
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

from chrion import HybridSession, load
from chrion.common.files import cache_folder
from chrion.errors import ProviderError
from chrion.graph.model import Graph
from chrion.graph.opened_model import OpenedModel
from chrion.runtime import background_tuning, engine_table
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import Decision
from chrion.runtime.selection.known_decisions import KnownDecisions
from chrion.runtime.selection.tuning_process import NamedShapes
from chrion.scheduler import fixed_plan
from helpers import assert_equal, assert_same_as_plain, branches, free_branches, run_plain
from seams.sessions import (
    before_step,
    decide_by,
    engine_of,
    engines_of,
    fail_at,
    install_decision,
    noted_of,
    refuse_threads,
    replace_step,
    replace_tuning_process,
    stop_noting,
)
from tuning_support import alternate, wait_for

pytestmark = pytest.mark.usefixtures("background_tuning")

CPU = "CPUExecutionProvider"
X = np.ones((2, 4), np.float32)


# Requests.


def test_requests_with_ort_values_are_tuned(tuned_shapes: list[NamedShapes], gate: threading.Event) -> None:
    """Requests with OrtValues are tuned by their shapes, and the caller's memory is released before that."""
    with HybridSession(free_branches()) as session:
        session.run_with_ort_values(None, {"x": ort.OrtValue.ortvalue_from_numpy(X)})
        binding = session.io_binding()
        binding.bind_cpu_input("x", np.ones((3, 4), np.float32))
        binding.bind_output("y")
        session.run_with_iobinding(binding)
        gate.set()
        assert session.wait_until_tuned(30)
    assert [shapes["x"] for shapes in tuned_shapes] == [(2, 4), (3, 4)]


def test_requests_that_fail_are_not_tuned(tuned_shapes: list[NamedShapes], gate: threading.Event) -> None:
    """Requests with wrong names or wrong shapes do not reach the tuning process."""
    gate.set()
    with HybridSession(free_branches()) as session:
        for feed in ({"z": X}, {"x": X, "z": X}, {"x": X[:, :3]}, {"x": X.astype(np.int64)}, {}):
            with pytest.raises(Exception, match=r"."):
                session.run(None, feed)
            with pytest.raises(Exception, match=r"."):
                session.run(["y"], feed)
        session.run(None, {"x": X})
        assert session.wait_until_tuned(30)
        assert session.plan is not None
    assert tuned_shapes == [{"x": (2, 4)}]


def test_shapes_with_a_plan_are_not_tuned_again(tuned_shapes: list[NamedShapes], gate: threading.Event) -> None:
    """Requests that select outputs are looked up each time, but the engine is not opened again."""
    gate.set()
    with HybridSession(free_branches()) as session:
        session.run(["y"], {"x": X})
        assert session.wait_until_tuned(30)
        opened = None
        for _ in range(3):
            for _ in range(64):
                session.run(["y"], {"x": X})
            opened = opened or engine_of(session)
            assert session.wait_until_tuned(30)
            assert engine_of(session) is opened
    assert len(tuned_shapes) == 1


# The swap.


def test_requests_are_right_at_every_step_of_the_swap() -> None:
    """Requests of the tuned shape and of another are correct at each line that installs an engine."""
    model = free_branches()
    feeds = [{"x": np.ones((batch, 4), np.float32)} for batch in (3, 2)]
    expected = [run_plain(model, feed) for feed in feeds]
    decided = alternate(load(model, {"x": (2, 4)}))
    steps = []
    with HybridSession(model, tune="never") as session:
        stop_noting(session)  # otherwise the tuning thread may install a decision on these shapes meanwhile
        session.run(None, feeds[1])

        def trace(frame: FrameType, event: str, _: object) -> Any:
            if frame.f_code.co_filename not in {background_tuning.__file__, engine_table.__file__}:
                return None
            if event == "line":
                sys.settrace(None)
                steps.append(frame.f_lineno)
                for feed, outputs in zip(feeds, expected, strict=True):
                    assert_equal(session.run(None, feed), outputs)
                sys.settrace(trace)
            return trace

        for decision in (decided, Decision("plain", None, "later"), decided):
            before = sys.gettrace()
            sys.settrace(trace)
            try:
                install_decision(session, {"x": (2, 4)}, decision)
            finally:
                sys.settrace(before)
        assert session.run(None, feeds[1])
        assert session.plan is not None
    assert len(steps) > 20


def test_a_decision_for_other_providers_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tuned_shapes: list[NamedShapes], gate: threading.Event
) -> None:
    """A decision is dropped if the providers change while its engine is being opened."""
    opening, proceed, plans = threading.Event(), threading.Event(), []
    gate.set()

    def wait() -> None:
        opening.set()
        assert proceed.wait(30)
        plans.append(session.plan)

    before_step(monkeypatch, "open the engine", wait)
    with HybridSession(branches()) as session:
        assert opening.wait(30)
        session.set_providers([CPU])
        proceed.set()
        assert session.wait_until_tuned(30)
        assert plans == [None, None], "the first engine was in use when the second one was opened"
        assert session.plan is not None
        assert_same_as_plain(session, branches(), {"x": X})
    assert len(tuned_shapes) == 1


@pytest.mark.parametrize("free", [False, True])
def test_a_failed_accelerator_is_not_selected_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, free: bool
) -> None:
    """After the plan has failed on the accelerator, the CPU serves, and the cached decision is not used again."""

    def on_accelerator(graph: Graph) -> Decision:
        return Decision("plan 1", fixed_plan(graph, [0, 1, 0, 1], accelerator=CPU), "by the test")

    asked = replace_tuning_process(monkeypatch, on_accelerator)
    model = free_branches() if free else branches()
    with caplog.at_level(logging.WARNING), HybridSession(model) as session:
        session.run(None, {"x": X})
        assert session.wait_until_tuned(30)
        session.run(None, {"x": X})
        assert session.plan is not None
        fail_at(monkeypatch, "run on the accelerator", Fail("device lost"))
        for _ in range(3):
            assert_same_as_plain(session, model, {"x": X})
            assert session.wait_until_tuned(30)
        assert session.plan is None
        assert "device lost" in session.explain()
    assert caplog.text.count("device lost") == 1
    assert len(asked) == 1


# Failures of tuning.


def test_without_a_thread_the_session_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """If no thread can be started, as at a limit of the system, the session serves and says that it is not tuned."""
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        refuse_threads(patch)
        session = HybridSession(branches())
        assert not session.wait_until_tuned()
    with session:
        assert_same_as_plain(session, branches(), {"x": X})
        assert "tuning could not start: can't start new thread" in session.explain()
    assert "can't start new thread" in caplog.text


def test_an_error_in_the_tuning_thread_does_not_end_it(
    tuned_shapes: list[NamedShapes], gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """After an error the thread, which tunes for all sessions of the process, still tunes."""
    errors = [RuntimeError("dictionary changed size during iteration")]

    class Changing(dict[str, Any]):
        def items(self) -> Any:
            if errors:
                raise errors.pop()
            return super().items()

    gate.set()
    with HybridSession(free_branches()) as session:
        noted = noted_of(session)
        assert noted is not None
        noted.append(Changing(x=None))
        session.run(None, {"x": X})
        assert session.wait_until_tuned(30)
        session.run(None, {"x": X})
        assert session.plan is not None
    assert len(tuned_shapes) == 1
    assert "dictionary changed size during iteration" in caplog.text


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "no locks available"), NotImplementedError("flock")])
def test_file_systems_without_locks(
    error: Exception, tuned_shapes: list[NamedShapes], gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision is made on network file systems without locks."""
    gate.set()
    calls = fail_at(monkeypatch, "lock a file", error)
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(30)
        assert session.plan is not None
    assert tuned_shapes
    assert calls


@pytest.mark.parametrize("tune", ["background", "now"])
def test_a_cache_that_cannot_be_written_does_not_prevent_tuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tune: str
) -> None:
    """In a folder that cannot be created, as on a full or read-only disk, the session runs the plan without a lock."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "file" / "cache"))
    decided = [decide_by(monkeypatch, alternate), replace_tuning_process(monkeypatch, alternate)]
    for number in (1, 2):
        with HybridSession(branches(), tune=tune) as session:
            assert session.wait_until_tuned(30)
            assert session.plan is not None
            assert_same_as_plain(session, branches(), {"x": X})
        assert sum(map(len, decided)) == number


def test_a_process_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its patience the session tunes beside the other process."""
    decide_by(monkeypatch, alternate)
    with (
        filelock.FileLock(cache_folder() / "tuning.lock", thread_local=False),
        HybridSession(branches(), tune="now") as session,
    ):
        assert session.plan is not None


def test_another_process_that_tunes_does_not_delay_cached_decisions(
    tuned_shapes: list[NamedShapes], gate: threading.Event
) -> None:
    """The session without a decision waits for the other process, and the session with one does not."""
    gate.set()
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(30)
    with filelock.FileLock(cache_folder() / "tuning.lock"):
        first, second = HybridSession(branches(size=8)), HybridSession(branches())
        with first, second:
            wait_for(lambda: second.plan is not None, 10)
            assert first.plan is None
            assert not first.wait_until_tuned(0.1)
        assert len(tuned_shapes) == 1
    with HybridSession(branches(size=8)) as session:
        assert session.wait_until_tuned(30)
        assert session.plan is not None


def test_a_process_that_was_ended_is_started_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that the system has ended, for example for lack of memory, is started again."""
    ended = [OSError("the tuning process ended with status -9")]

    def decide(graph: Graph) -> Decision:
        if ended:
            raise ended.pop()
        return alternate(graph)

    asked = replace_tuning_process(monkeypatch, decide)
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(30)
        assert "status -9" in session.explain()
        wait_for(lambda: session.plan is not None)
    assert len(asked) == 2


def test_options_that_are_changed_later_do_not_matter(tuned_shapes: list[NamedShapes], gate: threading.Event) -> None:
    """Options that the caller changes after the creation have no effect, as with InferenceSession."""
    gate.set()
    options = ort.SessionOptions()
    with HybridSession(branches(), options) as session:
        options.intra_op_num_threads = 1
        options.enable_mem_pattern = False
        assert session.wait_until_tuned(30)
        assert session.plan is None
        assert "options were changed" in session.explain()
        assert_same_as_plain(session, branches(), {"x": X})
    assert not tuned_shapes
    with HybridSession(branches(), options) as session:
        assert session.wait_until_tuned(30)
        assert session.plan is not None


def test_options_that_are_changed_during_tuning_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision may be about other options than the session's, so that it is neither used nor cached."""
    options = ort.SessionOptions()

    def decide(graph: Graph) -> Decision:
        options.enable_mem_pattern = False
        return alternate(graph)

    asked = replace_tuning_process(monkeypatch, decide)
    with HybridSession(branches(), options) as session:
        assert session.wait_until_tuned(30)
        assert session.plan is None
        assert "options were changed" in session.explain()
    with HybridSession(branches(), options) as session:
        assert session.wait_until_tuned(30)
        assert session.plan is not None
    assert len(asked) == 2


def test_a_cached_decision_that_does_not_fit_is_made_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A session of an unknown name, as of another release, is ignored with a warning."""
    decided = decide_by(monkeypatch, alternate)
    graph = load(branches())
    cache = KnownDecisions(SessionConfig(OpenedModel(branches().SerializeToString()))).of_digest(
        graph.digest, free=False
    )
    cache.keep(Decision("plain, on the Moon", None, "of another release"))
    for _ in range(2):
        with HybridSession(branches(), tune="now") as session:
            assert session.plan is not None
    assert len(decided) == 1
    assert caplog.text.count("ignoring cached decision: cached decision: unknown session 'plain, on the Moon'") == 1


def test_a_decision_that_another_process_has_just_made_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that tunes now looks for it when it has waited for the other process."""
    graph = load(branches())
    found = [None, alternate(graph)]
    decided = decide_by(monkeypatch, alternate)
    replace_step(monkeypatch, "recall the decision", lambda _: found.pop(0) if found else None)
    with (
        filelock.FileLock(cache_folder() / "tuning.lock", thread_local=False),
        HybridSession(branches(), tune="now") as session,
    ):
        assert session.plan is not None
    assert (found, decided) == ([], [])


def test_providers_may_be_changed() -> None:
    """Providers that do not work change nothing; with others, all sessions are opened again."""
    with HybridSession(branches(), tune="never", strict=True) as session:
        assert session.wait_until_tuned(30)
        engine, one_thread = engine_of(session), engines_of(session).diversion.one_thread
        one_thread.get()
        wait_for(lambda: one_thread.is_open)
        with pytest.raises(ProviderError):
            session.set_providers(["NoSuchExecutionProvider"])
        assert (engine_of(session), one_thread.is_open) == (engine, True)
        assert_same_as_plain(session, branches(), {"x": X})
        session.set_providers([CPU])
        assert session.wait_until_tuned(30)
        assert engine_of(session).session is not engine.session  # type: ignore[union-attr]
        assert not one_thread.is_open
        assert_same_as_plain(session, branches(), {"x": X})


# The end of a session.


def test_closing_while_the_process_decides_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """The process is ended, which is logged neither as a failure nor as the reason for another attempt."""

    def end(_: Graph) -> Decision:
        raise OSError("the tuning process ended with status -9")

    asked = replace_tuning_process(monkeypatch, end, gate)
    with caplog.at_level(logging.INFO), HybridSession(branches()) as session:
        wait_for(lambda: asked)
        session.close()
        engines_of(session).close_at_exit(time.monotonic() + 30)  # waits for the tuning thread
    assert gate.is_set()
    assert not caplog.text
    assert not list(cache_folder().rglob("decisions/*.json"))


@pytest.mark.usefixtures("tuned_shapes")
@pytest.mark.parametrize("tuned", [False, True])
def test_a_dropped_session_is_freed_at_once(gate: threading.Event, *, tuned: bool) -> None:
    """A dropped session is freed without a garbage collection, as an InferenceSession, also while it is being tuned."""
    session = HybridSession(branches())
    if tuned:
        gate.set()
        assert session.wait_until_tuned(30)
    engines = weakref.ref(engines_of(session))
    gc.collect()
    gc.disable()
    try:
        del session
        wait_for(lambda: engines() is None, 5)
    finally:
        gc.enable()
