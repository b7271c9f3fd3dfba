"""Nimble: its theorems by exhaustive search, and its published example."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import networkx as nx
from hypothesis import given
from reproduction.architectures import googlenet
from reproduction.schedule_counts import count_synchronisations

from chrion.graph import Dag
from chrion.scheduler.policies.nimble import nimble_streams
from property_tests import examples
from strategies import dags

Edge = tuple[int, int]


def concurrent(graph: nx.DiGraph[int], streams: Sequence[int]) -> bool:
    """Return True for maximum logical concurrency: operators without a path between them have different streams."""
    return all(
        streams[a] != streams[b] or nx.has_path(graph, a, b) or nx.has_path(graph, b, a)
        for a, b in itertools.combinations(graph, 2)
    )


def fewest_synchronisations(graph: nx.DiGraph[int], streams: Sequence[int]) -> int:
    """Return the size of the smallest safe plan (Definition 2 of Nimble's appendix), over all sets of edges."""
    edges = list(graph.edges)
    paths = {e: [list(itertools.pairwise(p)) for p in nx.all_simple_paths(graph, *e)] for e in edges}

    def safe(plan: set[Edge]) -> bool:
        return all(streams[u] == streams[v] or any(plan & set(p) for p in paths[u, v]) for u, v in edges)

    return next(
        size for size in range(len(edges) + 1) if any(safe(set(plan)) for plan in itertools.combinations(edges, size))
    )


def assignments(n: int) -> Iterator[tuple[int, ...]]:
    """Yield every assignment of n operators to unnamed streams: restricted growth strings."""
    found: list[tuple[int, ...]] = [()]
    for _ in range(n):
        found = [(*head, stream) for head in found for stream in range(max(head, default=-1) + 2)]
    yield from found


def matchings(edges: Sequence[Edge]) -> Iterator[tuple[Edge, ...]]:
    """Yield the sets of edges of which no two leave, or enter, the same operator."""
    for size in range(len(edges) + 1):
        for chosen in itertools.combinations(edges, size):
            if len({a for a, _ in chosen}) == len({b for _, b in chosen}) == size:
                yield chosen


def chains(n: int, matching: Sequence[Edge]) -> list[int]:
    """Return the chain of each operator: steps 4 and 5 of Nimble's Algorithm 1."""
    joined: nx.Graph[int] = nx.Graph(matching)
    joined.add_nodes_from(range(n))
    return [min(nx.node_connected_component(joined, i)) for i in range(n)]


@examples(40)
@given(dag=dags(5))
def test_theorem_1_the_reduction_stands_for_the_graph(dag: Dag) -> None:
    """For any assignment, the graph and its reduction have the same concurrency.

    If it is maximal, they also have as many synchronisations.
    """
    graph = dag.to_networkx()
    reduced = nx.transitive_reduction(graph)
    for streams in assignments(len(dag)):
        assert concurrent(graph, streams) == concurrent(reduced, streams)
        if concurrent(graph, streams):
            fewest = fewest_synchronisations(graph, streams)
            assert fewest == fewest_synchronisations(reduced, streams) == count_synchronisations(dag, streams)


@examples(40)
@given(dag=dags(6))
def test_theorem_3_a_matched_edge_saves_a_synchronisation(dag: Dag) -> None:
    """For every matching of the reduction's edges, the edges that remain need one synchronisation each."""
    reduced = nx.transitive_reduction(dag.to_networkx())
    for matching in itertools.islice(matchings(list(reduced.edges)), 60):
        streams = chains(len(dag), matching)
        assert fewest_synchronisations(reduced, streams) == len(reduced.edges) - len(matching)


@examples(60)
@given(dag=dags(6))
def test_theorem_4_no_assignment_as_concurrent_synchronises_less(dag: Dag) -> None:
    """No assignment of operators to streams with the same concurrency has fewer synchronisations."""
    graph = dag.to_networkx()
    streams = nimble_streams(dag)
    assert concurrent(graph, streams)
    possible = [other for other in assignments(len(dag)) if concurrent(graph, other)]
    assert count_synchronisations(dag, streams) == min(count_synchronisations(dag, other) for other in possible)


@given(dag=dags(12))
def test_shared_streams_are_as_few_as_concurrency_allows(dag: Dag) -> None:
    """Sharing loses no concurrency; there are as many streams as chains that may all overlap (Dilworth)."""
    graph = dag.to_networkx()
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
    assert max(shared) + 1 == largest


@given(dag=dags(12))
def test_streams_are_numbered_in_topological_order(dag: Dag) -> None:
    """Each new stream has the next number."""
    for streams in (nimble_streams(dag), nimble_streams(dag, share=True)):
        seen = list(dict.fromkeys(streams[i] for i in dag.topological_order))
        assert seen == list(range(len(seen)))


@given(dag=dags(12))
def test_the_transitive_reduction_is_that_of_networkx(dag: Dag) -> None:
    """The transitive reduction, descendants and ancestors equal those of networkx."""
    graph = dag.to_networkx()
    assert set(nx.transitive_reduction(graph).edges) == {(i, s) for i, own in enumerate(dag.reduced) for s in own}
    for i in range(len(dag)):
        assert dag.descendants[i] == sum(1 << j for j in nx.descendants(graph, i))
        assert dag.ancestors[i] == sum(1 << j for j in nx.ancestors(graph, i))


def test_googlenet_as_published() -> None:
    """GoogLeNet has 28 chains, and 4 streams if chains that cannot overlap share one."""
    dag = googlenet()
    found = [max(streams) + 1 for streams in (nimble_streams(dag), nimble_streams(dag, share=True))]
    assert found == [28, 4]
