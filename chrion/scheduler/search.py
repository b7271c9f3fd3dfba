"""Choosing alpha: the largest that still meets an SLO.

A larger alpha saves more accelerator memory and, mostly, costs latency; but the greedy selection behind it is not
monotone, so that bisection alone could settle far below the answer. A grid is walked from the largest alpha down to
the first that meets the SLO, and bisection goes on between that one and the one above it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chrion.graph.model import Graph
from chrion.scheduler.solution import Solution

_STEPS = 16
_BISECTIONS = 6


@dataclass(frozen=True, slots=True)
class Candidate:
    """A solution tried out, and what it was made with."""

    alpha: float
    solution: Solution
    #: The chunk that recurrent operators are cut into, or None, and the graph that this gives.
    chunk: int | None
    graph: Graph
    #: Operators that were merged into one, by name.
    merged: tuple[tuple[str, ...], ...] = ()

    def meets(self, slo_ms: float | None) -> bool:
        """Whether its predicted latency is within the SLO; any latency is within None."""
        return slo_ms is None or self.solution.timeline.latency_ms <= slo_ms


def choose(attempt: Callable[[float], Candidate], slo_ms: float | None, alpha: float | None, scale: float) -> Candidate:
    """Choose alpha as asked.

    With ``alpha`` given it is used, and lowered only if the SLO would be missed. With only an SLO, it is the largest
    that meets it. With neither it is 0, the least latency.

    Args:
        attempt: Makes the candidate of one alpha.
        slo_ms: The SLO, or None.
        alpha: ms per MB, or None.
        scale: An alpha at which latency and memory weigh about the same, where the search starts from.

    Returns:
        The candidate; the fastest of those tried if none meets the SLO.
    """
    if slo_ms is None or (alpha is not None and alpha <= 0):
        return attempt(alpha or 0.0)
    if alpha is not None:
        grid = [alpha * step / _STEPS for step in range(_STEPS, -1, -1)]
    else:
        grid = [scale * 2 ** (step / 4) for step in range(20, -9, -1)] + [0.0]
    return _descend(attempt, slo_ms, grid)


def _descend(attempt: Callable[[float], Candidate], slo_ms: float, grid: Sequence[float]) -> Candidate:
    fastest = None
    above = None
    for alpha in grid:
        candidate = attempt(alpha)
        if candidate.meets(slo_ms):
            return candidate if above is None else _bisect(attempt, slo_ms, candidate, above)
        above = alpha
        if fastest is None or candidate.solution.timeline.latency_ms < fastest.solution.timeline.latency_ms:
            fastest = candidate
    assert fastest is not None  # noqa: S101 - the grid is never empty
    return fastest


def _bisect(attempt: Callable[[float], Candidate], slo_ms: float, good: Candidate, above: float) -> Candidate:
    low = good.alpha
    for _ in range(_BISECTIONS):
        middle = (low + above) / 2
        candidate = attempt(middle)
        if candidate.meets(slo_ms):
            good, low = candidate, middle
        else:
            above = middle
    return good
