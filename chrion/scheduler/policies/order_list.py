"""A list that keeps its elements comparable: "who stands first?" in constant time, insertion in O(log n) amortised.

Elements carry integer tags that grow along the list. Insertion takes a tag between two neighbours; where there is
none left, the smallest aligned range of tags that is sparse enough is spread out evenly again (Bender, Cole, Demaine,
Farach-Colton, Zito: Two simplified algorithms for maintaining order in a list, ESA 2002). Spreading keeps the order,
so heaps of places stay heaps.
"""

from __future__ import annotations

#: A range of 2^i tags is sparse enough with fewer than (2 / _GROWTH)^i elements; between 1 and 2.
_GROWTH = 1.4
_TAGS = 1 << 62


class Place:
    """An element and where it stands. Compares by position in its list."""

    __slots__ = ("after", "before", "item", "tag")

    def __init__(self, item: int, tag: int) -> None:
        self.item = item
        self.tag = tag
        self.before = self.after = self

    def __lt__(self, other: Place) -> bool:
        return self.tag < other.tag


class Places:
    """The list. It starts with one sentinel at each end."""

    def __init__(self) -> None:
        self.first = Place(-1, 0)
        end = Place(-1, _TAGS)
        self.first.after, end.before = end, self.first

    def insert(self, item: int, behind: Place) -> Place:
        """Put ``item`` right behind a place of this list."""
        if behind.after.tag - behind.tag < 2:
            _spread(behind)
        place = Place(item, (behind.tag + behind.after.tag) // 2)
        place.before, place.after = behind, behind.after
        place.before.after = place.after.before = place
        return place

    def remove(self, place: Place) -> None:
        """Take a place out."""
        place.before.after, place.after.before = place.after, place.before


def _spread(place: Place) -> None:
    """Spread the tags around ``place`` evenly over the smallest aligned range that is sparse enough.

    The sentinels keep their tags: the first is 0 and starts every range it is in, the last lies outside of all.
    """
    low = high = place
    count = size = 1
    capacity = 1.0
    while count >= capacity or count * 2 > size:
        size, capacity = size * 2, capacity * 2 / _GROWTH
        start = place.tag // size * size
        while low.before.tag >= start and low.before is not low:
            low = low.before
            count += 1
        while high.after.tag < start + size:
            high = high.after
            count += 1
    step, element = size // count, low
    for at in range(count):
        element.tag = start + at * step
        element = element.after
