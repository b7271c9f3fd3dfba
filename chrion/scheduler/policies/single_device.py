"""Baselines on one device: the accelerator alone, and the CPU cores alone."""

from __future__ import annotations

import math

from chrion.errors import ScheduleError
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.policies.core_counts import selection_counts
from chrion.scheduler.policies.device_selection import DeviceSelector
from chrion.scheduler.policies.list_scheduling import edge_times
from chrion.scheduler.policies.orders import hybrid_order
from chrion.scheduler.schedule import Schedule


def cpu_only(dag: Dag, costs: Costs, alpha: float) -> Schedule:
    """Return the paper's schedule on the CPU cores alone, at the best number of them that is tried."""
    costs = costs.without_accelerator()
    selector = DeviceSelector(dag, costs, edge_times(dag, costs), counts=selection_counts)
    return selector.select(costs, hybrid_order(dag, costs), alpha).schedule


def accelerator_only(dag: Dag, costs: Costs, _alpha: float) -> Schedule:
    """Return the schedule with every operator on the accelerator.

    As in onnxruntime, operators that the accelerator does not support run on one CPU core.

    Raises:
        ScheduleError: The profile has no accelerator.
    """
    if costs.accelerator_ms is None:
        raise ScheduleError("policy accelerator: the profile has no accelerator", hint="choose policy cpu")
    lanes = tuple(int(ms == math.inf) for ms in costs.accelerator_ms)
    return Schedule(hybrid_order(dag, costs), lanes, max(lanes, default=0))
