"""Choice of the number of CPU cores: W[i, j] depends on it, so policies plan for every number and compare."""

from __future__ import annotations

import math
from collections.abc import Callable

from chrion.errors import ScheduleError
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.solution import Problem
from chrion.scheduler.schedule import Schedule


def usable_core_counts(costs: Costs) -> range:
    """Return the numbers of CPU cores k' to plan for: 0 to k, without 0 unless the accelerator runs every operator.

    Raises:
        ScheduleError: There is neither such an accelerator nor a CPU core.
    """
    accelerator_suffices = costs.accelerator_ms is not None and math.inf not in costs.accelerator_ms
    counts = range(0 if accelerator_suffices else 1, costs.cores + 1)
    if not counts:
        raise ScheduleError("schedule: there is neither an accelerator that runs every operator nor a CPU core")
    return counts


def best_core_count(dag: Dag, costs: Costs, alpha: float, build: Callable[[int], Schedule]) -> Schedule:
    """Return the schedule with the least L + alpha * M over all usable numbers of cores.

    Args:
        dag: The graph.
        costs: The machine's costs of its operators.
        alpha: Price of accelerator memory, in ms per MB.
        build: Builds the schedule for a number of cores.

    Raises:
        ScheduleError: As for :func:`usable_core_counts`.
    """
    problem = Problem(dag, costs)
    solutions = [problem.evaluate(build(cores)) for cores in usable_core_counts(costs)]
    return min(solutions, key=lambda solution: solution.cost(alpha)).schedule
