"""Detection of crowded requests, on a fake clock."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest

from chrion.runtime.diversion import Crowding, in_flight
from chrion.runtime.execution.plain_engine import PlainEngine
from helpers import FakeClock, branches
from seams.machine import pretend_cores

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
def clock() -> FakeClock:
    """Return the clock that the crowding reads."""
    return FakeClock()


def persistent(clock: FakeClock) -> Crowding:
    """Return a crowding after many crowded requests."""
    crowding = Crowding(OneThread(), clock)  # type: ignore[arg-type]
    crowded(crowding, 2, 32)
    return crowding


def test_the_session_is_used_when_crowds_persist(clock: FakeClock) -> None:
    """A few requests that happen to overlap do not open the session."""
    one_thread = OneThread()
    crowding = Crowding(one_thread, clock)  # type: ignore[arg-type]
    assert crowded(crowding, 2, 31) == [None] * 31
    assert not one_thread.uses
    assert crowded(crowding, 2, 10) == [SESSION] * 10


def test_the_session_is_used_when_a_crowd_of_slow_requests_lasts(clock: FakeClock) -> None:
    """Where a request takes a tenth of a second, 32 of them would take too long."""
    crowding = Crowding(OneThread(), clock)  # type: ignore[arg-type]
    found = []
    for _ in range(6):
        found += crowded(crowding, 2)
        clock.now_s += 0.05
    assert found == [None] * 4 + [SESSION] * 2
    clock.now_s += 1.0
    assert crowded(crowding, 2) == [SESSION]  # further crowds need no patience


def test_requests_that_overlap_now_and_then_are_no_crowd(clock: FakeClock) -> None:
    """After a tenth of a second without a crowd, patience starts anew."""
    crowding = Crowding(OneThread(), clock)  # type: ignore[arg-type]
    for _ in range(20):
        assert crowded(crowding, 2) == [None]
        clock.now_s += 0.15
        assert crowded(crowding, 1) == [None]


@pytest.mark.parametrize("capacity", [1, 2, 15])
def test_a_crowd_is_more_requests_than_the_engine_has_cores_for(clock: FakeClock, capacity: int) -> None:
    """A plan of two lanes on 16 cores serves eight requests at a time before any of them is crowded."""
    crowding = persistent(clock)
    clock.now_s += 1.0
    assert crowded(crowding, capacity, capacity=capacity) == [None]
    assert crowded(crowding, capacity + 1, capacity=capacity) == [SESSION]
    assert crowded(crowding, capacity + 5, capacity=capacity) == [SESSION]


@pytest.mark.parametrize(("cores", "capacity"), [(1, 1), (2, 1), (16, 15)])
def test_a_plain_session_is_crowded_if_there_are_as_many_requests_as_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, capacity: int
) -> None:
    """With fewer requests, several threads for each are faster; a single request is never crowded."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    engine = PlainEngine(branches().SerializeToString(), options, None, None, "")
    pretend_cores(monkeypatch, range(cores))
    assert engine.capacity == capacity


def test_requests_stay_crowded_for_a_while(clock: FakeClock) -> None:
    """A single caller returns to the plan a tenth of a second after the last crowd."""
    crowding = persistent(clock)
    clock.now_s += 0.09
    assert crowded(crowding, 1) == [SESSION]
    assert crowding.active
    clock.now_s += 0.02
    assert crowded(crowding, 1) == [None]
    assert not crowding.active


def test_requests_of_all_sessions_count(clock: FakeClock) -> None:
    """Two sessions with one request each share the cores, so both requests are crowded."""
    first = persistent(clock)
    clock.now_s += 1.0
    assert crowded(first, 1) == [None]
    in_flight.append(None)  # a request of the second session
    assert crowded(first, 1) == [SESSION]
    in_flight.pop()
