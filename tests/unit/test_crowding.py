"""Detection of crowded requests, on a fake clock."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from chrion.runtime.crowding import Crowding, in_flight
from chrion.runtime.execution import engine
from chrion.runtime.execution.engine import PlainEngine
from tests.helpers import branches

SESSION: Any = object()


class OneThread:
    """Stands for an open one-thread session, and counts its uses."""

    uses = 0

    def get(self) -> Any:
        """Return the session."""
        self.uses += 1
        return SESSION


def crowded(crowding: Crowding, count: int, requests: int = 1, *, capacity: int = 1) -> list[object]:
    """Return the sessions of some requests, while so many are in flight."""
    engine: Any = SimpleNamespace(capacity=capacity)
    in_flight.extend([None] * count)
    found = [crowding.engine(engine) for _ in range(requests)]
    for _ in range(count):
        in_flight.pop()
    return found


@pytest.fixture(autouse=True)
def _nothing_in_flight() -> Iterator[None]:
    assert not in_flight
    yield
    in_flight.clear()


@pytest.fixture
def clock() -> list[float]:
    """Return the time in seconds that the crowding reads."""
    return [0.0]


def persistent(clock: list[float]) -> Crowding:
    """Return a crowding after many crowded requests."""
    crowding = Crowding(OneThread(), lambda: clock[0])  # type: ignore[arg-type]
    crowded(crowding, 2, 32)
    return crowding


def test_the_session_is_used_when_crowds_persist(clock: list[float]) -> None:
    """A few requests that happen to overlap do not open the session."""
    one_thread = OneThread()
    crowding = Crowding(one_thread, lambda: clock[0])  # type: ignore[arg-type]
    assert crowded(crowding, 2, 31) == [None] * 31
    assert not one_thread.uses
    assert crowded(crowding, 2, 10) == [SESSION] * 10


def test_the_session_is_used_when_a_crowd_of_slow_requests_lasts(clock: list[float]) -> None:
    """Where a request takes a tenth of a second, 32 of them would take too long."""
    crowding = Crowding(OneThread(), lambda: clock[0])  # type: ignore[arg-type]
    found = []
    for _ in range(6):
        found += crowded(crowding, 2)
        clock[0] += 0.05
    assert found == [None] * 4 + [SESSION] * 2
    clock[0] += 1.0
    assert crowded(crowding, 2) == [SESSION]  # further crowds need no patience


def test_requests_that_overlap_now_and_then_are_no_crowd(clock: list[float]) -> None:
    """After a tenth of a second without a crowd, patience starts anew."""
    crowding = Crowding(OneThread(), lambda: clock[0])  # type: ignore[arg-type]
    for _ in range(20):
        assert crowded(crowding, 2) == [None]
        clock[0] += 0.15
        assert crowded(crowding, 1) == [None]


@pytest.mark.parametrize("capacity", [1, 2, 15])
def test_a_crowd_is_more_requests_than_the_engine_has_cores_for(clock: list[float], capacity: int) -> None:
    """A plan of two lanes on 16 cores serves eight requests at a time before any of them is crowded."""
    crowding = persistent(clock)
    clock[0] += 1.0
    assert crowded(crowding, capacity, capacity=capacity) == [None]
    assert crowded(crowding, capacity + 1, capacity=capacity) == [SESSION]
    assert crowded(crowding, capacity + 5, capacity=capacity) == [SESSION]


@pytest.mark.parametrize(("cores", "capacity"), [(1, 1), (2, 1), (16, 15)])
def test_a_plain_session_is_crowded_if_there_are_as_many_requests_as_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, capacity: int
) -> None:
    """With fewer requests, several threads for each are faster; a single request is never crowded."""
    monkeypatch.setattr(engine, "physical_cores", lambda: tuple(range(cores)))
    assert PlainEngine(branches().SerializeToString(), None, None, None, "").capacity == capacity


def test_requests_stay_crowded_for_a_while(clock: list[float]) -> None:
    """A single caller returns to the plan a tenth of a second after the last crowd."""
    crowding = persistent(clock)
    clock[0] += 0.09
    assert crowded(crowding, 1) == [SESSION]
    assert crowding.active
    clock[0] += 0.02
    assert crowded(crowding, 1) == [None]
    assert not crowding.active


def test_requests_of_all_sessions_count(clock: list[float]) -> None:
    """Two sessions with one request each share the cores, so both requests are crowded."""
    first = persistent(clock)
    clock[0] += 1.0
    assert crowded(first, 1) == [None]
    in_flight.append(None)  # a request of the second session
    assert crowded(first, 1) == [SESSION]
    in_flight.pop()
