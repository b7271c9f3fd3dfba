"""Random placements of random models give what plain onnxruntime gives."""

from __future__ import annotations

import random

import pytest

from chrion import HybridSession, load
from helpers import assert_equal, forced_plan, plain
from random_models import RandomModel


@pytest.mark.parametrize("seed", range(60))
def test_any_placement_of_any_model_is_right(seed: int) -> None:
    """Every output equals plain onnxruntime's, run after run, however the operators are spread over lanes."""
    made = RandomModel(seed)
    model = made.build(4 + seed % 14)
    graph = load(model)
    pick = random.Random(seed)
    expected = plain(model, made.feed)
    for _ in range(2):
        lanes = [pick.randint(1, 2) for _ in range(len(graph.dag))]
        order: list[int] = []
        while len(order) < len(graph.dag):
            left = [i for i in range(len(graph.dag)) if i not in order]
            order.append(pick.choice([i for i in left if set(graph.dag.predecessors[i]) <= set(order)]))
        plan = forced_plan(graph, lanes, order)
        with HybridSession(graph, plan=plan) as session:
            for _ in range(3):
                assert_equal(session.run(None, made.feed), expected)
            name = session.get_outputs()[-1].name
            assert_equal(session.run([name], made.feed), plain(model, made.feed, [name]))
