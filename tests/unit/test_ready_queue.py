"""The queue of ready requests: its delays after removals, and its memory."""

import tracemalloc
from math import inf

import pytest

from chrion.serving.manager.ready_queue import ALONE, BatchLimits, ReadyQueue

#: Two requests make a batch, and one waits for another for this time.
PAIR = BatchLimits(2, 50.0)


def pairs() -> ReadyQueue[str]:
    """Return a queue of requests that can all share a batch."""
    return ReadyQueue[str](lambda _: ("key", 1), lambda _: 0)


@pytest.mark.parametrize("waited", [False, True])
def test_the_rest_of_a_batch_waits_again_after_a_removal(*, waited: bool) -> None:
    """A batch that has room starts when its delay is over, however often another request joined and left it."""
    queue = pairs()
    queue.add(0.0, "a", 0, 0.0, PAIR)
    if waited:
        assert queue.head(0.0) is None
    for joined in (1.0, 2.0, 3.0):
        queue.add(joined, "b", 0, 0.0, PAIR)
        line = queue.head(joined)
        assert line is not None
        assert queue.batch(line) == (["a", "b"], 2)
        queue.remove(line, ["b"])
        assert queue.head(joined) is None
        assert queue.wait_ends_ms == 50.0
    assert queue.head(49.9) is None
    assert queue.head(50.0) is line
    queue.add(51.0, "b", 0, 0.0, PAIR)
    queue.remove(line, ["b"])
    assert queue.head(51.0) is line, "its delay is over"
    assert queue.take(line) == (["a"], False)
    assert queue.head(52.0) is None
    assert queue.wait_ends_ms == inf


def test_the_second_request_of_a_batch_waits_as_long_as_the_first() -> None:
    """After the first has left, the delay counts from the second."""
    queue = pairs()
    queue.add(0.0, "a", 0, 0.0, PAIR)
    queue.add(1.0, "b", 0, 0.0, PAIR)
    line = queue.head(1.0)
    assert line is not None
    queue.remove(line, ["a"])
    assert queue.head(50.9) is None
    assert queue.head(51.0) is line


@pytest.mark.parametrize("limits", [ALONE, BatchLimits(9, 0.5)])
def test_requests_that_leave_behind_others_take_no_memory(limits: BatchLimits) -> None:
    """Requests of a low priority come and expire while one of a higher priority is at the head."""
    queue = ReadyQueue[int](lambda _: (0, 1))
    queue.add(0.0, -1, 0, 1.0)
    tracemalloc.start()
    try:
        for number in range(20_000):
            queue.add(number, number, 1, 0.0, limits)
            head = queue.head(number + 0.5)
            assert head is not None
            assert head.priority == 1.0
            queue.remove(queue.lines[1, 0.0], [number])
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()


def test_batches_that_start_before_their_delay_is_over_take_no_memory() -> None:
    """Full batches start at once, however long one with room would wait, and no wait is left of them."""
    queue = ReadyQueue[int](lambda _: (0, 1))
    limits = BatchLimits(2, 1e9)
    tracemalloc.start()
    try:
        for number in range(0, 40_000, 2):
            queue.add(number, number, 0, 0.0, limits)
            assert queue.head(number) is None
            queue.add(number, number + 1, 0, 0.0, limits)
            line = queue.head(number)
            assert line is not None
            assert queue.take(line) == ([number, number + 1], False)
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()
    assert queue.wait_ends_ms == inf


def test_late_requests_leave_their_batch_to_others() -> None:
    """A batch of which some requests are late loses these, and forms anew with those that had no room."""
    queue = ReadyQueue[int](lambda _: (0, 1))
    for number in range(4):
        queue.add(0.0, number, 0, 0.0, BatchLimits(2))
    line = queue.head(0.0)
    assert line is not None
    assert queue.take(line, lambda request: request == 1) == ([1], True)
    assert queue.take(line, lambda request: request == 1) == ([0, 2], False)
    assert queue.take(line) == ([3], False)


def test_lines_of_priorities_are_forgotten() -> None:
    """A queue keeps no line for a priority whose requests have started."""
    queue = ReadyQueue[int](lambda _: (None, 1))
    for priority in range(100):
        queue.add(0.0, priority, -1, float(priority))
        line = queue.head(0.0)
        assert line is not None
        assert queue.take(line) == ((priority,), False)
    assert len(queue.lines) <= 1
