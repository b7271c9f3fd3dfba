"""Segments of a placed order."""

from __future__ import annotations

import itertools
from dataclasses import replace

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.graph.segments import cut
from chrion.scheduler import evaluate
from property_tests import examples
from strategies import costs_for, dags, schedules


@examples(300)
@given(st.data())
def test_cutting_changes_no_start_and_no_finish(data: st.DataObject) -> None:
    """Without a dispatch, every operator runs exactly when it would in a segment of its own."""
    dag = data.draw(dags())
    costs = data.draw(costs_for(dag, dispatch=False))
    schedule = data.draw(schedules(dag, costs))
    segments = cut(dag, schedule.order, schedule.lanes)
    together, apart = evaluate(dag, costs, schedule, segments), evaluate(dag, costs, schedule)
    assert together.start_ms == apart.start_ms
    assert together.finish_ms == apart.finish_ms


@given(st.data())
def test_segments_are_a_convex_partition_in_topological_order(data: st.DataObject) -> None:
    """Each operator is in one segment on one lane; no path leaves a segment and returns to it."""
    dag = data.draw(dags())
    costs = data.draw(costs_for(dag))
    schedule = data.draw(schedules(dag, costs))
    segments = cut(dag, schedule.order, schedule.lanes)
    assert sorted(i for s in segments for i in s) == list(range(len(dag)))
    assert all(len({schedule.lanes[i] for i in s}) == 1 for s in segments)
    position = {i: at for at, i in enumerate(schedule.order)}
    assert all(list(s) == sorted(s, key=position.__getitem__) for s in segments)
    home = {i: at for at, s in enumerate(segments) for i in s}
    between = nx.DiGraph()
    between.add_nodes_from(range(len(segments)))
    between.add_edges_from(
        (home[m], home[i]) for i, before in enumerate(dag.predecessors) for m in before if home[m] != home[i]
    )
    assert nx.is_directed_acyclic_graph(between)  # a path out and back would be a cycle
    assert all(a < b for a, b in between.edges)


@given(st.data())
def test_neighbours_are_cut_only_for_a_reason(data: st.DataObject) -> None:
    """A lane starts a new segment only to wait for more values, or because another lane waits for the last one."""
    dag = data.draw(dags())
    # With equal copies on all edges, waiting for an operator is waiting for all of its results.
    dag = replace(dag, edge_bytes=tuple((1,) * len(before) for before in dag.predecessors))
    costs = data.draw(costs_for(dag))
    schedule = data.draw(schedules(dag, costs))
    segments = cut(dag, schedule.order, schedule.lanes)

    def foreign(i: int) -> set[int]:
        return {m for m in dag.predecessors[i] if schedule.lanes[m] != schedule.lanes[i]}

    for lane in set(schedule.lanes):
        own = [s for s in segments if schedule.lanes[s[0]] == lane]
        for before, after in itertools.pairwise(own):
            awaited = any(schedule.lanes[w] != lane for w in dag.successors[before[-1]])
            more = not foreign(after[0]) <= {m for i in before for m in foreign(i)}
            assert awaited or more


def test_one_lane_is_one_segment() -> None:
    """A schedule on one lane has one segment, since no other lane waits."""
    dag = Dag.from_edges(4, [(0, 1), (1, 2), (0, 3)])
    assert cut(dag, (0, 1, 2, 3), (1, 1, 1, 1)) == ((0, 1, 2, 3),)


def test_two_lanes_by_hand() -> None:
    """If lane 2 runs operator 2 between 1 and 3, lane 1 has one segment of 0 and 1, and one of 3."""
    dag = Dag.from_edges(4, [(0, 1), (1, 2), (2, 3)])
    assert cut(dag, (0, 1, 2, 3), (1, 1, 2, 1)) == ((0, 1), (2,), (3,))


def test_a_larger_copy_from_the_same_operator_starts_a_new_segment() -> None:
    """Operator 0 makes a small value for 1 and a large one for 2, both on the accelerator.

    In one segment, 1 would wait for both.
    """
    dag = replace(Dag.from_edges(3, [(0, 1), (0, 2)], [1, 9]), edge_values=((), ((0,),), ((1,),)), value_bytes=(1, 9))
    assert cut(dag, (0, 1, 2), (1, 0, 0)) == ((0,), (1,), (2,))
    assert cut(dag, (0, 2, 1), (1, 0, 0)) == ((0,), (2, 1))


def test_joining_an_earlier_segment_changes_no_order_of_copies() -> None:
    """The values of 1 and 2 are copied to 3 in this order, even if 2 joins the segment of 0, which precedes 1."""
    dag = Dag.from_edges(4, [(1, 3), (2, 3)])
    assert cut(dag, (0, 1, 2, 3), (1, 2, 1, 0)) == ((1,), (0, 2), (3,))


def test_no_operators() -> None:
    """An empty graph has no segments."""
    assert cut(Dag.from_edges(0, []), (), ()) == ()
