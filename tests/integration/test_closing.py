"""Closing a session from a signal handler that has interrupted one of its requests."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from chrion import HybridSession, load
from chrion.scheduler import fixed_plan
from helpers import alternating_lanes, assert_equal, branches, remaining_lane_threads, run_plain
from seams.sessions import before_step

# A close that waits for the request that it has interrupted is a deadlock.
pytestmark = [
    pytest.mark.timeout(60, method="thread"),
    pytest.mark.skipif(sys.platform == "win32", reason="no such signals"),
]
FEED = {"x": np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)}


@pytest.fixture
def session() -> Iterator[HybridSession]:
    """Return a session on two lanes that SIGUSR1 closes."""
    graph = load(branches())
    session = HybridSession(graph, plan=fixed_plan(graph, alternating_lanes(graph)))
    before = signal.signal(signal.SIGUSR1, lambda *_: session.close())
    yield session
    signal.signal(signal.SIGUSR1, before)
    session.close()


def raise_signal() -> None:
    """Raise the signal in the main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.raise_signal(signal.SIGUSR1)


@pytest.mark.usefixtures("either_lanes")
@pytest.mark.parametrize("step", ["begin a request", "return an array"])
def test_a_handler_closes_the_session_of_its_own_request(
    session: HybridSession, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupted request is served, later ones are refused, and the lanes stop."""
    session.run(None, FEED)
    with monkeypatch.context() as patch:
        before_step(patch, step, raise_signal)
        found = session.run(None, FEED)
    assert_equal(found, run_plain(branches(), FEED))
    with pytest.raises(RuntimeError, match="this session is closed"):
        session.run(None, FEED)
    assert not remaining_lane_threads()


@pytest.mark.usefixtures("interpreted")
def test_a_handler_interrupts_a_lane_of_the_caller(session: HybridSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other lanes wait for the caller's lane, so that the request cannot finish while the handler runs."""
    with monkeypatch.context() as patch:
        before_step(patch, "run a segment", raise_signal)
        found = session.run(None, FEED)
    assert_equal(found, run_plain(branches(), FEED))
    assert not remaining_lane_threads()


@pytest.mark.usefixtures("either_lanes")
def test_a_request_of_another_thread_is_waited_for(session: HybridSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A close outside of a request of its own thread returns after all requests in flight have been served."""
    begun, proceed, results = threading.Event(), threading.Event(), []

    def wait() -> None:
        begun.set()
        assert proceed.wait(20)

    before_step(monkeypatch, "begin a request", wait)
    caller = threading.Thread(target=lambda: results.append(session.run(None, FEED)))
    caller.start()
    assert begun.wait(20)
    threading.Timer(0.2, proceed.set).start()
    session.close()
    assert proceed.is_set()
    caller.join(20)
    assert_equal(results[0], run_plain(branches(), FEED))
    assert not remaining_lane_threads()
