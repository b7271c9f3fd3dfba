"""A program: for every lane of a plan, the instructions it carries out in order.

A pure record, made once for each plan and shape. A lane waits until others have come far enough, runs a segment, and
signals how far it is itself. Waits that others imply are left out: a lane that has waited for another knows all that
the other knew when it signalled (vector clocks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chrion.graph.dag import Dag

Clock = dict[int, int]


@dataclass(frozen=True, slots=True)
class Wait:
    """Go on when ``lane`` has run ``count`` of its segments."""

    lane: int
    count: int


@dataclass(frozen=True, slots=True)
class Run:
    """Run a segment, by its index in the plan."""

    segment: int


@dataclass(frozen=True, slots=True)
class Signal:
    """Tell the others that this lane has run ``count`` of its segments."""

    count: int


Instruction = Wait | Run | Signal


@dataclass(frozen=True, slots=True)
class Program:
    """Instructions by lane. A lane signals only counts that another waits for."""

    #: Lanes in the order of their first segment; the first is the one that the caller's thread carries out.
    lanes: Mapping[int, tuple[Instruction, ...]]

    @property
    def waits(self) -> int:
        """Number of waits: what the lanes' synchronisation costs."""
        return sum(isinstance(i, Wait) for instructions in self.lanes.values() for i in instructions)


def build_program(
    dag: Dag, lanes: Sequence[int], segments: Sequence[Sequence[int]], stages: Sequence[int] = ()
) -> Program:
    """Turn a plan's segments into instructions.

    Args:
        dag: The graph.
        lanes: Lane of each operator.
        segments: Segments in topological order; the operators of one are all on its lane.
        stages: Stage of each operator, which never falls along the segments. A lane begins a stage when all lanes
            have ended those before it. Without stages there are no such barriers.
    """
    place: dict[int, tuple[int, int]] = {}  # operator -> lane, and count of that lane once it is done
    done: Clock = {}
    known: dict[int, Clock] = {}  # what each lane knows of the others
    at_signal: dict[tuple[int, int], Clock] = {}
    drafts: dict[int, list[Wait | Run]] = {}
    barrier: Clock = {}  # how far each lane is when the stages before this segment's have ended
    for index, segment in enumerate(segments):
        if stages and index and stages[segment[0]] != stages[segments[index - 1][0]]:
            barrier = dict(done)
        lane = lanes[segment[0]]
        mine = known.setdefault(lane, {})
        draft = drafts.setdefault(lane, [])
        needed = _needed(dag, segment, lane, place)
        _merge(needed, {other: count for other, count in barrier.items() if other != lane})
        for wait in _undominated(needed, mine, at_signal):
            draft.append(wait)
            _merge(mine, {**at_signal[wait.lane, wait.count], wait.lane: wait.count})
        draft.append(Run(index))
        done[lane] = done.get(lane, 0) + 1
        at_signal[lane, done[lane]] = dict(mine)
        place.update(dict.fromkeys(segment, (lane, done[lane])))
    awaited = {(i.lane, i.count) for draft in drafts.values() for i in draft if isinstance(i, Wait)}
    return Program({lane: _with_signals(lane, draft, awaited) for lane, draft in drafts.items()})


def _needed(dag: Dag, segment: Sequence[int], lane: int, place: Mapping[int, tuple[int, int]]) -> Clock:
    """How far each other lane must be before the segment may start."""
    inside = set(segment)
    needed: Clock = {}
    for i in segment:
        for m in dag.predecessors[i]:
            if m not in inside and place[m][0] != lane:
                _merge(needed, dict([place[m]]))
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


def _with_signals(lane: int, draft: Sequence[Wait | Run], awaited: set[tuple[int, int]]) -> tuple[Instruction, ...]:
    instructions: list[Instruction] = []
    count = 0
    for instruction in draft:
        instructions.append(instruction)
        if isinstance(instruction, Run):
            count += 1
            if (lane, count) in awaited:
                instructions.append(Signal(count))
    return tuple(instructions)
