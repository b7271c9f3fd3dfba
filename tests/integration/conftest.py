"""Fixtures for tuning in the background, and for decoders with and without native operators."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import onnxruntime as ort
import psutil
import pytest

from chrion.native import operators_available, register_operators
from chrion.native.library import path_of
from chrion.runtime.selection import tuning
from chrion.runtime.selection.tuning_process import NamedShapes
from seams.generation import without_native_operators
from tuning_support import alternate, deciding_with, wait_for


@pytest.fixture
def background_tuning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Tune in the background without a delay and with an empty cache; check that no tuning process is left."""
    monkeypatch.setattr(tuning, "_DELAY_S", 0.0)
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CHRION_TUNE")
    before = set(psutil.Process().children())  # such as the resource tracker of multiprocessing
    yield
    gc.collect()
    wait_for(lambda: set(psutil.Process().children()) <= before)


@pytest.fixture
def gate() -> threading.Event:
    """Return the event that lets the stand-in for the tuning process answer."""
    return threading.Event()


@pytest.fixture
def tuned_shapes(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> list[NamedShapes]:
    """Replace the tuning process by one that always selects a plan; return the list of shapes that it receives."""
    shapes: list[NamedShapes] = []
    monkeypatch.setattr(tuning, "TuningProcess", deciding_with(alternate, shapes, gate))
    return shapes


@pytest.fixture
def several_operators() -> Iterator[None]:
    """Let decoders have attention of several operators, as where there is no C compiler."""
    with without_native_operators():
        yield


@pytest.fixture(params=[True, False], ids=["one operator", "several operators"])
def native(request: pytest.FixtureRequest) -> bool:
    """Run a test with attention as the native operator, and without it."""
    if not request.param:
        request.getfixturevalue("several_operators")
    elif not operators_available():
        pytest.skip("native attention is not compiled")
    return bool(request.param)


@pytest.fixture(params=[0, 1, 2], ids=["portable", "AVX2", "AVX-512"])
def instructions(request: pytest.FixtureRequest) -> Iterator[int]:
    """Let the native operators use some instructions of the processor."""
    choose = ctypes.CDLL(str(path_of("operators"))).chrion_choose
    register_operators(ort.SessionOptions())  # chooses the best one when it is called first
    if choose(request.param) != request.param:
        choose(2)
        pytest.skip("the processor does not have these instructions")
    yield request.param
    choose(2)
