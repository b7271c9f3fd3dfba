"""The order-maintenance list."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from chrion.scheduler.policies.order_list import OrderKey, OrderList


def items(order: OrderList) -> list[int]:
    """Return the items from the first to the last."""
    found, key = [], order.head.following
    while key.item != -1:
        found.append(key.item)
        key = key.following
    return found


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1000)), max_size=200))
def test_keys_compare_like_positions_in_a_plain_list(steps: list[tuple[bool, int]]) -> None:
    """After any insertions and removals the items are those of a plain list, and keys are ordered by position."""
    order, plain, made = OrderList(), [], {}
    for item, (remove, at) in enumerate(steps):
        if remove and plain:
            gone = plain.pop(at % len(plain))
            order.remove(made.pop(gone))
        else:
            where = at % (len(plain) + 1)
            made[item] = order.insert(item, made[plain[where - 1]] if where else order.head)
            plain.insert(where, item)
    assert items(order) == plain
    in_order = [made[item] for item in plain]
    assert all(a < b and not b < a for a, b in itertools.pairwise(in_order))


def test_tags_are_spread_when_they_run_out() -> None:
    """After twenty thousand insertions behind the same key, tags still increase strictly."""
    order = OrderList()
    anchor = order.insert(0, order.head)
    for item in range(1, 20_000):
        order.insert(item, anchor)
    assert items(order) == [0, *range(19_999, 0, -1)]
    tags, key = [], order.head
    while key.following is not key:
        tags.append(key.tag)
        key = key.following
    assert tags == sorted(set(tags))
    assert tags[0] == 0


def test_appending_keeps_order() -> None:
    """Each of five thousand items is inserted behind the last one."""
    order = OrderList()
    last: OrderKey = order.head
    for item in range(5000):
        last = order.insert(item, last)
    assert items(order) == list(range(5000))
