"""Sessions respect the affinity that threads are given after the session was opened."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from chrion.native import available, bindings
from chrion.runtime.execution.engine import CutEngine
from process_exits import busy_session

pytestmark = [
    pytest.mark.timeout(120, method="thread"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU"),
]


def tasks() -> list[int]:
    """Return the numbers of all threads of this process."""
    return [int(path.name) for path in Path("/proc/self/task").iterdir()]


def lane_tasks() -> list[int]:
    """Return the numbers of the lanes' threads."""
    names = {task: Path(f"/proc/self/task/{task}/comm").read_text() for task in tasks()}
    return [task for task, name in names.items() if name.startswith("chrion-lane-")]


@contextmanager
def affinity_of(affected: Sequence[int], cpus: set[int]) -> Iterator[None]:
    """Limit threads to some CPUs, as ``taskset --pid`` does, and restore the affinity of those that still exist."""
    before = {task: os.sched_getaffinity(task) for task in affected}
    for task in affected:
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
                for _ in range(10):
                    np.testing.assert_array_equal(session.run(None, feed)[0], expected[0])
            assert found == {cpu}


@pytest.mark.skipif(not available(), reason="lanes are not compiled here")
def test_an_affinity_that_is_set_during_a_request_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A native request does not restore an affinity that was changed from outside while it was in flight."""
    monkeypatch.setattr(bindings, "_PRESSURE_LIMIT", 1000)  # the caller is pinned in any case
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


@contextmanager
def busy_cpus(cpus: set[int]) -> Iterator[None]:
    """Run a process on each CPU that uses it all the time."""
    code = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", code, str(cpu)]) for cpu in cpus]  # noqa: S603
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.skipif(not available(), reason="lanes are not compiled here")
@pytest.mark.parametrize("limit", [bindings._PRESSURE_LIMIT, 1000])
def test_lanes_are_not_pinned_beside_other_work(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """If other processes preempt lanes, these may run on any core, as far as the limit of the pressure allows."""
    monkeypatch.setattr(bindings, "_PRESSURE_LIMIT", limit)
    session, feed = busy_session()
    cpus = os.sched_getaffinity(0)
    with session:
        expected = session.run(None, feed)
        (lane,) = lane_tasks()
        requests = 0
        with busy_cpus(cpus):
            end = time.monotonic() + (60 if limit < 64 else 2)
            while time.monotonic() < end and os.sched_getaffinity(lane) != cpus:
                np.testing.assert_array_equal(session.run(None, feed)[0], expected[0])
                requests += 1
        assert requests > 0
        assert (os.sched_getaffinity(lane) == cpus) == (limit < 64)
        assert os.sched_getaffinity(0) == cpus


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
            lanes = lane_tasks()
            with watched([threading.get_native_id(), *lanes]) as found:
                for _ in range(10):
                    np.testing.assert_array_equal(session.run(None, feed)[0], expected[0])
            assert found == {cpu}
            assert lanes == lane_tasks()  # opened again once
            engine = session._engine
            assert isinstance(engine, CutEngine)
            assert engine.capacity == 1
            executor = engine._native or engine._python
            assert executor
            (group,) = executor._groups._groups  # type: ignore[attr-defined]
            assert {core for core in group.cores.values() if core is not None} == {cpu}
