"""Opara: its published example, and its two algorithms step by step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reproduction.architectures import googlenet

from chrion.graph import Dag
from chrion.scheduler.policies.opara import launch_order, opara_streams
from strategies import dags

FIGURE = "1-2 1-3 1-4 2-5 3-6 5-7 4-8 6-8 7-9 7-10 8-11 8-12 9-13 10-13 11-13 12-13"


def test_the_published_example() -> None:
    """In the example of the paper's appendix, thirteen operators in numeric order have five streams."""
    pairs = [tuple(int(end) - 1 for end in edge.split("-")) for edge in FIGURE.split()]
    streams = opara_streams(Dag.from_edges(13, [(a, b) for a, b in pairs]), range(13))
    found = [{i + 1 for i in range(13) if streams[i] == stream} for stream in range(max(streams) + 1)]
    assert found == [{1, 2, 5, 7, 9, 13}, {3, 6}, {4, 8, 11}, {10}, {12}]


def test_googlenet_has_28_streams() -> None:
    """GoogLeNet has the number of streams that the paper gives."""
    assert max(opara_streams(googlenet())) + 1 == 28


@given(dag=dags(12))
def test_streams_are_numbered_in_topological_order(dag: Dag) -> None:
    """Each new stream has the next number."""
    streams = opara_streams(dag)
    seen = list(dict.fromkeys(streams[i] for i in dag.topological_order))
    assert seen == list(range(len(seen)))


@given(data=st.data())
def test_an_operator_joins_a_predecessor_without_a_follower(data: st.DataObject) -> None:
    """Every operator of a stream depends on the one before it; a stream starts only without such a predecessor."""
    dag = data.draw(dags(12))
    streams = opara_streams(dag)
    leaders = set()
    for i in dag.topological_order:
        before = [m for m in dag.predecessors[i] if streams[m] == streams[i] and m not in leaders]
        if before:
            leaders.add(before[0])
        else:
            assert all(m in leaders for m in dag.predecessors[i])
    for stream in set(streams):
        own = [i for i in dag.topological_order if streams[i] == stream]
        assert all(a in dag.predecessors[b] for a, b in itertools.pairwise(own))


class _Counted(tuple[int, ...]):
    """A tuple that counts the members read from all tuples of its type."""

    __slots__ = ()
    reads = 0

    def __iter__(self) -> Iterator[int]:
        for member in super().__iter__():
            _Counted.reads += 1
            yield member


@pytest.mark.parametrize("n", [10, 100, 1000])
def test_each_edge_is_read_at_most_once(n: int) -> None:
    """The assignment takes linear time on a graph in which every operator depends on the twenty before it."""
    dag = Dag.from_edges(n, [(m, i) for i in range(n) for m in range(max(0, i - 20), i)])
    counted = replace(dag, predecessors=tuple(_Counted(before) for before in dag.predecessors))
    _Counted.reads = 0
    opara_streams(counted, dag.topological_order)
    assert 0 < _Counted.reads <= sum(map(len, dag.predecessors))


def test_the_launch_order_by_hand() -> None:
    """The launch order starts with a compute-bound operator and alternates, each kind in order of demand.

    An empty kind is skipped.
    """
    dag = Dag.from_edges(5, [(1, 4)])
    order = launch_order(dag, [3.0, 1.0, 2.0, 5.0, 0.0], [False, False, True, True, False])
    # compute: 1 (1) before 0 (3), and 4 (0) once 1 has been launched; memory: 2 before 3
    assert order == [1, 2, 4, 3, 0]
    assert launch_order(Dag.from_edges(3, []), [3.0, 2.0, 1.0], [True] * 3) == [2, 1, 0]


@given(data=st.data())
def test_the_launch_order_is_topological_and_alternates(data: st.DataObject) -> None:
    """Each step launches the ready operator with the least demand, of the next kind unless it has none."""
    dag = data.draw(dags(10))
    demand = [data.draw(st.integers(0, 3)) for _ in range(len(dag))]
    bound = [data.draw(st.booleans()) for _ in range(len(dag))]
    order = launch_order(dag, demand, bound)
    assert sorted(order) == list(range(len(dag)))
    for at, i in enumerate(order):
        ready = [v for v in range(len(dag)) if v not in order[:at] and set(dag.predecessors[v]) <= set(order[:at])]
        memory_next = at % 2 == 1
        kind = [v for v in ready if bound[v] == memory_next] or ready
        assert i == min(kind, key=lambda v: (demand[v], v))
