"""Policies: schedulers with a name, and the declaration of what each of them can do.

The planner, the commands and the registry know a policy by what it declares, never by its name. There are two kinds:

- A policy of **schedules** is a function from a graph of operators, its costs and a price of memory to a schedule. It
  may declare that it plans for all lanes it is given, so that it is tried with several numbers of CPU cores.
- A policy of **solutions** returns all its solutions at once. Prices and limits only select from them. It may change
  the model as well: divide its recurrent operators, or merge operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from chrion.graph.dag import Dag
from chrion.graph.model import Graph
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.solution import Problem, Solution, VariantSolution
from chrion.scheduler.policies.stages import StageMeter
from chrion.scheduler.priced_memory import Memory
from chrion.scheduler.schedule import Schedule

#: From a graph, its costs and alpha (ms per MB) to a schedule.
ScheduleFunction = Callable[[Dag, Costs, float], Schedule]
#: From alpha to the policy's solution for one graph and its costs.
Solver = Callable[[float], Solution]
#: From costs and the number of operators to the numbers of CPU cores to plan for.
CoreCounts = Callable[[Costs, int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class PlanningTask:
    """What a policy of solutions plans for."""

    graph: Graph
    #: Returns the costs of the operators of the graph or of one of its variants.
    costs_of: Callable[[Dag], Costs]
    #: Returns what the profile lacks of the operators of the graph or of one of its variants, by signature.
    unmeasured: Callable[[Dag], frozenset[str]] = lambda _dag: frozenset()
    #: Prices of memory that solutions will be selected for, if they are known, in ms per MB.
    alphas: Sequence[float] = ()
    #: The memory that has these prices, and of which an SLO alone leaves the least.
    memory: Memory = "resident"
    #: Measures stages; if missing, their latencies are predicted.
    meter: StageMeter | None = None
    #: Resident accelerator memory that must not be exceeded, for policies that fill the memory.
    budget_mb: float = math.inf
    #: True if only the fastest solutions are asked for, whatever their memory.
    fastest_only: bool = False
    #: The only SLO that solutions will be selected for, in ms; None if there is none or there may be several.
    slo_ms: float | None = None


@dataclass(frozen=True, slots=True)
class NamedPolicy:
    """What all policies declare."""

    name: str
    #: One line for help texts and documentation.
    description: str
    #: True if a larger alpha leads to less accelerator memory, so that a budget can be met by raising alpha.
    weighs_memory: bool = field(default=False, kw_only=True)
    #: Raises an OptionError if an optional package that the policy needs is missing; None if it needs none.
    require: Callable[[], object] | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class SchedulePolicy(NamedPolicy):
    """A policy of schedules; they are cut into segments without delaying any operator."""

    function: ScheduleFunction
    #: Returns the numbers of CPU cores to plan for, if the function uses all lanes of the costs that it is given. The
    #: schedule with the least L + alpha * M is kept. The function is given one stream of the accelerator: it assumes
    #: that lanes do not slow each other. If missing, the function is called once, and chooses its lanes itself.
    core_counts: CoreCounts | None = None

    def make_solver(self, dag: Dag, costs: Costs) -> Solver:
        """Prepare the policy for a graph and its costs."""
        problem = Problem(dag, costs)

        def solve(alpha: float) -> Solution:
            counts = () if self.core_counts is None else self.core_counts(costs, len(dag))
            machines = [costs.limited_to(cores, 1) for cores in counts] or [costs]
            solutions = [problem.evaluate(self.function(dag, machine, alpha), origin=self.name) for machine in machines]
            return min(solutions, key=lambda solution: solution.cost(alpha))

        return solve


@dataclass(frozen=True, slots=True)
class SolutionPolicy(NamedPolicy):
    """A policy of solutions: it returns all of them at once, and plans anew for each budget."""

    find_solutions: Callable[[PlanningTask], list[VariantSolution]]
    #: Returns variants of a graph with further operators that solutions may have; the profile should have their costs.
    variants: Callable[[Graph], Sequence[Graph]] = lambda _graph: ()
    #: True if the policy can measure stages.
    measures_stages: bool = False


#: A scheduler with a name.
Policy = SchedulePolicy | SolutionPolicy
