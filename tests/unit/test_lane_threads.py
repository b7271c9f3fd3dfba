"""Lane threads: the order of their work, their cores, and their end."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from chrion.runtime.execution import lane_threads
from chrion.runtime.execution.lane_threads import LaneThreads


def test_parts_run_in_the_order_they_are_submitted() -> None:
    """Each thread has its own queue, and finishes the parts in it after closing."""
    threads = LaneThreads({1: None, 2: None})
    seen: dict[int, list[int]] = {1: [], 2: []}
    for request in range(50):
        threads.submit({lane: lambda lane=lane, request=request: seen[lane].append(request) for lane in (1, 2)})
    threads.close()
    assert seen == {1: list(range(50)), 2: list(range(50))}


def test_threads_are_pinned_and_named() -> None:
    """The thread of a lane with a core is pinned to it."""
    core = max(os.sched_getaffinity(0))
    threads = LaneThreads({3: core})
    found: list[tuple[str, set[int]]] = []
    threads.submit({3: lambda: found.append((threading.current_thread().name, os.sched_getaffinity(0)))})
    threads.close()
    assert found == [("chrion-lane-3", {core})]


def test_stopped_threads_refuse_parts() -> None:
    """Threads that have been closed refuse parts, and closing them again has no effect."""
    threads = LaneThreads({1: None})
    threads.close()
    threads.close()
    with pytest.raises(RuntimeError, match="stopped"):
        threads.submit({1: lambda: None})


def test_a_parked_thread_takes_its_next_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that parks without spinning is woken up by its next part."""
    monkeypatch.setattr(lane_threads, "_IDLE_SPINS", 0)
    threads = LaneThreads({1: None})
    done = threading.Event()
    threads.submit({1: done.set})
    assert done.wait(20)
    threads.close()


def test_threads_stop_when_their_owner_is_collected() -> None:
    """The threads stop even if their owner is not closed."""
    threads = LaneThreads({1: None})
    (thread,) = [lane.thread for lane in threads._lanes.values()]
    del threads
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
