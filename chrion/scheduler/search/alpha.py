"""Choice of a solution within limits, and of alpha: the largest within an SLO, or the least that fits a budget.

A larger alpha saves more accelerator memory and usually costs latency. But policies select greedily, so
latency is not monotone in alpha, and bisection alone could stop far below the answer. Instead, a grid is tried from the
largest alpha down to the first that meets the SLO, followed by bisection between that alpha and the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chrion.scheduler.evaluation.solution import VariantSolution
from chrion.scheduler.limits import Limits
from chrion.scheduler.priced_memory import Memory

#: Steps of the grid below a given alpha, and bisections after it: alpha is exact to a thousandth.
_STEPS, _BISECTIONS = 16, 6
#: Powers of two, times the scale, by which alpha is raised until a budget fits.
_DOUBLINGS = range(-8, 25)


def choose(
    solve: Callable[[float], VariantSolution], slo_ms: float | None, alpha: float | None, scale: float
) -> VariantSolution:
    """Choose alpha and return its solution.

    A given ``alpha`` is used, and lowered only if the SLO would be missed. With an SLO alone, alpha is the largest that
    meets it. With neither, alpha is 0: the least latency.

    Args:
        solve: Returns the solution for an alpha.
        slo_ms: The SLO, or None.
        alpha: Price of accelerator memory, in ms per MB, or None.
        scale: An alpha at which latency and memory have about the same weight; the search starts near it.

    Returns:
        The solution; the fastest of those tried if none meets the SLO.
    """
    if slo_ms is None or (alpha is not None and alpha <= 0):
        return solve(alpha or 0.0)
    if alpha is not None:
        grid = [alpha * step / _STEPS for step in range(_STEPS, -1, -1)]
    else:
        grid = [scale * 2 ** (step / 4) for step in range(20, -9, -1)] + [0.0]
    return _descend(solve, slo_ms, grid)


def raise_to_fit(
    solve: Callable[[float], VariantSolution], start: VariantSolution, budget_mb: float, scale: float
) -> VariantSolution:
    """Raise alpha until the memory budget fits, and no further, because that costs latency.

    Args:
        solve: Returns the solution for an alpha.
        start: The solution chosen without the budget.
        budget_mb: The budget.
        scale: An alpha at which latency and memory have about the same weight.

    Returns:
        A solution that fits; if none does, the one that exceeds the budget least.
    """
    if start.fits(budget_mb):
        return start
    smallest, below = start, start.alpha
    for power in _DOUBLINGS:
        alpha = start.alpha + scale * 2.0**power
        variant = solve(alpha)
        if variant.fits(budget_mb):
            return _bisect(solve, lambda v: v.fits(budget_mb), variant, below)
        below = alpha
        smallest = min(smallest, variant, key=lambda v: v.solution.timeline.resident_mb)
    return smallest


def best_within(
    pool: Sequence[VariantSolution], limits: Limits, alpha: float | None, memory: Memory = "resident"
) -> list[VariantSolution]:
    """Return the solutions of a pool that keep the limits, the best first.

    The budget takes precedence over the SLO. If no solution keeps both, the result holds those within the budget, the
    fastest first; if none fits the budget, it holds the whole pool, the smallest excess first. If the pool does not
    depend on the budget, the choice is monotone: a larger budget chooses among more solutions, and any gain in
    ``L + alpha * M`` at a larger M is a gain in L.

    Args:
        pool: Solutions, made without regard to the budget.
        limits: SLO and budget.
        alpha: Price of accelerator memory, in ms per MB; None for the least memory that meets the SLO, or without an
            SLO for the least latency.
        memory: The memory that has this price.
    """

    def memory_mb(variant: VariantSolution) -> float:
        return variant.memory_mb(memory)

    def latency_ms(variant: VariantSolution) -> float:
        return variant.solution.timeline.latency_ms

    def cost(variant: VariantSolution) -> float:
        return latency_ms(variant) + (alpha or 0.0) * memory_mb(variant)

    def segments(variant: VariantSolution) -> int:
        return len(variant.solution.segments)

    fitting = [v for v in pool if v.fits(limits.budget_mb)]
    if not fitting:
        return sorted(pool, key=lambda v: (v.solution.timeline.resident_mb, v.solution.timeline.latency_ms))
    meeting = [v for v in fitting if v.meets(limits.slo_ms)]
    if not meeting:
        return sorted(fitting, key=lambda v: (latency_ms(v), memory_mb(v), segments(v)))
    if alpha is None and limits.slo_ms is not None:
        return sorted(meeting, key=lambda v: (memory_mb(v), latency_ms(v), segments(v)))
    return sorted(meeting, key=lambda v: (cost(v), memory_mb(v), segments(v)))


def _descend(solve: Callable[[float], VariantSolution], slo_ms: float, grid: Sequence[float]) -> VariantSolution:
    """Return the solution of the largest alpha that meets the SLO, from a grid of decreasing alphas."""
    fastest = None
    above = None
    for alpha in grid:
        variant = solve(alpha)
        if variant.meets(slo_ms):
            return variant if above is None else _bisect(solve, lambda v: v.meets(slo_ms), variant, above)
        above = alpha
        if fastest is None or variant.solution.timeline.latency_ms < fastest.solution.timeline.latency_ms:
            fastest = variant
    assert fastest is not None  # noqa: S101 - the grid is never empty
    return fastest


def _bisect(
    solve: Callable[[float], VariantSolution],
    accepts: Callable[[VariantSolution], bool],
    accepted: VariantSolution,
    rejected: float,
) -> VariantSolution:
    """Return the accepted solution closest to a rejected alpha, which may be on either side of ``accepted``."""
    for _ in range(_BISECTIONS):
        middle = (accepted.alpha + rejected) / 2
        variant = solve(middle)
        if accepts(variant):
            accepted = variant
        else:
            rejected = middle
    return accepted
