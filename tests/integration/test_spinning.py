"""Spinning of idle lanes: it is limited to requests that follow each other at once."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from chrion.native import NativeBinding, NativeFrame, NativeLanes, NativeProgram, NativeSession, available
from chrion.native.bindings import IDLE_SPIN_US, RUN
from chrion.runtime.execution.lane_threads import IDLE_SPINS_S, LaneThreads
from helpers import FLOAT, make_model, node, value
from seams.execution import note

pytestmark = pytest.mark.timeout(120, method="thread")
REQUESTS = 60


def lane_cpu_s() -> float:
    """Return the CPU time of all native lanes of this process, in seconds."""
    found = [
        int((task / "schedstat").read_text().split()[0]) * 1e-9
        for task in Path("/proc/self/task").iterdir()
        if (task / "comm").read_text().startswith("chrion-lane-")
    ]
    assert found
    return sum(found)


@pytest.mark.skipif(not available(), reason="lanes are not compiled here")
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not count threads' CPU time")
def test_native_lanes_do_not_spin_between_requests_at_intervals() -> None:
    """A lane uses a fraction of the CPU time that spinning after every request would take."""
    model = make_model([node("Relu", ["x"], ["y"])], [value("x", FLOAT, [1])], [value("y", FLOAT, [1])])
    session = NativeSession(model.SerializeToString(), ort.SessionOptions())
    binding = NativeBinding(session)
    tensors = [ort.OrtValue.ortvalue_from_numpy(np.ones(1, np.float32)) for _ in "xy"]
    binding.bind_ortvalue_input("x", tensors[0])
    binding.bind_ortvalue_output("y", tensors[1])
    cores = sorted(os.sched_getaffinity(0))
    program = NativeProgram([[], [(RUN, 0, 0)]])
    lanes = NativeLanes(program, [cores[0], cores[-1]])
    frame = NativeFrame(program, [session], [binding])
    lanes.run(frame)
    before = lane_cpu_s()
    for _ in range(REQUESTS):
        time.sleep(3 * IDLE_SPIN_US * 1e-6)
        lanes.run(frame)
    assert lane_cpu_s() - before < REQUESTS * IDLE_SPIN_US * 1e-6 / 3
    lanes.close()


def test_lane_threads_do_not_spin_between_parts_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread whose last wait was long parks at once."""
    spins = note(monkeypatch, "spin")
    threads = LaneThreads({1: None})
    for _ in range(5):
        time.sleep(500 * IDLE_SPINS_S)  # a busy machine may wake the thread late
        threads.submit({1: lambda: None})
    threads.close()
    assert not spins


def test_lane_threads_spin_between_parts_in_succession(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread whose last wait was short spins before it parks."""
    spins = note(monkeypatch, "spin")
    threads = LaneThreads({1: None})
    done, end = threading.Event(), time.monotonic() + 60
    while not spins and time.monotonic() < end:  # other work may make any wait long
        done.clear()
        threads.submit({1: done.set})
        assert done.wait(20)
    threads.close()
    assert spins
