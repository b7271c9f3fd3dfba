"""Programs: carried out by lanes that take turns at random, and compared with a transitive reduction."""

from __future__ import annotations

import itertools

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.graph.segments import cut
from chrion.runtime.program import Program, Run, Signal, Wait, build_program
from chrion.scheduler import Schedule
from strategies import costs_for, dags, schedules


def drawn_program(data: st.DataObject) -> tuple[Dag, Schedule, tuple[tuple[int, ...], ...], Program]:
    """A random graph with a schedule, its segments and its program."""
    dag = data.draw(dags(12))
    costs = data.draw(costs_for(dag))
    schedule = data.draw(schedules(dag, costs, most_streams=3, staged=None))
    whole = data.draw(st.booleans())
    cuts = cut(dag, schedule.order, schedule.lanes, stages=schedule.stages)
    segments = cuts if whole else tuple((i,) for i in schedule.order)
    return dag, schedule, segments, build_program(dag, schedule.lanes, segments, schedule.stages)


def earlier_stages(dag: Dag, schedule: Schedule, i: int) -> set[int]:
    """Operators of the stages before an operator's."""
    stages = schedule.stages
    return {m for m in range(len(dag)) if stages[m] < stages[i]} if stages else set()


@given(st.data())
def test_any_interleaving_respects_all_dependencies_and_ends(data: st.DataObject) -> None:
    """Whichever lane goes on next, every segment finds its inputs ready, and some lane can always go on."""
    dag, schedule, segments, program = drawn_program(data)
    lanes = schedule.lanes
    at = dict.fromkeys(program.lanes, 0)
    signalled = dict.fromkeys(program.lanes, 0)
    done: set[int] = set()

    def can_go(lane: int) -> bool:
        if at[lane] == len(program.lanes[lane]):
            return False
        step = program.lanes[lane][at[lane]]
        return not isinstance(step, Wait) or signalled[step.lane] >= step.count

    while any(at[lane] < len(program.lanes[lane]) for lane in at):
        able = [lane for lane in at if can_go(lane)]
        assert able, "deadlock"
        lane = data.draw(st.sampled_from(able))
        step = program.lanes[lane][at[lane]]
        at[lane] += 1
        if isinstance(step, Signal):
            signalled[lane] = step.count
        elif isinstance(step, Run):
            for i in segments[step.segment]:
                assert lanes[i] == lane
                assert set(dag.predecessors[i]) | earlier_stages(dag, schedule, i) <= done
                done.add(i)
    assert done == set(range(len(dag)))


@given(st.data())
def test_waits_are_the_transitive_reduction(data: st.DataObject) -> None:
    """A lane waits exactly where neither its own past nor another wait tells it that a segment is done."""
    dag, schedule, segments, program = drawn_program(data)
    lanes = schedule.lanes
    home = {i: at for at, s in enumerate(segments) for i in s}
    lane_of = [lanes[s[0]] for s in segments]
    own = {lane: [at for at, la in enumerate(lane_of) if la == lane] for lane in program.lanes}
    knows = nx.DiGraph()
    knows.add_nodes_from(range(len(segments)))
    knows.add_edges_from((a, b) for s in own.values() for a, b in itertools.pairwise(s))
    knows.add_edges_from(
        (home[m], home[i])
        for i, before in enumerate(dag.predecessors)
        for m in {*before, *earlier_stages(dag, schedule, i)}
        if home[m] != home[i]
    )
    expected = {(a, b) for a, b in nx.transitive_reduction(knows).edges if lane_of[a] != lane_of[b]}
    found = []
    for instructions in program.lanes.values():
        waits: list[Wait] = []
        for step in instructions:
            if isinstance(step, Wait):
                waits.append(step)
            elif isinstance(step, Run):
                found += [(own[w.lane][w.count - 1], step.segment) for w in waits]
                waits = []
        assert not waits
    assert sorted(found) == sorted(expected)
    assert program.waits == len(expected)


@given(st.data())
def test_lanes_signal_only_what_is_awaited(data: st.DataObject) -> None:
    """Signals and waits name the same counts, and each signal follows the run that reaches its count."""
    *_, program = drawn_program(data)
    awaited = {(s.lane, s.count) for steps in program.lanes.values() for s in steps if isinstance(s, Wait)}
    signalled = set()
    for lane, steps in program.lanes.items():
        runs = 0
        for before, step in zip((None, *steps), steps, strict=False):
            runs += isinstance(step, Run)
            if isinstance(step, Signal):
                assert isinstance(before, Run)
                assert step.count == runs
                signalled.add((lane, step.count))
    assert signalled == awaited


@given(st.data())
def test_the_first_lane_has_the_first_segment(data: st.DataObject) -> None:
    """The caller's thread carries out the lane that starts."""
    _, schedule, segments, program = drawn_program(data)
    lanes = schedule.lanes
    assert next(iter(program.lanes)) == lanes[segments[0][0]]
    assert set(program.lanes) == set(lanes)


def test_a_diamond_by_hand() -> None:
    """0 -> 1, 2 -> 3 with 2 on a lane of its own: one wait each way."""
    dag = Dag.from_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    program = build_program(dag, (1, 1, 2, 1), ((0,), (1,), (2,), (3,)))
    assert program.lanes == {
        1: (Run(0), Signal(1), Run(1), Wait(2, 1), Run(3)),
        2: (Wait(1, 1), Run(2), Signal(1)),
    }


def test_a_wait_that_another_implies_is_left_out() -> None:
    """2 needs 0 and 1; lane 2 has already waited for 0 before it ran 1, so that lane 3 only waits for 1."""
    dag = Dag.from_edges(3, [(0, 1), (0, 2), (1, 2)])
    program = build_program(dag, (1, 2, 3), ((0,), (1,), (2,)))
    assert program.lanes[3] == (Wait(2, 1), Run(2))


def test_a_barrier_by_hand() -> None:
    """Two independent pairs, in two stages: each lane waits once for the other, though no edge joins them."""
    dag = Dag.from_edges(4, [(0, 2), (1, 3)])
    program = build_program(dag, (0, -1, 0, -1), ((0,), (1,), (2,), (3,)), (0, 0, 1, 1))
    assert program.lanes == {
        0: (Run(0), Signal(1), Wait(-1, 1), Run(2)),
        -1: (Run(1), Signal(1), Wait(0, 1), Run(3)),
    }
