"""Native lanes beside processes that use all cores."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from chrion.native import available
from helpers import lanes
from process_exits import busy_session
from seams.execution import limit as set_limit

pytestmark = [
    pytest.mark.timeout(120, method="thread"),
    pytest.mark.skipif(not available(), reason="lanes are not compiled here"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU"),
]


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


@pytest.mark.parametrize("limit", [None, 1000])
def test_lanes_are_not_pinned_beside_other_work(monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    """If other processes preempt lanes, these may run on any core, as far as the limit of the pressure allows."""
    if limit:
        set_limit(monkeypatch, "pressure on native lanes", limit)
    session, feed = busy_session()
    cpus = os.sched_getaffinity(0)
    with session:
        expected = session.run(None, feed)
        (lane,) = lanes()
        requests = 0
        with busy_cpus(cpus):
            end = time.monotonic() + (2 if limit else 60)
            while time.monotonic() < end and os.sched_getaffinity(lane) != cpus:
                np.testing.assert_array_equal(session.run(None, feed)[0], expected[0])
                requests += 1
        assert requests > 0
        assert (os.sched_getaffinity(lane) == cpus) == (limit is None)
        assert os.sched_getaffinity(0) == cpus
