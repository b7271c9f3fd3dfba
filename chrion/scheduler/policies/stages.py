"""Schedules in stages: groups of operators side by side on the lanes of one device, then all wait for each other.

That is how IOS runs a model, and how its two simplest rivals do: *greedy* (IOS's baseline) puts whatever can run now
into one stage, each operator a group; the *wavefront* (Rammer's order) deals the same waves to the lanes in turn,
without looking at what they cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chrion.graph.dag import Dag
from chrion.lane_numbers import all_lanes, is_accelerator_lane
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.contention import side_by_side_ms
from chrion.scheduler.schedule import Schedule

#: From the groups of a stage to the operators of each lane that gets any.
Pack = Callable[[Sequence[Sequence[int]]], list[list[int]]]
#: Where an operator goes that the accelerator cannot run.
_ASIDE = 1


@dataclass(frozen=True, slots=True)
class Stage:
    """Operators between two barriers."""

    #: Independent of each other; the operators of one are in a topological order and on one lane.
    groups: tuple[tuple[int, ...], ...]
    #: Whether its operators are merged into one (the second of IOS's strategies).
    merged: bool = False


class Device:
    """The lanes that stages run on, and what a stage costs there.

    They are the accelerator's ``costs.streams`` lanes where there is one, else the CPU cores. The latency of a stage
    comes from the profile: a dispatch, then the fullest lane, with operators slowed by those beside them (W[i, j] on j
    cores; :mod:`chrion.scheduler.evaluation.contention` on the accelerator), and handoffs where lanes have to wait for
    each other.
    What precedes a stage does not matter; so it is no less than what the evaluator finds.

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
        """Time of an operator with nothing beside it, where it runs."""
        there = self._costs.accelerator_ms
        if there is None or there[i] == float("inf"):
            return self._costs.cpu_ms[0][i] if self._costs.cores else 0.0
        return there[i]

    def runs(self, i: int) -> bool:
        """Whether the device has the operator; another goes to a CPU core."""
        there = self._costs.accelerator_ms
        return there is None or there[i] < float("inf")

    def placed(self, lanes: Sequence[int]) -> tuple[int, ...]:
        """Lanes as given, but for operators that the device does not have."""
        return tuple(lane if self.runs(i) else _ASIDE for i, lane in enumerate(lanes))

    def pack(self, groups: Sequence[Sequence[int]]) -> list[list[int]]:
        """Groups by lane: each to the lane with least to do, the longest first.

        Returns:
            The operators of each lane that gets any, in a topological order; the fullest lane first.
        """
        times = [sum([self._alone[i] for i in group]) for group in groups]
        falling = sorted(range(len(groups)), key=lambda g: (-times[g], g))
        if len(groups) <= len(self.lanes):
            return [list(groups[g]) for g in falling]
        loads = [(0.0, lane) for lane in range(len(self.lanes))]
        packed: list[list[int]] = [[] for _ in loads]
        for g in falling:
            least, lane = heapq.heappop(loads)
            heapq.heappush(loads, (least + times[g], lane))
            packed[lane].extend(groups[g])
        fullest_first = sorted(loads, key=lambda load: (-load[0], load[1]))
        return [sorted(packed[lane], key=self._position.__getitem__) for _, lane in fullest_first]

    def stage_ms(self, groups: Sequence[Sequence[int]]) -> float:
        """Latency of a stage: from when the first lane may begin it until that lane may begin the next."""
        packed = self.pack(groups)
        first, *others = packed
        apart_ms = 2 * self._costs.handoff_ms  # another lane learns of the stage's beginning, and tells its end
        if not others:
            work = sum([self._alone[i] for i in first])
        elif is_accelerator_lane(self.lanes[0]):
            rows = [[(self._alone[i], self._costs.share(i)) for i in own] for own in packed]
            work = side_by_side_ms(rows) + apart_ms
        else:
            times = self._costs.cpu_ms[len(packed) - 1]
            spans = [sum([times[i] for i in own]) for own in packed]
            work = max(spans[0], max(spans[1:]) + apart_ms)
        return self._costs.dispatch_ms + work


def staged(dag: Dag, device: Device, stages: Sequence[Stage], pack: Pack | None = None) -> Schedule:
    """The schedule that runs stages one after another.

    Neighbouring stages of a single lane are one: no lane waits for another between them.

    Args:
        dag: The graph.
        device: Where to run them.
        stages: Stages that hold each operator once, first to last.
        pack: How to spread the groups of a stage over lanes; the device's way if missing.
    """
    lanes = [0] * len(dag)
    labels = [0] * len(dag)
    order: list[int] = []
    label, before = 0, 1
    for stage in stages:
        packed = (pack or device.pack)(stage.groups)
        label += bool(order) and not len(packed) == before == 1
        before = len(packed)
        for lane, own in zip(device.lanes, packed, strict=False):
            for i in own:
                lanes[i] = lane
                labels[i] = label
                order.append(i)
    return schedule_on(order, device.placed(lanes), labels)


def schedule_on(order: Sequence[int], lanes: Sequence[int], stages: Sequence[int] = ()) -> Schedule:
    """A schedule with as many cores and accelerator lanes as its lanes need."""
    return Schedule(tuple(order), tuple(lanes), max([0, *lanes]), 1 - min([0, *lanes]), tuple(stages))


def greedy_stages(dag: Dag) -> list[Stage]:
    """IOS's baseline: each stage runs all operators whose predecessors have run, each by itself."""
    return [Stage(tuple((i,) for i in wave)) for wave in generations(dag)]


def generations(dag: Dag) -> list[list[int]]:
    """Operators by the length of the longest path that leads to them, each generation in topological order."""
    depth = [0] * len(dag)
    waves: list[list[int]] = []
    for i in dag.topological_order:
        depth[i] = 1 + max((depth[m] for m in dag.predecessors[i]), default=-1)
        if depth[i] == len(waves):
            waves.append([])
        waves[depth[i]].append(i)
    return waves


def in_turn(lanes: int) -> Pack:
    """Rammer's way to pack a wave: the first group to the first lane, the next to the next, and round again."""

    def pack(groups: Sequence[Sequence[int]]) -> list[list[int]]:
        packed: list[list[int]] = [[] for _ in range(lanes)]
        for at, group in enumerate(groups):
            packed[at % lanes].extend(group)
        return [own for own in packed if own]

    return pack
