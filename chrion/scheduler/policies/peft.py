"""PEFT: predict earliest finish time (Arabnejad, Barbosa, 2014, Algorithm 1).

The optimistic cost of an operator on a lane is the longest path from its end to an exit, if every operator after it
runs on its best lane, which is never busy. Operators are taken by their mean optimistic cost over the lanes, and each
goes to the lane where its finish time plus its optimistic cost is least. So a lane that finishes an operator soon, but
is slow for what follows, is avoided.
"""

from __future__ import annotations

import math

from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.policies.list_scheduling import Lanes, ListScheduler
from chrion.scheduler.policies.orders import priority_order
from chrion.scheduler.schedule import Schedule


def peft(dag: Dag, costs: Costs, _alpha: float) -> Schedule:
    """Return PEFT's schedule on all lanes."""
    return place_by_optimistic_costs(Lanes(dag, costs))


def place_by_optimistic_costs(lanes: Lanes) -> Schedule:
    """Return the schedule that places operators by finish time plus optimistic cost, on the lanes to use."""
    on_host, on_device = optimistic_costs(lanes)
    pairs = zip(on_host, on_device, strict=True)
    rank = [(lanes.cores * host + lanes.streams * device) / len(lanes.numbers) for host, device in pairs]
    scheduler = ListScheduler(lanes)
    for i in priority_order(lanes.dag, rank):
        scheduler.place(
            i,
            min(
                scheduler.slots(i),
                key=lambda slot: (slot.end + (on_device if slot.lane <= 0 else on_host)[i], slot.end, slot.lane),
            ),
        )
    return scheduler.schedule()


def optimistic_costs(lanes: Lanes) -> tuple[list[float], list[float]]:
    """Return the optimistic cost table: that of each operator on a CPU core, and on the accelerator.

    The lanes of one device are alike, and a successor is never better on another lane of the same device. So two
    columns are enough, and a successor either stays on its predecessor's lane or is copied to the other device.
    """
    dag, transfers = lanes.dag, lanes.mean_transfers_ms()
    device = lanes.ms[0] if lanes.streams else [math.inf] * len(dag)
    host = lanes.ms[1] if lanes.cores else [math.inf] * len(dag)
    table = ([0.0] * len(dag), [0.0] * len(dag))
    for i in reversed(dag.topological_order):
        rest_host, rest_device = host[i] + table[0][i], device[i] + table[1][i]
        for m, transfer in zip(dag.predecessors[i], transfers[i], strict=True):
            table[0][m] = max(table[0][m], min(rest_host, rest_device + transfer))
            table[1][m] = max(table[1][m], min(rest_device, rest_host + transfer))
    return table
