"""Many callers, many sessions, interrupted callers: short versions of ``scripts/stress.py``."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from chrion.waiting import Counter
from stress_scenarios import WIDTH, cut_for_every_shape, cycles, free_batch, hammer, interrupts

# What hangs is a failure.
pytestmark = pytest.mark.timeout(300, method="thread")
#: More growth than this, in MB, is a leak.
MOST_MB = 32.0


@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("either_lanes")
def test_many_threads_with_many_shapes(seconds: float) -> None:
    """Every answer is right, no two requests have one frame, and memory does not grow."""
    found = hammer(seconds, 32, seed=0)
    assert found.calls >= 32
    assert found.grown_mb < MOST_MB


@pytest.mark.usefixtures("either_lanes")
def test_interrupted_callers_leave_the_session_usable() -> None:
    """KeyboardInterrupt at any moment: what is run next is right, and the thread is pinned no longer."""
    found = interrupts(3, seed=0)
    assert found.interrupted >= 10


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("close", [True, False])
@pytest.mark.usefixtures("either_lanes")
def test_sessions_leave_nothing_behind(close: bool, count: int) -> None:  # noqa: FBT001 - a case
    """Made, run and let go of, closed or not: neither threads nor memory."""
    found = cycles(count, close=close)
    assert found.threads == 0
    assert found.grown_mb < MOST_MB


@pytest.mark.usefixtures("interpreted")
def test_an_interrupt_while_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that arrives while the caller waits for another lane is raised, and the request's lanes end."""
    wait, raised = Counter.wait, threading.Event()

    def interrupted(self: Counter, *given: object, **more: object) -> None:
        if threading.current_thread() is threading.main_thread() and not raised.is_set():
            raised.set()
            raise KeyboardInterrupt
        wait(self, *given, **more)

    model = free_batch()
    with cut_for_every_shape(model) as session:
        feed = {"x": np.ones((2, WIDTH), np.float32)}
        monkeypatch.setattr(Counter, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.run(None, feed)
        assert len(session.run(None, feed)) == 1
