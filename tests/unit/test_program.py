"""Programs: carried out in random interleavings of their lanes, and compared with a transitive reduction."""

from __future__ import annotations

import itertools

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from chrion.common.lane_numbers import DOWNLOAD_LANE, UPLOAD_LANE, is_copy_lane
from chrion.graph import Dag
from chrion.graph.segments import cut
from chrion.runtime.execution.program import Copy, Program, RunSegment, Signal, Transfer, Wait, build_program
from chrion.scheduler import Schedule
from strategies import costs_for, dags, schedules


def draw_program(data: st.DataObject) -> tuple[Dag, Schedule, tuple[tuple[int, ...], ...], Program]:
    """Return a random graph with a schedule, its segments and its program."""
    dag = data.draw(dags(12))
    costs = data.draw(costs_for(dag, wide=data.draw(st.booleans())))
    schedule = data.draw(schedules(dag, costs, most_streams=3, staged=None))
    whole = data.draw(st.booleans())
    cuts = cut(dag, schedule.order, schedule.lanes, stages=schedule.stages, widths=schedule.widths)
    segments = cuts if whole else tuple((i,) for i in schedule.order)
    transfers = draw_transfers(data, dag, schedule)
    return dag, schedule, segments, build_program(dag, schedule, segments, transfers)


def draw_transfers(data: st.DataObject, dag: Dag, schedule: Schedule) -> tuple[Transfer, ...]:
    """Return transfers of some or all values between host and device, and of an input of some device operators.

    The value of operator m is named m, the input is named input.
    """
    on_device = [lane <= 0 for lane in schedule.lanes]
    all_values = data.draw(st.booleans())
    first = tuple(i for i in range(len(dag)) if on_device[i] and data.draw(st.booleans()))
    transfers = [Transfer("input", None, first, upload=True)] if first else []
    for m in schedule.order:
        readers = tuple(s for s in dag.successors[m] if on_device[s] != on_device[m])
        if readers and (all_values or data.draw(st.booleans())):
            transfers.append(Transfer(str(m), m, readers, upload=not on_device[m]))
    return tuple(transfers)


def earlier_stages(dag: Dag, schedule: Schedule, i: int) -> set[int]:
    """Return the operators of all stages before an operator's."""
    stages = schedule.stages
    return {m for m in range(len(dag)) if stages[m] < stages[i]} if stages else set()


@given(st.data())
def test_any_interleaving_respects_all_dependencies_and_ends(data: st.DataObject) -> None:
    """In any interleaving every segment finds its inputs and cores ready, and some lane can always continue."""
    dag, schedule, segments, program = draw_program(data)
    lanes = schedule.lanes
    at = dict.fromkeys(program.lanes, 0)
    signalled = dict.fromkeys(program.lanes, 0)
    done: set[int] = set()
    copied: set[str] = set()
    transfers = {
        step.value: step.upload for steps in program.lanes.values() for step in steps if isinstance(step, Copy)
    }

    def can_continue(lane: int) -> bool:
        if at[lane] == len(program.lanes[lane]):
            return False
        step = program.lanes[lane][at[lane]]
        return not isinstance(step, Wait) or signalled[step.lane] >= step.count

    while any(at[lane] < len(program.lanes[lane]) for lane in at):
        ready = [lane for lane in at if can_continue(lane)]
        assert ready, "deadlock"
        lane = data.draw(st.sampled_from(ready))
        step = program.lanes[lane][at[lane]]
        at[lane] += 1
        if isinstance(step, Signal):
            signalled[lane] = step.count
        elif isinstance(step, Copy):
            assert lane == (UPLOAD_LANE if step.upload else DOWNLOAD_LANE)
            assert step.value == "input" or int(step.value) in done
            copied.add(step.value)
        elif isinstance(step, RunSegment):
            for core in schedule.occupied(segments[step.segment][0]):
                earlier = (s for s in segments[: step.segment] if core in schedule.occupied(s[0]))
                assert all(done.issuperset(s) for s in earlier)
                if core != lane and core in at:  # the core's own lane does nothing meanwhile
                    parked = program.lanes[core][at[core]]
                    assert isinstance(parked, Wait)
                    assert parked.park
            for i in segments[step.segment]:
                assert lanes[i] == lane
                remote = {str(m) for m in dag.predecessors[i] if (lanes[m] <= 0) != (lane <= 0)}
                assert remote & set(transfers) <= copied
                assert set(dag.predecessors[i]) | earlier_stages(dag, schedule, i) <= done
                done.add(i)
    assert done == set(range(len(dag)))
    assert copied == set(transfers)
    assert program.copies == len(transfers)


@given(st.data())
def test_waits_are_the_transitive_reduction(data: st.DataObject) -> None:
    """A lane waits exactly if neither its earlier steps nor another wait imply that a segment or a copy is done."""
    dag = data.draw(dags(12))
    schedule = data.draw(schedules(dag, data.draw(costs_for(dag)), most_streams=3, staged=None))
    segments = cut(dag, schedule.order, schedule.lanes, stages=schedule.stages)
    transfers = draw_transfers(data, dag, schedule)
    program = build_program(dag, schedule, segments, transfers)
    # The work of each lane in order: segments by index, copies by the name of their value.
    own = {
        lane: [s.segment if isinstance(s, RunSegment) else s.value for s in steps if isinstance(s, RunSegment | Copy)]
        for lane, steps in program.lanes.items()
    }
    lane_of = {step: lane for lane, steps in own.items() for step in steps}
    segment_of = {i: at for at, s in enumerate(segments) for i in s}
    copied = {(c.producer, reader): c.value for c in transfers for reader in c.readers}
    precedes: nx.DiGraph = nx.DiGraph()
    precedes.add_nodes_from(lane_of)
    precedes.add_edges_from(pair for steps in own.values() for pair in itertools.pairwise(steps))
    precedes.add_edges_from((segment_of[c.producer], c.value) for c in transfers if c.producer is not None)
    precedes.add_edges_from((c.value, segment_of[r]) for c in transfers for r in c.readers)
    precedes.add_edges_from(
        (segment_of[m], segment_of[i])
        for i, before in enumerate(dag.predecessors)
        for m in {*before, *earlier_stages(dag, schedule, i)}
        if segment_of[m] != segment_of[i]
        and (m not in before or (m, i) not in copied or m in earlier_stages(dag, schedule, i))
    )
    expected = {(a, b) for a, b in nx.transitive_reduction(precedes).edges if lane_of[a] != lane_of[b]}
    found = []
    for steps in program.lanes.values():
        waits: list[Wait] = []
        for step in steps:
            if isinstance(step, Wait):
                waits.append(step)
            elif isinstance(step, RunSegment | Copy):
                name = step.segment if isinstance(step, RunSegment) else step.value
                found += [(own[w.lane][w.count - 1], name) for w in waits]
                waits = []
        assert not waits
    assert set(found) == expected
    assert program.waits == len(found) == len(expected)


@given(st.data())
def test_lanes_signal_only_what_is_awaited(data: st.DataObject) -> None:
    """Signals and waits name the same counts, and each signal follows the run that reaches its count."""
    *_, program = draw_program(data)
    awaited = {(s.lane, s.count) for steps in program.lanes.values() for s in steps if isinstance(s, Wait)}
    signalled = set()
    for lane, steps in program.lanes.items():
        runs = 0
        for before, step in zip((None, *steps), steps, strict=False):
            runs += isinstance(step, RunSegment | Copy)
            if isinstance(step, Signal):
                assert isinstance(before, RunSegment | Copy)
                assert step.count == runs
                signalled.add((lane, step.count))
    assert signalled == awaited


@given(st.data())
def test_the_first_lane_has_the_first_segment(data: st.DataObject) -> None:
    """The lane of the first segment is the first one, which the caller's thread runs."""
    _, schedule, segments, program = draw_program(data)
    lanes = schedule.lanes
    assert next(iter(program.lanes)) == lanes[segments[0][0]]
    assert {lane for lane in program.lanes if not is_copy_lane(lane)} == set(lanes)
    used = {lane for i in range(len(lanes)) for lane in schedule.occupied(i)}
    assert {lane for lane in program.occupied if not is_copy_lane(lane)} == used


@given(st.data())
def test_results_are_complete_when_another_lane_or_the_caller_reads_them(data: st.DataObject) -> None:
    """On the accelerator, runs that are signalled or end their lane are complete; on the cores, all runs are."""
    *_, program = draw_program(data)
    for lane, steps in program.lanes.items():
        for at, step in enumerate(steps):
            if isinstance(step, RunSegment):
                last = not any(isinstance(later, RunSegment) for later in steps[at + 1 :])
                signalled = at + 1 < len(steps) and isinstance(steps[at + 1], Signal)
                assert step.complete == (lane > 0 or last or signalled)


def test_a_diamond_by_hand() -> None:
    """For 0 -> 1, 2 -> 3 with 2 on a lane of its own, each lane waits once."""
    dag = Dag.from_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    program = build_program(dag, Schedule((0, 1, 2, 3), (1, 1, 2, 1), 2), ((0,), (1,), (2,), (3,)))
    assert program.lanes == {
        1: (RunSegment(0), Signal(1), RunSegment(1), Wait(2, 1), RunSegment(3)),
        2: (Wait(1, 1), RunSegment(2), Signal(1)),
    }


def test_a_wait_that_another_implies_is_left_out() -> None:
    """Operator 2 needs 0 and 1; lane 2 has waited for 0 before it runs 1, so that lane 3 waits for 1 only."""
    dag = Dag.from_edges(3, [(0, 1), (0, 2), (1, 2)])
    program = build_program(dag, Schedule((0, 1, 2), (1, 2, 3), 3), ((0,), (1,), (2,)))
    assert program.lanes[3] == (Wait(2, 1), RunSegment(2))


def test_a_wide_segment_by_hand() -> None:
    """Segment 1 uses both cores: lane 1 waits for lane 2, which is parked until the segment has ended.

    Lane 3 has no segments: the second wide segment only needs its core.
    """
    dag = Dag.from_edges(4, [])
    schedule = Schedule((0, 1, 2, 3), (2, 1, 2, 2), 3, widths=(1, 2, 1, 2))
    program = build_program(dag, schedule, ((0,), (1,), (2,), (3,)))
    assert program.lanes == {
        2: (RunSegment(0), Signal(1), Wait(1, 1, park=True), RunSegment(2), RunSegment(3)),
        1: (Wait(2, 1), RunSegment(1), Signal(1)),
    }
    assert program.occupied == (2, 1, 3)


def test_a_barrier_by_hand() -> None:
    """For two independent pairs in two stages, each lane waits once for the other, although no edge joins them."""
    dag = Dag.from_edges(4, [(0, 2), (1, 3)])
    schedule = Schedule((0, 1, 2, 3), (0, -1, 0, -1), 0, 2, (0, 0, 1, 1))
    program = build_program(dag, schedule, ((0,), (1,), (2,), (3,)))
    assert program.lanes == {
        0: (RunSegment(0), Signal(1), Wait(-1, 1), RunSegment(2)),
        -1: (RunSegment(1), Signal(1), Wait(0, 1), RunSegment(3)),
    }


def test_a_value_is_copied_once_for_all_its_readers_by_hand() -> None:
    """Operators 1 and 2, on two accelerator lanes, share one upload of the value of 0.

    Operator 3 reads a download of 1.
    """
    dag = Dag.from_edges(4, [(0, 1), (0, 2), (1, 3)])
    transfers = (Transfer("a", 0, (1, 2), upload=True), Transfer("b", 1, (3,), upload=False))
    schedule = Schedule((0, 1, 2, 3), (1, 0, -1, 1), 1, 2)
    program = build_program(dag, schedule, ((0,), (1,), (2,), (3,)), transfers)
    assert program.copies == 2
    assert program.lanes == {
        1: (RunSegment(0), Signal(1), Wait(DOWNLOAD_LANE, 1), RunSegment(3)),
        0: (Wait(UPLOAD_LANE, 1), RunSegment(1), Signal(1)),
        -1: (Wait(UPLOAD_LANE, 1), RunSegment(2)),
        UPLOAD_LANE: (Wait(1, 1), Copy("a", upload=True), Signal(1)),
        DOWNLOAD_LANE: (Wait(0, 1), Copy("b", upload=False), Signal(1)),
    }
