"""Fixtures and decisions for tests of tuning in the background."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from chrion.graph.model import Graph
from chrion.profiler import OperatorCost
from chrion.profiler.precision import Precision
from chrion.profiler.profiles import Profile
from chrion.runtime.selection.decisions import Decision
from chrion.runtime.selection.tuning_process import NamedShapes
from chrion.scheduler import fixed_plan
from helpers import MACHINE, alternating_lanes
from seams.sessions import replace_tuning_process, shorten_waits


def wait_for(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    """Return once a condition holds; fail if it does not within the limit."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def alternate(graph: Graph) -> Decision:
    """Decide on a plan that alternates between two lanes."""
    return Decision("plan 1", fixed_plan(graph, alternating_lanes(graph)), "by the test")


def invented_profile(
    graph: Graph, *_: object, accelerator: str | None = None, precision: Precision = "float32", **__: bool
) -> Profile:
    """Return a profile of two cores in which each operator takes 1 ms on any device, and a handoff 1 us."""
    on_device_ms = 1.0 if accelerator else None
    pairs = zip(graph.dag.signatures, graph.dag.op_types, strict=True)
    costs = {signature: OperatorCost(op_type, (1.0, 1.0), on_device_ms) for signature, op_type in pairs}
    return Profile(MACHINE, 2, accelerator, costs, handoff_ms=1e-3, precision=precision)


@pytest.fixture
def background_tuning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tune in the background without a delay and with an empty cache."""
    shorten_waits(monkeypatch)
    monkeypatch.setenv("CHRION_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CHRION_TUNE")


@pytest.fixture
def no_process_left() -> Iterator[None]:
    """Check that no process that the test has started is left."""
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
    return replace_tuning_process(monkeypatch, alternate, gate)
