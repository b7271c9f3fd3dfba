"""Random ensembles of every library: read, written, and as tensors, with the library's own predictions.

The converters are those that people use: onnxmltools for LightGBM and XGBoost, CatBoost's own exporter, and
``chrion.translate`` for scikit-learn. Libraries that are not installed are skipped.
"""

from __future__ import annotations

import importlib
import random
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import chrion
from chrion.graph.trees import FORMS, is_tree_ensemble, read_ensemble, write_ensemble
from chrion.graph.trees.tensor_form import with_tensor_trees
from property_tests import examples
from random_trees import run

ROWS, FEATURES = 300, 5
SEEDS = st.integers(0, 2**32)
#: Fits a model of a number of trees and of a depth, and returns its predictions and its ONNX model.
Fit = Callable[[random.Random, Any, Any, str, int, int], tuple[Any, onnx.ModelProto]]


def data(seed: int, task: str, *, missing: bool) -> tuple[Any, Any]:
    """Return features, of which one is constant and one may be empty, and a target of two, four or many values."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((ROWS, FEATURES)).astype(np.float32)
    x[:, 1] = np.round(2 * x[:, 1])
    x[:, 2] = 3.0
    z = x[:, 0] * x[:, 1] + x[:, 3]
    if missing:
        x[rng.random(x.shape) < 0.15] = np.nan
        x[:, 4] = np.nan if rng.random() < 0.3 else x[:, 4]
    if task == "numbers":
        return x, z.astype(np.float64)
    y = (z > 0).astype(int) if task == "two" else np.digitize(z, [-1.0, 0.0, 1.0])
    y[:4] = [0, 1, 0, 1] if task == "two" else [0, 1, 2, 3]
    return x, y


def inputs_of(package: str) -> list[Any]:
    """Return the declaration of features for a converter of onnxmltools."""
    pytest.importorskip("onnxmltools", reason=f"no onnxmltools for {package} in this environment")
    kinds = importlib.import_module("onnxmltools.convert.common.data_types")
    return [("x", kinds.FloatTensorType([None, FEATURES]))]


def predicted(fitted: Any, x: Any, task: str) -> Any:
    """Return the predictions of an estimator: probabilities, or numbers."""
    return fitted.predict(x) if task == "numbers" else fitted.predict_proba(x)


def fit_lightgbm(draw: random.Random, x: Any, y: Any, task: str, trees: int, depth: int) -> Any:
    """Fit LightGBM: boosting of both kinds; the converter adds up the trees of forests, which are averaged."""
    package = pytest.importorskip("lightgbm", reason="no LightGBM in this environment")
    kind = draw.choice(["gbdt", "dart"])
    name = "LGBMRegressor" if task == "numbers" else "LGBMClassifier"
    fitted = getattr(package, name)(
        boosting_type=kind, n_estimators=trees, max_depth=depth, num_leaves=draw.choice([2, 15, 63]),
        min_child_samples=draw.choice([1, 20]), n_jobs=1, verbose=-1,
    ).fit(x, y)  # fmt: skip
    tools = importlib.import_module("onnxmltools")
    model = tools.convert_lightgbm(fitted, initial_types=inputs_of("LightGBM"), zipmap=False)
    return predicted(fitted, x, task), model


def fit_xgboost(draw: random.Random, x: Any, y: Any, task: str, trees: int, depth: int) -> Any:
    """Fit XGBoost: boosting and forests; the converter mixes up the trees of forests of several classes."""
    package = pytest.importorskip("xgboost", reason="no XGBoost in this environment")
    forest = draw.random() < 0.3 and task != "several"
    name = ("XGBRF" if forest else "XGB") + ("Regressor" if task == "numbers" else "Classifier")
    fitted = getattr(package, name)(n_estimators=trees, max_depth=depth, n_jobs=1, tree_method="hist").fit(x, y)
    tools = importlib.import_module("onnxmltools")
    return predicted(fitted, x, task), tools.convert_xgboost(fitted, initial_types=inputs_of("XGBoost"))


def fit_catboost(draw: random.Random, x: Any, y: Any, task: str, trees: int, depth: int) -> Any:
    """Fit CatBoost, whose exporter writes maps from classes to probabilities."""
    package = pytest.importorskip("catboost", reason="no CatBoost in this environment")
    name = "CatBoostRegressor" if task == "numbers" else "CatBoostClassifier"
    fitted = getattr(package, name)(
        iterations=trees, depth=min(depth, 8), nan_mode=draw.choice(["Min", "Max"]), allow_writing_files=False,
        verbose=False, thread_count=1,
    ).fit(x, y)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        fitted.save_model(str(Path(folder) / "model.onnx"), format="onnx")
        return predicted(fitted, x, task), onnx.load(Path(folder) / "model.onnx")


def fit_sklearn(draw: random.Random, x: Any, y: Any, task: str, trees: int, depth: int) -> Any:
    """Fit trees of scikit-learn: forests, boosting and histograms; only the latter with missing values.

    Histograms of a column without any value fail: it has one in the rows to fit with.
    """
    pytest.importorskip("skl2onnx", reason="no skl2onnx in this environment")
    ensemble = importlib.import_module("sklearn.ensemble")
    kinds = ["HistGradientBoosting"]
    if not np.isnan(x).any():
        kinds += ["RandomForest", "ExtraTrees", "GradientBoosting"]
    kind = draw.choice(kinds)
    options = {"max_iter" if kind.startswith("Hist") else "n_estimators": trees, "max_depth": depth}
    known = x.copy()
    known[0, np.isnan(x).all(axis=0)] = 0.0
    estimator = getattr(ensemble, kind + ("Regressor" if task == "numbers" else "Classifier"))(**options)
    with importlib.import_module("threadpoolctl").threadpool_limits(1):  # several that wait for each other take longer
        fitted = estimator.fit(known, y)
        return predicted(fitted, x, task), chrion.translate(fitted)


LIBRARIES: dict[str, Fit] = {
    "LightGBM": fit_lightgbm,
    "XGBoost": fit_xgboost,
    "CatBoost": fit_catboost,
    "scikit-learn": fit_sklearn,
}


def scores(outputs: list[Any]) -> Any:
    """Return scores as an array, also those in maps from classes."""
    last = outputs[-1]
    return np.array([[row[label] for label in sorted(row)] for row in last]) if isinstance(last, list) else last


def check(library: str, seed: int, trees: int, depth: int) -> None:
    """Fit a model, and check its ONNX model, with trees as they are, written again, and as tensors."""
    draw = random.Random(seed)
    task = draw.choice(["two", "several", "numbers"])
    x, y = data(seed, task, missing=draw.random() < 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, model = LIBRARIES[library](draw, x, y, task, trees, depth)
    names = [value.name for value in model.graph.input]
    feeds = {names[0]: x} if len(names) == 1 else {name: x[:, [at]] for at, name in enumerate(names)}
    plain = run(model, feeds)
    top = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(scores(plain).reshape(expected.shape), expected, atol=1e-4 * top)
    again = onnx.ModelProto()
    again.CopyFrom(model)
    for node in filter(is_tree_ensemble, again.graph.node):
        node.CopyFrom(write_ensemble(read_ensemble(node), node))
    np.testing.assert_array_equal(scores(run(again, feeds)), scores(plain))
    for form in FORMS:
        tensors = with_tensor_trees(model, form, {node.input[0]: "tensor(float)" for node in model.graph.node})
        np.testing.assert_allclose(scores(run(tensors, feeds)), scores(plain), atol=1e-5 * top)


@pytest.mark.parametrize("library", LIBRARIES)
@given(seed=SEEDS)
@examples(50)
def test_random_ensembles_keep_the_results_of_their_library(library: str, seed: int) -> None:
    """1 to 500 trees of 1 to 20 levels, with missing values, an empty column, and a constant one."""
    draw = random.Random(seed + 1)
    [trees] = draw.choices([1, 2, 5, 50, 500], [4, 4, 4, 4, 1])
    check(library, seed, trees, draw.choice([1, 3, 6, 20]))


@pytest.mark.parametrize("library", LIBRARIES)
def test_large_ensembles_keep_the_results_of_their_library(library: str) -> None:
    """500 trees of up to 20 levels."""
    check(library, 3, 500, 20)


def test_categories_of_lightgbm_are_sets() -> None:
    """A chain of comparisons with the categories of a set is one test of membership, also in tensor forms."""
    package = pytest.importorskip("lightgbm", reason="no LightGBM in this environment")
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.integers(0, 9, 2000), rng.standard_normal(2000)]).astype(np.float32)
    y = (np.isin(x[:, 0], [1, 4, 7]) ^ (x[:, 1] > 0)).astype(int)
    options = {"n_estimators": 5, "num_leaves": 8, "verbose": -1, "n_jobs": 1}
    fitted = package.LGBMClassifier(**options, max_cat_to_onehot=1).fit(x, y, categorical_feature=[0])
    kinds = importlib.import_module("onnxmltools.convert.common.data_types")
    declared = [("x", kinds.FloatTensorType([None, 2]))]
    model = importlib.import_module("onnxmltools").convert_lightgbm(fitted, initial_types=declared, zipmap=False)
    [node] = filter(is_tree_ensemble, model.graph.node)
    ensemble = read_ensemble(node)
    assert (len(ensemble.members) > 0, ensemble.leaf_count) == (True, 40)
    plain = run(model, {"x": x})
    np.testing.assert_allclose(plain[1], fitted.predict_proba(x), atol=1e-5)
    raw = ensemble.leaf_weights[ensemble.leaves_of(x)].sum(axis=(1, 2)) + ensemble.base.sum()
    np.testing.assert_allclose(1 / (1 + np.exp(-raw)), plain[1][:, 1], atol=1e-5)
    node.CopyFrom(write_ensemble(ensemble, node))
    np.testing.assert_array_equal(run(model, {"x": x})[1], plain[1])
    others = np.concatenate([x, [[np.nan, 0.5], [-1, 0], [12, 0], [1, np.nan]]]).astype(np.float32)
    for form in FORMS:
        tensors = with_tensor_trees(model, form, {"x": "tensor(float)"})
        np.testing.assert_allclose(run(tensors, {"x": others})[1], run(model, {"x": others})[1], atol=1e-5)
