"""Stream allocation, against Nimble's theorems by brute force and the examples that the papers give."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from architectures import googlenet
from chrion.graph import Dag
from chrion.scheduler.policies.nimble import nimble_streams
from chrion.scheduler.policies.opara import launch_order, opara_streams
from chrion.scheduler.policies.streams import count_synchronisations
from strategies import dags

Edge = tuple[int, int]


def digraph(dag: Dag) -> nx.DiGraph[int]:
    """The same graph for networkx."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(len(dag)))
    graph.add_edges_from((m, i) for i, before in enumerate(dag.predecessors) for m in before)
    return graph


def concurrent(graph: nx.DiGraph[int], streams: Sequence[int]) -> bool:
    """Maximum logical concurrency: operators without a path between them are on different streams."""
    return all(
        streams[a] != streams[b] or nx.has_path(graph, a, b) or nx.has_path(graph, b, a)
        for a, b in itertools.combinations(graph, 2)
    )


def fewest_synchronisations(graph: nx.DiGraph[int], streams: Sequence[int]) -> int:
    """The size of the smallest safe plan (Definition 2 of Nimble's appendix), over all sets of edges."""
    edges = list(graph.edges)
    paths = {e: [list(itertools.pairwise(p)) for p in nx.all_simple_paths(graph, *e)] for e in edges}

    def safe(plan: set[Edge]) -> bool:
        return all(streams[u] == streams[v] or any(plan & set(p) for p in paths[u, v]) for u, v in edges)

    return next(
        size for size in range(len(edges) + 1) if any(safe(set(plan)) for plan in itertools.combinations(edges, size))
    )


def assignments(n: int) -> Iterator[tuple[int, ...]]:
    """Every way to put n operators on unnamed streams: restricted growth strings."""
    found: list[tuple[int, ...]] = [()]
    for _ in range(n):
        found = [(*head, stream) for head in found for stream in range(max(head, default=-1) + 2)]
    yield from found


def matchings(edges: Sequence[Edge]) -> Iterator[tuple[Edge, ...]]:
    """Sets of edges no two of which leave, or enter, one operator."""
    for size in range(len(edges) + 1):
        for chosen in itertools.combinations(edges, size):
            if len({a for a, _ in chosen}) == len({b for _, b in chosen}) == size:
                yield chosen


def chains(n: int, matching: Sequence[Edge]) -> list[int]:
    """Steps 4 and 5 of Nimble's Algorithm 1."""
    joined: nx.Graph[int] = nx.Graph(matching)
    joined.add_nodes_from(range(n))
    return [min(nx.node_connected_component(joined, i)) for i in range(n)]


@settings(max_examples=40, deadline=None)
@given(dag=dags(5))
def test_theorem_1_the_reduction_stands_for_the_graph(dag: Dag) -> None:
    """On any assignment, both ask the same of concurrency, and need as many synchronisations where they have it."""
    graph = digraph(dag)
    reduced = nx.transitive_reduction(graph)
    for streams in assignments(len(dag)):
        assert concurrent(graph, streams) == concurrent(reduced, streams)
        if concurrent(graph, streams):
            fewest = fewest_synchronisations(graph, streams)
            assert fewest == fewest_synchronisations(reduced, streams) == count_synchronisations(dag, streams)


@settings(max_examples=40, deadline=None)
@given(dag=dags(6))
def test_theorem_3_a_matched_edge_saves_a_synchronisation(dag: Dag) -> None:
    """For every matching of the reduction's edges, those that are left over are what is needed."""
    reduced = nx.transitive_reduction(digraph(dag))
    for matching in itertools.islice(matchings(list(reduced.edges)), 60):
        streams = chains(len(dag), matching)
        assert fewest_synchronisations(reduced, streams) == len(reduced.edges) - len(matching)


@settings(max_examples=60, deadline=None)
@given(dag=dags(6))
def test_theorem_4_no_assignment_as_concurrent_synchronises_less(dag: Dag) -> None:
    """Against every way to put the operators on streams."""
    graph = digraph(dag)
    streams = nimble_streams(dag)
    assert concurrent(graph, streams)
    possible = [other for other in assignments(len(dag)) if concurrent(graph, other)]
    assert count_synchronisations(dag, streams) == min(count_synchronisations(dag, other) for other in possible)


@given(dag=dags(12))
def test_shared_streams_are_as_few_as_concurrency_allows(dag: Dag) -> None:
    """Sharing loses no concurrency; chains that may overlap pairwise need a stream each, and there are no more."""
    graph = digraph(dag)
    apart, shared = nimble_streams(dag), nimble_streams(dag, share=True)
    assert concurrent(graph, shared)
    members = [[i for i in dag.topological_order if apart[i] == chain] for chain in range(max(apart) + 1)]
    may_overlap: nx.Graph[int] = nx.Graph()
    may_overlap.add_nodes_from(range(len(members)))
    for a, b in itertools.combinations(range(len(members)), 2):
        ordered = nx.has_path(graph, members[a][-1], members[b][0]) or nx.has_path(graph, members[b][-1], members[a][0])
        if not ordered:
            may_overlap.add_edge(a, b)
    largest = max(len(clique) for clique in nx.find_cliques(may_overlap))
    assert max(shared) + 1 == largest  # Dilworth


@given(dag=dags(12))
def test_streams_are_numbered_as_they_begin(dag: Dag) -> None:
    """Along the topological order, each new stream has the next number."""
    for streams in (nimble_streams(dag), nimble_streams(dag, share=True), opara_streams(dag)):
        seen = list(dict.fromkeys(streams[i] for i in dag.topological_order))
        assert seen == list(range(len(seen)))


@given(dag=dags(12))
def test_the_reduction_is_networkx(dag: Dag) -> None:
    """Successors, descendants and ancestors agree with an independent library."""
    graph = digraph(dag)
    assert set(nx.transitive_reduction(graph).edges) == {(i, s) for i, own in enumerate(dag.reduced) for s in own}
    for i in range(len(dag)):
        assert dag.descendants[i] == sum(1 << j for j in nx.descendants(graph, i))
        assert dag.ancestors[i] == sum(1 << j for j in nx.ancestors(graph, i))


OPARA = "1-2 1-3 1-4 2-5 3-6 5-7 4-8 6-8 7-9 7-10 8-11 8-12 9-13 10-13 11-13 12-13"


def test_oparas_example() -> None:
    """The figure of its appendix: thirteen operators in numeric order, five streams."""
    pairs = [tuple(int(end) - 1 for end in edge.split("-")) for edge in OPARA.split()]
    streams = opara_streams(Dag.from_edges(13, [(a, b) for a, b in pairs]), range(13))
    found = [{i + 1 for i in range(13) if streams[i] == stream} for stream in range(max(streams) + 1)]
    assert found == [{1, 2, 5, 7, 9, 13}, {3, 6}, {4, 8, 11}, {10}, {12}]


def test_googlenet_as_published() -> None:
    """28 streams by Opara, 28 chains by Nimble, and 4 when chains that cannot overlap share one."""
    dag = googlenet()
    found = [max(streams) + 1 for streams in (opara_streams(dag), nimble_streams(dag), nimble_streams(dag, share=True))]
    assert found == [28, 28, 4]


@given(data=st.data())
def test_opara_follows_a_predecessor_that_nobody_follows(data: st.DataObject) -> None:
    """Of each stream, each operator waits for the one before it; a new one begins only for want of a leader."""
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
    """A tuple that counts how many of its members are looked at, over all of its kind."""

    __slots__ = ()
    looks = 0

    def __iter__(self) -> Iterator[int]:
        for member in super().__iter__():
            _Counted.looks += 1
            yield member


@pytest.mark.parametrize("n", [10, 100, 1000])
def test_opara_looks_at_each_edge_once_at_most(n: int) -> None:
    """Linear, on a graph in which every operator reads the twenty before it."""
    dag = Dag.from_edges(n, [(m, i) for i in range(n) for m in range(max(0, i - 20), i)])
    counted = replace(dag, predecessors=tuple(_Counted(before) for before in dag.predecessors))
    _Counted.looks = 0
    opara_streams(counted, dag.topological_order)
    assert 0 < _Counted.looks <= sum(map(len, dag.predecessors))


def test_the_launch_order_by_hand() -> None:
    """Compute first, then memory, in turn; the small before the large; a kind that has none misses its turn."""
    dag = Dag.from_edges(5, [(1, 4)])
    order = launch_order(dag, [3.0, 1.0, 2.0, 5.0, 0.0], [False, False, True, True, False])
    # compute: 1 (1) before 0 (3), and 4 (0) once 1 has been launched; memory: 2 before 3
    assert order == [1, 2, 4, 3, 0]
    assert launch_order(Dag.from_edges(3, []), [3.0, 2.0, 1.0], [True] * 3) == [2, 1, 0]


@given(data=st.data())
def test_the_launch_order_is_topological_and_takes_the_least(data: st.DataObject) -> None:
    """At every step: ready, of the kind whose turn it is unless that has none, and the least of its kind."""
    dag = data.draw(dags(10))
    demand = [data.draw(st.integers(0, 3)) for _ in range(len(dag))]
    bound = [data.draw(st.booleans()) for _ in range(len(dag))]
    order = launch_order(dag, demand, bound)
    assert sorted(order) == list(range(len(dag)))
    for at, i in enumerate(order):
        ready = [v for v in range(len(dag)) if v not in order[:at] and set(dag.predecessors[v]) <= set(order[:at])]
        turn = at % 2 == 1
        kind = [v for v in ready if bound[v] == turn] or ready
        assert i == min(kind, key=lambda v: (demand[v], v))
