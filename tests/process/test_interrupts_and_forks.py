"""Interrupts and forks while requests are in flight, on every path on which a session serves requests."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from helpers import assert_equal, run_plain
from session_paths import PATHS, Served, call_from_threads, indexed_branches, open_path, request
from stress_scenarios import interrupt_calls, schedule_interrupts
from tuning_support import background_tuning, gate, tuned_shapes  # noqa: F401 - fixtures

# A deadlock is a failure.
pytestmark = pytest.mark.timeout(180, method="thread")

SECONDS = 1.0


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    """Return the name of a path."""
    return str(request.param)


@pytest.fixture
def served(path: str, request: pytest.FixtureRequest) -> Iterator[Served]:
    """Return a session that serves on the path."""
    with open_path(path, request) as opened:
        yield opened


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no such signals")
def test_interrupts(served: Served) -> None:
    """After a KeyboardInterrupt at any moment the next output is correct, and the thread's affinity is restored."""
    pick, feed, affinity = random.Random(0), request(0), os.sched_getaffinity(0)
    expected = run_plain(indexed_branches(), feed)
    interrupted = 0
    alone = served.name != "crowded"
    more = served.more_for(SECONDS, alone=alone)
    limit_s = time.monotonic() + 30  # on a busy machine, ten interrupts take longer
    with schedule_interrupts() as interrupt_in:
        while more() or (interrupted < 10 and time.monotonic() < limit_s):
            try:
                interrupt_in(pick.uniform(1e-6, 3e-3))
                until_s = time.monotonic() + 0.1  # in case the interrupt is lost
                while time.monotonic() < until_s:
                    served.session.run(None, feed)
            except KeyboardInterrupt:
                interrupted += 1
            assert_equal(served.session.run(None, feed), expected)
            assert os.sched_getaffinity(0) == affinity
    assert interrupted >= 10
    assert served.is_on_path(alone=alone), served.session.explain()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forks(served: Served) -> None:
    """A child forked while requests are in flight is served, or refused with a reason; the parent is served."""
    feed = request(0)
    expected = run_plain(indexed_branches(), feed)
    more = served.more_for(SECONDS)

    def fork() -> None:
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends a child that is deadlocked
            os._exit(result_in_child(served, feed, expected))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0

    def call(caller: int) -> None:
        while more():
            assert_equal(served.session.run(None, feed), expected)
            if not caller:
                fork()
                time.sleep(0.05)

    call_from_threads(4, call)


def result_in_child(served: Served, feed: dict[str, np.ndarray[Any, Any]], expected: list[Any]) -> int:
    """Return 0 if the session serves correctly or refuses with a reason, in a forked child."""
    try:
        assert_equal(served.session.run(None, feed), expected)
        served.session.close()
    except RuntimeError as error:
        return 0 if "forked" in str(error) else 2
    except BaseException:  # noqa: BLE001 - reported by the exit code
        return 3
    return 0


@pytest.mark.usefixtures("uncrowded", "either_lanes")
def test_interrupted_calls_leave_the_session_usable() -> None:
    """After a KeyboardInterrupt at any moment, the next output is correct and the thread's affinity is restored."""
    found = interrupt_calls(3, seed=0)
    assert found.interrupted >= 10
