"""Processes that exit or fork while a session is in use neither hang nor crash."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import onnxruntime as ort
import pytest

from chrion import HybridSession
from chrion.runtime import process_hooks

TESTS = Path(__file__).parent.parent
CLOSED, SHAPE = "this session is closed", "(600, 600)"


def run_process(scenario: str) -> tuple[int, list[str], str]:
    """Run a scenario of ``process_exits.py``; return its exit code, lines on stdout, and stderr."""
    done = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, str(TESTS / "process_exits.py"), scenario],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))},
        check=False,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize(
    ("scenario", "code", "message"),
    [("end", 0, ""), ("leave", 3, ""), ("fail", 1, "ValueError: unhandled")],
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


def test_the_hooks_are_not_methods_of_the_session() -> None:
    """A session has only the public methods of InferenceSession and those of its own documentation."""
    added = {name for name in dir(HybridSession) if not name.startswith("_")} - set(dir(ort.InferenceSession))
    assert added == {"close", "explain", "plan", "trace", "wait_until_tuned"}


def test_hooks_run_while_other_threads_create_sessions() -> None:
    """Sessions that are registered while the hooks run do not affect the iteration."""

    class Owner:
        pass

    stop = threading.Event()

    def register() -> None:
        while not stop.is_set():
            for owner in [Owner() for _ in range(50)]:
                process_hooks.register(owner, lambda _: None, lambda *_: None)

    owner = Owner()
    process_hooks.register(owner, lambda _: None, lambda *_: None)
    threads = [threading.Thread(target=register) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(3000):
            assert owner in dict(process_hooks._registered())
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        for thread in threads:
            thread.join()
