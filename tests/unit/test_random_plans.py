"""Random orders."""

from __future__ import annotations

import itertools
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from chrion.graph import Dag
from random_plans import random_order
from strategies import dags

EDGES = [(0, 1), (0, 2), (3, 4)]


@given(dag=dags(), seed=st.integers(0, 1000))
def test_orders_are_topological(dag: Dag, seed: int) -> None:
    """Every operator occurs once, after its predecessors; equal seeds give equal orders."""
    order = random_order(dag, Random(seed))
    assert sorted(order) == list(range(len(dag)))
    assert all(order.index(m) < order.index(i) for i in range(len(dag)) for m in dag.predecessors[i])
    assert order == random_order(dag, Random(seed))


def test_every_order_is_possible() -> None:
    """The orders of many seeds are all permutations that respect the edges."""
    dag = Dag.from_edges(5, [(0, 1), (0, 2), (3, 4)])
    valid = {
        o
        for o in itertools.permutations(range(5))
        if o.index(0) < min(o.index(1), o.index(2)) and o.index(3) < o.index(4)
    }
    assert {random_order(dag, Random(seed)) for seed in range(1000)} == valid
