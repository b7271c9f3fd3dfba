"""Packing of values into device buffers, so that values share memory if their lifetimes cannot overlap.

Lifetimes are a partial order (:meth:`DeviceValue.precedes`): values that are not ordered may be alive at the same time.

Values are packed in the order in which they are written. A value conflicts with the earlier ones that it does not
follow. A lane's steps know ever more, so for each lane that writes, an earlier value is released once and for all:
:class:`_Lane` keeps it in a heap by the count that it waits for, and never tests the others.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

#: Number of ended steps by position: the accelerator's lanes 0, -1, ..., then the copy lanes to and from the device.
Clock = list[int]
#: Multiple of bytes at which values begin in a buffer, as in the arenas of onnxruntime.
ALIGNMENT = 256


class Place(NamedTuple):
    """The place of a value in the buffers of a frame."""

    buffer: int
    #: Position in the buffer in bytes.
    offset: int = 0


class DeviceValue:
    """A value in a frame, and the steps that access it.

    Args:
        kind: Type and shape.
        size: Size in bytes.
        known: The steps that have ended before the one that writes it.
        writer: The position in the clock of the lane that writes it.

    Attributes:
        ends: The last access of each lane: its position in the clock, and the lane's count when the access has ended.
    """

    __slots__ = ("ends", "kind", "known", "size", "writer")

    def __init__(self, kind: str, size: int, known: Clock, writer: int) -> None:
        self.kind, self.size, self.known, self.writer = kind, size, known, writer
        self.ends = {writer: known[writer] + 1}

    def precedes(self, other: DeviceValue) -> bool:
        """Return whether all accesses end before ``other`` is written, in any run."""
        return self.blocked_at(other.known) is None

    def blocked_at(self, known: Clock) -> int | None:
        """Return a position at which a step with this knowledge has to wait for an access; None if there is none."""
        for at, count in self.ends.items():
            if known[at] < count:
                return at
        return None


def pack(values: Sequence[DeviceValue]) -> tuple[tuple[int, ...], list[Place]]:
    """Give each value an offset in one buffer: in the smallest gap between conflicting values in which it fits.

    Args:
        values: Each after all values that precede it.

    Returns:
        The size of the buffer, if there is any value, and the place of each value.
    """
    lanes = {value.writer: _Lane(values) for value in values}
    spans = {writer: _Spans() for writer in lanes}
    places: list[Place] = []
    ends: list[int] = []
    for at, value in enumerate(values):
        own = spans[value.writer]
        for other in lanes[value.writer].release(value.known):
            own.remove(places[other].offset, ends[other], other)
        size = -(-value.size // ALIGNMENT) * ALIGNMENT
        offset = own.find(size)
        places.append(Place(0, offset))
        ends.append(offset + size)
        for writer, lane in lanes.items():
            lane.add(at)
            spans[writer].add(offset, offset + size, at)
    return ((max(ends),) if values else ()), places


class _Spans:
    """The parts of a buffer that values occupy, as one lane sees them."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int, int]] = []  # (offset, end, value), sorted
        self._top = 0
        #: The least size for which there is known to be no gap.
        self._no_gap: float = math.inf

    def add(self, offset: int, end: int, at: int) -> None:
        """Add the part of value ``at``."""
        insort(self._spans, (offset, end, at))
        if offset > self._top:  # there is a gap before a value that another lane has placed
            self._no_gap = math.inf
        self._top = max(self._top, end)

    def remove(self, offset: int, end: int, at: int) -> None:
        """Remove the part of value ``at``."""
        del self._spans[bisect_left(self._spans, (offset, end, at))]
        self._no_gap = math.inf
        if end == self._top:
            self._top = max((span[1] for span in self._spans), default=0)

    def find(self, size: int) -> int:
        """Return the offset of the smallest gap of a size, or the end of the last part."""
        if size >= self._no_gap:
            return self._top
        end = best = smallest = 0
        for offset, until, _ in self._spans:
            if offset > end:
                gap = offset - end
                if gap == size:
                    return end
                if gap > size and (not smallest or gap < smallest):
                    best, smallest = end, gap
            if until > end:  # noqa: PLR1730 - most time is spent here, and a call of max takes twice as long
                end = until
        if smallest:
            return best
        self._no_gap = size
        return end


def share_buffers(values: Sequence[DeviceValue]) -> tuple[tuple[int, ...], list[Place]]:
    """Give each value a whole buffer of its kind: the one that was written last among those it may follow.

    Values of one buffer are a chain of the partial order, so the fewest buffers of a kind are its width (Dilworth).

    Args:
        values: Each after all values that precede it.

    Returns:
        The size of each buffer, and the place of each value.
    """
    lanes = {value.writer: _Lane(values) for value in values}
    #: By lane and kind: released values, which a value of the lane may follow if none has done so.
    free: dict[tuple[int, str], list[int]] = {}
    followed: set[int] = set()
    sizes: list[int] = []
    places: list[Place] = []
    for at, value in enumerate(values):
        for other in lanes[value.writer].release(value.known):
            insort(free.setdefault((value.writer, values[other].kind), []), other)
        released = free.get((value.writer, value.kind), [])
        while released and released[-1] in followed:
            released.pop()
        if released:
            before = released.pop()
            followed.add(before)
            places.append(places[before])
        else:
            places.append(Place(len(sizes)))
            sizes.append(value.size)
        for lane in lanes.values():
            lane.add(at)
    return tuple(sizes), places


class _Lane:
    """The values that the steps of one lane conflict with."""

    def __init__(self, values: Sequence[DeviceValue]) -> None:
        self._values = values
        #: Values by the position in the clock at which they wait: (count, value).
        self._waiting: dict[int, list[tuple[int, int]]] = {}

    def add(self, at: int) -> None:
        """Add a value."""
        self._wait(at, self._values[at].writer)

    def release(self, known: Clock) -> list[int]:
        """Remove and return the values of which all accesses have ended."""
        released = []
        for position, heap in list(self._waiting.items()):
            while heap and heap[0][0] <= known[position]:
                at = heappop(heap)[1]
                blocked = self._values[at].blocked_at(known)
                if blocked is None:
                    released.append(at)
                else:
                    self._wait(at, blocked)
        return released

    def _wait(self, at: int, position: int) -> None:
        heappush(self._waiting.setdefault(position, []), (self._values[at].ends[position], at))
