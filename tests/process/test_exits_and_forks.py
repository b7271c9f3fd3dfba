"""Processes that exit or fork while a session is in use neither hang nor crash."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from chrion import load
from chrion.graph.opened_model import OpenedModel
from chrion.graph.recurrent import unroll
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.decisions import Decision
from chrion.runtime.selection.known_decisions import KnownDecisions
from chrion.scheduler import fixed_plan
from chrion.zoo import build
from helpers import alternating_lanes, branches

#: Forks while the tuning thread imports onnx, in order to open a plan; the child imports it as well.
_FORK_DURING_IMPORT = """
import faulthandler, os, sys, threading, time
import numpy as np
from chrion import HybridSession
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("onnx.") and threading.current_thread() is not threading.main_thread():
            begun.set()
            time.sleep(0.02)
begun = threading.Event()
sys.meta_path.insert(0, Finder())
session = HybridSession(sys.argv[1], tune="never")
assert begun.wait(30)
if os.fork() == 0:
    faulthandler.dump_traceback_later(30, exit=True)
    import onnx.helper
    print("imported", flush=True)
    os._exit(0)
os.wait()
print(session.wait_until_tuned(30), session.plan is not None, flush=True)
os._exit(0)
"""
#: Prints the modules that the tuning thread imports without the lock that a fork takes, and how many it imports.
_IMPORTS_OF_TUNING = """
import sys, threading
from chrion import HybridSession
from chrion.common import imports
class Finder:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread().name == "chrion-tuning":
            found[imports._lock._is_owned()].add(name)
found = {True: set(), False: set()}
sys.meta_path.insert(0, Finder())
with HybridSession(sys.argv[1], tune="never") as session:
    print(session.wait_until_tuned(30), session.plan is not None, sorted(found[False]), len(found[True]) > 20)
"""
TESTS = Path(__file__).parent.parent
CLOSED, SHAPE = "this session is closed", "(600, 600)"


def run_process(scenario: str) -> tuple[int, list[str], str]:
    """Run a scenario of ``process_exits.py``; return its exit code, lines on stdout, and stderr."""
    done = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-W", "ignore::DeprecationWarning", str(TESTS / "process_exits.py"), scenario],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))},
        check=False,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize(
    ("scenario", "code", "message"),
    [
        ("end", 0, ""),
        ("call_plain", 0, ""),
        ("call_bound", 0, ""),
        ("leave", 3, ""),
        ("fail", 1, "ValueError: unhandled"),
    ],
)
def test_requests_in_flight_finish_before_the_exit(scenario: str, code: int, message: str) -> None:
    """Requests in flight are served and later ones refused. Without the hooks, the process aborts."""
    found, lines, stderr = run_process(scenario)
    assert found == code, stderr
    assert set(lines) <= {CLOSED}
    assert stderr.strip().endswith(message)


def test_a_thread_that_is_not_a_daemon_finishes_its_request() -> None:
    """The interpreter waits for the thread before it runs the hooks."""
    assert run_process("thread")[:2] == (0, [SHAPE])


def test_requests_at_exit() -> None:
    """Requests before the session's hook are served. Later ones are refused and do not wait for lanes forever."""
    assert run_process("late")[:2] == (0, [SHAPE, CLOSED])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_refuses_requests() -> None:
    """The error names the fork, and the child can close the session."""
    code, lines, stderr = run_process("fork")
    assert code == 0, stderr
    assert "child 0" in lines


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_plain_session_is_refused_in_a_child_only_if_requests_were_in_flight() -> None:
    """Otherwise onnxruntime decides, as without Chrion; a session that the child creates is served in any case."""
    code, lines, stderr = run_process("fork_plain")
    assert code == 0, stderr
    assert lines == ["idle: served, created in the child: served", "in flight: refused, created in the child: served"]


@pytest.mark.parametrize("scenario", ["tune", "decide", "collect"])
def test_exits_do_not_wait_for_tuning(scenario: str) -> None:
    """A script that ends while its session is being tuned exits without waiting, and without a message.

    It waits only until an engine is open that the tuning thread is opening, for a session that may be gone: in the
    middle of that, the thread cannot be stopped without aborting the process.
    """
    code, _, stderr = run_process(scenario)
    assert (code, stderr) == (0, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_no_tuning_and_no_crowd() -> None:
    """A child that is forked while threads of its parent run has neither.

    Plain onnxruntime itself may hang if it runs in such a child.
    """
    assert run_process("fork_tuned") == (0, ["child 0"], "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_exits_at_once_while_the_parent_tunes() -> None:
    """The child does not wait for the parent's tuning thread, and can tune sessions of its own."""
    assert run_process("fork_tuning") == (0, ["True True True", "True"], "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_while_live_requests_compare_a_plan() -> None:
    """The plain session serves the child, which has no lanes; the parent goes on and decides."""
    assert run_process("fork_comparing") == (0, ["child: served False", "parent: served True"], "")


def decide(path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int | None = None) -> None:
    """Store a decision for a plan of a model's file, in a cache beside it."""
    monkeypatch.setenv("CHRION_CACHE", str(path.parent / "cache"))
    graph = load(path) if chunk is None else unroll(load(path), chunk)
    plan = replace(fixed_plan(graph, alternating_lanes(graph)), chunk=chunk)
    KnownDecisions(SessionConfig(OpenedModel(path))).of_source({}).keep(Decision("plan 1", plan, "by the test"))


def run_program(program: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Run a program on a model's file in a process of its own."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)  # noqa: S603 - our own


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_while_the_tuning_thread_imports_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The child can import the same modules: without a lock at the fork, it waits for the parent's thread forever."""
    path = tmp_path / "m.onnx"
    onnx.save(branches(), path)
    decide(path, monkeypatch)
    done = run_program(_FORK_DURING_IMPORT, path)
    assert done.stdout.splitlines() == ["imported", "True True"], done.stderr


@pytest.mark.parametrize("chunk", [None, 4])
def test_imports_of_the_tuning_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chunk: int | None) -> None:
    """Whatever it imports to open a plan, also one that folds chains of operators by networkx, no fork interrupts."""
    path = tmp_path / "m.onnx"
    stack = build("lstm", {"layers": 2, "seq": 12, "batch": 1, "io": 8, "chunk": 1})
    onnx.save(branches() if chunk is None else stack, path)
    decide(path, monkeypatch, chunk)
    done = run_program(_IMPORTS_OF_TUNING, path)
    assert done.stdout == "True True [] True\n", done.stdout + done.stderr
