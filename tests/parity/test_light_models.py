"""Tests of the nine real architectures in the onnx package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.backend.test.data import __path__ as data_path

from chrion import HybridSession, load
from chrion.scheduler import fixed_plan
from helpers import assert_equal, run_plain

FOLDER = Path(next(iter(data_path))) / "light"
MODELS = sorted(p.stem for p in FOLDER.glob("*.onnx"))


def test_the_package_has_nine_models() -> None:
    """The onnx package contains nine models."""
    assert len(MODELS) == 9


@pytest.mark.parametrize("name", MODELS)
def test_real_architectures_give_onnxruntimes_outputs(name: str) -> None:
    """Each model is cut after every third operator and placed on two lanes."""
    path = str(FOLDER / f"{name}.onnx")
    graph = load(path)
    assert len(graph.dag) > 5
    feed = {
        i.name: np.random.default_rng(0).random([d for d in i.shape or () if isinstance(d, int)], np.float32)
        for i in graph.inputs
    }
    lanes = [0] * len(graph.dag)
    for at, i in enumerate(graph.dag.topological_order):
        lanes[i] = 1 + (at // 3) % 2
    with HybridSession(graph, plan=fixed_plan(graph, lanes)) as session:
        assert session.plan is not None
        found = session.run(None, feed)
    assert_equal(found, run_plain(path, feed))
    assert len(onnx.load(path).graph.output) == len(found)
