"""The field's inter-operator schedulers as schedules of one device: its accelerator's lanes, or its CPU cores.

What they decide are streams or stages; here those become lanes. None looks at memory, and none uses the CPU beside an
accelerator, but for operators that the accelerator does not have.
"""

from __future__ import annotations

from collections.abc import Sequence

from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.profiler.roofline import Roofline
from chrion.scheduler.policies.ios import ios
from chrion.scheduler.policies.stages import Device, greedy_stages, in_turn, schedule_on, staged
from chrion.scheduler.policies.streams import nimble, opara, opara_order
from chrion.scheduler.schedule import Schedule


def ios_schedule(dag: Dag, costs: Costs, alpha: float) -> Schedule:  # noqa: ARG001 - a policy takes alpha
    """IOS's stages, with latencies from the profile."""
    device = Device(dag, costs)
    return staged(dag, device, ios(dag, device.stage_ms))


def greedy_schedule(dag: Dag, costs: Costs, alpha: float) -> Schedule:  # noqa: ARG001 - a policy takes alpha
    """IOS's baseline: whatever can run now, side by side, then the next stage."""
    return staged(dag, Device(dag, costs), greedy_stages(dag))


def wavefront_schedule(dag: Dag, costs: Costs, alpha: float) -> Schedule:  # noqa: ARG001 - a policy takes alpha
    """Rammer's order: the same waves, dealt to the lanes in turn."""
    device = Device(dag, costs)
    return staged(dag, device, greedy_stages(dag), in_turn(len(device.lanes)))


def nimble_schedule(dag: Dag, costs: Costs, alpha: float) -> Schedule:  # noqa: ARG001 - a policy takes alpha
    """Nimble's streams, shared by chains that cannot overlap, launched in topological order."""
    return on_streams(dag, costs, nimble(dag, share=True), dag.topological_order)


def opara_schedule(dag: Dag, costs: Costs, alpha: float) -> Schedule:  # noqa: ARG001 - a policy takes alpha
    """Opara's streams and launch order.

    onnxruntime tells neither registers nor shared memory of a kernel; so an operator's demand is its working set, and
    it is memory-bound if moving its bytes takes longer than its arithmetic at the machine's best rates.
    """
    times = costs.cpu_ms[0] if costs.accelerator_ms is None else costs.accelerator_ms
    roofline = Roofline.of(dag, times)
    demand = [float(roofline.bytes[i]) for i in range(len(dag))]
    memory_bound = [roofline.memory_bound(i) for i in range(len(dag))]
    return on_streams(dag, costs, opara(dag), opara_order(dag, demand, memory_bound))


def on_streams(dag: Dag, costs: Costs, streams: Sequence[int], order: Sequence[int]) -> Schedule:
    """Put streams on the lanes of one device.

    A stream takes a lane when its first operator is launched: the one that could begin it first, of equal ones the
    first. Where streams are no more than lanes, each has its own.

    Args:
        dag: The graph.
        costs: The machine's costs of its operators.
        streams: The stream of each operator.
        order: The launch order, topological.
    """
    device = Device(dag, costs)
    free = dict.fromkeys(device.lanes, 0.0)
    unused = list(device.lanes)
    lane_of: dict[int, int] = {}
    finish = [0.0] * len(dag)
    several = len(set(streams)) > len(device.lanes)
    for i in order:
        ready = max((finish[m] for m in dag.predecessors[i]), default=0.0)
        if streams[i] not in lane_of:
            first = min(device.lanes, key=lambda lane: max(free[lane], ready)) if several else unused.pop(0)
            lane_of[streams[i]] = first
        lane = lane_of[streams[i]]
        finish[i] = free[lane] = max(free[lane], ready) + device.alone_ms(i)
    return schedule_on(order, device.placed([lane_of[stream] for stream in streams]))
