"""Ready requests of a device in the order in which they start, without a clock.

These rules are those of the model server and of the simulator:

- The requests of one model and priority form a line; those that start alone and have no ranks may share one line of all
  models. The first requests of a line start together as a batch, if they have equal keys and not more rows than a batch
  may have; one that does not fit lets smaller ones behind it pass.
- A batch that has room waits for further requests of its line until a delay after its oldest request became ready;
  other lines may start meanwhile. It does not wait if requests of its line cannot join it.
- Of the lines whose first batch does not wait, the one of the highest priority starts first, and of equal ones the one
  whose oldest request became ready first: to wait for others costs a batch no place.
- Requests of a line may have ranks. Those of a lower rank go before others, and leave them their places in the order of
  all lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count, islice
from math import inf
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class BatchLimits(NamedTuple):
    """What a batch of a model may have."""

    max_rows: int = 1
    #: Time for which a request waits for others.
    delay_ms: float = 0.0


#: A request starts alone.
ALONE = BatchLimits()
#: Outdated entries of lines that are kept beyond twice the number of lines (a choice, not measured).
_OUTDATED = 64


class Line(Generic[T]):
    """Requests of one priority, of a model or of all models.

    Attributes:
        items: The requests in the order in which they start, each after a number and the time at which it, or the
            request of a higher rank whose place it has, became ready.
    """

    __slots__ = ("delayed", "items", "limits", "name", "opened", "priority")

    def __init__(self, name: int, priority: float, limits: BatchLimits) -> None:
        self.name, self.priority, self.limits = name, priority, limits
        self.items: deque[tuple[int, float, T]] = deque()
        #: The first places with which the line was entered among those that may start, and among those that wait.
        self.opened = self.delayed = -1

    @property
    def order(self) -> tuple[float, int]:
        """What lines are sorted by."""
        return -self.priority, self.items[0][0]

    @property
    def requests(self) -> list[T]:
        """The requests in the order in which they start."""
        return [item[2] for item in self.items]


#: What lines are sorted by, the number of the first request then, and the line.
_Entry = tuple[float, int, Line[T]]


class ReadyQueue(Generic[T]):
    """The queue of one device.

    Args:
        shape: Returns the key of a request's batch, None if it starts alone, and its rows.
        rank: Returns the rank of a request; None if all are equal.
        tickets: Numbers that order the requests of all devices of a server.

    Attributes:
        lines: Lines by name and priority; one that all models share may be empty.
        open: Entries of lines that may start, the next one first; empty if :meth:`head` has found none.
    """

    def __init__(
        self,
        shape: Callable[[T], tuple[Hashable, int]],
        rank: Callable[[T], Any] | None = None,
        tickets: Iterator[int] | None = None,
    ) -> None:
        self.lines: dict[tuple[int, float], Line[T]] = {}
        self._shape, self._rank = shape, rank
        self._tickets = count() if tickets is None else tickets
        #: Heaps, which may have outdated entries: lines by their order, and lines by the time until which they wait.
        self.open: list[_Entry[T]] = []
        self._delayed: list[_Entry[T]] = []

    def add(self, now: float, request: T, name: int, priority: float, limits: BatchLimits = ALONE) -> None:
        """Add a request that has become ready to the line of its model, or of all models whose requests start alone."""
        line = self.lines.get((name, priority))
        if line is None:
            line = self.lines[name, priority] = Line(name, priority, limits)
        items = line.items
        items.append((next(self._tickets), now, request))
        if len(items) > 1 and self._rank and self._rank(request) < self._rank(items[-2][2]):
            ordered = sorted(line.requests, key=self._rank)
            line.items = deque((*item[:2], other) for item, other in zip(items, ordered, strict=True))
        if line.opened != items[0][0]:
            self._settle(line)

    def head(self, now: float) -> Line[T] | None:
        """Return the line whose first batch is the next to start; None if all batches wait."""
        while self._delayed and self._delayed[0][0] <= now:
            _, ticket, line = heappop(self._delayed)
            if line.delayed == ticket:
                line.delayed = -1
            if line.items and line.opened < ticket == line.items[0][0]:
                line.opened = ticket
                heappush(self.open, (-line.priority, ticket, line))
        while self.open:
            _, ticket, line = self.open[0]
            if line.items and line.items[0][0] == ticket:  # _is_current, without a call
                return line
            heappop(self.open)
        return None

    def batch(self, line: Line[T]) -> tuple[list[T], int]:
        """Return the first batch of a line, and its rows."""
        found, most = [line.items[0][2]], line.limits.max_rows
        key, rows = self._shape(found[0])
        if key is None:
            return found, most
        for _, _, request in islice(line.items, 1, None):
            if rows >= most:
                break
            own_key, own_rows = self._shape(request)
            if own_key == key and rows + own_rows <= most:
                found.append(request)
                rows += own_rows
        return found, rows

    def take(self, line: Line[T], is_late: Callable[[T], bool] | None = None) -> tuple[Sequence[T], bool]:
        """Remove the first batch of a line, which starts; or, if some of its requests are late, these.

        Args:
            line: The line.
            is_late: Returns whether a request must not start any more; None if all may.

        Returns:
            The requests, and whether they are late: the rest of the batch then forms anew.
        """
        batch = self.batch(line)[0] if line.limits.max_rows > 1 else line.items[0][2:]
        late = [request for request in batch if is_late(request)] if is_late else ()
        if late or line.limits.max_rows > 1:
            self.remove(line, late or batch)
        else:
            line.items.popleft()
            self._settle(line)
        return late or batch, bool(late)

    def remove(self, line: Line[T], requests: Sequence[T]) -> None:
        """Remove requests of a line; the rest of a batch that had no room waits again."""
        for request in requests:
            if line.items[0][2] is request:
                line.items.popleft()
            else:
                del line.items[line.requests.index(request)]
        if line.limits.delay_ms and line.items and line.opened == line.items[0][0] and not self._is_complete(line):
            self.open.remove((-line.priority, line.opened, line))
            heapify(self.open)
            line.opened = -1
        self._settle(line)
        for heap in (self.open, self._delayed):
            if len(heap) > 2 * len(self.lines) + _OUTDATED:
                heap[:] = filter(_is_current, heap)
                heapify(heap)

    def ahead_of(self, priority: float) -> list[T]:
        """Return the requests that precede one of a priority that becomes ready now, in order, apart from batches."""
        lines = (line for line in self.lines.values() if line.priority >= priority)
        places = ((-line.priority, ticket, request) for line in lines for ticket, _, request in line.items)
        return [request for *_, request in sorted(places)]  # which differ in their tickets

    @property
    def wait_ends_ms(self) -> float:
        """The first time at which a batch need not wait any longer; infinite for none."""
        while self._delayed and not _is_current(self._delayed[0]):
            heappop(self._delayed)
        return self._delayed[0][0] if self._delayed else inf

    def clear(self) -> list[T]:
        """Remove all requests, and return them."""
        found = [request for line in self.lines.values() for request in line.requests]
        for one in (self.lines, self.open, self._delayed):
            one.clear()
        return found

    def _settle(self, line: Line[T]) -> None:
        """Note when the first batch of a line may start, if it is another one."""
        if not line.items:
            if line.limits is not ALONE or self._rank or line.priority:
                del self.lines[line.name, line.priority]
            return
        ticket, since_ms, _ = line.items[0]
        if line.opened == ticket:
            return
        delay_ms = line.limits.delay_ms
        if not delay_ms or self._is_complete(line):
            line.opened = ticket
            heappush(self.open, (-line.priority, ticket, line))
        elif line.delayed != ticket:
            line.delayed = ticket
            heappush(self._delayed, (since_ms + delay_ms, ticket, line))

    def _is_complete(self, line: Line[T]) -> bool:
        """Return whether no further request can join the first batch of a line, or one has not joined it."""
        batch, rows = self.batch(line)
        return rows >= line.limits.max_rows or len(batch) < len(line.items)


def _is_current(entry: _Entry[Any]) -> bool:
    """Return whether the first request of an entry's line is still the same."""
    _, ticket, line = entry
    return bool(line.items) and line.items[0][0] == ticket
