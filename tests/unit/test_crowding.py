"""Detection of crowded requests, on a fake clock."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from chrion.runtime.crowding import Crowding

SESSION: Any = object()


def crowded(crowding: Crowding, in_flight: int, requests: int = 1) -> list[object]:
    """Return the sessions of some requests, while so many are in flight."""
    crowding.in_flight.extend([None] * in_flight)
    found = [crowding.engine() for _ in range(requests)]
    for _ in range(in_flight):
        crowding.in_flight.pop()
    return found


@pytest.fixture
def clock() -> list[float]:
    """Return the time in seconds that the crowding reads."""
    return [0.0]


def opened(clock: list[float], cores: int = 2) -> Crowding:
    """Return a crowding whose session is open."""
    crowding = Crowding(lambda: SESSION, cores, lambda: clock[0])
    crowded(crowding, max(2, cores), 32)
    end = time.monotonic() + 30
    while crowding._engine is None:
        assert time.monotonic() < end
        time.sleep(0.001)
    return crowding


def test_the_session_is_opened_when_crowds_persist(clock: list[float]) -> None:
    """A few requests that happen to overlap do not open the session."""
    calls: list[int] = []

    def open_session() -> Any:
        calls.append(1)
        return SESSION

    crowding = Crowding(open_session, 2, lambda: clock[0])
    assert crowded(crowding, 2, 31) == [None] * 31
    assert not calls
    crowded(crowding, 2, 1000)
    end = time.monotonic() + 30
    while crowding._engine is None and time.monotonic() < end:
        time.sleep(0.001)
    assert calls == [1]


@pytest.mark.parametrize("cores", [1, 2, 4, 16])
def test_a_crowd_is_as_many_requests_as_cores(clock: list[float], cores: int) -> None:
    """Requests are crowded if there are as many as cores, and at least two."""
    crowding = opened(clock, cores)
    clock[0] += 1.0
    assert crowded(crowding, max(2, cores) - 1) == [None]
    assert crowded(crowding, max(2, cores)) == [SESSION]
    assert crowded(crowding, max(2, cores) + 5) == [SESSION]


def test_requests_stay_crowded_for_a_while(clock: list[float]) -> None:
    """A single caller returns to the plan a tenth of a second after the last crowd."""
    crowding = opened(clock)
    clock[0] += 0.09
    assert crowded(crowding, 1) == [SESSION]
    assert crowding.active
    clock[0] += 0.02
    assert crowded(crowding, 1) == [None]
    assert not crowding.active


def test_a_session_that_cannot_be_opened_does_not_affect_requests(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """Opening is tried once, its error is logged, and the plan serves."""
    calls: list[int] = []

    def fails() -> Any:
        calls.append(1)
        raise RuntimeError("no memory")

    crowding = Crowding(fails, 2, lambda: clock[0])
    assert crowded(crowding, 2, 100) == [None] * 100
    end = time.monotonic() + 30
    while "no memory" not in caplog.text:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert crowded(crowding, 2, 100) == [None] * 100
    assert len(calls) == 1


def test_a_closed_session_is_not_used_again(clock: list[float]) -> None:
    """After closing, requests do not use the session or open it again."""
    crowding = opened(clock)
    crowding.close()
    assert crowded(crowding, 2, 100) == [None] * 100


def test_a_session_that_is_opened_too_late_is_dropped(clock: list[float]) -> None:
    """A session is dropped if its owner is closed while it is being opened; at exit, opening is awaited."""
    release = threading.Event()

    def open_session() -> Any:
        release.wait(30)
        return SESSION

    crowding = Crowding(open_session, 2, lambda: clock[0])
    crowded(crowding, 2, 32)
    crowding.close()
    release.set()
    crowding.close(time.monotonic() + 30)
    assert crowding._thread is not None
    assert not crowding._thread.is_alive()
    assert crowding._engine is None


def test_without_a_thread_requests_are_served_as_before(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests are served if no thread can be started, as while the interpreter exits or at a limit of the system."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    crowding = Crowding(lambda: SESSION, 2, lambda: clock[0])
    assert crowded(crowding, 2, 100) == [None] * 100
    assert "can't start new thread" in caplog.text
