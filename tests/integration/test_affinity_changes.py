"""Sessions respect the affinity that threads are given after the session was opened."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from chrion.native import available
from helpers import lanes, tasks
from process_exits import busy_session
from seams.execution import groups_of
from seams.execution import limit as set_limit

pytestmark = [
    pytest.mark.timeout(120, method="thread"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU"),
]


@contextmanager
def affinity_of(affected: Sequence[int], cpus: set[int]) -> Iterator[None]:
    """Limit threads to some CPUs, as ``taskset --pid`` does, and restore their affinity; some may end at any time."""
    before = {}
    for task in affected:
        with contextlib.suppress(ProcessLookupError):
            before[task] = os.sched_getaffinity(task)
            os.sched_setaffinity(task, cpus)
    try:
        yield
    finally:
        for task, mask in before.items():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(task, mask)


@contextmanager
def watched(affected: Sequence[int]) -> Iterator[set[int]]:
    """Collect the CPUs that threads may use during the context."""
    found: set[int] = set()
    end = threading.Event()

    def watch() -> None:
        while not end.is_set():
            for task in affected:
                found.update(os.sched_getaffinity(task))
            end.wait(0.0002)

    thread = threading.Thread(target=watch)
    thread.start()
    yield found
    end.set()
    thread.join()


@pytest.mark.usefixtures("either_lanes")
def test_a_caller_stays_on_its_own_cpus() -> None:
    """A thread that may use one CPU only is not moved to a lane's core, not even during its requests."""
    session, feed = busy_session()
    with session:
        expected = session.run(None, feed)
        for cpu in sorted(os.sched_getaffinity(0)):
            own = threading.get_native_id()
            with affinity_of([own], {cpu}), watched([own]) as found:
                for _ in range(4):
                    np.testing.assert_array_equal(session.run(None, feed)[0], expected[0])
            assert found == {cpu}


@pytest.mark.skipif(not available(), reason="lanes are not compiled here")
def test_an_affinity_that_is_set_during_a_request_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A native request does not restore an affinity that was changed from outside while it was in flight."""
    set_limit(monkeypatch, "pressure on native lanes", 1000)  # the caller is pinned in any case
    session, feed = busy_session()
    caller, cpus = threading.get_native_id(), os.sched_getaffinity(0)

    def limit() -> None:
        while len(pinned := os.sched_getaffinity(caller)) > 1:
            pass
        os.sched_setaffinity(caller, cpus - pinned)

    with session, affinity_of([caller], cpus):
        thread = threading.Thread(target=limit)
        thread.start()
        while thread.is_alive():
            session.run(None, feed)
        thread.join()
        assert len(os.sched_getaffinity(0)) == len(cpus) - 1


@pytest.mark.usefixtures("either_lanes")
def test_lanes_leave_cpus_that_are_taken_from_the_process() -> None:
    """If all threads of the process are limited to other CPUs, the lanes are opened again on those."""
    session, feed = busy_session()
    cpu = max(os.sched_getaffinity(0))
    with session:
        expected = session.run(None, feed)
        with affinity_of(tasks(), {cpu}):
            for _ in range(3):
                np.testing.assert_array_equal(session.run(None, feed)[0], expected[0])
            opened = lanes()
            with watched([threading.get_native_id(), *opened]) as found:
                for _ in range(4):
                    np.testing.assert_array_equal(session.run(None, feed)[0], expected[0])
            assert found == {cpu}
            assert opened == lanes()  # opened again once
            groups = groups_of(session)
            assert groups.capacity == 1
            assert {core for core in groups.lease("any").cores.values() if core is not None} == {cpu}
            groups.release("any")
