"""Input shapes that are worth tuning."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from chrion.runtime.selection.shapes import ShapeCounter
from property_tests import examples


def test_the_first_shapes_are_tuned_at_once() -> None:
    """Each of the first eight shapes is tuned at its first request."""
    counter = ShapeCounter()
    assert [counter.count(shape) for shape in range(10)] == [True] * 8 + [False] * 2


def test_a_later_shape_is_tuned_when_it_is_requested_often() -> None:
    """A later shape is tuned at its sixteenth request."""
    counter = ShapeCounter()
    for shape in range(8):
        counter.count(shape)
    assert [counter.count("late") for _ in range(20)].index(True) == 15


def test_the_work_for_a_shape_grows_with_the_logarithm_of_its_requests() -> None:
    """Each further time takes four times as many requests: 16 (4^k - 1) / 3 requests allow k times."""
    counter = ShapeCounter()
    for shape in range(8):
        counter.count(shape)
    times = sum(counter.count("late") for _ in range(16 * (4**5 - 1) // 3))
    assert times == 5


@examples(100)
@given(st.lists(st.integers(0, 30), max_size=2000))
def test_shapes_are_tuned_after_the_documented_numbers_of_requests(requests: list[int]) -> None:
    """The first eight shapes are tuned at requests 1, 1 + 64, 1 + 64 + 256, ...; later ones at 16, 16 + 64, ..."""
    counter, seen = ShapeCounter(), Counter[int]()
    for shape in requests:
        first = 1 if shape in list(dict.fromkeys(requests))[:8] else 16
        seen[shape] += 1
        due = {first + 64 * (4**k - 1) // 3 for k in range(5)}
        assert counter.count(shape) == (seen[shape] in due)


def test_shapes_that_are_not_requested_again_take_bounded_memory() -> None:
    """A model with a new shape in every request is tuned for the first ones only."""
    counter = ShapeCounter()
    assert sum(counter.count(shape) for shape in range(4096)) == 8
    assert not any(counter.count("late") for _ in range(100))  # no further shape is counted
    assert counter.recent("late") == 0


def test_recent_requests_are_halved() -> None:
    """Each time that 4096 requests have been counted, the numbers of recent requests are halved."""
    counter = ShapeCounter()
    for at in range(2 * 4096):
        assert counter.halvings == at // 4096
        counter.count("late" if at >= 4096 else "early")
    assert (counter.halvings, counter.recent("early"), counter.recent("late")) == (2, 1024, 2048)
