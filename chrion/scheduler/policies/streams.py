"""Stream schedules: helpers of the policies that assign operators to streams of one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.policies.list_scheduling import Lanes, ListScheduler
from chrion.scheduler.policies.stages import DeviceLanes, make_schedule
from chrion.scheduler.schedule import Schedule


def schedule_streams(dag: Dag, costs: Costs, streams: Sequence[int], order: Sequence[int]) -> Schedule:
    """Return the schedule that runs streams on the lanes of one device.

    A stream is assigned to a lane when its first operator is launched: the lane on which that operator starts first, on
    a tie the first lane. If there are no more streams than lanes, each stream has a lane of its own. Lanes run
    operators in the order of their launch, so gaps stay idle.

    Args:
        dag: The graph.
        costs: The machine's costs of its operators.
        streams: The stream of each operator.
        order: The launch order, topological.
    """
    device = DeviceLanes(dag, costs)
    scheduler = ListScheduler(_without_overheads(dag, costs, device), insertion=False)
    unused = list(device.lanes)
    shared = len(set(streams)) > len(unused)
    choices_of: dict[int, list[int]] = {}
    for i in order:
        choices = choices_of.get(streams[i]) or (device.lanes if shared else [unused.pop(0)])
        slot = min(scheduler.slots(i, choices), key=lambda slot: (slot.start, abs(slot.lane)))
        scheduler.place(i, slot)
        choices_of[streams[i]] = [slot.lane]
    return make_schedule(order, device.with_exceptions([choices_of[stream][0] for stream in streams]))


def _without_overheads(dag: Dag, costs: Costs, device: DeviceLanes) -> Lanes:
    """Return the lanes of a device on which each operator takes the time that it takes alone, and nothing else does.

    An operator that the device does not support occupies its stream for as long as it runs on a core.
    """
    alone_ms = tuple(device.alone_ms(i) for i in range(len(dag)))
    if costs.accelerator_ms is None:
        ideal = replace(costs, cpu_ms=(alone_ms,) * costs.cores)
    else:
        ideal = replace(costs, accelerator_ms=alone_ms, cpu_ms=())
    return Lanes(dag, replace(ideal, handoff_ms=0.0, dispatch_ms=0.0))
