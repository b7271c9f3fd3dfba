"""Choosing alpha: the largest that still meets an SLO, or the least that fits a memory budget.

A larger alpha saves more accelerator memory and, mostly, costs latency; but the greedy selection behind it is not
monotone, so that bisection alone could settle far below the answer. A grid is walked from the largest alpha down to
the first that meets the SLO, and bisection goes on between that one and the one above it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chrion.graph.model import Graph
from chrion.scheduler.evaluation.solution import Solution

_STEPS = 16
_BISECTIONS = 6
#: Doublings of alpha that are tried until a budget fits.
_DOUBLINGS = range(-8, 25)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan must not exceed; None where there is no such limit."""

    slo_ms: float | None = None
    #: Resident accelerator memory; see :mod:`chrion.scheduler.evaluation.memory`.
    budget_mb: float | None = None


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

    def fits(self, budget_mb: float | None) -> bool:
        """Whether its resident accelerator memory is within the budget; any is within None."""
        return budget_mb is None or self.solution.timeline.resident_mb <= budget_mb


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


def raise_to_fit(attempt: Callable[[float], Candidate], start: Candidate, budget_mb: float, scale: float) -> Candidate:
    """Raise alpha no further than a memory budget needs, which costs least latency.

    Args:
        attempt: Makes the candidate of one alpha.
        start: What was chosen without the budget.
        budget_mb: The budget.
        scale: An alpha at which latency and memory weigh about the same.

    Returns:
        A candidate that fits; if none does, the one that exceeds the budget least.
    """
    if start.fits(budget_mb):
        return start
    smallest, below = start, start.alpha
    for power in _DOUBLINGS:
        alpha = start.alpha + scale * 2.0**power
        candidate = attempt(alpha)
        if candidate.fits(budget_mb):
            return _bisect(attempt, lambda c: c.fits(budget_mb), candidate, below)
        below = alpha
        smallest = min(smallest, candidate, key=lambda c: c.solution.timeline.resident_mb)
    return smallest


def best_within(pool: Sequence[Candidate], limits: Limits, alpha: float | None) -> list[Candidate]:
    """Those of a pool that keep to the limits, the best first.

    The budget goes before the SLO: where nothing keeps to both, the fastest within the budget come first; where nothing
    fits the budget either, those that exceed it least. A pool that does not depend on the budget makes this monotone: a
    larger budget chooses among more, and what it gains in ``L + alpha * M`` at more M it gains in L.

    Args:
        pool: Candidates, made without regard to the budget.
        limits: SLO and budget.
        alpha: ms per MB; None for the least memory that meets the SLO, or the least latency without one.
    """
    fitting = [c for c in pool if c.fits(limits.budget_mb)]
    if not fitting:
        return sorted(pool, key=lambda c: (c.solution.timeline.resident_mb, c.solution.timeline.latency_ms))
    meeting = [c for c in fitting if c.meets(limits.slo_ms)]
    if not meeting:
        return sorted(fitting, key=lambda c: (c.solution.timeline.latency_ms, c.solution.timeline.resident_mb))
    if alpha is None and limits.slo_ms is not None:
        return sorted(meeting, key=lambda c: (c.solution.timeline.resident_mb, c.solution.timeline.latency_ms))
    return sorted(meeting, key=lambda c: (c.solution.cost(alpha or 0.0), c.solution.timeline.resident_mb))


def _descend(attempt: Callable[[float], Candidate], slo_ms: float, grid: Sequence[float]) -> Candidate:
    fastest = None
    above = None
    for alpha in grid:
        candidate = attempt(alpha)
        if candidate.meets(slo_ms):
            return candidate if above is None else _bisect(attempt, lambda c: c.meets(slo_ms), candidate, above)
        above = alpha
        if fastest is None or candidate.solution.timeline.latency_ms < fastest.solution.timeline.latency_ms:
            fastest = candidate
    assert fastest is not None  # noqa: S101 - the grid is never empty
    return fastest


def _bisect(
    attempt: Callable[[float], Candidate], good: Callable[[Candidate], bool], found: Candidate, bad: float
) -> Candidate:
    """From an alpha that is good towards one that is not, on whichever side."""
    for _ in range(_BISECTIONS):
        middle = (found.alpha + bad) / 2
        candidate = attempt(middle)
        if good(candidate):
            found = candidate
        else:
            bad = middle
    return found
