"""Real architectures and random models, placed by hand and by published policies, against plain onnxruntime."""

from __future__ import annotations

import onnx
import pytest

from chrion import HybridSession, load
from chrion.scheduler import fixed_plan
from helpers import assert_equal, run_plain
from light_models import LIGHT_MODELS, random_feed
from published_policies import check_light_model, check_random_model


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


def test_policies_are_correct_on_inception() -> None:
    """Plans of published policies have the outputs of plain onnxruntime on branches and long chains."""
    check_light_model("light_inception_v1")


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_policies_are_correct_on_random_models(seed: int, *, accelerator: bool) -> None:
    """Every policy's plan is correct on cores and on several accelerator lanes."""
    check_random_model(seed, accelerator=accelerator)
