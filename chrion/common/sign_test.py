"""Wald's sequential sign test between two engines whose latencies are measured in pairs, shortly after each other.

What affects both latencies of a pair does not count, such as another process that uses the cores meanwhile. A pair is
won by the candidate if it takes at most the given share of the baseline's latency, else by the baseline. The engine
that leads by :data:`LEAD` pairs is the faster one; after :data:`MOST_PAIRS` pairs without such a lead the difference is
small.

**Error.** If a pair shows the right sign with probability p, and pairs are independent, the wrong engine is selected
with probability 1 / (1 + (p / (1 - p))^5): 0.1 % with p = 0.8, 1.4 % with p = 0.7. It takes 8 and 12 pairs then on
average.
"""

from __future__ import annotations

from collections.abc import Iterable

#: Lead in pairs at which an engine is selected, which gives the errors above, and maximum number of pairs (a choice,
#: not measured).
LEAD, MOST_PAIRS = 5, 60


def is_faster(pairs: Iterable[tuple[float, float]], share: float) -> bool | None:
    """Return whether a candidate is faster than the baseline; None while that is undecided.

    Args:
        pairs: Latencies of the candidate and of the baseline.
        share: The candidate wins a pair if it takes at most this share of the baseline's latency.
    """
    lead = sum(1 if candidate <= share * baseline else -1 for candidate, baseline in pairs)
    return lead > 0 if abs(lead) >= LEAD else None
