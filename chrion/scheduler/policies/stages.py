"""Stage schedules: groups of operators run side by side on the lanes of one device, with a barrier after each stage.

IOS plans in stages, and so do two simpler policies. *Greedy* (the baseline of IOS) makes a stage of all operators that
are ready, each a group of its own. *Wavefront* (the order of Rammer, Ma et al., 2020) distributes the same stages over
the lanes round robin, without regard to cost.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chrion.common.lane_numbers import all_lanes, is_accelerator_lane
from chrion.graph.dag import Dag
from chrion.graph.model import Graph
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.contention import concurrent_ms
from chrion.scheduler.schedule import Schedule

#: From the groups of a stage to the operators of each lane that is used.
Pack = Callable[[Sequence[Sequence[int]]], list[list[int]]]
#: From the groups of a stage, each in a topological order, to its latency in ms.
StageCost = Callable[[Sequence[Sequence[int]]], float]
#: The CPU lane for operators that the accelerator does not support.
_EXCEPTION_LANE = 1


@dataclass(frozen=True, slots=True)
class Stage:
    """Operators between two barriers."""

    #: Groups that do not depend on each other; the operators of a group are in topological order, on one lane.
    groups: tuple[tuple[int, ...], ...]
    #: True if the operators of the stage are merged into one (the second of IOS's strategies).
    merged: bool = False


class DeviceLanes:
    """The lanes that stages and streams run on, with the cost of a stage.

    They are the accelerator's ``costs.streams`` lanes, or the CPU cores if there is no accelerator. The latency of a
    stage comes from the profile: a dispatch, then the lane with most work, slowed by contention (W[i, j] on j cores;
    :mod:`chrion.scheduler.evaluation.contention` on the accelerator), and handoffs where lanes wait for each other. It
    does not depend on earlier stages, and is an upper bound on what the evaluator predicts.

    Args:
        dag: The graph.
        costs: The machine's costs of its operators.
    """

    def __init__(self, dag: Dag, costs: Costs) -> None:
        self._costs = costs
        streams, cores = (costs.streams, 0) if costs.accelerator_ms is not None else (0, costs.cores)
        self.lanes = all_lanes(cores, streams)
        self._position = {v: at for at, v in enumerate(dag.topological_order)}
        self._alone = [self.alone_ms(i) for i in range(len(dag))]

    def alone_ms(self, i: int) -> float:
        """Return the time in ms of an operator that runs alone: on this device, or on a core if not supported."""
        accelerator_ms = self._costs.accelerator_ms
        if accelerator_ms is None or accelerator_ms[i] == math.inf:
            return self._costs.cpu_ms[0][i] if self._costs.cores else 0.0
        return accelerator_ms[i]

    def supports(self, i: int) -> bool:
        """Return True if the device can run the operator."""
        return self._costs.accelerator_ms is None or self._costs.accelerator_ms[i] < math.inf

    def with_exceptions(self, lanes: Sequence[int]) -> tuple[int, ...]:
        """Return lanes as given, except that operators which the device does not support go to a CPU core."""
        return tuple(lane if self.supports(i) else _EXCEPTION_LANE for i, lane in enumerate(lanes))

    def pack(self, groups: Sequence[Sequence[int]]) -> list[list[int]]:
        """Distribute groups over the lanes: the longest first, each to the lane with the least work.

        Returns:
            The operators of each lane that is used, in topological order; the lane with most work first.
        """
        times = [sum([self._alone[i] for i in group]) for group in groups]
        longest_first = sorted(range(len(groups)), key=lambda g: (-times[g], g))
        if len(groups) <= len(self.lanes):
            return [list(groups[g]) for g in longest_first]
        loads = [(0.0, lane) for lane in range(len(self.lanes))]
        packed: list[list[int]] = [[] for _ in loads]
        for g in longest_first:
            least, lane = heapq.heappop(loads)
            heapq.heappush(loads, (least + times[g], lane))
            packed[lane].extend(groups[g])
        fullest_first = sorted(loads, key=lambda load: (-load[0], load[1]))
        return [sorted(packed[lane], key=self._position.__getitem__) for _, lane in fullest_first]

    def stage_ms(self, groups: Sequence[Sequence[int]]) -> float:
        """Return the latency of a stage in ms: on the first lane, from its start to the start of the next stage."""
        packed = self.pack(groups)
        first, *others = packed
        # The other lanes wait for the start, and the first lane waits for their ends.
        barriers_ms = 2 * self._costs.handoff_ms
        if not others:
            work = sum([self._alone[i] for i in first])
        elif is_accelerator_lane(self.lanes[0]):
            rows = [[(self._alone[i], self._costs.share(i)) for i in own] for own in packed]
            work = concurrent_ms(rows) + barriers_ms
        else:
            times = self._costs.cpu_ms[len(packed) - 1]
            spans = [sum([times[i] for i in own]) for own in packed]
            work = max(spans[0], max(spans[1:]) + barriers_ms)
        return self._costs.dispatch_ms + work


#: Returns the stage cost of a graph on the lanes of a device, for example by measuring stages.
StageMeter = Callable[[Graph, DeviceLanes], StageCost]


def schedule_stages(dag: Dag, device: DeviceLanes, stages: Sequence[Stage], pack: Pack | None = None) -> Schedule:
    """Return the schedule that runs stages one after another.

    Neighbouring stages that use a single lane become one stage, because no lane waits for another between them.

    Args:
        dag: The graph.
        device: The lanes to use.
        stages: Stages that hold each operator once, first to last.
        pack: Distributes the groups of a stage over lanes; ``device.pack`` if missing.
    """
    lanes = [0] * len(dag)
    labels = [0] * len(dag)
    order: list[int] = []
    label, lanes_before = 0, 1
    for stage in stages:
        packed = (pack or device.pack)(stage.groups)
        label += bool(order) and not len(packed) == lanes_before == 1
        lanes_before = len(packed)
        for lane, own in zip(device.lanes, packed, strict=False):
            for i in own:
                lanes[i] = lane
                labels[i] = label
                order.append(i)
    return make_schedule(order, device.with_exceptions(lanes), labels)


def make_schedule(order: Sequence[int], lanes: Sequence[int], stages: Sequence[int] = ()) -> Schedule:
    """Return a schedule with as many cores and accelerator lanes as its lane numbers need."""
    return Schedule(tuple(order), tuple(lanes), max([0, *lanes]), 1 - min([0, *lanes]), tuple(stages))


def greedy_stages(dag: Dag) -> list[Stage]:
    """Return one stage for each generation, with each operator as a group of its own."""
    return [Stage(tuple((i,) for i in members)) for members in generations(dag)]


def generations(dag: Dag) -> list[list[int]]:
    """Return operators by the length of the longest path that leads to them, each list in topological order."""
    depth = [0] * len(dag)
    levels: list[list[int]] = []
    for i in dag.topological_order:
        depth[i] = 1 + max((depth[m] for m in dag.predecessors[i]), default=-1)
        if depth[i] == len(levels):
            levels.append([])
        levels[depth[i]].append(i)
    return levels


def greedy(dag: Dag, costs: Costs, _alpha: float) -> Schedule:
    """Return the schedule of greedy stages, packed onto the lanes by cost."""
    return schedule_stages(dag, DeviceLanes(dag, costs), greedy_stages(dag))


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
