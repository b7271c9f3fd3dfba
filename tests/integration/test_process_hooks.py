"""Processes that end or fork while a session is in use: none hangs, none crashes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
CLOSED, SHAPE = "this session is closed", "(600, 600)"


def leave(how: str) -> tuple[int, list[str], str]:
    """Exit code, lines printed and what went to stderr."""
    done = subprocess.run(  # noqa: S603 - ourselves
        [sys.executable, str(TESTS / "process_exits.py"), how],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))},
        check=False,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [("end", 0, ""), ("leave", 3, ""), ("fail", 1, "ValueError: unhandled")],
)
def test_exits_with_runs_in_flight(how: str, code: int, told: str) -> None:
    """They end first, and later ones are refused; without that, the process aborts."""
    found, lines, stderr = leave(how)
    assert found == code, stderr
    assert set(lines) <= {CLOSED}
    assert stderr.strip().endswith(told)


def test_a_thread_that_is_no_daemon_ends_its_run() -> None:
    """As with any thread."""
    assert leave("thread")[:2] == (0, [SHAPE])


def test_runs_while_a_process_ends() -> None:
    """Before the session is told, they are served; afterwards, refused: they do not wait for lanes that have gone."""
    assert leave("late")[:2] == (0, [SHAPE, CLOSED])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_told_that_its_lanes_are_gone() -> None:
    """In so many words; it may close the session, and make one of its own."""
    code, lines, stderr = leave("fork")
    assert code == 0, stderr
    assert "child 0" in lines
