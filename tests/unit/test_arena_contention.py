"""Detection of requests that wait for one another."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from chrion.runtime import arena_contention
from chrion.runtime.arena_contention import ArenaContention, voluntary_switches

#: Enough requests for a decision.
ENOUGH = arena_contention._INTERVAL * arena_contention._SAMPLES


def serve(requests: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> int:
    """Record requests with given numbers of voluntary context switches; return how often contention was found."""
    switches = [1000]
    monkeypatch.setattr(arena_contention, "voluntary_switches", lambda: switches[0])
    found: list[int] = []
    counter = ArenaContention(lambda: found.append(1))
    for request in requests:
        sample = counter.sample()
        switches[0] += request
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
def test_contention_is_found_by_the_median(
    requests: Sequence[int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most requests of a number of samples must have many voluntary context switches."""
    assert serve(requests, monkeypatch) == expected


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
