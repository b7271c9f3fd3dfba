"""Cutting a graph into a chain of blocks, against exhaustive search."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from chrion.graph.blocks import crossing_bytes, cut_blocks
from chrion.graph.dag import Dag, depth_first_order
from property_tests import examples
from strategies import dags


@given(dags())
@examples(100)
def test_the_order_is_topological(dag: Dag) -> None:
    """Every operator comes once, after its predecessors."""
    order = depth_first_order(dag)
    assert sorted(order) == list(range(len(dag)))
    assert all(order.index(m) < order.index(i) for i in range(len(dag)) for m in dag.predecessors[i])


def test_one_branch_ends_before_the_next_begins() -> None:
    """Of two branches of two operators, only one value of the other branch is alive inside each."""
    dag = Dag.from_edges(6, [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5)], [1] * 6)
    assert depth_first_order(dag) == (0, 1, 3, 2, 4, 5)


@given(dags())
@examples(100)
def test_bytes_across_each_position(dag: Dag) -> None:
    """The bytes at a position are those of each value that is computed before and read later, each value once."""
    order = depth_first_order(dag)
    for at, found in enumerate(crossing_bytes(dag, order)):
        early, late = set(order[:at]), order[at:]
        values = {
            value
            for i in late
            for m, own in zip(dag.predecessors[i], dag.edge_values[i], strict=True)
            if m in early
            for value in own
        }
        assert found == sum(dag.value_bytes[value] for value in values)


@given(dags(7), st.data())
@examples(100)
def test_blocks_are_the_cheapest_within_the_limit(dag: Dag, data: st.DataObject) -> None:
    """No other division of the order has fewer blocks and fewer bytes across cuts, one against the other."""
    times = data.draw(st.lists(st.integers(0, 5).map(float), min_size=len(dag), max_size=len(dag)))
    limit = data.draw(st.integers(1, 12))
    order = depth_first_order(dag)
    crossing = crossing_bytes(dag, order)

    def cost(cuts: tuple[int, ...]) -> int:
        return sum(250_000 + crossing[at] for at in cuts)

    def fits(cuts: tuple[int, ...]) -> bool:
        bounds = [0, *cuts, len(dag)]
        parts = [order[a:b] for a, b in itertools.pairwise(bounds)]
        return all(len(part) == 1 or sum(times[i] for i in part) <= limit for part in parts)

    inner = range(1, len(dag))
    possible = [cuts for n in range(len(dag)) for cuts in itertools.combinations(inner, n) if fits(cuts)]
    blocks = cut_blocks(dag, times, limit)
    assert tuple(i for block in blocks for i in block) == order
    found = tuple(itertools.accumulate(len(block) for block in blocks))[:-1]
    assert fits(found)
    assert cost(found) == min(map(cost, possible))


def test_a_long_operator_is_a_block_of_its_own() -> None:
    """An operator beyond the limit cannot be divided; its neighbours stay within the limit."""
    dag = Dag.from_edges(4, [(0, 1), (1, 2), (2, 3)], [1] * 3)
    assert cut_blocks(dag, [1.0, 9.0, 1.0, 1.0], 3.0) == ((0,), (1,), (2, 3))
