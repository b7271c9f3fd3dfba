"""Short versions of the stress scenarios of ``scripts/stress.py``."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest

from seams.sessions import before_step
from stress_scenarios import WIDTH, call_concurrently, cut_session, free_batch, recreate_sessions

# A deadlock is a failure.
pytestmark = [pytest.mark.timeout(300, method="thread"), pytest.mark.usefixtures("uncrowded")]
#: Growth in MB that counts as a leak.
LEAK_MB = 32.0


@pytest.mark.parametrize(
    ("seconds", "leak_mb"), [(0.5, math.inf), pytest.param(60, LEAK_MB, marks=pytest.mark.slow)], ids=["short", "long"]
)
@pytest.mark.usefixtures("either_lanes")
def test_concurrent_calls_with_many_shapes(seconds: float, leak_mb: float) -> None:
    """Every output is correct, no two requests use one frame at the same time, and in a minute memory does not grow."""
    found = call_concurrently(seconds, 32, seed=0)
    assert found.calls >= 32
    assert found.grown_mb < leak_mb


@pytest.mark.parametrize(
    ("count", "close"), [(16, False), *(pytest.param(1000, close, marks=pytest.mark.slow) for close in (True, False))]
)
@pytest.mark.usefixtures("either_lanes")
def test_deleted_sessions_release_threads_and_memory(count: int, *, close: bool) -> None:
    """Sessions that are created, run and deleted, closed or not, leave neither threads nor memory."""
    found = recreate_sessions(count, close=close)
    assert found.threads == 0
    assert found.grown_mb < LEAK_MB


@pytest.mark.usefixtures("interpreted")
def test_an_interrupt_while_waiting_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KeyboardInterrupt while the caller waits for another lane is raised, and the next run succeeds."""
    raised = threading.Event()

    def interrupt() -> None:
        if threading.current_thread() is threading.main_thread() and not raised.is_set():
            raised.set()
            raise KeyboardInterrupt

    model = free_batch()
    with cut_session(model) as session:
        feed = {"x": np.ones((2, WIDTH), np.float32)}
        before_step(monkeypatch, "wait for a lane", interrupt)
        with pytest.raises(KeyboardInterrupt):
            session.run(None, feed)
        assert len(session.run(None, feed)) == 1
