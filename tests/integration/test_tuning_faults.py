"""Tuning in the background under faults and races: requests are served and no thread, process or session is left."""

from __future__ import annotations

import errno
import gc
import logging
import os
import subprocess
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
from chrion.files import cache_folder
from chrion.graph.model import Graph
from chrion.runtime import engines as engines_module
from chrion.runtime.engines import Engines
from chrion.runtime.execution.accelerator import Accelerator
from chrion.runtime.selection import decisions, tuning
from chrion.runtime.selection.decisions import Decision
from chrion.runtime.selection.selector import EngineSelector
from chrion.runtime.selection.tuning_process import NamedShapes
from chrion.scheduler import fixed_plan
from helpers import assert_equal, assert_same_as_plain, branches, free_branches, run_plain
from tuning_support import alternate, deciding_with, wait_for

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


def test_shapes_with_a_plan_are_not_tuned_again(
    tuned_shapes: list[NamedShapes], gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that select outputs are looked up each time, but the engine is not opened again."""
    gate.set()
    opened: list[NamedShapes] = []
    open_engine = Engines._open

    def counted(self: Engines, named: NamedShapes, decision: Decision) -> Any:
        opened.append(named)
        return open_engine(self, named, decision)

    monkeypatch.setattr(Engines, "_open", counted)
    with HybridSession(free_branches()) as session:
        session.run(["y"], {"x": X})
        assert session.wait_until_tuned(30)
        for _ in range(3):
            for _ in range(64):
                session.run(["y"], {"x": X})
            time.sleep(2 * tuning._POLL_S)
        assert session.wait_until_tuned(30)
    assert len(opened) == len(tuned_shapes) == 1


# The swap.


def test_requests_are_right_at_every_step_of_the_swap() -> None:
    """Requests of the tuned shape and of another are correct at each line that installs an engine."""
    model = free_branches()
    feeds = [{"x": np.ones((batch, 4), np.float32)} for batch in (3, 2)]
    expected = [run_plain(model, feed) for feed in feeds]
    decided = alternate(load(model, {"x": (2, 4)}))
    steps = []
    with HybridSession(model, tune="never") as session:
        engines = session._engines
        assert engines._tuner
        engines.noted = None  # otherwise the tuning thread may install a decision on these shapes meanwhile
        session.run(None, feeds[1])

        def trace(frame: FrameType, event: str, _: object) -> Any:
            if frame.f_code.co_filename != engines_module.__file__:
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
                engines._install(engines._tuner, {"x": (2, 4)}, decision)
            finally:
                sys.settrace(before)
        assert session.run(None, feeds[1])
        assert session.plan is not None
    assert len(steps) > 20


@pytest.mark.usefixtures("tuned_shapes")
def test_a_decision_for_other_providers_is_not_installed(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decision is dropped if the providers change while its engine is being opened."""
    opening, opened = threading.Event(), threading.Event()
    open_engine = EngineSelector.open

    def slow(self: EngineSelector, graph: Graph, decision: Decision) -> Any:
        opening.set()
        assert opened.wait(30)
        return open_engine(self, graph, decision)

    monkeypatch.setattr(EngineSelector, "open", slow)
    gate.set()
    with HybridSession(branches()) as session:
        assert opening.wait(30)
        plans = []

        def decide(*_: object, **__: object) -> Decision:
            plans.append(session.plan)
            return Decision("plain", None, "for the new providers")

        monkeypatch.setattr(tuning.Tuner, "_decision", decide)
        session.set_providers([CPU])
        opened.set()
        assert session.wait_until_tuned(30)
        assert plans == [None]
        assert "for the new providers" in session.explain()
        assert_same_as_plain(session, branches(), {"x": X})


@pytest.mark.parametrize("free", [False, True])
def test_a_failed_accelerator_is_not_selected_again(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, free: bool
) -> None:
    """After the plan has failed on the accelerator, the CPU serves, and the cached decision is not used again."""

    def on_accelerator(graph: Graph) -> Decision:
        return Decision("plan 1", fixed_plan(graph, [0, 1, 0, 1], accelerator=CPU), "by the test")

    def lost(*_: object, **__: object) -> None:
        raise Fail("device lost")

    gate.set()
    monkeypatch.setattr(tuning, "TuningProcess", deciding_with(on_accelerator, [], gate))
    model = free_branches() if free else branches()
    with caplog.at_level(logging.WARNING), HybridSession(model) as session:
        session.run(None, {"x": X})
        assert session.wait_until_tuned(30)
        session.run(None, {"x": X})
        assert session.plan is not None
        monkeypatch.setattr(Accelerator, "run", lost)
        for _ in range(3):
            assert_same_as_plain(session, model, {"x": X})
            assert session.wait_until_tuned(30)
            time.sleep(2 * tuning._POLL_S)
        assert session.plan is None
        assert "device lost" in session.explain()
    assert caplog.text.count("device lost") == 1


# Failures of tuning.


def test_without_a_thread_the_session_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The session serves if no thread can be started, as while the interpreter exits or at a limit of the system."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(tuning, "_thread", tuning._TuningThread())
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(threading.Thread, "start", refuse)
        session = HybridSession(branches())
    with session:
        assert session.wait_until_tuned(5)
        assert_same_as_plain(session, branches(), {"x": X})
    assert "can't start new thread" in caplog.text


def test_an_error_in_the_tuning_thread_does_not_end_it(
    tuned_shapes: list[NamedShapes],
    gate: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After an error the thread, which tunes for all sessions of the process, still tunes."""
    gate.set()
    count = tuning.Tuner.count_noted
    errors = [RuntimeError("Set changed size during iteration")]

    def fail_once(self: tuning.Tuner) -> None:
        if errors:
            raise errors.pop()
        count(self)

    monkeypatch.setattr(tuning.Tuner, "count_noted", fail_once)
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(30)
        assert session.plan is not None
    assert tuned_shapes
    assert "Set changed size during iteration" in caplog.text


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "no locks available"), NotImplementedError("flock")])
def test_file_systems_without_locks(
    error: Exception, tuned_shapes: list[NamedShapes], gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision is made on network file systems without locks."""

    def refuse(*_: object, **__: object) -> None:
        raise error

    gate.set()
    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(30)
        assert session.plan is not None
    assert tuned_shapes


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


@pytest.mark.usefixtures("tuned_shapes")
def test_a_process_that_was_ended_is_started_again_later(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that the system has ended, for example for lack of memory, is started again."""
    gate.set()
    ask, ended = tuning.TuningProcess.ask, []  # type: ignore[attr-defined]

    def end_once(self: Any, shapes: NamedShapes, **rest: Any) -> dict[str, Any]:
        if not ended:
            ended.append(shapes)
            raise OSError("the tuning process ended with status -9")
        answer: dict[str, Any] = ask(self, shapes, **rest)
        return answer

    monkeypatch.setattr(tuning.TuningProcess, "ask", end_once)
    monkeypatch.setattr(decisions, "_FIRST_RETRY_S", 0.5)
    with HybridSession(branches()) as session:
        assert session.wait_until_tuned(30)
        assert "status -9" in session.explain()
        wait_for(lambda: session.plan is not None)


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


# The end of a session.


@pytest.mark.usefixtures("tuned_shapes")
@pytest.mark.parametrize("tuned", [False, True])
def test_a_dropped_session_is_freed_at_once(gate: threading.Event, *, tuned: bool) -> None:
    """A dropped session is freed without a garbage collection, as an InferenceSession, also while it is being tuned."""
    session = HybridSession(branches())
    if tuned:
        gate.set()
        assert session.wait_until_tuned(30)
    engines = weakref.ref(session._engines)
    gc.collect()
    gc.disable()
    try:
        del session
        wait_for(lambda: engines() is None, 5)
    finally:
        gc.enable()


def test_a_forked_child_exits_at_once_while_the_parent_tunes() -> None:
    """The child does not wait for the parent's tuning thread, and can tune sessions of its own."""
    code = """
import os, sys, threading, time
sys.path.insert(0, sys.argv[1])
from chrion import HybridSession
from chrion.runtime import process_hooks
from chrion.runtime.selection import tuning
from helpers import branches

asked = threading.Event()

def never(*_, **__):
    asked.set()
    time.sleep(60)

tuning._DELAY_S = 0.0
tuning.Tuner._ask = never
session = HybridSession(branches())
assert asked.wait(30)
child = os.fork() == 0
try:
    if child:
        print(session.wait_until_tuned())
        own = HybridSession(branches(), tune="never")
        print(own.wait_until_tuned(30), "switched off" in own.explain())
        start = time.monotonic()
        process_hooks._run_exit_hooks()
        print(time.monotonic() - start < process_hooks.EXIT_LIMIT_S, flush=True)
    else:
        os.wait()
finally:
    os._exit(0)  # a normal exit would wait for onnxruntime's threads of the parent's session
"""
    done = subprocess.run(  # noqa: S603 - ourselves
        [sys.executable, "-c", code, str(Path(__file__).parent.parent)],
        env=os.environ | {"CHRION_TUNE": "background"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("True\nTrue True\nTrue\n", "")
