"""Timing of calls, on a clock that the calls themselves advance."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from chrion import timing


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return work of 1 s, then 2 s, 3 s and so on."""
    now, calls = [100.0], [0]

    def call() -> None:
        calls[0] += 1
        now[0] += calls[0]

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return call


def test_one_call(work: Callable[[], None]) -> None:
    """The duration of one call is in milliseconds."""
    assert timing.time_call(work) == 1e3


def test_a_number_of_calls(work: Callable[[], None]) -> None:
    """Each call has its own duration, in order."""
    assert timing.time_calls(work, 3) == [1e3, 2e3, 3e3]


@pytest.mark.parametrize(
    ("end_s", "min_calls", "calls"),
    [(103.5, 0, 3), (103.0, 0, 2), (103.0, 1, 2), (100.0, 0, 0), (100.0, 2, 2)],
)
def test_calls_until_a_time(work: Callable[[], None], end_s: float, min_calls: int, calls: int) -> None:
    """The last call that starts before the end is finished, and the minimum number of calls is made.

    Calls start at 100, 101, 103 and 106 s.
    """
    assert timing.time_calls_until(work, end_s, min_calls) == [1e3 * (call + 1) for call in range(calls)]
