"""Random placements of random models give what plain onnxruntime gives."""

from __future__ import annotations

import random

import pytest

from chrion import HybridSession, load
from helpers import assert_equal, forced_plan, plain
from random_models import RandomModel


@pytest.mark.parametrize("seed", range(12))
def test_stages_and_several_accelerator_lanes_are_right(seed: int) -> None:
    """With barriers between random stages, over two lanes of an accelerator (the CPU's provider) and two cores."""
    made = RandomModel(seed)
    model = made.build(8 + seed)
    graph = load(model)
    pick = random.Random(seed)
    order = graph.dag.topological_order
    step = [0] * len(order)
    for at in range(1, len(order)):
        step[at] = step[at - 1] + (pick.random() < 0.3)
    stages = [step[order.index(i)] for i in range(len(order))]
    lanes = [pick.choice([-1, 0, 1, 2]) for _ in order]
    plan = forced_plan(graph, lanes, order, "CPUExecutionProvider", stages)
    with HybridSession(graph, plan=plan) as session:
        for _ in range(3):
            assert_equal(session.run(None, made.feed), plain(model, made.feed))


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
