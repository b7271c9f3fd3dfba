"""The algorithms of the Chrion paper as printed: Algorithm 1 orders, Algorithm 2 places; also on plainer orders."""

from __future__ import annotations

from chrion.graph.dag import Dag, depth_first_order
from chrion.profiler.costs import Costs
from chrion.scheduler.policies.device_selection import select_devices
from chrion.scheduler.policies.orders import bfs_order, hybrid_order
from chrion.scheduler.schedule import Schedule


def chrion_paper(dag: Dag, costs: Costs, alpha: float) -> Schedule:
    """Return Algorithm 2's placement of Algorithm 1's order."""
    return select_devices(dag, costs, hybrid_order(dag, costs), alpha).schedule


def breadth_first(dag: Dag, costs: Costs, alpha: float) -> Schedule:
    """Return Algorithm 2's placement of the breadth-first order."""
    return select_devices(dag, costs, bfs_order(dag), alpha).schedule


def depth_first(dag: Dag, costs: Costs, alpha: float) -> Schedule:
    """Return Algorithm 2's placement of the depth-first order."""
    return select_devices(dag, costs, depth_first_order(dag), alpha).schedule
