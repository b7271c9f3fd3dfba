"""Packing of values into device buffers, so that values share memory if their lifetimes cannot overlap.

Lifetimes are a partial order (:meth:`DeviceValue.precedes`): values that are not ordered may be alive at the same time.

Values are packed in the order in which they are written. A value conflicts with the earlier ones that it does not
follow. A lane's steps know ever more, so for each lane that writes, an earlier value is released once and for all:
:class:`_Lane` keeps it in a heap by the count that it waits for, and never tests the others.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

#: Number of ended steps by position: the accelerator's lanes 0, -1, ..., then the copy lanes to and from the device.
Clock = list[int]
#: Multiple of bytes at which values begin in a buffer, as in the arenas of onnxruntime.
ALIGNMENT = 256


class BufferPlace(NamedTuple):
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

    def blocked_at(self, known: Clock) -> int | None:
        """Return a position at which a step with this knowledge has to wait for an access; None if there is none."""
        for at, count in self.ends.items():
            if known[at] < count:
                return at
        return None


def pack(values: Sequence[DeviceValue]) -> tuple[tuple[int, ...], list[BufferPlace]]:
    """Give each value an offset in one buffer: in the smallest gap between conflicting values in which it fits.

    Args:
        values: Each after all values that precede it.

    Returns:
        The size of the buffer, if there is any value, and the place of each value.
    """
    lanes = {value.writer: _Lane(values) for value in values}
    spans = {writer: _Spans() for writer in lanes}
    places: list[BufferPlace] = []
    ends: list[int] = []
    for at, value in enumerate(values):
        own = spans[value.writer]
        for other in lanes[value.writer].release(value.known):
            own.change(places[other].offset, ends[other], -1)
        size = -(-value.size // ALIGNMENT) * ALIGNMENT
        offset = own.find(size)
        places.append(BufferPlace(0, offset))
        ends.append(offset + size)
        for writer, lane in lanes.items():
            lane.add(at)
            spans[writer].change(offset, offset + size, 1)
    return ((max(ends),) if values else ()), places


class _Spans:
    """The parts of a buffer that values occupy, as one lane sees them, and the gaps between them.

    The buffer is divided into pieces, each occupied by one number of values throughout: several if they follow each
    other, and only the lane's next step does not follow all of them. A change affects the pieces that it overlaps, as a
    rule few of them, and gaps are found by size, so that no call passes over all values.
    """

    def __init__(self) -> None:
        #: Where each piece begins, ascending, and its number of values; neighbours have different numbers. The last
        #: piece has no values and no end.
        self._begins, self._counts = [0], [0]
        #: The pieces without values that lie before others: (size, offset), sorted.
        self._gaps: list[tuple[int, int]] = []

    def find(self, size: int) -> int:
        """Return the offset of the smallest gap of a size, the first of equal ones, or the end of the last value."""
        at = bisect_left(self._gaps, (size, 0))
        return self._gaps[at][1] if at < len(self._gaps) else self._begins[-1]

    def change(self, offset: int, end: int, change: int) -> None:
        """Change the number of values from ``offset`` to ``end``: 1 adds one, -1 removes it."""
        begins, counts = self._begins, self._counts
        first = max(bisect_left(begins, offset) - 1, 0)  # the last piece that begins before the offset
        last = bisect_right(begins, end) - 1  # the last piece that begins before or at the end
        for gap in self._gaps_between(first, last):
            del self._gaps[bisect_left(self._gaps, gap)]
        at, pieces = first, [(-1, -1)]
        for begin in sorted({offset, end, *begins[first : last + 1]}):
            at += at < last and begins[at + 1] <= begin
            count = counts[at] + (change if offset <= begin < end else 0)
            if count != pieces[-1][1]:
                pieces.append((begin, count))
        begins[first : last + 1] = [begin for begin, _ in pieces[1:]]
        counts[first : last + 1] = [count for _, count in pieces[1:]]
        for gap in self._gaps_between(first, first + len(pieces) - 2):
            insort(self._gaps, gap)

    def _gaps_between(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the gaps among the pieces from ``first`` to ``last``."""
        begins, counts = self._begins, self._counts
        end = min(last + 1, len(begins) - 1)
        return [(begins[at + 1] - begins[at], begins[at]) for at in range(first, end) if not counts[at]]


def share_buffers(values: Sequence[DeviceValue]) -> tuple[tuple[int, ...], list[BufferPlace]]:
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
    places: list[BufferPlace] = []
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
            places.append(BufferPlace(len(sizes)))
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
