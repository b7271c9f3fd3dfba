"""Maximum matching."""

from __future__ import annotations

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from chrion.scheduler.policies.matching import maximum_matching


@given(st.integers(0, 9).flatmap(lambda n: st.lists(st.lists(st.integers(0, 7), unique=True), min_size=n, max_size=n)))
def test_the_matching_is_as_large_as_that_of_networkx(edges: list[list[int]]) -> None:
    """The matching is of maximum size, consists of edges, and has each right node at most once."""
    found = maximum_matching(edges, 8)
    matched = [right for right in found if right is not None]
    assert len(set(matched)) == len(matched)
    assert all(right is None or right in own for right, own in zip(found, edges, strict=True))
    graph: nx.Graph[object] = nx.Graph()
    graph.add_nodes_from(("left", i) for i in range(len(edges)))
    graph.add_edges_from((("left", i), ("right", right)) for i, own in enumerate(edges) for right in own)
    expected = nx.bipartite.maximum_matching(graph, [("left", i) for i in range(len(edges))])
    assert len(matched) == len(expected) // 2


def test_augmenting_paths_may_be_long() -> None:
    """Matching the last free node changes the partners of two thousand others."""
    n = 2000
    edges = [[i, i + 1] for i in range(n)] + [[0]]
    assert maximum_matching(edges, n + 1) == [*range(1, n + 1), 0]
