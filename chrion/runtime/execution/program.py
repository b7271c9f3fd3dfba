"""A program: for every lane of a plan, the instructions it carries out in order.

A pure record, made once for each plan and shape. A lane waits until others have come far enough, runs a segment or
copies a value, and signals how far it is itself. Waits that others imply are left out: a lane that has waited for
another knows all that the other knew when it signalled (vector clocks).

Copies between the memories of the CPU and the accelerator have a lane for each direction, so that they overlap with
what the others compute, and with each other. A value is copied once to each side, as soon as it has been made; the
copies of a lane follow the order in which their values are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chrion.graph.dag import Dag
from chrion.lane_numbers import DOWNLOAD_LANE, UPLOAD_LANE, is_accelerator_lane, is_copy_lane

Clock = dict[int, int]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value that is made on one side and wanted on the other."""

    #: Its name in the graph.
    value: str
    #: The operator that makes it; None for an input of the request.
    producer: int | None
    #: Operators of the other side that read it; empty for an output of the request that nobody there reads.
    readers: tuple[int, ...]
    #: To the accelerator, or from it.
    upload: bool

    @property
    def lane(self) -> int:
        """The lane that copies it."""
        return UPLOAD_LANE if self.upload else DOWNLOAD_LANE


@dataclass(frozen=True, slots=True)
class Wait:
    """Go on when ``lane`` has done ``count`` of its segments or copies."""

    lane: int
    count: int


@dataclass(frozen=True, slots=True)
class Run:
    """Run a segment, by its index in the plan."""

    segment: int
    #: Whether its results are looked at before the same lane runs its next segment, so that they have to be complete.
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy a value to the accelerator's memory, or from there to the CPU's."""

    value: str
    upload: bool


@dataclass(frozen=True, slots=True)
class Signal:
    """Tell the others that this lane has done ``count`` of its segments or copies."""

    count: int


Instruction = Wait | Run | Copy | Signal


@dataclass(frozen=True, slots=True)
class Program:
    """Instructions by lane. A lane signals only counts that another waits for."""

    #: Lanes in the order of their first segment, then those that copy; the first is the one that the caller's thread
    #: carries out.
    lanes: Mapping[int, tuple[Instruction, ...]]

    @property
    def waits(self) -> int:
        """Number of waits: what the lanes' synchronisation costs."""
        return self._count(Wait)

    @property
    def copies(self) -> int:
        """Number of copies."""
        return self._count(Copy)

    def _count(self, kind: type) -> int:
        return sum(isinstance(i, kind) for instructions in self.lanes.values() for i in instructions)


def build_program(
    dag: Dag,
    lanes: Sequence[int],
    segments: Sequence[Sequence[int]],
    stages: Sequence[int] = (),
    transfers: Sequence[Transfer] = (),
) -> Program:
    """Turn a plan's segments into instructions.

    Args:
        dag: The graph.
        lanes: Lane of each operator.
        segments: Segments in topological order; the operators of one are all on its lane.
        stages: Stage of each operator, which never falls along the segments. A lane begins a stage when all lanes
            have ended those before it. Without stages there are no such barriers.
        transfers: Values to copy. An edge between the sides that none of them serves is a wait for its producer: both
            sides see the same memory.
    """
    draft = _Draft(dag, lanes, transfers)
    for index, segment in enumerate(segments):
        if stages and index and stages[segment[0]] != stages[segments[index - 1][0]]:
            draft.end_stage()
        draft.add(index, segment)
    return draft.program()


class _Draft:
    """A program being written."""

    def __init__(self, dag: Dag, lanes: Sequence[int], transfers: Sequence[Transfer]) -> None:
        self._dag = dag
        self._lanes = lanes
        self._place: dict[int, tuple[int, int]] = {}  # operator -> lane, and count of that lane once it is done
        self._copied: dict[tuple[int, int], tuple[int, int]] = {}  # the same for edges that are copied
        self._done: Clock = {}
        self._known: dict[int, Clock] = {}  # what each lane knows of the others
        self._at_signal: dict[tuple[int, int], Clock] = {}
        self._steps: dict[int, list[Wait | Run | Copy]] = {}
        self._barrier: Clock = {}  # how far each lane is when the stages before this segment's have ended
        self._brought: dict[int, list[tuple[int, int]]] = {}  # operator -> places of the request's values it reads
        self._leaving: dict[int, list[Transfer]] = {}
        for crossing in transfers:
            if crossing.producer is None:
                self._copy(crossing)
            else:
                self._leaving.setdefault(crossing.producer, []).append(crossing)

    def end_stage(self) -> None:
        """What follows waits for all that computes before it."""
        self._barrier = {lane: count for lane, count in self._done.items() if not is_copy_lane(lane)}

    def add(self, index: int, segment: Sequence[int]) -> None:
        """The next segment, and the copies of what it makes."""
        lane = self._lanes[segment[0]]
        needed = self._needed(segment, lane)
        _merge(needed, {other: count for other, count in self._barrier.items() if other != lane})
        self._step(lane, needed, Run(index))
        self._place.update(dict.fromkeys(segment, (lane, self._done[lane])))
        for i in segment:
            for crossing in self._leaving.get(i, ()):
                self._copy(crossing)

    def program(self) -> Program:
        """All of it, with signals where others wait."""
        awaited = {(i.lane, i.count) for steps in self._steps.values() for i in steps if isinstance(i, Wait)}
        order = sorted(self._steps, key=is_copy_lane)
        return Program({lane: _with_signals(lane, self._steps[lane], awaited) for lane in order})

    def _copy(self, crossing: Transfer) -> None:
        producer, lane = crossing.producer, crossing.lane
        needed = {} if producer is None else dict([self._place[producer]])
        self._step(lane, needed, Copy(crossing.value, crossing.upload))
        for reader in crossing.readers:
            if producer is None:
                self._brought.setdefault(reader, []).append((lane, self._done[lane]))
            else:
                place = self._copied.setdefault((producer, reader), (lane, self._done[lane]))
                self._copied[producer, reader] = max(place, (lane, self._done[lane]))

    def _step(self, lane: int, needed: Clock, step: Run | Copy) -> None:
        mine = self._known.setdefault(lane, {})
        steps = self._steps.setdefault(lane, [])
        for wait in _undominated(needed, mine, self._at_signal):
            steps.append(wait)
            _merge(mine, {**self._at_signal[wait.lane, wait.count], wait.lane: wait.count})
        steps.append(step)
        self._done[lane] = self._done.get(lane, 0) + 1
        self._at_signal[lane, self._done[lane]] = dict(mine)

    def _needed(self, segment: Sequence[int], lane: int) -> Clock:
        """How far each other lane must be before the segment may start."""
        inside = set(segment)
        needed: Clock = {}
        for i in segment:
            for place in self._brought.get(i, ()):
                _merge(needed, dict([place]))
            for m in self._dag.predecessors[i]:
                if m not in inside and self._place[m][0] != lane:
                    _merge(needed, dict([self._copied.get((m, i), self._place[m])]))
        return needed


def _undominated(needed: Clock, mine: Clock, at_signal: Mapping[tuple[int, int], Clock]) -> list[Wait]:
    """The waits that neither the lane's knowledge nor another wait implies."""
    waits = [Wait(lane, count) for lane, count in sorted(needed.items()) if mine.get(lane, 0) < count]
    return [
        wait
        for wait in waits
        if not any(at_signal[o.lane, o.count].get(wait.lane, 0) >= wait.count for o in waits if o is not wait)
    ]


def _merge(clock: Clock, other: Mapping[int, int]) -> None:
    for lane, count in other.items():
        clock[lane] = max(clock.get(lane, 0), count)


def _with_signals(
    lane: int, steps: Sequence[Wait | Run | Copy], awaited: set[tuple[int, int]]
) -> tuple[Instruction, ...]:
    instructions: list[Instruction] = []
    count = 0
    for at, step in enumerate(steps):
        if isinstance(step, Wait):
            instructions.append(step)
            continue
        count += 1
        signalled = (lane, count) in awaited
        if isinstance(step, Run) and is_accelerator_lane(lane):
            step = Run(step.segment, complete=signalled or at == len(steps) - 1)  # noqa: PLW2901 - the same, completed
        instructions.append(step)
        if signalled:
            instructions.append(Signal(count))
    return tuple(instructions)
