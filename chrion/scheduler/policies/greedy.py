"""Greedy stages: the baseline of IOS (Ding et al., 2021). Each stage runs every operator that is ready."""

from __future__ import annotations

from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.policies.stages import DeviceLanes, greedy_stages, schedule_stages
from chrion.scheduler.schedule import Schedule


def greedy(dag: Dag, costs: Costs, _alpha: float) -> Schedule:
    """Return the schedule of greedy stages, packed onto the lanes by cost."""
    return schedule_stages(dag, DeviceLanes(dag, costs), greedy_stages(dag))
