"""Timing of calls."""

from __future__ import annotations

import itertools
import time

import pytest

from chrion.common.timing import time_call, time_calls, time_calls_until
from helpers import FakeClock


def test_one_call() -> None:
    """The duration of one call is in milliseconds."""
    start_s = time.perf_counter()
    found_ms = time_call(lambda: time.sleep(0.01))
    assert 10 <= found_ms <= (time.perf_counter() - start_s) * 1e3


def test_a_number_of_calls() -> None:
    """Each call has its own duration, in order."""
    pauses_s = iter([0.02, 0.0, 0.01])
    long, _, short = time_calls(lambda: time.sleep(next(pauses_s)), 3)
    assert long >= 20
    assert short >= 10


@pytest.mark.parametrize(
    ("end_s", "min_calls", "calls"),
    [(103.5, 0, 3), (103.0, 0, 2), (103.0, 1, 2), (100.0, 0, 0), (100.0, 2, 2)],
)
def test_calls_until_a_time(end_s: float, min_calls: int, calls: int) -> None:
    """The last call that starts before the end is finished, and the minimum number of calls is made.

    Calls start at 100, 101, 103 and 106 s.
    """
    clock, durations_s = FakeClock(100.0), itertools.count(1)

    def work() -> None:
        clock.now_s += next(durations_s)

    assert time_calls_until(work, end_s, min_calls, clock) == [1e3 * (call + 1) for call in range(calls)]
