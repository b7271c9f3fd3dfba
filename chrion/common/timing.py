"""Timing of individual calls in ms, for all measurements."""

from __future__ import annotations

import time
from collections.abc import Callable


def time_call(work: Callable[[], object]) -> float:
    """Return the duration of one call in ms."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def time_calls(work: Callable[[], object], count: int) -> list[float]:
    """Return the durations of ``count`` calls in ms."""
    return [time_call(work) for _ in range(count)]


def time_calls_until(
    work: Callable[[], object], end_s: float, min_calls: int = 0, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Call a function repeatedly until an end time.

    Args:
        work: The function.
        end_s: The time after which no further call is started, in seconds of the clock.
        min_calls: The number of calls that are made even after that time.
        clock: Returns the time in seconds.

    Returns:
        The duration of each call in ms.
    """
    times_ms: list[float] = []
    while len(times_ms) < min_calls or clock() < end_s:
        start = clock()
        work()
        times_ms.append((clock() - start) * 1e3)
    return times_ms
