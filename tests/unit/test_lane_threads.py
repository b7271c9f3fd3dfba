"""Lane threads: the order of their work, their cores, and their end."""

from __future__ import annotations

import gc
import os
import threading

import pytest

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


class Part:
    """A part that ends its thread, or that records that it was carried out."""

    def __init__(self, *, deadly: bool = False) -> None:
        self.deadly = deadly
        self.done = threading.Event()
        self.failed = 0

    def __call__(self) -> None:
        """Carry out the part."""
        self.done.set()
        if self.deadly:
            raise SystemExit  # without a report

    def fail(self) -> None:
        """Count the failure."""
        self.failed += 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_is_replaced_and_fails_its_part_only() -> None:
    """Parts after the one in which it died are carried out by its successor; other threads stay."""
    threads = LaneThreads({1: None, 2: None})
    deadly, later, other = Part(deadly=True), Part(), Part()
    threads.submit({1: deadly, 2: other})
    threads.submit({1: later})
    (dying,) = (thread for thread in threading.enumerate() if thread.name == "chrion-lane-1")
    dying.join(20)
    assert not later.done.is_set()
    for _ in range(2):
        threads.replace_dead()
    assert later.done.wait(20)
    assert other.done.wait(20)
    assert (deadly.failed, later.failed, other.failed) == (1, 0, 0)
    threads.close()
    threads.replace_dead()  # stopped threads are not dead
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("chrion-lane-")]


def test_threads_that_may_no_longer_use_their_cores_are_found() -> None:
    """Without a core, and while its core is allowed, a thread has not moved."""
    cores = sorted(os.sched_getaffinity(0))
    threads = LaneThreads({1: cores[0], 2: None})
    done = Part()
    threads.submit({1: done})
    assert done.done.wait(20)
    threads.check_cores()
    assert not threads.moved
    if len(cores) > 1:
        (pinned,) = (thread for thread in threading.enumerate() if thread.name == "chrion-lane-1")
        os.sched_setaffinity(pinned.native_id or 0, {cores[1]})
        threads.check_cores()
        assert threads.moved
    threads.close()


def test_threads_stop_when_their_owner_is_collected() -> None:
    """The threads stop even if their owner is not closed, and wake up for that if they are parked."""
    threads = LaneThreads({1: None})
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "chrion-lane-1")
    del threads
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
