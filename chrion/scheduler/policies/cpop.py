"""CPOP: critical path on a processor (Topcuoglu, Hariri, Wu, 2002, Figure 4).

The priority of an operator is the length of the longest path through it. The operators of the critical path all run on
the lane that takes the least time for them; every other operator runs where it finishes first.
"""

from __future__ import annotations

from collections.abc import Sequence

from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.policies.list_scheduling import Lanes, ListScheduler, downward_ranks, upward_ranks
from chrion.scheduler.policies.orders import priority_order
from chrion.scheduler.schedule import Schedule


def cpop(dag: Dag, costs: Costs, _alpha: float) -> Schedule:
    """Return CPOP's schedule on all lanes."""
    lanes = Lanes(dag, costs)
    return place_critical_path(lanes, path_lengths(lanes))


def path_lengths(lanes: Lanes) -> list[float]:
    """Return the length of the longest path through each operator, in mean times."""
    return [up + down for up, down in zip(upward_ranks(lanes), downward_ranks(lanes), strict=True)]


def place_critical_path(lanes: Lanes, priority: Sequence[float]) -> Schedule:
    """Return the schedule with the critical path on one lane, and all other operators where they finish first.

    Args:
        lanes: The lanes to use.
        priority: The length of the longest path through each operator.
    """
    dag = lanes.dag
    path = critical_path(dag, priority)
    path_lane = min(lanes.numbers, key=lambda lane: sum(lanes.ms[lane][i] for i in path))
    on_path = frozenset(path)
    scheduler = ListScheduler(lanes)
    for i in priority_order(dag, priority):
        slots = scheduler.slots(i, [path_lane] if i in on_path else None)
        scheduler.place(i, min(slots, key=lambda slot: (slot.end, slot.lane)))
    return scheduler.schedule()


def critical_path(dag: Dag, priority: Sequence[float]) -> list[int]:
    """Return the operators of a critical path: from an entry, always to the successor of highest priority."""
    path: list[int] = []
    choices: Sequence[int] = [i for i, before in enumerate(dag.predecessors) if not before]
    while choices:
        path.append(max(choices, key=priority.__getitem__))
        choices = dag.successors[path[-1]]
    return path
