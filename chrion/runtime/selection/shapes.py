"""Shapes worth tuning: which input shapes of a model with free dimensions get an engine of their own."""

from __future__ import annotations

from collections.abc import Hashable

#: The first shapes are tuned at their first request.
_AT_ONCE = 8
#: A later shape is tuned at this many requests; each further time, after its engine was evicted, at four times as many.
_REQUESTS, _GROWTH = 16, 4
#: Shapes whose requests are counted; beyond them, further shapes are not tuned.
_COUNTED = 4096


class ShapeCounter:
    """Counts requests by shape and decides when a shape is to be tuned.

    A model may see a new shape in every request. Tuning each would never end, so it is limited to shapes that are
    requested often. The work for a shape that is evicted again and again grows with the logarithm of its requests.
    """

    def __init__(self) -> None:
        self._counts: dict[Hashable, int] = {}
        self._due: dict[Hashable, int] = {}

    def count(self, shapes: Hashable) -> bool:
        """Count a request of shapes without an engine of their own; return whether to tune them now."""
        if shapes not in self._counts and len(self._counts) >= _COUNTED:
            return False
        count = self._counts[shapes] = self._counts.get(shapes, 0) + 1
        due = self._due.setdefault(shapes, 1 if len(self._due) < _AT_ONCE else _REQUESTS)
        if count < due:
            return False
        self._counts[shapes] = 0
        self._due[shapes] = max(due, _REQUESTS) * _GROWTH
        return True
