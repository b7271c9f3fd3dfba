"""The list whose elements can be compared."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from chrion.scheduler.policies.order_list import OrderKey, OrderList


def positions(places: OrderList) -> list[int]:
    """Items from the first to the last."""
    found, place = [], places.head.following
    while place.item != -1:
        found.append(place.item)
        place = place.following
    return found


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1000)), max_size=200))
def test_places_stand_like_the_elements_of_a_list(steps: list[tuple[bool, int]]) -> None:
    """After any insertions and removals the order is that of a plain list, and comparing two places tells it."""
    places, plain, made = OrderList(), [], {}
    for item, (remove, at) in enumerate(steps):
        if remove and plain:
            gone = plain.pop(at % len(plain))
            places.remove(made.pop(gone))
        else:
            where = at % (len(plain) + 1)
            made[item] = places.insert(item, made[plain[where - 1]] if where else places.head)
            plain.insert(where, item)
    assert positions(places) == plain
    in_order = [made[item] for item in plain]
    assert all(a < b and not b < a for a, b in itertools.pairwise(in_order))


def test_inserting_at_one_spot_runs_out_of_tags_and_recovers() -> None:
    """Twenty thousand insertions behind the same place leave strictly growing tags within the two ends."""
    places = OrderList()
    anchor = places.insert(0, places.head)
    for item in range(1, 20_000):
        places.insert(item, anchor)
    assert positions(places) == [0, *range(19_999, 0, -1)]
    tags, place = [], places.head
    while place.following is not place:
        tags.append(place.tag)
        place = place.following
    assert tags == sorted(set(tags))
    assert tags[0] == 0


def test_appending_keeps_order() -> None:
    """Insertions each behind the last one grow towards the far end."""
    places = OrderList()
    last: OrderKey = places.head
    for item in range(5000):
        last = places.insert(item, last)
    assert positions(places) == list(range(5000))
