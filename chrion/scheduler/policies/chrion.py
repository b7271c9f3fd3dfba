"""The default policy: initial solutions of several kinds, the best of them improved by local search.

It follows the outline of the paper: for several numbers of cores k', choose lanes by finish time plus alpha times
memory, and keep the k' with the least L + alpha * M, where M is resident memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from chrion.graph.dag import Dag
from chrion.graph.model import Graph
from chrion.graph.recurrent import chunk_choices, unroll
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.solution import Solution, VariantSolution
from chrion.scheduler.search.alpha import Limits, best_within
from chrion.scheduler.search.initial_solutions import LARGE, InitialSolutions, preference
from chrion.scheduler.search.local_search import LocalSearch
from chrion.scheduler.search.pareto import find_frontier, pareto_points, refine_point, sample_frontier

#: Initial solutions that are improved, best first.
_IMPROVED = 3
#: Variants (chunk lengths) that are improved, those with the best initial solutions first.
_VARIANTS_IMPROVED = 3


class ChrionPolicy:
    """The default policy for one graph and its costs.

    Args:
        dag: The graph.
        costs: The machine's costs, overheads included.
    """

    def __init__(self, dag: Dag, costs: Costs) -> None:
        self.initial = InitialSolutions(dag, costs)
        self.search = LocalSearch(self.initial.problem, self.initial.groups.members, self.initial.units)

    def __call__(self, alpha: float) -> Solution:
        """Return the best solution found for an alpha (ms per MB). Equal inputs give equal solutions."""
        return self.improve(self.initial(alpha), alpha)

    def improve(self, initial: Sequence[Solution], alpha: float) -> Solution:
        """Improve the best of the given initial solutions, which are sorted, and return the best result."""
        count = 1 if len(self.initial.problem.dag) > LARGE else _IMPROVED
        improved = [self.search.improve(solution, alpha) for solution in initial[:count]]
        return min(improved, key=partial(preference, alpha))


class ChunkSearch:
    """The default policy for a graph and its variants with recurrent operators in chunks.

    Alpha is chosen by initial solutions, which are fast to make. Only those of the chosen alpha are improved.

    Args:
        variants: Each variant of the graph and its policy, by chunk length; None for the graph without chunks.
    """

    def __init__(self, variants: Mapping[int | None, tuple[Graph, ChrionPolicy]]) -> None:
        self._variants = variants

    @classmethod
    def of(cls, graph: Graph, costs_of: Callable[[Dag], Costs]) -> ChunkSearch:
        """Return the search over a graph without chunks and with every promising chunk length."""
        graphs: dict[int | None, Graph] = {None: graph}
        graphs |= {chunk: unroll(graph, chunk) for chunk in chunk_choices(graph)}
        return cls(
            {chunk: (variant, ChrionPolicy(variant.dag, costs_of(variant.dag))) for chunk, variant in graphs.items()}
        )

    def initial(self, alpha: float) -> VariantSolution:
        """Return the best initial solution of all variants."""
        return self._ranked_initial(alpha)[0]

    def improve(self, alpha: float) -> list[VariantSolution]:
        """Return improved solutions of the variants with the best initial solutions, the best first."""
        found = []
        for start in self._ranked_initial(alpha)[:_VARIANTS_IMPROVED]:
            policy = self._variants[start.chunk][1]
            found.append(replace(start, solution=policy(alpha)))
        return sorted(found, key=lambda v: v.solution.cost(alpha))

    def within(
        self, found: Sequence[VariantSolution], limits: Limits, alpha: float | None, scale: float
    ) -> list[VariantSolution]:
        """Return solutions within a memory budget: the best solution of each variant, the best variant first.

        Args:
            found: Solutions found without the budget.
            limits: The SLO and the budget.
            alpha: The requested alpha, or None.
            scale: An alpha at which latency and memory have about the same weight.

        Returns:
            The solutions; if none keeps both limits, the one that comes closest (see :func:`best_within`).
        """
        made_with = found[0].alpha
        points = [
            VariantSolution(made_with, solution, chunk, variant)
            for chunk, (variant, policy) in self._variants.items()
            for solution in find_frontier(policy.initial, policy.search, scale)
        ]
        sample = sample_frontier(pareto_points(points, lambda v: v.solution))
        refined = [
            replace(p, solution=refine_point(self._variants[p.chunk][1].search, p.solution, len(sample)))
            for p in sample
        ]
        ranked = best_within([*found, *points, *refined], limits, alpha)
        best_of_chunk: dict[int | None, VariantSolution] = {}
        for variant_solution in ranked:
            best_of_chunk.setdefault(variant_solution.chunk, variant_solution)
        acceptable = [v for v in best_of_chunk.values() if v.fits(limits.budget_mb) and v.meets(limits.slo_ms)]
        return acceptable[:_VARIANTS_IMPROVED] or [ranked[0]]

    def _ranked_initial(self, alpha: float) -> list[VariantSolution]:
        """Return the best initial solution of each variant, the best first."""
        found = [
            VariantSolution(alpha, policy.initial(alpha)[0], chunk, variant)
            for chunk, (variant, policy) in self._variants.items()
        ]
        return sorted(found, key=lambda v: v.solution.cost(alpha))
