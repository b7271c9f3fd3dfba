"""Algorithm 1: the hybrid of breadth and depth first, compared with worked examples and with the literal algorithm."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from chrion.graph.dag import depth_first_order
from chrion.profiler import CopyCost, Costs, OperatorMemory, uniform_costs
from chrion.scheduler.policies.orders import bfs_order, hybrid_order
from strategies import costs_for, dags

A, B, C, D, E, F = range(6)
FIGURE_8 = [(A, B), (A, C), (B, D), (C, E), (D, F), (E, F)]


def figure_8(between: int, at_the_root: int) -> tuple[Dag, Costs]:
    """Return Figure 8's graph, with 5 ms for each operator on every device, and 1 ms to copy a byte."""
    dag = Dag.from_edges(6, FIGURE_8, [at_the_root, at_the_root, between, between, 1, 1])
    copy = CopyCost(0.0, 1.0)
    return dag, uniform_costs(dag, accelerator_ms=5.0, cpu_ms=(5.0,), upload=copy, download=copy)


def naive_order(dag: Dag, costs: Costs, *, merge: bool) -> tuple[int, ...]:
    """Return the order of Algorithm 1 as printed, with children pushed breadth first and merged as in section 4.2."""
    n = len(dag)
    children = [[w for w in range(n) if v in dag.predecessors[w]] for v in range(n)]
    devices = len(costs.cpu_ms) + (costs.accelerator_ms is not None)

    def joins(v: int, w: int) -> bool:
        if not merge or costs.accelerator_ms is None or dag.predecessors[w] != (v,):
            return False
        size = dag.edge_bytes[w][0]
        communication = costs.upload.latency_ms + size * costs.upload.ms_per_byte
        return communication > (costs.accelerator_ms[w] + sum(row[w] for row in costs.cpu_ms)) / devices

    order: list[int] = []
    pushed = [not dag.predecessors[v] for v in range(n)]
    queue = deque(v for v in range(n) if pushed[v])

    def append(v: int) -> None:
        order.append(v)
        for w in children[v]:
            if joins(v, w):
                append(w)
            elif not pushed[w]:
                pushed[w] = True
                queue.append(w)

    while queue:
        v = queue.popleft()
        if all(m in order for m in dag.predecessors[v]):
            append(v)
        else:
            queue.append(v)
    return tuple(order)


def test_figure_8_merges_close_neighbours() -> None:
    """The order is A, BD, CE, F.

    Copies of 6 ms below the branches exceed the mean of 5 ms, and copies of 4 ms at the root do not.
    """
    assert hybrid_order(*figure_8(between=6, at_the_root=4)) == (A, B, D, C, E, F)


def test_figure_8_without_costly_copies_is_breadth_first() -> None:
    """If no copy takes longer than an operator, the order is the breadth-first one of Figure 8."""
    assert hybrid_order(*figure_8(between=4, at_the_root=4)) == (A, B, C, D, E, F)


def test_figure_8_a_copy_as_long_as_an_operator_does_not_merge() -> None:
    """The communication time must exceed the mean execution time; equal times do not merge."""
    assert hybrid_order(*figure_8(between=5, at_the_root=5)) == (A, B, C, D, E, F)


def test_figure_8_bfs_and_dfs() -> None:
    """The breadth-first and depth-first orders are the two that Figure 8 compares with."""
    dag, _ = figure_8(6, 4)
    assert bfs_order(dag) == (A, B, C, D, E, F)
    assert depth_first_order(dag) == (A, B, D, C, E, F)


def test_the_mean_is_over_all_devices() -> None:
    """A child of 1 ms on the accelerator and 9 and 11 ms on cores has a mean of 7 ms. Only a longer copy merges it."""
    for copy_ms, expected in ((7.0, (0, 1, 2, 3)), (7.5, (0, 1, 3, 2))):
        dag = Dag.from_edges(4, [(0, 1), (0, 2), (1, 3)], [0, 0, 1])
        costs = Costs((1.0,) * 4, ((9.0,) * 4, (11.0,) * 4), (OperatorMemory(),) * 4, *[CopyCost(0.0, copy_ms)] * 2)
        assert hybrid_order(dag, costs) == expected


def test_cores_alone_merge_nothing() -> None:
    """Without an accelerator no edge communicates, since CPU cores share a memory."""
    dag, costs = figure_8(6, 4)
    assert hybrid_order(dag, costs.without_accelerator()) == (A, B, C, D, E, F)


def test_a_child_of_two_parents_never_merges() -> None:
    """The child follows both parents, however long its copies take."""
    dag = Dag.from_edges(3, [(0, 2), (1, 2)], [100, 100])
    copy = CopyCost(0.0, 1.0)
    assert hybrid_order(dag, uniform_costs(dag, accelerator_ms=1.0, upload=copy, download=copy)) == (0, 1, 2)


def test_no_operators() -> None:
    """A graph without operators has an empty order."""
    dag = Dag.from_edges(0, [])
    assert hybrid_order(dag, uniform_costs(dag)) == bfs_order(dag) == depth_first_order(dag) == ()


@given(st.data())
def test_hybrid_order_is_the_literal_algorithm(data: st.DataObject) -> None:
    """The order-maintenance list gives the order of Algorithm 1's queue."""
    dag = data.draw(dags(12))
    costs = data.draw(costs_for(dag))
    costs = Costs(costs.accelerator_ms, costs.cpu_ms, costs.memory, costs.upload, costs.upload)
    assert hybrid_order(dag, costs) == naive_order(dag, costs, merge=True)
    assert bfs_order(dag) == naive_order(dag, costs, merge=False)


@given(dags(12))
def test_dfs_order_is_the_recursive_one(dag: Dag) -> None:
    """The order visits the first child whose predecessors are all done, and backtracks if there is none."""
    order: list[int] = []

    def visit(v: int) -> None:
        order.append(v)
        for w in range(len(dag)):
            if v in dag.predecessors[w] and w not in order and set(dag.predecessors[w]) <= set(order):
                visit(w)

    for root in range(len(dag)):
        if not dag.predecessors[root]:
            visit(root)
    assert depth_first_order(dag) == tuple(order)


@pytest.mark.parametrize("width", [1, 7])
def test_long_chains_need_no_recursion(width: int) -> None:
    """Thousands of joined operators do not exhaust the stack."""
    n = 6000
    dag = Dag.from_edges(n, [(i, i + width) for i in range(n - width)], [1] * (n - width))
    copy = CopyCost(9.0, 0.0)
    order = hybrid_order(dag, uniform_costs(dag, accelerator_ms=1.0, upload=copy, download=copy))
    assert order == tuple(i for root in range(width) for i in range(root, n, width))
