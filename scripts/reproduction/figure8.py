"""Figure 8 of the Chrion paper: three orders of a graph of six operators."""

from __future__ import annotations

from chrion.graph import Dag
from chrion.graph.dag import depth_first_order
from chrion.profiler import CopyCost, uniform_costs
from chrion.scheduler.policies.orders import bfs_order, hybrid_order
from reproduction.results import Tables

EDGES = ("AB", "AC", "BD", "CE", "DF", "EF")
#: Times in ms that the figure leaves open: of an operator, and of a copy along each edge. Those below the branches take
#: longer than an operator, so that Algorithm 1 keeps an operator and its successor together.
OPERATOR_MS, COPIES_MS = 5.0, (4, 4, 6, 6, 1, 1)
#: The orders as printed; parentheses are operators that Algorithm 1 keeps together.
PAPER = {"breadth first": "A, B, C, D, E, F", "depth first": "A, B, D, C, E, F", "Algorithm 1": "A, (B, D), (C, E), F"}


def figure8() -> Tables:
    """Return the orders beside the printed ones."""
    dag = Dag.from_edges(6, [(ord(edge[0]) - ord("A"), ord(edge[1]) - ord("A")) for edge in EDGES], COPIES_MS)
    copy = CopyCost(0.0, 1.0)
    costs = uniform_costs(dag, accelerator_ms=OPERATOR_MS, cpu_ms=(OPERATOR_MS,), upload=copy, download=copy)
    orders = (bfs_order(dag), depth_first_order(dag), hybrid_order(dag, costs))
    rows = [["order", "ours", "paper's"]]
    for (name, printed), order in zip(PAPER.items(), orders, strict=True):
        rows.append([name, ", ".join(chr(ord("A") + i) for i in order), printed])
    return {"figure8": rows}
