"""Threads of lanes."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from chrion.runtime.execution import lane_threads as module
from chrion.runtime.execution.lane_threads import LaneThreads


def test_parts_run_in_the_order_they_are_submitted() -> None:
    """Each lane works through its own queue; closing lets it end what it has."""
    lanes = LaneThreads({1: None, 2: None})
    seen: dict[int, list[int]] = {1: [], 2: []}
    for turn in range(50):
        lanes.submit({lane: lambda lane=lane, turn=turn: seen[lane].append(turn) for lane in (1, 2)})
    lanes.close()
    assert seen == {1: list(range(50)), 2: list(range(50))}


def test_lanes_are_pinned_and_named() -> None:
    """A lane with a core stays on it; the caller does not."""
    core = max(os.sched_getaffinity(0))
    lanes = LaneThreads({3: core})
    found: list[tuple[str, set[int]]] = []
    lanes.submit({3: lambda: found.append((threading.current_thread().name, os.sched_getaffinity(0)))})
    lanes.close()
    assert found == [("chrion-lane-3", {core})]


def test_closed_lanes_refuse() -> None:
    """Also when they are closed twice."""
    lanes = LaneThreads({1: None})
    lanes.close()
    lanes.close()
    with pytest.raises(RuntimeError, match="stopped"):
        lanes.submit({1: lambda: None})


def test_a_parked_lane_takes_its_next_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that does not spin at all still finds its work."""
    monkeypatch.setattr(module, "_IDLE_ROUNDS", 0)
    lanes = LaneThreads({1: None})
    done = threading.Event()
    lanes.submit({1: done.set})
    assert done.wait(20)
    lanes.close()


def test_lanes_stop_when_they_are_collected() -> None:
    """Nobody has to close them."""
    lanes = LaneThreads({1: None})
    (thread,) = [lane.thread for lane in lanes._lanes.values()]
    del lanes
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
