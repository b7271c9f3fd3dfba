"""List scheduling with insertion, which HEFT and CPOP share (Topcuoglu, Hariri, Wu, 2002, section 4).

Operators are placed one after another, each after its predecessors, in the first idle gap of a lane that is long
enough. The earliest start (EST) includes this machine's overheads: a handoff between lanes of one device, a copy
between devices, and a dispatch for every operator without a predecessor on its own lane.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.schedule import Schedule


class TimeSlot(NamedTuple):
    """A time interval on a lane, in ms."""

    lane: int
    start: float
    end: float


class ListScheduler:
    """A schedule that is built operator by operator.

    Args:
        dag: The graph.
        costs: The machine's costs of its operators.
        cores: Number of CPU lanes to use, 0 or more.
    """

    def __init__(self, dag: Dag, costs: Costs, cores: int) -> None:
        self._dag, self._costs, self._cores = dag, costs, cores
        #: Lanes that operators may be placed on.
        self.lanes = range(0 if costs.accelerator_ms is not None else 1, cores + 1)
        #: W: time of every operator on each lane, by lane.
        self.lane_ms = [costs.lane_ms(lane, cores) for lane in range(cores + 1)]
        self._slots = [TimeSlot(0, 0.0, 0.0)] * len(dag)
        self._busy: list[list[tuple[float, float]]] = [[] for _ in range(cores + 1)]

    def slot(self, i: int, lane: int) -> TimeSlot:
        """Return the earliest slot of operator ``i`` on a lane; its predecessors must have been placed."""
        length = self.lane_ms[lane][i]
        before = self._dag.predecessors[i]
        if all(self._slots[m].lane != lane for m in before):
            length += self._costs.dispatch_ms
        start = _first_gap(self._busy[lane], self._ready_ms(i, lane), length)
        return TimeSlot(lane, start, start + length)

    def place(self, i: int, slot: TimeSlot) -> None:
        """Place operator ``i`` in a slot."""
        self._slots[i] = slot
        bisect.insort(self._busy[slot.lane], (slot.start, slot.end))

    def schedule(self) -> Schedule:
        """Return the schedule, ordered by start times, once every operator has been placed."""
        position = {v: at for at, v in enumerate(self._dag.topological_order)}
        order = sorted(range(len(self._dag)), key=lambda v: (self._slots[v].start, position[v]))
        return Schedule(tuple(order), tuple(slot.lane for slot in self._slots), self._cores)

    def _ready_ms(self, i: int, lane: int) -> float:
        """Return when the results of all predecessors have reached a lane, in ms."""
        ready = 0.0
        for m, size in zip(self._dag.predecessors[i], self._dag.edge_bytes[i], strict=True):
            source = self._slots[m]
            transfer = 0.0 if source.lane == lane else self._costs.transfer_ms(source.lane, lane, size)
            ready = max(ready, source.end + transfer)
        return ready


def upward_ranks(dag: Dag, costs: Costs) -> list[float]:
    """Return the length of the longest path from the start of each operator to the end of an exit, in mean times."""
    rank = [0.0] * len(dag)
    for i in reversed(dag.topological_order):
        after = (rank[s] + mean_transfer_ms(dag, costs, i, s) for s in dag.successors[i])
        rank[i] = costs.mean_ms(i) + max(after, default=0.0)
    return rank


def downward_ranks(dag: Dag, costs: Costs) -> list[float]:
    """Return the length of the longest path from the start of an entry to the start of each operator, in mean times."""
    rank = [0.0] * len(dag)
    for i in dag.topological_order:
        before = (rank[m] + costs.mean_ms(m) + mean_transfer_ms(dag, costs, m, i) for m in dag.predecessors[i])
        rank[i] = max(before, default=0.0)
    return rank


def mean_transfer_ms(dag: Dag, costs: Costs, before: int, after: int) -> float:
    """Return the mean time in ms from the end of an operator to the start of its successor on another lane."""
    if costs.accelerator_ms is None:
        return costs.handoff_ms
    size = dag.edge_bytes[after][dag.predecessors[after].index(before)]
    return (costs.upload.ms(size) + costs.download.ms(size)) / 2


def _first_gap(busy: Sequence[tuple[float, float]], ready: float, length: float) -> float:
    """Return the first time from ``ready`` on at which a lane with the given busy intervals is idle for ``length``."""
    at = bisect.bisect_right(busy, (ready, math.inf))
    start = max(ready, busy[at - 1][1] if at else 0.0)
    for busy_start, busy_end in busy[at:]:
        if start + length <= busy_start:
            break
        start = max(start, busy_end)
    return start
