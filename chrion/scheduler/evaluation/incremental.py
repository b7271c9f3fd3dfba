"""Incremental evaluation: the latency of schedules that differ little from one whose run is known.

A search tries thousands of schedules that differ from the best one in the lane or the position of a few operators, and
nearly all of them are slower. The full evaluation (:mod:`chrion.scheduler.evaluation.evaluate`) takes O(n + edges) for
each. Here a :class:`Trace` keeps the states that the run of the best schedule went through, and a trial

1. starts from the last state before anything that the move can change, and
2. ends as soon as a lower bound shows that the trial is no faster: the time so far, plus the longest path that is left.

After the last change, that path is the one of the best schedule itself, so that most trials end a few operators later.
Operations on floating-point numbers are those of the full evaluation in the same order: the results are equal bit by
bit, and tests compare them. Schedules with stages, several accelerator lanes or wide lanes are evaluated in full.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.weight_cache import durations_ms
from chrion.scheduler.schedule import Schedule

#: Fewest operators between two states that are kept.
_LEAST_DISTANCE = 16
#: A bound must exceed the limit by this factor, since it is rounded in another order than the latency.
_ROUNDING = 1 + 1e-9


def has_traces(schedule: Schedule) -> bool:
    """Return True if a schedule can be evaluated incrementally."""
    return not schedule.stages and not schedule.widths and schedule.streams == 1


class GraphTables:
    """What the evaluation needs to know of a graph and its costs, prepared for speed.

    Args:
        dag: The graph.
        costs: The machine's costs.
    """

    def __init__(self, dag: Dag, costs: Costs) -> None:
        self.dag, self.costs = dag, costs
        self.upload_ms = [costs.upload.ms(size) for size in dag.value_bytes]
        self.download_ms = [costs.download.ms(size) for size in dag.value_bytes]
        outputs = set(dag.request_outputs)
        #: Of each operator: its values that are read or returned, with their readers, and whether they are returned.
        self.values = [
            [(value, readers, (i, value) in outputs) for value, readers in row]
            for i, row in enumerate(dag.output_values)
        ]
        self.input_readers = frozenset(reader for _, readers in dag.request_inputs for reader in readers)
        self.reloads = bool(costs.cache_bytes and costs.reload_ms_per_byte)
        self._tails: dict[int, list[float]] = {}

    def tails_ms(self, cores: int) -> list[float]:
        """Return the longest path from the end of each operator, if each runs on its fastest lane, in ms."""
        if cores not in self._tails:
            rows = [self.costs.lane_ms(lane, cores) for lane in (0, 1)[: 1 + bool(cores)]]
            least = [min(times) for times in zip(*rows, strict=True)]
            tail = [0.0] * len(self.dag)
            for i in reversed(self.dag.topological_order):
                for m in self.dag.predecessors[i]:
                    tail[m] = max(tail[m], least[i] + tail[i])
            self._tails[cores] = tail
        return self._tails[cores]


@dataclass(slots=True)
class _Open:
    """A segment that may still grow."""

    members: list[int]
    #: The operators of other lanes that it waits for, each with the last of the values read from it.
    awaited: dict[int, int]
    #: The number of members when the state was kept: operators are only ever added.
    count: int = 0


@dataclass(slots=True)
class _State:
    """The state of an evaluation between two operators of the order."""

    #: The open segment of each lane, in the order in which the full evaluation closes those that are left.
    open: dict[int, _Open]
    #: When each lane is available, and the time of its operators that have not run, in ms.
    available: list[float]
    left: list[float]
    #: When the copy lanes are free, in ms.
    upload_free: float = 0.0
    download_free: float = 0.0
    #: The end of the last segment so far, in ms.
    latest: float = 0.0

    def keep(self) -> _State:
        """Return a copy to start from later."""
        return self._copy({lane: _Open(own.members, own.awaited, len(own.members)) for lane, own in self.open.items()})

    def resume(self) -> _State:
        """Return a state with the segments as they were when this state was kept."""
        return self._copy({lane: _Open(own.members[: own.count], own.awaited) for lane, own in self.open.items()})

    def _copy(self, segments: dict[int, _Open]) -> _State:
        frees = self.upload_free, self.download_free, self.latest
        return _State(segments, self.available.copy(), self.left.copy(), *frees)


class Trace:
    """The run of one schedule.

    Attributes:
        latency_ms: Its latency.
        work: Operators that this trace has evaluated so far.

    Args:
        tables: The graph and its costs.
        schedule: The schedule; see :func:`has_traces`.
        tiles: Label of each operator by which the schedule is cut into segments, or None.
    """

    def __init__(self, tables: GraphTables, schedule: Schedule, tiles: Sequence[int] | None) -> None:
        n = len(tables.dag)
        self._tables, self._schedule = tables, schedule
        self._position = [0] * n
        for at, i in enumerate(schedule.order):
            self._position[i] = at
        self._duration = durations_ms(tables.dag, tables.costs, schedule)
        self._distance = max(_LEAST_DISTANCE, math.isqrt(n))
        self._states: list[_State] = []
        self._run = _Run(tables, schedule, tiles, self._duration)
        self.latency_ms = self._run.to_end(0, self._states, self._distance)
        self._tails = self._tails_ms()
        self.work = n

    def latency_below(
        self, limit_ms: float, schedule: Schedule, changed: Sequence[int], tiles: Sequence[int] | None = None
    ) -> float | None:
        """Return the latency of a similar schedule in ms, or None if it is ``limit_ms`` or more.

        Args:
            limit_ms: The limit.
            schedule: The schedule, with the same number of cores.
            changed: The operators that have another lane, position or label in it.
            tiles: Its labels; None if this trace has none.
        """
        dag, position = self._tables.dag, self._position
        duration = self._durations(schedule, changed)
        old = self._schedule.lanes
        moved = [i for i in changed if schedule.lanes[i] != old[i]]
        touched = set(changed).union(*(dag.predecessors[i] for i in moved))
        if duration is not self._duration and self._tables.reloads:
            slower = [i for i, (a, b) in enumerate(zip(duration, self._duration, strict=True)) if a != b]
            touched.update(slower)
            changed = [*changed, *slower]
        if not touched:
            return self.latency_ms if self.latency_ms < limit_ms else None
        readers = self._tables.input_readers
        if any(i in readers and is_accelerator_lane(old[i]) != is_accelerator_lane(schedule.lanes[i]) for i in moved):
            first = 0
            run = _Run(self._tables, schedule, tiles, duration)
        else:
            at = min(position[i] for i in touched) // self._distance
            first = at * self._distance
            run = _Run(self._tables, schedule, tiles, duration, self._states[at].resume(), self._run)
            for i in dict.fromkeys(changed):
                run.state.left[old[i]] -= self._duration[i]
                run.state.left[schedule.lanes[i]] += duration[i]
        run.limit(limit_ms, max(position[i] for i in changed), self._tails, self._position)
        latency = run.to_limit(first)
        self.work += run.work
        return latency

    def _durations(self, schedule: Schedule, changed: Sequence[int]) -> list[float]:
        """Return the time of each operator in a similar schedule, in ms."""
        if self._tables.reloads:
            return durations_ms(self._tables.dag, self._tables.costs, schedule)
        durations = self._duration.copy()
        for i in changed:
            durations[i] = self._tables.costs.lane_ms(schedule.lanes[i], schedule.cores)[i]
        return durations

    def _tails_ms(self) -> list[float]:
        """Return the longest path from the end of each operator to the end of the schedule, in ms.

        It leads over operators that are next on their lane, and over handoffs and copies to other lanes. Only segments,
        which wait for all of their inputs, and copies, which wait for each other, may take longer.
        """
        tables, lanes, duration = self._tables, self._schedule.lanes, self._duration
        costs, dispatch = tables.costs, tables.costs.dispatch_ms
        tails = [0.0] * len(lanes)
        following: dict[int, float] = {}  # the rest of a lane from the start of its next operator
        for i in reversed(self._schedule.order):
            lane = lanes[i]
            if lane <= 0:
                for value, _, returned in tables.values[i]:
                    if returned:
                        tails[i] = max(tails[i], tables.download_ms[value])
            tails[i] = max(tails[i], following.get(lane, 0.0))
            rest = following[lane] = duration[i] + tails[i]
            for m, values in tables.dag.received[i]:
                other = lanes[m]
                if other == lane:
                    continue
                if (other <= 0) == (lane <= 0):
                    between = costs.handoff_ms
                else:
                    copies = tables.upload_ms if lane <= 0 else tables.download_ms
                    between = max(copies[value] for value in values)
                tails[m] = max(tails[m], between + dispatch + rest)
        return tails


class _Run:
    """One evaluation.

    Args:
        tables: The graph and its costs.
        schedule: The schedule.
        tiles: Its labels, or None.
        duration: The time of each operator, in ms.
        state: The state to start from; the beginning of a request if missing.
        before: The run that the state comes from.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - a state comes with its run
        self,
        tables: GraphTables,
        schedule: Schedule,
        tiles: Sequence[int] | None,
        duration: list[float],
        state: _State | None = None,
        before: _Run | None = None,
    ) -> None:
        n = len(tables.dag)
        self.tables, self.order, self.lanes, self.tiles = tables, schedule.order, schedule.lanes, tiles
        self.duration, self.work = duration, 0
        #: When other lanes of the same device see each result, when each value has reached the other memory, and the
        #: segment of each operator.
        self.visible: list[float] = before.visible.copy() if before else [0.0] * n
        self.arrived: list[float] = before.arrived.copy() if before else [0.0] * len(tables.dag.value_bytes)
        self.home: list[_Open | None] = [None] * n
        self.inputs_ready: dict[int, float] = before.inputs_ready if before and state else {}
        self._safe_limit, self._last = math.inf, 0
        self._tails: Sequence[float] = ()
        self._weak: Sequence[float] = tables.tails_ms(schedule.cores)
        self._position: Sequence[int] = ()
        self._limit = math.inf
        if state is not None:
            self.state = state
            if tiles is not None:
                for own in state.open.values():
                    for i in own.members:
                        self.home[i] = own
            return
        left = [0.0] * (schedule.cores + schedule.streams)
        for i, lane in enumerate(schedule.lanes):
            left[lane] += duration[i]
        self.state = _State({}, [0.0] * len(left), left)
        for size, readers in tables.dag.request_inputs:
            on_device = [reader for reader in readers if is_accelerator_lane(schedule.lanes[reader])]
            if on_device:
                self.state.upload_free += tables.costs.upload.ms(size)
                self.inputs_ready.update(dict.fromkeys(on_device, self.state.upload_free))

    def limit(self, limit_ms: float, last: int, tails: Sequence[float], position: Sequence[int]) -> None:
        """Let the run end when its latency is known to be ``limit_ms`` or more.

        Args:
            limit_ms: The limit.
            last: The position of the last operator that differs from a known schedule.
            tails: The longest path from the end of each operator in that schedule, in ms.
            position: The position of each operator in that schedule.
        """
        self._limit, self._safe_limit = limit_ms, limit_ms * _ROUNDING
        self._last, self._tails, self._position = last, tails, position

    def to_end(self, first: int, states: list[_State], distance: int) -> float:
        """Return the latency in ms, and keep the states at every multiple of ``distance`` operators."""
        for at in range(first, len(self.order)):
            if at % distance == 0:
                states.append(self.state.keep())
            self._add(self.order[at])
        for own in self.state.open.values():
            self._close(own.members)
        return max(self.state.latest, self.state.upload_free, self.state.download_free)

    def to_limit(self, first: int) -> float | None:
        """Return the latency in ms, or None if it is at least the limit."""
        state = self.state
        if any(free + rest >= self._safe_limit for free, rest in zip(state.available, state.left, strict=True)):
            return None
        for at in range(first, len(self.order)):
            if not self._add(self.order[at]):
                self.work = at + 1 - first
                return None
        self.work = len(self.order) - first
        if not all(self._close(own.members) for own in state.open.values()):
            return None
        latency = max(state.latest, state.upload_free, state.download_free)
        return latency if latency < self._limit else None

    def _add(self, i: int) -> bool:
        """Add the next operator of the order to a segment (see :func:`chrion.graph.segments.cut`), and run what ends.

        Returns:
            False if the limit is exceeded.
        """
        return self._add_without_delay(i) if self.tiles is None else self._add_by_tile(i, self.tiles)

    def _add_without_delay(self, i: int) -> bool:
        lanes, segments = self.lanes, self.state.open
        lane = lanes[i]
        foreign = {m: max(values) for m, values in self.tables.dag.received[i] if lanes[m] != lane}
        own = segments.get(lane)
        below = True
        if own is not None and (not foreign or _awaits(own.awaited, foreign)):
            own.members.append(i)
        else:
            below = own is None or self._close(own.members)
            own = segments[lane] = _Open([i], foreign)
        for after in self.tables.dag.successors[i]:
            if lanes[after] != lane:
                del segments[lane]
                return self._close(own.members) and below
        return below

    def _add_by_tile(self, i: int, tiles: Sequence[int]) -> bool:
        lanes, segments, home = self.lanes, self.state.open, self.home
        lane = lanes[i]
        below = True
        for m in self.tables.dag.predecessors[i]:
            other = lanes[m]
            if other != lane:
                read = segments.get(other)
                if read is not None and read is home[m]:
                    below &= self._close(segments.pop(other).members)
        own = segments.get(lane)
        if own is None or tiles[own.members[0]] != tiles[i]:
            below &= own is None or self._close(own.members)
            own = segments[lane] = _Open([], {})
        own.members.append(i)
        home[i] = own
        return below

    def _close(self, members: list[int]) -> bool:
        """Run a segment; return False if the limit is exceeded."""
        state, duration, tables = self.state, self.duration, self.tables
        lane = self.lanes[members[0]]
        time = self._start_ms(members, lane) + tables.costs.dispatch_ms
        later = self._position and self._position[members[0]] > self._last
        tails = self._tails if later else self._weak
        longest = 0.0
        left = state.left[lane]
        for i in members:
            time += duration[i]
            left -= duration[i]
            longest = max(longest, time + tails[i])
        visible = self.visible
        for i in members:
            visible[i] = time
        state.available[lane], state.left[lane] = time, left
        state.latest = max(state.latest, time)
        self._copy(members, time, on_device=lane <= 0)
        return longest < self._safe_limit and time + left < self._safe_limit

    def _start_ms(self, members: Sequence[int], lane: int) -> float:
        """Return when a segment's lane is available and its inputs have arrived, in ms."""
        lanes, received, visible, arrived = self.lanes, self.tables.dag.received, self.visible, self.arrived
        handoff = self.tables.costs.handoff_ms
        on_device = lane <= 0
        time = self.state.available[lane]
        for i in members:
            for m, values in received[i]:
                other = lanes[m]
                if other == lane:
                    continue
                if (other <= 0) == on_device:
                    time = max(time, visible[m] + handoff)
                else:
                    for value in values:
                        time = max(time, arrived[value])
        if on_device and self.inputs_ready:
            for i in members:
                time = max(time, self.inputs_ready.get(i, 0.0))
        return time

    def _copy(self, members: Sequence[int], time: float, *, on_device: bool) -> None:
        """Copy the values of a segment that are read in the other memory, or are outputs made on the device."""
        state, lanes, values = self.state, self.lanes, self.tables.values
        for i in members:
            for value, readers, returned in values[i]:
                if not (on_device and returned) and all((lanes[reader] <= 0) == on_device for reader in readers):
                    continue
                if on_device:
                    end = state.download_free = max(state.download_free, time) + self.tables.download_ms[value]
                else:
                    end = state.upload_free = max(state.upload_free, time) + self.tables.upload_ms[value]
                self.arrived[value] = end


def _awaits(awaited: dict[int, int], foreign: dict[int, int]) -> bool:
    """Return True if a segment already waits for given values; both map operators to their last value."""
    return all(m in awaited and last <= awaited[m] for m, last in foreign.items())
