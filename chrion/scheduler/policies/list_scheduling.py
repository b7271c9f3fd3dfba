"""List scheduling, which HEFT, CPOP, PEFT, streams and Algorithm 2 share (Topcuoglu, Hariri, Wu, 2002, section 4).

Operators are placed one after another, each after its predecessors, in the first idle gap of a lane that is long
enough; those of streams and of Algorithm 2 without insertion, at the end of a lane. The earliest start (EST) of
:meth:`ListScheduler.slots` includes this machine's overheads: a handoff between lanes of one device, a copy between
devices, and a dispatch for every operator without a predecessor on its own lane.

Lanes of one device that have none of an operator's predecessors are alike. So an operator has at most one slot for each
device and one for each lane with a predecessor: O(predecessors + lanes) for few of the latter, besides the search for
gaps.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from chrion.common.lane_numbers import all_lanes
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.schedule import Schedule

#: The times in ms from the end of an operator until its result is available: to another lane of the same device, to
#: the accelerator from the host, and to the host from the accelerator.
TransferTimes = tuple[float, float, float]
#: Of each operator, the transfer times of its edges, parallel to its predecessors.
EdgeTimes = list[list[TransferTimes]]


def edge_times(dag: Dag, costs: Costs) -> EdgeTimes:
    """Return the transfer times of a graph's edges on a machine, which are those of all smaller machines within it.

    Edges of equal size share one entry: large graphs have few different sizes.
    """
    known: dict[int, TransferTimes] = {}

    def times(size: int) -> TransferTimes:
        transfer_times = known.get(size)
        if transfer_times is None:
            transfer_times = known[size] = (
                costs.transfer_ms(1, 2, size),
                costs.transfer_ms(1, 0, size),
                costs.transfer_ms(0, 1, size),
            )
        return transfer_times

    return [[times(size) for size in sizes] for sizes in dag.edge_bytes]


class TimeSlot(NamedTuple):
    """A time interval on a lane, in ms."""

    lane: int
    start: float
    end: float


#: The slot of an operator that is not placed yet; it delays no successor.
_NOT_PLACED = TimeSlot(1, -math.inf, -math.inf)


class Lanes:
    """The lanes of a machine as list scheduling sees them, with the times of operators and of edges between lanes.

    Args:
        dag: The graph.
        costs: The machine's costs of its operators. All of its lanes are used.
        edges: The transfer times of the graph's edges on the machine, or on a larger one; calculated if missing.
    """

    def __init__(self, dag: Dag, costs: Costs, edges: EdgeTimes | None = None) -> None:
        self.dag, self.costs, self.cores = dag, costs, costs.cores
        self.streams = costs.streams if costs.accelerator_ms is not None else 0
        #: The lane numbers; the lowest first.
        self.numbers = sorted(all_lanes(self.cores, self.streams))
        #: W: time of every operator on each lane, by lane.
        self.ms = {lane: costs.lane_ms(lane, self.cores) for lane in self.numbers}
        self.edges = edge_times(dag, costs) if edges is None else edges
        #: The lane numbers, divided into lanes of one device that have equal times.
        self.alike = self.split(self.numbers)

    def split(self, numbers: Iterable[int]) -> list[list[int]]:
        """Divide lanes into lists, each of lanes of one device that have equal times."""
        groups: dict[tuple[bool, int], list[int]] = {}
        for lane in numbers:
            groups.setdefault((lane > 0, id(self.ms[lane])), []).append(lane)
        return list(groups.values())

    def mean_ms(self) -> list[float]:
        """Return the mean time of each operator over the lanes, without those that do not support it."""
        means_ms = []
        for row in zip(*(self.ms[lane] for lane in self.numbers), strict=True):
            finite = [ms for ms in row if ms < math.inf]
            means_ms.append(sum(finite) / len(finite) if finite else 0.0)
        return means_ms

    def mean_transfers_ms(self) -> list[list[float]]:
        """Return the mean time of each edge over all pairs of different lanes, by operator and predecessor."""
        lanes = len(self.numbers)
        pairs = lanes * (lanes - 1)
        apart = self.cores * self.streams
        same = pairs - 2 * apart
        means = {
            (within, up, down): (same * within + apart * (up + down)) / pairs if pairs else 0.0
            for within, up, down in {times for row in self.edges for times in row}
        }
        return [[means[times] for times in row] for row in self.edges]


class ListScheduler:
    """A schedule that is built operator by operator.

    Args:
        lanes: The lanes to use.
        insertion: Use idle gaps between operators; otherwise each one follows those that its lane has already.
    """

    def __init__(self, lanes: Lanes, *, insertion: bool = True) -> None:
        self.lanes, self._insertion = lanes, insertion
        self._slots = [_NOT_PLACED] * len(lanes.dag)
        #: Starts and ends of each lane's busy intervals. Intervals that touch are one.
        self._starts: dict[int, list[float]] = {lane: [] for lane in lanes.numbers}
        self._ends: dict[int, list[float]] = {lane: [] for lane in lanes.numbers}
        #: The last end of each lane.
        self._last = dict.fromkeys(lanes.numbers, -1.0)

    def ready_ms(self, i: int) -> tuple[float, float]:
        """Return when the inputs of an operator have arrived, on the accelerator and on the host, without handoffs."""
        placed = self._slots
        on_device = on_host = 0.0
        for m, (_, up, down) in zip(self.lanes.dag.predecessors[i], self.lanes.edges[i], strict=True):
            lane, _, device = placed[m]
            host = device
            if lane > 0:
                device += up
            else:
                host += down
            # Most time of large graphs is spent here, and calls of max would double it.
            if device > on_device:  # noqa: PLR1730
                on_device = device
            if host > on_host:  # noqa: PLR1730
                on_host = host
        return on_device, on_host

    def first_slot(self, choices: Iterable[int], ready: float, length: float) -> TimeSlot:
        """Return the first slot of a length on any of several lanes that are alike; on a tie, that of the first lane.

        Args:
            choices: The lanes; without any, the slot never starts.
            ready: The time in ms from which on the slot may start.
            length: The time in ms that it takes.
        """
        best, least = 0, math.inf
        last = self._last
        for lane in choices:
            if ready >= last[lane]:
                return TimeSlot(lane, ready, ready + length)
            start = self._first_gap(lane, ready, length) if self._insertion else last[lane]
            if start < least:
                best, least = lane, start
                if start == ready:
                    break
        return TimeSlot(best, least, least + length)

    def slots(self, i: int, choices: Iterable[int] | None = None) -> list[TimeSlot]:
        """Return the earliest slot of an operator on each lane that supports it, after the predecessors placed so far.

        Lanes of one device without a predecessor are alike. Of those, only the one on which the operator starts first
        is returned, on a tie the first. It ends no later than on the others.

        Args:
            i: The operator.
            choices: The lanes; all if missing.

        Returns:
            The slots in the order of lane numbers; if none of the lanes supports the operator, slots that never end.
        """
        lanes, placed = self.lanes, self._slots
        handed_over: dict[int, float] = {}  # when results of each lane reach the other lanes of its device
        for m, (within, _, _) in zip(lanes.dag.predecessors[i], lanes.edges[i], strict=True):
            lane, _, end = placed[m]
            if end + within > handed_over.get(lane, -1.0):
                handed_over[lane] = end + within
        arrivals = self.ready_ms(i)
        latest = list(arrivals)
        for lane, time in handed_over.items():
            latest[lane > 0] = max(latest[lane > 0], time)
        slots = []
        for numbers in lanes.alike if choices is None else lanes.split(choices):
            on_host, length = numbers[0] > 0, lanes.ms[numbers[0]][i]
            alike = numbers
            for lane in handed_over:
                if lane in numbers:
                    alike = [other for other in alike if other != lane]
                    others = [time for other, time in handed_over.items() if other != lane and (other > 0) == on_host]
                    slots.append(self.first_slot((lane,), max([arrivals[on_host], *others]), length))
            if alike:
                slots.append(self.first_slot(alike, latest[on_host], length + lanes.costs.dispatch_ms))
        return sorted([slot for slot in slots if slot.end < math.inf] or slots)

    def place(self, i: int, slot: TimeSlot) -> None:
        """Place operator ``i`` in a slot."""
        self._slots[i] = slot
        lane, start, end = slot
        starts, ends = self._starts[lane], self._ends[lane]
        last = self._last[lane]
        if start >= last:
            self._last[lane] = end
            if start == last:
                ends[-1] = end
            else:
                starts.append(start)
                ends.append(end)
            return
        at = bisect.bisect_right(starts, start)
        if at and ends[at - 1] == start:
            ends[at - 1] = end
            at -= 1
        else:
            starts.insert(at, start)
            ends.insert(at, end)
        if at + 1 < len(starts) and starts[at + 1] == end:
            ends[at] = ends.pop(at + 1)
            del starts[at + 1]

    def schedule(self) -> Schedule:
        """Return the schedule, ordered by start times, once every operator has been placed."""
        order = sorted(self.lanes.dag.topological_order, key=lambda v: self._slots[v].start)
        placement = tuple(slot.lane for slot in self._slots)
        return Schedule(tuple(order), placement, self.lanes.cores, max(1, self.lanes.streams))

    def _first_gap(self, lane: int, ready: float, length: float) -> float:
        """Return the first time from ``ready`` on, before its last end, when a lane has room for ``length``."""
        starts, ends = self._starts[lane], self._ends[lane]
        at = bisect.bisect_right(starts, ready)
        start = max(ready, ends[at - 1]) if at else ready
        for following in range(at, len(starts)):
            if start + length <= starts[following]:
                break
            start = ends[following]
        return start


def upward_ranks(lanes: Lanes, *, transfers: bool = True) -> list[float]:
    """Return the length of the longest path from the start of each operator to the end of an exit, in mean times.

    Args:
        lanes: The lanes.
        transfers: Whether the mean times of transfers between lanes count.
    """
    dag, mean, edges = lanes.dag, lanes.mean_ms(), lanes.mean_transfers_ms()
    longest = [0.0] * len(dag)  # from the end of each operator
    rank = [0.0] * len(dag)
    for i in reversed(dag.topological_order):
        rank[i] = mean[i] + longest[i]
        for m, transfer in zip(dag.predecessors[i], edges[i], strict=True):
            longest[m] = max(longest[m], transfer * transfers + rank[i])
    return rank


def downward_ranks(lanes: Lanes) -> list[float]:
    """Return the length of the longest path from the start of an entry to the start of each operator, in mean times."""
    dag, mean, transfers = lanes.dag, lanes.mean_ms(), lanes.mean_transfers_ms()
    rank = [0.0] * len(dag)
    for i in dag.topological_order:
        before = zip(dag.predecessors[i], transfers[i], strict=True)
        rank[i] = max((rank[m] + mean[m] + transfer for m, transfer in before), default=0.0)
    return rank


def by_rank(dag: Dag, rank: Sequence[float]) -> list[int]:
    """Return the operators by decreasing upward rank; of equal ones, predecessors first."""
    return sorted(dag.topological_order, key=lambda v: -rank[v])
