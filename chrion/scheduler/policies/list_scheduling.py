"""List scheduling, which HEFT, CPOP, PEFT and streams share (Topcuoglu, Hariri, Wu, 2002, section 4).

Operators are placed one after another, each after its predecessors, in the first idle gap of a lane that is long
enough; those of streams without insertion, at the end of a lane. The earliest start (EST) includes this machine's
overheads: a handoff between lanes of one device, a copy between devices, and a dispatch for every operator without a
predecessor on its own lane.

Naively, the slots of an operator on all lanes take O(predecessors * lanes). But a result reaches all other lanes of a
device at the same time. So one pass over the predecessors suffices, which keeps for each device the two latest arrivals
from different lanes: the second one counts for the lane that the first one comes from. O(predecessors + lanes), plus
the search for gaps.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from chrion.graph.dag import Dag
from chrion.lane_numbers import all_lanes
from chrion.profiler.costs import Costs
from chrion.scheduler.policies.edge_times import EdgeTimes, edge_times
from chrion.scheduler.schedule import Schedule


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

    def mean_ms(self) -> list[float]:
        """Return the mean time of each operator over the lanes, without those that do not support it."""
        found = []
        for row in zip(*(self.ms[lane] for lane in self.numbers), strict=True):
            finite = [ms for ms in row if ms < math.inf]
            found.append(sum(finite) / len(finite) if finite else 0.0)
        return found

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

    def slots(self, i: int, choices: Iterable[int] | None = None) -> list[TimeSlot]:
        """Return the earliest slot of an operator on each lane that supports it, after the predecessors placed so far.

        Lanes of one device with equal times, and without a predecessor, are alike. Once one of them is idle when the
        inputs have arrived, the following ones are left out: they are no better.

        Args:
            i: The operator.
            choices: The lanes; all if missing.

        Returns:
            The slots in the order of the lanes; if none of the lanes supports the operator, slots that never end.
        """
        own: dict[int, float] = {}  # the latest end of the predecessors on each lane
        to_host = to_device = 0.0
        host, device = _Arrivals(), _Arrivals()
        for m, (within, up, down) in zip(self.lanes.dag.predecessors[i], self.lanes.edges[i], strict=True):
            lane, _, end = self._slots[m]
            if end > own.get(lane, -1.0):
                own[lane] = end
            if lane > 0:
                host.add(lane, end + within)
                to_device = max(to_device, end + up)
            else:
                device.add(lane, end + within)
                to_host = max(to_host, end + down)
        dispatch, times_of, ends_of = self.lanes.costs.dispatch_ms, self.lanes.ms, self._ends
        found = []
        idle: list[Sequence[float] | None] = [None, None]  # times of such a lane, on the accelerator and the host
        for lane in self.lanes.numbers if choices is None else choices:
            on_host, alike, times = lane > 0, lane not in own, times_of[lane]
            if alike and idle[on_host] is times:
                continue
            length = times[i]
            other, foreign = (host, to_host) if on_host else (device, to_device)
            ready = max(foreign, other.second if lane == other.lane else other.first)
            if alike:
                length += dispatch
            elif own[lane] > ready:
                ready = own[lane]
            ends = ends_of[lane]
            start = ready if not ends or ready >= ends[-1] else self._first_gap(lane, ready, length)
            if alike and start == ready:
                idle[on_host] = times
            found.append(TimeSlot(lane, start, start + length))
        return [slot for slot in found if slot.end < math.inf] or found

    def place(self, i: int, slot: TimeSlot) -> None:
        """Place operator ``i`` in a slot."""
        self._slots[i] = slot
        lane, start, end = slot
        starts, ends = self._starts[lane], self._ends[lane]
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

    def last_end(self, i: int, slot: TimeSlot) -> float:
        """Return the latest of the first possible ends of an operator's successors, if it were placed in a slot.

        Returns:
            The time in ms, at least the end of the slot. Other predecessors of the successors count if they are placed.
        """
        starts, ends = self._starts[slot.lane], self._ends[slot.lane]
        kept = starts.copy(), ends.copy()
        self.place(i, slot)
        firsts = [min(found.end for found in self.slots(s)) for s in self.lanes.dag.successors[i]]
        starts[:], ends[:] = kept
        self._slots[i] = _NOT_PLACED
        return max(slot.end, *firsts) if firsts else slot.end

    def schedule(self) -> Schedule:
        """Return the schedule, ordered by start times, once every operator has been placed."""
        order = sorted(self.lanes.dag.topological_order, key=lambda v: self._slots[v].start)
        placement = tuple(slot.lane for slot in self._slots)
        return Schedule(tuple(order), placement, self.lanes.cores, max(1, self.lanes.streams))

    def _first_gap(self, lane: int, ready: float, length: float) -> float:
        """Return the first time from ``ready`` on, before its last end, when a lane has room for ``length``."""
        starts, ends = self._starts[lane], self._ends[lane]
        if not self._insertion:
            return ends[-1]
        at = bisect.bisect_right(starts, ready)
        start = max(ready, ends[at - 1]) if at else ready
        for following in range(at, len(starts)):
            if start + length <= starts[following]:
                break
            start = ends[following]
        return start


class _Arrivals:
    """The latest arrival of results from any lane of one device, and the latest from a different lane."""

    __slots__ = ("first", "lane", "second")

    def __init__(self) -> None:
        self.first = self.second = 0.0
        self.lane: int | None = None

    def add(self, lane: int, time: float) -> None:
        """Add a result that comes from a lane."""
        if time > self.first:
            if lane != self.lane:
                self.first, self.second, self.lane = time, self.first, lane
            else:
                self.first = time
        elif lane != self.lane and time > self.second:
            self.second = time


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
