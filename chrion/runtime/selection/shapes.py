"""Selection of the input shapes that are tuned, for models with free dimensions."""

from __future__ import annotations

from collections.abc import Hashable

#: Number of shapes that are tuned at their first request: as many as may have a plan.
_AT_ONCE = 8
#: Later shapes are tuned after this many requests; again, if the engine is evicted, after four times as many each time.
#: (Choices, not measured.)
_REQUESTS, _GROWTH = 16, 4
#: Number of counted requests after which all numbers of recent requests are halved.
_HALF_LIFE = 4096
#: Maximum number of shapes whose requests are counted; further shapes are not tuned.
_COUNTED = 4096


class ShapeCounter:
    """Counts requests by shape and decides when to tune a shape.

    A model may see a new shape in every request. Tuning each would never end, so it is limited to shapes that are
    requested often. The work for a shape that is evicted again and again grows with the logarithm of its requests.
    """

    def __init__(self) -> None:
        self._counts: dict[Hashable, int] = {}
        self._due: dict[Hashable, int] = {}
        self._recent: dict[Hashable, int] = {}
        self._counted = 0
        #: Number of times that all numbers of recent requests were halved.
        self.halvings = 0

    def count(self, shapes: Hashable) -> bool:
        """Count a request whose shapes have no engine of their own; return whether to tune them now."""
        if shapes not in self._counts and len(self._counts) >= _COUNTED:
            return False
        self._recent[shapes] = self._recent.get(shapes, 0) + 1
        self._counted += 1
        if self._counted % _HALF_LIFE == 0:
            self._recent = {known: count // 2 for known, count in self._recent.items()}
            self.halvings += 1
        count = self._counts[shapes] = self._counts.get(shapes, 0) + 1
        due = self._due.setdefault(shapes, 1 if len(self._due) < _AT_ONCE else _REQUESTS)
        if count < due:
            return False
        self._counts[shapes] = 0
        self._due[shapes] = max(due, _REQUESTS) * _GROWTH
        return True

    def recent(self, shapes: Hashable) -> int:
        """Return the number of recent requests of a shape: each was halved every 4096 requests since."""
        return self._recent.get(shapes, 0)
