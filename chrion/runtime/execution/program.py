"""Programs: for every lane of a plan, the instructions that it carries out in order.

A program is an immutable record, built once for each plan and shape. A lane waits until other lanes have finished the
steps that its next step needs, runs a segment or copies a value, and signals the number of steps that it has finished.
Waits that other waits imply are left out: a lane that has waited for another knows everything the other knew when it
signalled (vector clocks; Mattern, "Virtual
time and global states of distributed systems", 1989).

Copies between the memories of host and device have a lane for each direction, so that they overlap with what the other
lanes compute and with each other. A value is copied once to each memory, as soon as it has been computed; the copies of
a lane follow the order in which their values are computed.

A segment on several cores is run by the lane of the first one, with threads of its session on the others. It waits
until the lanes of these cores have finished their earlier segments. They are parked until it ends, since a spinning
lane would take its core from the segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chrion.common.lane_numbers import DOWNLOAD_LANE, UPLOAD_LANE, is_accelerator_lane, is_copy_lane
from chrion.graph.dag import Dag
from chrion.scheduler.schedule import Schedule

#: Number of segments and copies that each lane has finished.
Clock = dict[int, int]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value that is computed in one memory and read in the other."""

    #: Its name in the graph.
    value: str
    #: The operator that computes it; None for an input of the request.
    producer: int | None
    #: Operators that read it in the other memory; none is needed for an output of the request.
    readers: tuple[int, ...]
    #: Whether it is copied from host to device; otherwise it is copied from device to host.
    upload: bool

    @property
    def lane(self) -> int:
        """The lane that copies it."""
        return UPLOAD_LANE if self.upload else DOWNLOAD_LANE


@dataclass(frozen=True, slots=True)
class Wait:
    """Continue when ``lane`` has finished ``count`` of its segments or copies."""

    lane: int
    count: int
    #: Whether to park at once, because a segment of another lane uses the core.
    park: bool = False


@dataclass(frozen=True, slots=True)
class RunSegment:
    """Run a segment, given by its index in the plan."""

    segment: int
    #: Whether the results have to be complete before the same lane runs its next segment.
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy a value from host to device (``upload``), or from device to host."""

    value: str
    upload: bool


@dataclass(frozen=True, slots=True)
class Signal:
    """Signal that this lane has finished ``count`` of its segments or copies."""

    count: int


Instruction = Wait | RunSegment | Copy | Signal


@dataclass(frozen=True, slots=True)
class Program:
    """Instructions by lane. A lane signals only counts that another lane waits for."""

    #: Lanes in the order of their first segment, then those that copy. The caller's thread carries out the first.
    lanes: Mapping[int, tuple[Instruction, ...]]
    #: Further lanes without instructions, whose cores segments of other lanes use.
    cores_only: tuple[int, ...] = ()

    @property
    def occupied(self) -> tuple[int, ...]:
        """All lanes that need a core of their own."""
        return (*self.lanes, *self.cores_only)

    @property
    def lane_of_segment(self) -> dict[int, int]:
        """The lane that runs each segment."""
        return {i.segment: lane for lane, steps in self.lanes.items() for i in steps if isinstance(i, RunSegment)}

    @property
    def waits(self) -> int:
        """Number of waits, a measure of how much the lanes synchronise."""
        return self._count(Wait)

    @property
    def copies(self) -> int:
        """Number of copies."""
        return self._count(Copy)

    def _count(self, kind: type) -> int:
        return sum(isinstance(i, kind) for instructions in self.lanes.values() for i in instructions)


def build_program(
    dag: Dag, schedule: Schedule, segments: Sequence[Sequence[int]], transfers: Sequence[Transfer] = ()
) -> Program:
    """Build the program of a plan.

    Args:
        dag: The graph.
        schedule: Its schedule. A lane starts a stage when all lanes have finished the stages before it.
        segments: Segments in topological order; the operators of one are all on its lane and of its width.
        transfers: Values to copy. If an edge between host and device has no transfer, both use the value in the same
            memory, and the reader only waits for the producer.
    """
    builder = _ProgramBuilder(dag, schedule, transfers)
    stages = schedule.stages
    for index, segment in enumerate(segments):
        if stages and index and stages[segment[0]] != stages[segments[index - 1][0]]:
            builder.end_stage()
        builder.add(index, segment)
    return builder.build()


class _ProgramBuilder:
    """Builds a program segment by segment."""

    def __init__(self, dag: Dag, schedule: Schedule, transfers: Sequence[Transfer]) -> None:
        self._dag = dag
        self._schedule = schedule
        self._lanes = schedule.lanes
        #: Lane -> (lane, count of that lane) of the last segment that has used its core.
        self._used_by: dict[int, tuple[int, int]] = {}
        #: Operator -> (lane, count of that lane once the operator is done).
        self._done_at: dict[int, tuple[int, int]] = {}
        #: The same for edges whose value is copied: (producer, reader) -> (copying lane, count once it is copied).
        self._copied_at: dict[tuple[int, int], tuple[int, int]] = {}
        #: The same for inputs of the request: reader -> all copies that it needs.
        self._uploaded_at: dict[int, list[tuple[int, int]]] = {}
        self._counts: Clock = {}
        #: The counts of other lanes that each lane knows, now and at each of its own counts.
        self._known: dict[int, Clock] = {}
        self._known_at_signal: dict[tuple[int, int], Clock] = {}
        self._steps: dict[int, list[Wait | RunSegment | Copy]] = {}
        #: Count of each lane at the end of the stages before the current one.
        self._barrier: Clock = {}
        #: Operator -> transfers of the values that it computes.
        self._transfers: dict[int, list[Transfer]] = {}
        for transfer in transfers:
            if transfer.producer is None:
                self._copy(transfer)
            else:
                self._transfers.setdefault(transfer.producer, []).append(transfer)

    def end_stage(self) -> None:
        """Make all later segments wait for all segments so far."""
        self._barrier = {lane: count for lane, count in self._counts.items() if not is_copy_lane(lane)}

    def add(self, index: int, segment: Sequence[int]) -> None:
        """Add the next segment, and copies of the values that it computes."""
        lane = self._lanes[segment[0]]
        needed = self._needed(segment, lane)
        _merge(needed, {other: count for other, count in self._barrier.items() if other != lane})
        occupied = self._schedule.occupied(segment[0])
        for core in occupied:
            _merge(needed, dict([self._used_by.get(core, (lane, 0))]))
        needed.pop(lane, None)
        self._add_step(lane, needed, RunSegment(index))
        done = (lane, self._counts[lane])
        self._done_at.update(dict.fromkeys(segment, done))
        for core in occupied:
            self._used_by[core] = done
            if core != lane:
                self._park(core, *done)
        for i in segment:
            for transfer in self._transfers.get(i, ()):
                self._copy(transfer)

    def build(self) -> Program:
        """Return the program, with signals where other lanes wait."""
        running = [steps for lane, steps in self._steps.items() if self._counts.get(lane)]
        awaited = {(i.lane, i.count) for steps in running for i in steps if isinstance(i, Wait)}
        order = sorted((lane for lane in self._steps if self._counts.get(lane)), key=is_copy_lane)
        cores_only = tuple(sorted(self._used_by.keys() - set(order)))
        return Program({lane: _with_signals(lane, self._steps[lane], awaited) for lane in order}, cores_only)

    def _copy(self, transfer: Transfer) -> None:
        producer, lane = transfer.producer, transfer.lane
        needed = {} if producer is None else dict([self._done_at[producer]])
        self._add_step(lane, needed, Copy(transfer.value, transfer.upload))
        copied = (lane, self._counts[lane])
        for reader in transfer.readers:
            if producer is None:
                self._uploaded_at.setdefault(reader, []).append(copied)
            else:  # a reader of several values of one producer needs the last copy
                self._copied_at[producer, reader] = max(self._copied_at.get((producer, reader), copied), copied)

    def _add_step(self, lane: int, needed: Clock, step: RunSegment | Copy) -> None:
        known = self._known.setdefault(lane, {})
        steps = self._steps.setdefault(lane, [])
        for wait in _undominated(needed, known, self._known_at_signal):
            steps.append(wait)
            _merge(known, {**self._known_at_signal[wait.lane, wait.count], wait.lane: wait.count})
        steps.append(step)
        self._counts[lane] = self._counts.get(lane, 0) + 1
        self._known_at_signal[lane, self._counts[lane]] = dict(known)

    def _park(self, lane: int, runner: int, count: int) -> None:
        """Make a lane wait until another one has finished a segment that uses its core."""
        steps, known = self._steps.setdefault(lane, []), self._known.setdefault(lane, {})
        if steps and isinstance(last := steps[-1], Wait) and last.park and last.lane == runner:
            steps.pop()
        steps.append(Wait(runner, count, park=True))
        _merge(known, {**self._known_at_signal[runner, count], runner: count})

    def _needed(self, segment: Sequence[int], lane: int) -> Clock:
        """Return the count that each other lane must have reached before the segment may start."""
        inside = set(segment)
        needed: Clock = {}
        for i in segment:
            for uploaded in self._uploaded_at.get(i, ()):
                _merge(needed, dict([uploaded]))
            for m in self._dag.predecessors[i]:
                if m not in inside and self._done_at[m][0] != lane:
                    _merge(needed, dict([self._copied_at.get((m, i), self._done_at[m])]))
        return needed


def _undominated(needed: Clock, known: Clock, known_at_signal: Mapping[tuple[int, int], Clock]) -> list[Wait]:
    """Return the waits that are implied neither by the counts that the lane knows nor by another wait."""
    waits = [Wait(lane, count) for lane, count in sorted(needed.items()) if known.get(lane, 0) < count]
    return [
        wait
        for wait in waits
        if not any(known_at_signal[o.lane, o.count].get(wait.lane, 0) >= wait.count for o in waits if o is not wait)
    ]


def _merge(clock: Clock, other: Mapping[int, int]) -> None:
    for lane, count in other.items():
        clock[lane] = max(clock.get(lane, 0), count)


def _with_signals(
    lane: int, steps: Sequence[Wait | RunSegment | Copy], awaited: set[tuple[int, int]]
) -> tuple[Instruction, ...]:
    instructions: list[Instruction] = []
    count = 0
    for at, step in enumerate(steps):
        if isinstance(step, Wait):
            instructions.append(step)
            continue
        count += 1
        signalled = (lane, count) in awaited
        if isinstance(step, RunSegment) and is_accelerator_lane(lane):
            instructions.append(RunSegment(step.segment, complete=signalled or at == len(steps) - 1))
        else:
            instructions.append(step)
        if signalled:
            instructions.append(Signal(count))
    return tuple(instructions)
