"""Detection of requests that wait for one another."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from chrion.runtime import arena_contention
from chrion.runtime.arena_contention import ArenaContention, voluntary_switches
from helpers import FakeClock

#: Enough requests for a decision: 16 samples, one in four requests.
ENOUGH = 64


@pytest.fixture
def switch_interval() -> Iterator[Callable[[float], None]]:
    """Return the function that sets Python's switch interval in seconds."""
    before = sys.getswitchinterval()
    yield sys.setswitchinterval
    sys.setswitchinterval(before)


def serve(requests: Sequence[int], request_s: float = 0.0) -> int:
    """Record requests of given voluntary context switches and duration; return how often contention was found."""
    switches, clock = [1000], FakeClock()
    found: list[int] = []
    counter = ArenaContention(lambda: found.append(1), clock, lambda: switches[0])
    for request in requests:
        sample = counter.sample()
        switches[0] += request
        clock.now_s += request_s
        if sample:
            counter.add(sample)
    return len(found)


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([200] * ENOUGH, 1),
        ([200] * (ENOUGH - 1), 0),
        ([4] * ENOUGH * 10, 0),
        ([0] * (ENOUGH - ENOUGH * 4 // 10) + [2000] * (ENOUGH * 4 // 10), 0),
        ([0] * ENOUGH + [100] * ENOUGH, 1),
    ],
    ids=["contention", "too few", "locks of Python", "a busy second", "later"],
)
def test_contention_is_found_by_the_median(requests: Sequence[int], expected: int) -> None:
    """Most requests of a number of samples must have many voluntary context switches."""
    assert serve(requests) == expected


@pytest.mark.parametrize(("request_s", "expected"), [(0.1, 1), (0.4, 0)])
def test_waits_for_the_gil_are_not_contention(
    request_s: float, expected: int, switch_interval: Callable[[float], None]
) -> None:
    """A thread that waits for the GIL wakes up every 5 ms: 80 times in a request of 0.4 s."""
    switch_interval(0.005)
    assert serve([80] * ENOUGH, request_s) == expected


def test_any_switch_interval(switch_interval: Callable[[float], None]) -> None:
    """Python reports 0 for an interval below a microsecond."""
    switch_interval(1e-7)
    assert sys.getswitchinterval() == 0.0
    assert serve([2000] * ENOUGH, 0.1) == 1


def test_a_system_without_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sampled where the system does not count switches by thread."""
    monkeypatch.setattr(arena_contention, "resource", None)
    counter = ArenaContention(lambda: None)
    assert [counter.sample() for _ in range(ENOUGH)] == [None] * ENOUGH


@pytest.mark.skipif(voluntary_switches() is None, reason="the system does not count switches by thread")
def test_a_thread_that_waits_has_switches_and_others_have_not() -> None:
    """The system counts each wait of a thread for that thread."""
    waits = 50
    counts: list[int] = []

    def wait() -> None:
        before = voluntary_switches() or 0
        for _ in range(waits):
            threading.Event().wait(0.001)
        counts.append((voluntary_switches() or 0) - before)

    thread = threading.Thread(target=wait)
    before = voluntary_switches() or 0
    thread.start()
    thread.join()
    assert counts[0] >= waits // 2, "a thread that is late for its wait does not wait"
    assert (voluntary_switches() or 0) - before < waits // 2
