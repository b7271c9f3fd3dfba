"""Real architectures: plans of fixed placements and of published policies give the outputs of plain onnxruntime."""

from __future__ import annotations

import onnx
import pytest

from chrion import HybridSession, load, partition
from chrion.scheduler import fixed_plan
from helpers import assert_equal, run_plain
from light_models import LIGHT_MODELS, random_feed
from random_profiles import random_profile


def test_the_package_has_nine_models() -> None:
    """The onnx package contains nine models."""
    assert len(LIGHT_MODELS) == 9


@pytest.mark.parametrize("name", LIGHT_MODELS)
def test_real_architectures_give_onnxruntimes_outputs(name: str) -> None:
    """Each model is cut after every third operator and placed on two lanes."""
    path = LIGHT_MODELS[name]
    graph = load(path)
    assert len(graph.dag) > 5
    feed = random_feed(graph)
    lanes = [0] * len(graph.dag)
    for at, i in enumerate(graph.dag.topological_order):
        lanes[i] = 1 + (at // 3) % 2
    with HybridSession(graph, plan=fixed_plan(graph, lanes)) as session:
        assert session.plan is not None
        found = session.run(None, feed)
    assert_equal(found, run_plain(path, feed))
    assert len(onnx.load(path).graph.output) == len(found)


@pytest.mark.parametrize("policy", ["ios", "nimble", "opara", "wavefront", "greedy"])
def test_policies_are_correct_on_branches_and_concatenations(policy: str) -> None:
    """Plans of Inception on two cores have the outputs of plain onnxruntime."""
    path = LIGHT_MODELS["light_inception_v1"]
    graph = load(path)
    plan = partition(graph, random_profile([graph], accelerator=False), policy=policy)
    feed = random_feed(graph)
    with HybridSession(graph, plan=plan) as session:
        assert (session.plan is None) == (len(plan.segments) == 1)  # one segment runs plain
        assert_equal(session.run(None, feed), run_plain(path, feed))
