"""Fixtures of all tests: a separate cache, checked plans, and a check that no lane thread remains."""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import property_tests  # noqa: F401 - registers the profiles of Hypothesis
from chrion import HybridSession
from chrion.profiler import measure_graph
from chrion.runtime import crowding
from chrion.runtime.execution import native_executor as native
from chrion.runtime.execution.device_frame import DeviceFrame
from chrion.runtime.execution.engine import CutEngine
from chrion.runtime.selection import guard
from chrion.scheduler import planner
from chrion.scheduler.evaluation.validation import check_solution
from helpers import FakeInterferenceMonitor, lane_threads
from mirror_device import MirrorDevice
from seams.sessions import measure_machine_once

#: Folders whose tests have the marker of the same name.
_TIERS = ("process", "quality", "parity", "libraries", "webgpu")
_TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the folders that a plain ``pytest`` leaves out."""
    for item in items:
        folder = item.path.relative_to(_TESTS).parts[0]
        if folder in _TIERS:
            item.add_marker(folder)


def pytest_collection_finish() -> None:
    """Exempt the objects of pytest and of all imported modules from later garbage collections, to make them quick."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep measurements in a temporary folder; tests share it, so that each signature is measured once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHRION_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("CHRION_TUNE", "now")  # tests of tuning in the background ask for it
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))  # other processes do not count
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_interference() -> Iterator[None]:
    """Take no measurement as disturbed, so that tests do not depend on other processes; measure the machine once."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (guard, measure_graph):
            patch.setattr(module, "UsageMonitor", lambda _: FakeInterferenceMonitor())
        measure_machine_once(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _valid_plans() -> Iterator[None]:
    """Check the schedule of every plan that a test makes."""
    made = planner._PlanBuilder.build

    def checked(draft: Any, chosen: Any, *baselines: Any) -> Any:
        check_solution(chosen.graph.dag, draft.costs_of(chosen.graph.dag), chosen.solution)
        return made(draft, chosen, *baselines)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner._PlanBuilder, "build", checked)
        yield


@pytest.fixture(scope="session", autouse=True)
def _predicted_frames() -> Iterator[None]:
    """Check that every frame on a second device holds exactly what its plan predicts."""
    open_engine, make_frame = CutEngine.__init__, DeviceFrame.__init__

    def checked_engine(self: CutEngine, graph: Any, plan: Any, *rest: Any, **options: Any) -> None:
        open_engine(self, graph, plan, *rest, **options)
        device = self._accelerator.device if self._accelerator else None
        if isinstance(device, MirrorDevice) or (device is not None and device.name != "cpu"):
            assert self.frame_buffers.bytes == round(plan.predicted.frame_mb * 1e6)

    def checked_frame(self: DeviceFrame, graph: Any, segments: Any, device: Any, planned: Any) -> None:
        make_frame(self, graph, segments, device, planned)
        assert self.device_bytes == planned.bytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CutEngine, "__init__", checked_engine)
        patch.setattr(DeviceFrame, "__init__", checked_frame)
        yield


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use Python threads as lanes, as on a machine without a compiler."""
    monkeypatch.setattr(native, "available", lambda: False)


@pytest.fixture
def uncrowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve requests by the plan's lanes, however many are in flight."""
    monkeypatch.setattr(crowding, "_PATIENCE", math.inf)
    monkeypatch.setattr(crowding, "_PATIENCE_S", math.inf)


@pytest.fixture(params=[True, False], ids=["native", "interpreted"])
def either_lanes(request: pytest.FixtureRequest) -> None:
    """Run the test with native lanes and with Python threads as lanes."""
    if not request.param:
        request.getfixturevalue("interpreted")
    elif not native.available():
        pytest.skip("native lanes are not compiled")


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Check that no lane thread outlives its session, and that the caller's affinity is restored."""
    before, lanes, end_s = os.sched_getaffinity(0), len(lane_threads()), math.inf
    yield
    assert os.sched_getaffinity(0) == before, "the main thread's affinity was not restored"
    while len(lane_threads()) > lanes:
        assert time.monotonic() < end_s, f"left behind: {lane_threads()}"
        time.sleep(0.01)  # most are just ending
        if end_s == math.inf:
            end_s = time.monotonic() + 10
        elif len(lane_threads()) > lanes:
            gc.collect()
            if any(isinstance(thing, HybridSession) for thing in gc.get_objects()):
                return  # a fixture of a wider scope still holds one
