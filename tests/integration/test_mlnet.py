"""Models of ML.NET: loaded with shapes, run, planned with trees as tensors, served, and fine-tuned or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import chrion
from chrion.errors import ModelError
from chrion.graph.trees import FORMS, tensor_trees
from chrion.serving.server.repository import ServedVersion, scan
from helpers import run_plain
from mlnet_models import CITIES, INPUTS, binary, one_versus_all, regression
from model_repository import put

MODELS = [regression, binary, one_versus_all]
ROWS = 40


def rows(count: int = ROWS, seed: int = 0) -> dict[str, Any]:
    """Return columns, with an unseen city and a missing distance."""
    rng = np.random.default_rng(seed)
    distance = rng.normal(size=(count, 1)).astype(np.float32)
    distance[0] = np.nan
    city = rng.choice(np.array([*CITIES, "unseen"], object), (count, 1))
    return {"Label": rng.normal(size=(count, 1)).astype(np.float32), "Distance": distance, "City": city}


@pytest.mark.parametrize("build", MODELS)
def test_a_dimension_of_minus_one_is_free(build: Callable[[], onnx.ModelProto]) -> None:
    """Shapes are given for the rows, and both tensor forms of the trees have onnxruntime's results."""
    model, feeds = build(), rows()
    expected = run_plain(model, feeds)
    assert chrion.load(model).free_dimensions
    graph = chrion.load(model, dict.fromkeys(INPUTS, (ROWS, 1)))
    assert not graph.free_dimensions
    for form in FORMS:
        with chrion.HybridSession(tensor_trees(graph, form).model.SerializeToString(), tune="never") as session:
            for found, wanted in zip(session.run(None, feeds), expected, strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("build", MODELS)
def test_the_server_has_its_interface(build: Callable[[], onnx.ModelProto], tmp_path: Path) -> None:
    """Inputs are one column each with any number of rows."""
    put(tmp_path, "m", build())
    found = scan(tmp_path, accelerator=False)["m", "1"]
    assert isinstance(found, ServedVersion)
    assert [(spec.name, spec.shape) for spec in found.inputs] == [(name, (-1, 1)) for name in INPUTS]


def test_a_regression_is_fine_tuned() -> None:
    """The label, which is an input of the model, too, is the target; results stay those of the model's trees."""
    pa = pytest.importorskip("pyarrow", reason="no pyarrow in this environment")
    pytest.importorskip("scipy", reason="no SciPy in this environment")
    columns = rows(3000)
    score = run_plain(regression(), columns)[-1][:, 0]
    table = pa.table(
        {
            "Label": (score + 2 * (columns["City"][:, 0] == "Rome")).astype(np.float32),
            "Distance": columns["Distance"][:, 0],
            "City": columns["City"][:, 0].tolist(),
        }
    )
    tuned, report = chrion.finetune(regression(), table, target="Label")
    assert report.adopted
    later = rows(500, seed=1)
    wanted = run_plain(regression(), later)[-1] + 2 * (later["City"] == "Rome")
    before, after = (np.abs(run_plain(own, later)[-1] - wanted).mean() for own in (regression(), tuned))
    assert after < before / 4


def test_a_calibrated_classifier_is_tuned_as_a_network() -> None:
    """The trees and the calibration after them are differentiated; the probability of one class decides."""
    pa = pytest.importorskip("pyarrow", reason="no pyarrow in this environment")
    pytest.importorskip("jax", reason="no JAX in this environment")
    columns, rng = rows(3000), np.random.default_rng(0)
    before = run_plain(binary(), columns)[-1][:, 0]
    city = columns["City"][:, 0]
    y = (rng.random(3000) < np.where(city == "Rome", 1 - before, before)).astype(int)
    table = pa.table({"Label": y, "Distance": columns["Distance"][:, 0], "City": city.tolist()})
    tuned, report = chrion.finetune(binary(), table, target="Label", level="L2")
    assert report.adopted, report.reason
    assert run_plain(tuned, rows())[-1].shape == (ROWS, 1)


@pytest.mark.parametrize(
    ("build", "reason"),
    [(binary, "what follows its trees changes their scores"), (one_versus_all, "one tree ensemble")],
)
def test_what_cannot_be_fine_tuned_is_named(build: Callable[[], onnx.ModelProto], reason: str) -> None:
    """Leaves of calibrated scores would be fitted to the wrong results."""
    pa = pytest.importorskip("pyarrow", reason="no pyarrow in this environment")
    pytest.importorskip("scipy", reason="no SciPy in this environment")
    columns = rows(1000)
    table = pa.table({name: own[:, 0].tolist() for name, own in columns.items()})
    with pytest.raises(ModelError, match=reason):
        chrion.finetune(build(), table, target="Label")
