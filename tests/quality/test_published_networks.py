"""Networks of the zoo at their published sizes: concurrency, work and streams as their papers print them."""

from __future__ import annotations

from typing import Any

import networkx as nx
import pytest

import chrion
from chrion.graph import Dag
from chrion.scheduler.policies.nimble import nimble_streams
from chrion.scheduler.policies.opara import opara_streams
from chrion.zoo import build


def concurrency(dag: Dag) -> int:
    """Return the size of the largest antichain: by Dilworth, n minus a maximum matching of the transitive closure."""
    graph = dag.to_networkx()
    for i in list(nx.topological_sort(graph)):  # a chain has a width of one operator
        before = list(graph.predecessors(i))
        if len(before) == 1 and graph.out_degree(before[0]) == 1:
            graph.add_edges_from([(before[0], after) for after in graph.successors(i)])
            graph.remove_node(i)
    closure = nx.transitive_closure_dag(graph)
    pairs: nx.Graph[tuple[int, int]] = nx.Graph()
    pairs.add_nodes_from((side, i) for side in (0, 1) for i in closure)
    pairs.add_edges_from(((0, before), (1, after)) for before, after in closure.edges)
    matching = nx.bipartite.hopcroft_karp_matching(pairs, [(0, i) for i in closure])
    return len(closure) - len(matching) // 2


@pytest.mark.parametrize(
    ("name", "parameters", "degree"), [("inception-v3", {"width": 0.05}, 6), ("darts", {"channels": 4}, 7)]
)
def test_published_degrees_of_concurrency(name: str, parameters: dict[str, Any], degree: int) -> None:
    """The largest antichains have the sizes in Nimble's Table 3.1."""
    assert concurrency(chrion.load(build(name, parameters), optimise=False).dag) == degree


@pytest.mark.parametrize(
    ("name", "billions", "published"),
    [("inception-v3", 0.05, 5.7), ("darts", 0.05, 0.5), ("nasnet-a-mobile", 0.05, 0.6), ("randwire-regular", 0.1, 4.0)],
)
def test_published_amounts_of_work(name: str, billions: float, published: float) -> None:
    """Billions of multiply-adds equal the published ones to the printed digits (Nimble, Table 3.1; Xie et al.)."""
    dag = chrion.load(build(name)).dag
    work = sum(flops for flops, kind in zip(dag.flops, dag.op_types, strict=True) if kind in {"Conv", "Gemm"}) / 2e9
    assert abs(work - published) <= billions


def test_googlenets_streams_as_published() -> None:
    """GoogLeNet takes 28 streams by Opara, 28 by Nimble, and 4 by Nimble with shared streams."""
    dag = chrion.load(build("googlenet"), optimise=False).dag
    found = [max(streams) + 1 for streams in (opara_streams(dag), nimble_streams(dag), nimble_streams(dag, share=True))]
    assert found == [28, 28, 4]
