"""HEFT: heterogeneous earliest finish time (Topcuoglu, Hariri, Wu, 2002, Figure 2).

Operators are taken by decreasing upward rank, and each goes to the lane where it finishes first. There are two
additions to the paper: the overheads of :mod:`chrion.scheduler.policies.list_scheduling`, and a price of accelerator
memory.
"""

from __future__ import annotations

from functools import partial

from chrion.graph.dag import Dag
from chrion.lane_numbers import is_accelerator_lane
from chrion.profiler.costs import Costs
from chrion.scheduler.policies.core_counts import best_core_count
from chrion.scheduler.policies.list_scheduling import ListScheduler, TimeSlot, upward_ranks
from chrion.scheduler.schedule import Schedule


def heft(dag: Dag, costs: Costs, alpha: float) -> Schedule:
    """Return HEFT's schedule at the number of cores with the least L + alpha * M."""
    return best_core_count(dag, costs, alpha, partial(schedule_heft, dag, costs, alpha=alpha))


def schedule_heft(dag: Dag, costs: Costs, cores: int, *, alpha: float = 0.0) -> Schedule:
    """Return HEFT's schedule on the accelerator, if there is one, and ``cores`` CPU lanes.

    Args:
        dag: The graph.
        costs: The machine's costs of its operators.
        cores: Number of CPU lanes to use, 0 or more.
        alpha: Price, in ms per MB, of the memory that an operator adds on the accelerator.
    """
    rank = upward_ranks(dag, costs)
    position = {v: at for at, v in enumerate(dag.topological_order)}
    scheduler = ListScheduler(dag, costs, cores)
    resident: set[int] = set()  # weights on the accelerator
    for i in sorted(range(len(dag)), key=lambda v: (-rank[v], position[v])):  # equal ranks: predecessors first
        price = alpha * _marginal_mb(dag, costs, i, resident) if alpha else 0.0

        def preference(slot: TimeSlot, price: float = price) -> tuple[float, float, int]:
            return slot.end + (price if is_accelerator_lane(slot.lane) else 0.0), slot.start, slot.lane

        best = min((scheduler.slot(i, lane) for lane in scheduler.lanes), key=preference)
        scheduler.place(i, best)
        if is_accelerator_lane(best.lane):
            resident.update(dag.weights[i])
    return scheduler.schedule()


def _marginal_mb(dag: Dag, costs: Costs, i: int, resident: set[int]) -> float:
    """Return the memory in MB that operator ``i`` adds on the accelerator; resident weights add nothing."""
    new = sum(dag.weight_bytes[w] for w in dag.weights[i] if w not in resident)
    return costs.memory[i].outputs_mb + new / 1e6 + (0.0 if resident else costs.base_memory_mb)
