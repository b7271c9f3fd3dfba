"""A pool of solutions, from which limits and prices select, with exact memory where that decides.

Searches estimate resident memory. The exact figure takes as long as several evaluations, and for most solutions it
changes nothing: without a limit and a price the fastest one is selected, however much memory the others hold. So a pool
begins with a lower bound on the memory of each solution, and ranks them by it. Then it makes the memory of the first
selected solution exact and ranks again, until all that it selects are exact. Every rank only falls if memory grows.
So solutions that are selected by exact figures precede all others, whatever memory these hold: the result is the same
as if all figures were exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from chrion.scheduler.evaluation.solution import VariantSolution
from chrion.scheduler.limits import Limits
from chrion.scheduler.priced_memory import Memory
from chrion.scheduler.search.alpha import best_within

#: Returns a solution with another figure of its resident memory.
Measure = Callable[[VariantSolution], VariantSolution]
#: The most solutions that are selected at once.
_SELECTED = 3


class SolutionPool:
    """Solutions of one or several variants of a graph, made without regard to a limit or a price.

    Args:
        solutions: The solutions.
        memory: The memory that has a price.
        bounded: Returns a solution with a lower bound on its resident memory.
        exact: Returns a solution with its exact resident memory.
    """

    def __init__(self, solutions: Iterable[VariantSolution], memory: Memory, bounded: Measure, exact: Measure) -> None:
        self._solutions = [bounded(solution) for solution in solutions]
        self._memory, self._make_exact = memory, exact
        #: The solutions with exact memory, by identity.
        self._exact: set[int] = set()

    def select(self, limits: Limits, alpha: float | None) -> list[VariantSolution]:
        """Return the best solutions of each variant, with wide lanes and without, the best first.

        The result has at least one solution, with exact memory. If it has several, all keep the limits.

        Args:
            limits: SLO and budget.
            alpha: Price of accelerator memory in ms per MB; see :func:`chrion.scheduler.search.alpha.best_within`.
        """

        def select() -> Sequence[VariantSolution]:
            ranked = best_within(self._solutions, limits, alpha, self._memory)
            best = {(v.variant, v.wide): v for v in reversed(ranked)}
            kept = [v for v in ranked if best[v.variant, v.wide] is v]
            acceptable = [v for v in kept if v.fits(limits.budget_mb) and v.meets(limits.slo_ms)]
            return acceptable[:_SELECTED] or ranked[:1]

        return list(self._with_exact_memory(select))

    def implied_alpha(self, chosen: VariantSolution) -> float:
        """Return the least price of memory at which a solution costs no more than each faster one, in ms per MB.

        Args:
            chosen: A selected solution.
        """
        latency_ms, mb = chosen.solution.timeline.latency_ms, chosen.memory_mb(self._memory)

        def price(faster: VariantSolution) -> float:
            more_mb = faster.memory_mb(self._memory) - mb
            if more_mb > 0:
                return (latency_ms - faster.solution.timeline.latency_ms) / more_mb
            return math.inf if self._memory == "resident" and self._is_bound(faster) else 0.0

        def dearest() -> Sequence[VariantSolution]:
            faster = [v for v in self._solutions if v.solution.timeline.latency_ms < latency_ms]
            return [max(faster, key=price)] if faster else []

        priced = dearest() if self._memory == "paper" else self._with_exact_memory(dearest)
        return max(map(price, priced), default=0.0)

    def effective_alpha(self, limits: Limits, fastest: VariantSolution) -> float | None:
        """Return the least price of memory, in ms per MB, that selects a solution with less memory than the fastest.

        Args:
            limits: SLO and budget.
            fastest: The solution that is selected at price 0.

        Returns:
            None if no solution within the limits has less memory.
        """
        latency_ms, mb = fastest.solution.timeline.latency_ms, fastest.memory_mb(self._memory)

        def price(smaller: VariantSolution) -> float:
            return (smaller.solution.timeline.latency_ms - latency_ms) / (mb - smaller.memory_mb(self._memory))

        def cheapest() -> Sequence[VariantSolution]:
            within = (v for v in self._solutions if v.meets(limits.slo_ms) and v.fits(limits.budget_mb))
            smaller = [v for v in within if v.memory_mb(self._memory) < mb]
            return [min(smaller, key=price)] if smaller else []

        priced = cheapest() if self._memory == "paper" else self._with_exact_memory(cheapest)
        return min(map(price, priced), default=None)

    def _with_exact_memory(self, select: Callable[[], Sequence[VariantSolution]]) -> Sequence[VariantSolution]:
        """Return what a function selects, once the memory of all selected solutions is exact."""
        while True:
            selected = select()
            bounded = next((v for v in selected if self._is_bound(v)), None)
            if bounded is None:
                return selected
            at = next(at for at, solution in enumerate(self._solutions) if solution is bounded)
            self._solutions[at] = self._make_exact(bounded)
            self._exact.add(id(self._solutions[at]))

    def _is_bound(self, solution: VariantSolution) -> bool:
        """Return True if the resident memory of a solution is a lower bound."""
        return id(solution) not in self._exact
