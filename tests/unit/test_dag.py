"""Graphs of plain indices."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.errors import ModelError
from chrion.graph import Dag
from strategies import dags


def test_predecessors_keep_the_order_of_their_edges() -> None:
    """Predecessors are in the order of the edges, successors in ascending order."""
    dag = Dag.from_edges(4, [(2, 3), (0, 3), (1, 3), (0, 1)], [5, 6, 7, 8])
    assert dag.predecessors == ((), (0,), (), (2, 0, 1))
    assert dag.edge_bytes == ((), (8,), (), (5, 6, 7))
    assert dag.successors == ((1, 3), (3,), (3,), ())
    assert (dag.input_bytes[3], dag.output_bytes[0]) == (18, 8)


def test_a_graph_for_networkx() -> None:
    """Nodes have the names and types of operators, edges the bytes, and isolated operators are kept."""
    graph = Dag.from_edges(3, [(0, 2)], [5]).to_networkx()
    assert list(graph.nodes(data=True)) == [(i, {"name": str(i), "op_type": "Operator"}) for i in range(3)]
    assert list(graph.edges(data=True)) == [(0, 2, {"bytes": 5})]


def test_a_repeated_edge_counts_once() -> None:
    """The bytes of equal edges are added up."""
    dag = Dag.from_edges(2, [(0, 1), (0, 1)], [2, 3])
    assert (dag.predecessors[1], dag.edge_bytes[1]) == ((0,), (5,))


@pytest.mark.parametrize(
    ("n", "edges", "sizes"),
    [
        (2, [(0, 2)], None),
        (2, [(-1, 0)], None),
        (2, [(1, 1)], None),
        (3, [(0, 1), (1, 2), (2, 0)], None),
        (2, [(0, 1)], [1, 2]),
    ],
)
def test_invalid_edges_are_refused(n: int, edges: list[tuple[int, int]], sizes: list[int] | None) -> None:
    """Indices out of range, loops, cycles, and another number of sizes are refused."""
    with pytest.raises(ModelError, match="graph"):
        Dag.from_edges(n, edges, sizes)


@given(dags(15))
def test_the_topological_order_is_valid(dag: Dag) -> None:
    """Every operator occurs once, after its predecessors."""
    position = {i: at for at, i in enumerate(dag.topological_order)}
    assert sorted(position) == list(range(len(dag)))
    assert all(position[m] < position[i] for i, before in enumerate(dag.predecessors) for m in before)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_cycles_are_found_as_by_networkx(edges: list[tuple[int, int]]) -> None:
    """Edges are refused exactly if networkx finds a cycle in them."""
    graph = nx.DiGraph(edges)
    if nx.is_directed_acyclic_graph(graph):
        dag = Dag.from_edges(6, edges)
        assert {(m, i) for i, before in enumerate(dag.predecessors) for m in before} == set(edges)
    else:
        with pytest.raises(ModelError):
            Dag.from_edges(6, edges)


def test_a_dag_cannot_be_changed() -> None:
    """The fields of a DAG are frozen."""
    with pytest.raises(FrozenInstanceError):
        Dag.from_edges(1, []).names = ("x",)  # type: ignore[misc]
