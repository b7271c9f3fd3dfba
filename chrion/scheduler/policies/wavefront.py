"""Wavefront: the order of Rammer (Ma et al., 2020). The stages of greedy, distributed over the lanes round robin."""

from __future__ import annotations

from collections.abc import Sequence

from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.policies.stages import DeviceLanes, Pack, greedy_stages, schedule_stages
from chrion.scheduler.schedule import Schedule


def wavefront(dag: Dag, costs: Costs, _alpha: float) -> Schedule:
    """Return the schedule of greedy stages, distributed round robin without regard to cost."""
    device = DeviceLanes(dag, costs)
    return schedule_stages(dag, device, greedy_stages(dag), round_robin(len(device.lanes)))


def round_robin(lanes: int) -> Pack:
    """Return a packing that gives the first group to the first lane, the next to the next, and so on cyclically."""

    def pack(groups: Sequence[Sequence[int]]) -> list[list[int]]:
        packed: list[list[int]] = [[] for _ in range(lanes)]
        for at, group in enumerate(groups):
            packed[at % lanes].extend(group)
        return [own for own in packed if own]

    return pack
