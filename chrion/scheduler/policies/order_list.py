"""Order-maintenance list: constant-time comparison of two positions, insertion in O(log n) amortised.

Every position has an integer tag, and tags increase along the list. Insertion takes a tag between those of two
neighbours. If there is none left, the tags of the smallest aligned range that is sparse enough are spread evenly again
(Bender, Cole, Demaine, Farach-Colton, Zito: Two simplified algorithms for maintaining order in a list, ESA 2002).
Spreading preserves the order, so that heaps of keys remain heaps.
"""

from __future__ import annotations

#: Between 1 and 2: a range of 2^i tags is sparse enough if it holds fewer than (2 / _GROWTH)^i elements.
_GROWTH = 1.4
_TAGS = 1 << 62


class OrderKey:
    """An item's position in an :class:`OrderList`; keys of one list compare by position."""

    __slots__ = ("following", "item", "previous", "tag")

    def __init__(self, item: int, tag: int) -> None:
        self.item = item
        self.tag = tag
        self.previous = self.following = self

    def __lt__(self, other: OrderKey) -> bool:
        return self.tag < other.tag


class OrderList:
    """A doubly linked list of keys between two sentinels."""

    def __init__(self) -> None:
        #: The sentinel before the first item.
        self.head = OrderKey(-1, 0)
        tail = OrderKey(-1, _TAGS)
        self.head.following, tail.previous = tail, self.head

    def insert(self, item: int, after: OrderKey) -> OrderKey:
        """Insert ``item`` directly after a key of this list, and return its key."""
        if after.following.tag - after.tag < 2:
            _spread(after)
        key = OrderKey(item, (after.tag + after.following.tag) // 2)
        key.previous, key.following = after, after.following
        key.previous.following = key.following.previous = key
        return key

    def remove(self, key: OrderKey) -> None:
        """Remove a key, which must not be used to insert items any more."""
        key.previous.following, key.following.previous = key.following, key.previous
        del key.previous, key.following  # without cycles, a key is freed with its last reference


def _spread(key: OrderKey) -> None:
    """Spread the tags around ``key`` evenly over the smallest aligned range that is sparse enough.

    The sentinels keep their tags: the first is 0 and starts every range that contains it, the last is outside all.
    """
    low = high = key
    count = size = 1
    capacity = 1.0
    while count >= capacity or count * 2 > size:
        size, capacity = size * 2, capacity * 2 / _GROWTH
        start = key.tag // size * size
        while low.previous.tag >= start and low.previous is not low:
            low = low.previous
            count += 1
        while high.following.tag < start + size:
            high = high.following
            count += 1
    step, element = size // count, low
    for at in range(count):
        element.tag = start + at * step
        element = element.following
