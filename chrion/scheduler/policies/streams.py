"""Stream schedules: helpers of the policies that assign operators to streams of one device."""

from __future__ import annotations

from collections.abc import Sequence

from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.policies.stages import DeviceLanes, make_schedule
from chrion.scheduler.schedule import Schedule


def schedule_streams(dag: Dag, costs: Costs, streams: Sequence[int], order: Sequence[int]) -> Schedule:
    """Return the schedule that runs streams on the lanes of one device.

    A stream is assigned to a lane when its first operator is launched: the lane on which that operator starts first, on
    a tie the first lane. If there are no more streams than lanes, each stream has a lane of its own.

    Args:
        dag: The graph.
        costs: The machine's costs of its operators.
        streams: The stream of each operator.
        order: The launch order, topological.
    """
    device = DeviceLanes(dag, costs)
    available = dict.fromkeys(device.lanes, 0.0)
    unused = list(device.lanes)
    lane_of: dict[int, int] = {}
    finish = [0.0] * len(dag)
    shared = len(set(streams)) > len(device.lanes)
    for i in order:
        ready = max((finish[m] for m in dag.predecessors[i]), default=0.0)
        if streams[i] not in lane_of:
            first = min(device.lanes, key=lambda lane: max(available[lane], ready)) if shared else unused.pop(0)
            lane_of[streams[i]] = first
        lane = lane_of[streams[i]]
        finish[i] = available[lane] = max(available[lane], ready) + device.alone_ms(i)
    return make_schedule(order, device.with_exceptions([lane_of[stream] for stream in streams]))
