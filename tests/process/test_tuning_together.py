"""Several processes that tune with one cache."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from chrion.runtime.selection.tuning_lock import BusyError, tuning_lock
from helpers import branches

#: A session in one of the modes, whose comparison takes a second and prints a line.
_SESSION = """
import pytest, sys, time
from chrion import HybridSession
from seams.sessions import decide_by, replace_tuning_process
from tuning_support import alternate

def compare(graph):
    print("compared", flush=True)
    time.sleep(1.0)
    return alternate(graph)

decide_by(pytest.MonkeyPatch(), compare)
replace_tuning_process(pytest.MonkeyPatch(), compare)
sys.stdin.readline()
with HybridSession(sys.argv[1], tune=sys.argv[2]) as session:
    assert session.wait_until_tuned(60)
    print("plan" if session.plan else session.explain(), flush=True)
"""
_HOLDER = """
from chrion.runtime.selection.tuning_lock import tuning_lock
with tuning_lock():
    print("held", flush=True)
    input()
"""


def start(program: str, *arguments: str, cache: Path) -> subprocess.Popen[str]:
    """Start a Python program with a cache folder and the modules of the tests."""
    environment = os.environ | {"CHRION_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


@pytest.mark.parametrize("tune", ["background", "now"])
def test_three_processes_with_an_empty_cache_tune_once(tmp_path: Path, tune: str) -> None:
    """All of them run the plan that one of them selected."""
    model = tmp_path / "model.onnx"
    onnx.save(branches(), model)
    processes = [start(_SESSION, str(model), tune, cache=tmp_path / "cache") for _ in range(3)]
    try:
        for process in processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        printed = [line for process in processes for line in process.communicate(timeout=120)[0].splitlines()]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert sorted(printed) == ["compared", *["plan"] * 3]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="POSIX")
def test_the_lock_of_a_killed_process_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is held while the process lives, and not after it was killed."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "cache"))
    process = start(_HOLDER, cache=tmp_path / "cache")
    try:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        with pytest.raises(BusyError), tuning_lock():
            pass
    finally:
        process.kill()
        process.communicate()
    with tuning_lock(10.0):
        pass
