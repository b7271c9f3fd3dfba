"""HEFT: heterogeneous earliest finish time (Topcuoglu, Hariri, Wu, 2002, Figure 2).

Operators are taken by decreasing upward rank, and each goes to the lane where it finishes first. As published, ranks
are in mean times over the lanes in use, and in mean transfer times over all pairs of them. There are two additions to
the paper: the overheads of :mod:`chrion.scheduler.policies.list_scheduling`, and a price of accelerator memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.policies.list_scheduling import Lanes, ListScheduler, TimeSlot, by_rank, upward_ranks
from chrion.scheduler.schedule import Schedule


def heft(dag: Dag, costs: Costs, alpha: float) -> Schedule:
    """Return HEFT's schedule on all lanes.

    Args:
        dag: The graph.
        costs: The machine's costs of its operators.
        alpha: Price, in ms per MB, of the memory that an operator adds on the accelerator.
    """
    lanes = Lanes(dag, costs)
    return place_by_finish(lanes, by_rank(dag, upward_ranks(lanes)), alpha)


def place_by_finish(lanes: Lanes, order: Sequence[int], alpha: float = 0.0, *, insertion: bool = True) -> Schedule:
    """Return the schedule that places operators one after another, each on the lane where it finishes first.

    Args:
        lanes: The lanes to use.
        order: The operators in a topological order.
        alpha: Price, in ms per MB, of the memory that an operator adds on the accelerator.
        insertion: Use idle gaps between operators.
    """
    scheduler = ListScheduler(lanes, insertion=insertion)
    resident: set[int] = set()  # weights on the accelerator
    for i in order:
        price = alpha * _marginal_mb(lanes.dag, lanes.costs, i, resident) if alpha else 0.0

        def preference(slot: TimeSlot, price: float = price) -> tuple[float, float, int]:
            return slot.end + (price if slot.lane <= 0 else 0.0), slot.start, slot.lane

        best = min(scheduler.slots(i), key=preference)
        scheduler.place(i, best)
        if is_accelerator_lane(best.lane):
            resident.update(lanes.dag.weights[i])
    return scheduler.schedule()


def _marginal_mb(dag: Dag, costs: Costs, i: int, resident: set[int]) -> float:
    """Return the memory in MB that operator ``i`` adds on the accelerator; resident weights add nothing."""
    new = sum(dag.weight_bytes[w] for w in dag.weights[i] if w not in resident)
    return costs.memory[i].outputs_mb + new / 1e6 + (0.0 if resident else costs.base_memory_mb)
