"""Gradient-boosted trees: LightGBM and XGBoost by onnxmltools, CatBoost by its own exporter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cases import Feed, case, main
from catboost import CatBoostClassifier, CatBoostRegressor
from lightgbm import LGBMClassifier, LGBMRanker, LGBMRegressor
from numpy.typing import NDArray
from onnxmltools import convert_lightgbm, convert_xgboost
from onnxmltools.convert.common.data_types import FloatTensorType
from onnxmltools.convert.lightgbm.operator_converters.LightGbm import convert_lightgbm as lightgbm_converter
from skl2onnx import to_onnx, update_registered_converter
from skl2onnx.common.shape_calculator import calculate_linear_classifier_output_shapes
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from xgboost import XGBClassifier, XGBRegressor, XGBRFRegressor

REQUIREMENTS = [
    "catboost==1.2.10",
    "lightgbm==4.7.0",
    "numpy==2.4.6",
    "onnx==1.23.2",
    "onnxmltools==1.16.0",
    "protobuf==6.33.6",
    "scikit-learn==1.9.1",
    "skl2onnx==1.20.0",
    "xgboost==3.2.0",
]

#: Columns of the table that the models below are fitted to.
FEATURES = 6
QUIET = {"allow_writing_files": False, "verbose": False, "thread_count": 1, "random_seed": 0}
LIGHT = {"n_estimators": 12, "num_leaves": 8, "verbose": -1, "n_jobs": 1, "random_state": 0}
EXTREME = {"n_estimators": 12, "max_depth": 3, "n_jobs": 1, "random_state": 0}


def table(rows: int = 200, *, seed: int = 0) -> NDArray[np.float32]:
    """Draw a numeric table of shape ``(rows, FEATURES)``."""
    return np.random.default_rng(seed).standard_normal((rows, FEATURES)).astype(np.float32)


def score(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute a smooth target for every row."""
    return (np.sin(x[:, 0]) + x[:, 1] * x[:, 2]).astype(np.float32)


def labels(x: NDArray[np.float32], classes: int) -> NDArray[np.int64]:
    """Sort rows into classes of equal size by their score."""
    y = score(x)
    return np.digitize(y, np.quantile(y, np.linspace(0, 1, classes + 1)[1:-1])).astype(np.int64)


def batches(name: str) -> list[Feed]:
    """Draw requests of one, seven and forty rows, the last with missing values."""
    requests = [{name: table(rows, seed=rows)} for rows in (1, 7, 40)]
    requests[-1][name][::4, 1] = np.nan
    return requests


def lightgbm(model: Any, path: Path, **arguments: Any) -> Sequence[Feed]:
    """Export a fitted model of LightGBM."""
    kinds = [("input", FloatTensorType([None, FEATURES]))]
    path.write_bytes(convert_lightgbm(model, initial_types=kinds, **arguments).SerializeToString())
    return batches("input")


def xgboost(model: Any, path: Path, **arguments: Any) -> Sequence[Feed]:
    """Export a fitted model of XGBoost."""
    kinds = [("input", FloatTensorType([None, FEATURES]))]
    path.write_bytes(convert_xgboost(model, initial_types=kinds, **arguments).SerializeToString())
    return batches("input")


def catboost(model: Any, path: Path) -> Sequence[Feed]:
    """Export a fitted model of CatBoost."""
    model.save_model(str(path), format="onnx", export_parameters={"onnx_domain": "ai.catboost"})
    return batches("features")


def fitted(build: Callable[[], Any], classes: int = 0) -> Any:
    """Fit a model to the table: a classifier of so many classes, or a regressor for 0."""
    x = table()
    return build().fit(x, labels(x, classes) if classes else score(x))


@case("lightgbm-zipmap", exporter="onnxmltools (LightGBM)", package="onnxmltools")
def lightgbm_zipmap(path: Path) -> Sequence[Feed]:
    """Export a classifier whose probabilities are a list of maps."""
    return lightgbm(fitted(lambda: LGBMClassifier(**LIGHT), 3), path)


@case("lightgbm-tensor", exporter="onnxmltools (LightGBM)", package="onnxmltools")
def lightgbm_tensor(path: Path) -> Sequence[Feed]:
    """Export a binary classifier whose probabilities are a tensor."""
    return lightgbm(fitted(lambda: LGBMClassifier(**LIGHT), 2), path, zipmap=False, target_opset=15)


@case("lightgbm-regressor", exporter="onnxmltools (LightGBM)", package="onnxmltools")
def lightgbm_regressor(path: Path) -> Sequence[Feed]:
    """Export a regressor."""
    return lightgbm(fitted(lambda: LGBMRegressor(**LIGHT)), path)


@case("lightgbm-regressor-split", exporter="onnxmltools (LightGBM)", package="onnxmltools")
def lightgbm_split(path: Path) -> Sequence[Feed]:
    """Export a regressor whose trees are split over several nodes, summed in double precision."""
    return lightgbm(fitted(lambda: LGBMRegressor(**LIGHT)), path, split=4)


@case("lightgbm-ranker", exporter="onnxmltools (LightGBM)", package="onnxmltools")
def lightgbm_ranker(path: Path) -> Sequence[Feed]:
    """Export a ranker of groups of ten rows."""
    x = table()
    return lightgbm(LGBMRanker(**LIGHT).fit(x, labels(x, 4), group=[10] * 20), path)


@case("lightgbm-poisson", exporter="onnxmltools (LightGBM)", package="onnxmltools")
def lightgbm_poisson(path: Path) -> Sequence[Feed]:
    """Export a regressor whose scores are exponentiated."""
    x = table()
    return lightgbm(LGBMRegressor(objective="poisson", **LIGHT).fit(x, np.exp(score(x))), path)


@case("lightgbm-pipeline", exporter="skl2onnx (LightGBM)", package="skl2onnx")
def lightgbm_pipeline(path: Path) -> Sequence[Feed]:
    """Export a pipeline of scikit-learn that ends in a classifier of LightGBM."""
    update_registered_converter(
        LGBMClassifier,
        "LightGbmClassifier",
        calculate_linear_classifier_output_shapes,
        lightgbm_converter,
        options={"nocl": [True, False], "zipmap": [True, False, "columns"]},
    )
    model = fitted(lambda: make_pipeline(StandardScaler(), LGBMClassifier(**LIGHT)), 3)
    path.write_bytes(to_onnx(model, table(1), target_opset={"": 18, "ai.onnx.ml": 3}).SerializeToString())
    return batches("X")


@case("xgboost-classifier", exporter="onnxmltools (XGBoost)", package="onnxmltools")
def xgboost_classifier(path: Path) -> Sequence[Feed]:
    """Export a classifier of four classes."""
    return xgboost(fitted(lambda: XGBClassifier(**EXTREME), 4), path)


@case("xgboost-binary", exporter="onnxmltools (XGBoost)", package="onnxmltools")
def xgboost_binary(path: Path) -> Sequence[Feed]:
    """Export a binary classifier to an older opset."""
    return xgboost(fitted(lambda: XGBClassifier(**EXTREME), 2), path, target_opset=13)


@case("xgboost-regressor", exporter="onnxmltools (XGBoost)", package="onnxmltools")
def xgboost_regressor(path: Path) -> Sequence[Feed]:
    """Export a regressor."""
    return xgboost(fitted(lambda: XGBRegressor(**EXTREME)), path)


@case("xgboost-forest", exporter="onnxmltools (XGBoost)", package="onnxmltools")
def xgboost_forest(path: Path) -> Sequence[Feed]:
    """Export a random forest."""
    return xgboost(fitted(lambda: XGBRFRegressor(**EXTREME)), path)


@case("catboost-classifier", exporter="CatBoost", package="catboost")
def catboost_classifier(path: Path) -> Sequence[Feed]:
    """Export a classifier of three classes, which ends in a ZipMap."""
    return catboost(fitted(lambda: CatBoostClassifier(iterations=10, depth=3, **QUIET), 3), path)


@case("catboost-binary", exporter="CatBoost", package="catboost")
def catboost_binary(path: Path) -> Sequence[Feed]:
    """Export a binary classifier whose labels are strings."""
    x = table()
    y = np.array(["no", "yes"])[labels(x, 2)]
    return catboost(CatBoostClassifier(iterations=10, depth=3, **QUIET).fit(x, y), path)


@case("catboost-regressor", exporter="CatBoost", package="catboost")
def catboost_regressor(path: Path) -> Sequence[Feed]:
    """Export a regressor."""
    return catboost(fitted(lambda: CatBoostRegressor(iterations=10, depth=3, **QUIET)), path)


if __name__ == "__main__":
    sys.exit(main("boosting", sys.argv[1:]))
