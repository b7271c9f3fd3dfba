"""Several processes that tune with one cache, and caches that cannot be written."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import onnx
import pytest

from chrion import HybridSession, files
from chrion.errors import OptionError
from chrion.runtime.selection import decisions, selector, tuning
from chrion.runtime.selection.selector import EngineSelector
from chrion.runtime.selection.tuning_lock import BusyError, tuning_lock
from chrion.runtime.selection.tuning_process import NamedShapes
from helpers import assert_same_as_plain, branches
from tuning_support import alternate, deciding_with

#: A session in one of the modes, whose comparison takes a second and prints a line.
_SESSION = """
import sys, threading, time
from chrion import HybridSession
from chrion.runtime.selection import tuning
from chrion.runtime.selection.selector import EngineSelector
from tuning_support import alternate, deciding_with

def compare(graph):
    print("compared", flush=True)
    time.sleep(1.0)
    return alternate(graph)

at_once = threading.Event()
at_once.set()
EngineSelector._compare = lambda _, graph: compare(graph)
tuning.TuningProcess = deciding_with(compare, [], at_once)
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
def test_four_processes_with_an_empty_cache_tune_once(tmp_path: Path, tune: str) -> None:
    """All of them run the plan that one of them selected."""
    model = tmp_path / "model.onnx"
    onnx.save(branches(), model)
    processes = [start(_SESSION, str(model), tune, cache=tmp_path / "cache") for _ in range(4)]
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
    assert sorted(printed) == ["compared", *["plan"] * 4]


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


def test_a_process_that_never_ends_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its patience the session tunes beside the other process."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(selector, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(EngineSelector, "_compare", lambda _, graph: alternate(graph))
    with (
        filelock.FileLock(files.cache_folder() / "tuning.lock", thread_local=False),
        HybridSession(branches(), tune="now") as session,
    ):
        assert session.plan is not None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("tune", ["background", "now"])
def test_a_cache_that_cannot_be_written_does_not_prevent_tuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tune: str, number: int
) -> None:
    """On a full disk and in a read-only folder the session tunes, runs the plan, and raises nothing."""
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "cache"))

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    def refuse_file(path: Path, *_: Any, **__: Any) -> None:
        raise OptionError(f"{path}: cannot be written: {os.strerror(number)}")

    monkeypatch.setattr(files, "write_atomically", refuse_file)
    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    monkeypatch.setattr(EngineSelector, "_compare", lambda _, graph: alternate(graph))
    asked: list[NamedShapes] = []
    at_once = threading.Event()
    at_once.set()
    monkeypatch.setattr(tuning, "TuningProcess", deciding_with(alternate, asked, at_once))
    model = branches()
    with HybridSession(model, tune=tune) as session:
        assert session.wait_until_tuned(30)
        assert session.plan is not None
        feed = {i.name: np.ones(i.shape, np.float32) for i in session.get_inputs()}
        assert_same_as_plain(session, model, feed)
    assert decisions.DecisionCache("any").recall() is None
    assert not list((tmp_path / "cache").rglob("*.json"))
