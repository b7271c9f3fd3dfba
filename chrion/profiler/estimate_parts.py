"""Estimated times in parts, by what bounds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Bound(Enum):
    """What bounds a part of a time."""

    ARITHMETIC = "arithmetic"
    #: Traffic of values that fit the caches of one core.
    CACHE = "cache"
    #: Traffic of values that fit a cache of several cores.
    SHARED_CACHE = "shared cache"
    #: All other traffic.
    MEMORY = "memory"
    #: Launches, calls and loops, whatever the amount of arithmetic and traffic.
    OVERHEAD = "overhead"


#: Factors by which parts are multiplied; a bound without a factor has 1.
Scales = Mapping[Bound, float]


@dataclass(frozen=True, slots=True)
class Parts:
    """The estimated time of a node: ``max(arithmetic, traffic) + copies + overhead``."""

    arithmetic_ms: float = 0.0
    traffic_ms: float = 0.0
    #: Copies from one layout to another, before and after the arithmetic.
    copy_ms: float = 0.0
    overhead_ms: float = 0.0
    #: What bounds traffic and copies.
    level: Bound = Bound.CACHE

    def by_bound(self, scales: Scales | None = None) -> dict[Bound, float]:
        """Return the time that each bound takes, in ms; of arithmetic and traffic, only the longer one counts."""
        scales = scales or {}
        memory = scales.get(self.level, 1.0)
        arithmetic, traffic = scales.get(Bound.ARITHMETIC, 1.0) * self.arithmetic_ms, memory * self.traffic_ms
        times = dict.fromkeys(Bound, 0.0)
        times[Bound.OVERHEAD] = scales.get(Bound.OVERHEAD, 1.0) * self.overhead_ms
        times[self.level] += memory * self.copy_ms
        if arithmetic >= traffic:
            times[Bound.ARITHMETIC] += arithmetic
        else:
            times[self.level] += traffic
        return times

    def time_ms(self, scales: Scales | None = None) -> float:
        """Return the sum over all bounds."""
        return sum(self.by_bound(scales).values())
