"""Models of scikit-learn, exported by skl2onnx: trees, linear models, kernels and pipelines over columns of text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from cases import Feed, case, main
from numpy.typing import NDArray
from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType, Int64TensorType, StringTensorType
from sklearn.base import BaseEstimator
from sklearn.calibration import CalibratedClassifierCV
from sklearn.cluster import KMeans
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.ensemble import (
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingRegressor,
    IsolationForest,
    RandomForestClassifier,
    RandomForestRegressor,
    StackingClassifier,
    VotingRegressor,
)
from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, WhiteKernel
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.mixture import GaussianMixture
from sklearn.multiclass import OneVsRestClassifier
from sklearn.multioutput import MultiOutputClassifier, MultiOutputRegressor
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor, LocalOutlierFactor
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import (
    KBinsDiscretizer,
    MinMaxScaler,
    Normalizer,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    StandardScaler,
)
from sklearn.svm import SVC, SVR, LinearSVC
from sklearn.tree import DecisionTreeClassifier

REQUIREMENTS = [
    "numpy==2.4.6",
    "onnx==1.23.2",
    "pandas==3.1.1",
    "protobuf==6.33.6",  # 7 rejects the booleans that skl2onnx writes into lists of integers
    "scikit-learn==1.9.1",
    "skl2onnx==1.20.0",
]

#: Columns of the numeric table that the models below are fitted to.
FEATURES = 6
WORDS = [
    "graph",
    "node",
    "edge",
    "tensor",
    "kernel",
    "device",
    "host",
    "queue",
    "plan",
    "cost",
    "batch",
    "cache",
    "axis",
]


def table(rows: int = 160, *, seed: int = 0) -> NDArray[np.float32]:
    """Draw a numeric table of shape ``(rows, FEATURES)``."""
    return np.random.default_rng(seed).standard_normal((rows, FEATURES)).astype(np.float32)


def labels(x: NDArray[np.float32], classes: int = 3) -> NDArray[np.int64]:
    """Sort rows into classes of equal size by a quadratic score."""
    score = x[:, 0] + x[:, 1] * x[:, 2]
    return np.digitize(score, np.quantile(score, np.linspace(0, 1, classes + 1)[1:-1])).astype(np.int64)


def targets(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute a smooth target for every row."""
    return (np.sin(x[:, 0]) + x[:, 1] * x[:, 2]).astype(np.float32)


def sentences(rows: int, *, seed: int = 0) -> list[str]:
    """Draw short sentences from a fixed vocabulary."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=rng.integers(2, 9))) for _ in range(rows)]


def batches(*rows: int) -> list[Feed]:
    """Draw a request for each number of rows."""
    return [{"X": table(count, seed=count)} for count in rows]


def export(model: BaseEstimator, path: Path, options: dict[str, Any] | None = None, **arguments: Any) -> Sequence[Feed]:
    """Export a model fitted to the numeric table and draw requests of one, seven and forty rows."""
    options = {id(model): options} if options else None
    names = [("X", FloatTensorType([None, FEATURES]))]
    save(to_onnx(model, initial_types=names, options=options, **arguments), path)
    return batches(1, 7, 40)


def save(model: Any, path: Path) -> None:
    """Write a model's bytes."""
    path.write_bytes(model.SerializeToString())


def plain(
    name: str, build: Callable[[], BaseEstimator], *, classes: int = 0, tolerance: float = 1e-3, **arguments: Any
) -> None:
    """Declare a case that fits an estimator to the numeric table.

    Args:
        name: Of the case.
        build: Returns the estimator.
        classes: Number of classes of the target; 0 asks for a regression.
        tolerance: Relative and ten times the absolute tolerance for outputs.
        arguments: Arguments of :func:`export`.
    """

    @case(name, exporter="skl2onnx", package="skl2onnx", rtol=tolerance, atol=tolerance / 10)
    def make(path: Path) -> Sequence[Feed]:
        x = table()
        return export(build().fit(x, labels(x, classes) if classes else targets(x)), path, **arguments)


plain("logistic-zipmap", LogisticRegression, classes=3)
plain("logistic-tensor", LogisticRegression, classes=3, options={"zipmap": False})
plain("logistic-columns", LogisticRegression, classes=3, options={"zipmap": "columns"})
plain("logistic-binary-scores", LogisticRegression, classes=2, options={"zipmap": False, "raw_scores": True})
plain("linear-opset11", LinearRegression, target_opset=11)
plain("ridge", Ridge)
plain("tree", lambda: DecisionTreeClassifier(max_depth=4, random_state=0), classes=3)
plain(
    "tree-decision-path",
    lambda: DecisionTreeClassifier(max_depth=3, random_state=0),
    classes=3,
    options={"decision_path": True, "zipmap": False},
)
plain("calibrated", lambda: CalibratedClassifierCV(LinearSVC(random_state=0), cv=2), classes=3)
plain("one-vs-rest", lambda: OneVsRestClassifier(LogisticRegression()), classes=4)
plain("local-outliers", lambda: LocalOutlierFactor(5, novelty=True))
plain("forest-classifier", lambda: RandomForestClassifier(20, max_depth=5, random_state=0), classes=3)
plain(
    "forest-classifier-tensor",
    lambda: RandomForestClassifier(10, max_depth=5, random_state=0),
    classes=4,
    options={"zipmap": False},
)
plain("forest-regressor", lambda: RandomForestRegressor(20, max_depth=5, random_state=0))
plain("gradient-boosting", lambda: GradientBoostingClassifier(n_estimators=15, random_state=0), classes=3)
plain("gradient-boosting-regressor", lambda: GradientBoostingRegressor(n_estimators=15, random_state=0))
plain("hist-gradient-boosting", lambda: HistGradientBoostingRegressor(max_iter=15, random_state=0))
plain("svc", lambda: SVC(random_state=0), classes=3, options={"zipmap": False})
plain("linear-svc", lambda: LinearSVC(random_state=0), classes=3)
plain("svr", SVR)
plain("knn-classifier", lambda: KNeighborsClassifier(3), classes=3)
plain("knn-regressor", lambda: KNeighborsRegressor(4, weights="distance"))
plain("mlp-classifier", lambda: MLPClassifier((32, 16), max_iter=30, tol=1.0, random_state=0), classes=3)
plain("mlp-regressor", lambda: MLPRegressor(hidden_layer_sizes=(32, 32, 16), max_iter=30, tol=1.0, random_state=0))
plain("naive-bayes", GaussianNB, classes=3)
plain("kmeans", lambda: KMeans(4, n_init=1, random_state=0))
plain("gaussian-mixture", lambda: GaussianMixture(3, random_state=0))
plain("gaussian-process", lambda: GaussianProcessRegressor(RBF() + WhiteKernel(), optimizer=None), tolerance=1e-2)
plain("pca", lambda: PCA(3, random_state=0))
plain("polynomial-ridge", lambda: make_pipeline(MinMaxScaler(), PolynomialFeatures(2), Ridge()))
plain(
    "bins-logistic", lambda: make_pipeline(KBinsDiscretizer(4, encode="onehot-dense"), LogisticRegression()), classes=2
)
plain(
    "union-of-features",
    lambda: make_pipeline(FeatureUnion([("pca", PCA(2)), ("norm", Normalizer())]), StandardScaler(), SVR()),
)
plain(
    "stacking",
    lambda: StackingClassifier(
        [("svc", LinearSVC(random_state=0)), ("tree", DecisionTreeClassifier(max_depth=3, random_state=0))], cv=2
    ),
    classes=3,
)
plain("voting", lambda: VotingRegressor([("ridge", Ridge()), ("knn", KNeighborsRegressor(3))]))


@case("isolation-forest", exporter="skl2onnx", package="skl2onnx")
def isolation_forest(path: Path) -> Sequence[Feed]:
    """Export an outlier detector of two outputs."""
    model = IsolationForest(n_estimators=10, random_state=0).fit(table())
    return export(model, path, target_opset={"": 17, "ai.onnx.ml": 3})


@case("multi-output", exporter="skl2onnx", package="skl2onnx")
def multi_output(path: Path) -> Sequence[Feed]:
    """Export one regressor for each of three targets."""
    x = table()
    y = np.stack([targets(x), targets(x[:, ::-1]), x[:, 0] * 2], axis=1)
    return export(MultiOutputRegressor(Ridge()).fit(x, y), path)


@case("multi-output-classifier", exporter="skl2onnx", package="skl2onnx")
def multi_output_classifier(path: Path) -> Sequence[Feed]:
    """Export one classifier for each of two targets, whose probabilities are a sequence of tensors."""
    x = table()
    y = np.stack([labels(x, 2), labels(x[:, ::-1], 3)], axis=1)
    return export(MultiOutputClassifier(LogisticRegression()).fit(x, y), path, {"zipmap": False})


@case("gaussian-process-deviation", exporter="skl2onnx", package="skl2onnx", rtol=1e-2, atol=1e-2)
def deviation(path: Path) -> Sequence[Feed]:
    """Export a Gaussian process that returns the deviation too, in double precision."""
    x = table(60).astype(np.float64)
    model = GaussianProcessRegressor(RBF() + WhiteKernel(), optimizer=None).fit(x, targets(table(60)))
    save(to_onnx(model, x[:1], options={id(model): {"return_std": True}}), path)
    return [{"X": table(rows, seed=rows).astype(np.float64)} for rows in (1, 5, 23)]


@case("data-frame", exporter="skl2onnx", package="skl2onnx")
def data_frame(path: Path) -> Sequence[Feed]:
    """Export a pipeline over a data frame, which has one input for each of its columns."""
    frame = columns_of_frame(120)
    encode = ColumnTransformer(
        [
            ("numbers", StandardScaler(), ["width", "height", "depth"]),
            ("words", OneHotEncoder(handle_unknown="ignore"), ["colour", "shape"]),
        ]
    )
    model = make_pipeline(encode, GradientBoostingClassifier(n_estimators=5, random_state=0))
    model.fit(pd.DataFrame({name: column[:, 0] for name, column in frame.items()}), frame["width"][:, 0] > 0)
    kinds = [
        (name, StringTensorType([None, 1]) if column.dtype == object else FloatTensorType([None, 1]))
        for name, column in frame.items()
    ]
    save(to_onnx(model, initial_types=kinds, options={id(model): {"zipmap": "columns"}}), path)
    return [columns_of_frame(rows, seed=rows) for rows in (1, 9, 30)]


def columns_of_frame(rows: int, *, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Draw three columns of numbers and two of words, each of shape ``(rows, 1)``."""
    rng = np.random.default_rng(seed)
    return {
        **{name: rng.standard_normal((rows, 1)).astype(np.float32) for name in ("width", "height", "depth")},
        "colour": rng.choice(["red", "green"], size=(rows, 1)).astype(object),
        "shape": rng.choice(["round", "flat", "long"], size=(rows, 1)).astype(object),
    }


@case("string-labels", exporter="skl2onnx", package="skl2onnx")
def string_labels(path: Path) -> Sequence[Feed]:
    """Export a pipeline whose labels, and so whose keys of the map, are strings."""
    x = table()
    y = np.array(["low", "middle", "high"])[labels(x)]
    return export(make_pipeline(StandardScaler(), LogisticRegression()).fit(x, y), path)


@case("string-labels-tensor", exporter="skl2onnx", package="skl2onnx")
def string_labels_tensor(path: Path) -> Sequence[Feed]:
    """Export a forest whose labels are strings and whose probabilities are a tensor."""
    x = table()
    y = np.array(["no", "yes"])[labels(x, 2)]
    model = RandomForestClassifier(8, max_depth=4, random_state=0).fit(x, y)
    return export(model, path, {"zipmap": False})


@case("double", exporter="skl2onnx", package="skl2onnx", rtol=1e-9, atol=1e-10)
def double(path: Path) -> Sequence[Feed]:
    """Export a pipeline that computes in double precision."""
    x = table().astype(np.float64)
    model = make_pipeline(StandardScaler(), PCA(4), Ridge()).fit(x, targets(table()))
    save(to_onnx(model, x[:1]), path)
    return [{"X": table(rows, seed=rows).astype(np.float64)} for rows in (1, 5, 23)]


@case("imputer-missing", exporter="skl2onnx", package="skl2onnx")
def imputer(path: Path) -> Sequence[Feed]:
    """Export a pipeline that fills in missing values, which the requests have."""
    x = table()
    x[::5, 1] = np.nan
    model = make_pipeline(SimpleImputer(), StandardScaler(), Ridge()).fit(x, targets(table()))
    requests = export(model, path)
    for request in requests:
        request["X"][::3, 2] = np.nan  # type: ignore[call-overload]
    return requests


@case("tfidf-logistic", exporter="skl2onnx", package="skl2onnx")
def tfidf(path: Path) -> Sequence[Feed]:
    """Export a text classifier: tokens, weighted counts, logistic regression."""
    text = sentences(80)
    model = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(text, [len(line) > 30 for line in text])
    return export_text(model, path, {id(model): {"zipmap": False}})


@case("count-bigrams-svd", exporter="skl2onnx", package="skl2onnx")
def bigrams(path: Path) -> Sequence[Feed]:
    """Export counts of words and pairs of words, projected to five components."""
    model = make_pipeline(CountVectorizer(ngram_range=(1, 2)), TruncatedSVD(5, random_state=0))
    return export_text(model.fit(sentences(80)), path)


@case("columns-of-text-and-numbers", exporter="skl2onnx", package="skl2onnx")
def columns(path: Path) -> Sequence[Feed]:
    """Export a pipeline with one input for each group of columns: numbers, colours, and sizes."""
    frame = mixed(120)
    encode = ColumnTransformer(
        [
            ("numbers", StandardScaler(), [0, 1]),
            ("colour", OneHotEncoder(handle_unknown="ignore"), [2]),
            ("size", OneHotEncoder(handle_unknown="ignore"), [3]),
        ]
    )
    joined = np.concatenate([frame["numbers"].astype(object), frame["colour"], frame["size"]], axis=1)
    model = make_pipeline(encode, LogisticRegression()).fit(joined, (frame["numbers"][:, 0] > 0).astype(int))
    kinds = [
        ("numbers", FloatTensorType([None, 2])),
        ("colour", StringTensorType([None, 1])),
        ("size", Int64TensorType([None, 1])),
    ]
    save(to_onnx(model, initial_types=kinds), path)
    return [mixed(rows, seed=rows) for rows in (1, 9, 30)]


@case("ordinal-forest", exporter="skl2onnx", package="skl2onnx")
def ordinal(path: Path) -> Sequence[Feed]:
    """Export a forest over an input of text that is encoded by rank."""
    colours = mixed(120)["colour"]
    model = make_pipeline(OrdinalEncoder(), RandomForestRegressor(5, random_state=0))
    model.fit(colours, np.arange(120, dtype=np.float32))
    save(to_onnx(model, initial_types=[("colour", StringTensorType([None, 1]))]), path)
    return [{"colour": mixed(rows, seed=rows)["colour"]} for rows in (1, 4, 17)]


@case("one-hot-strings", exporter="skl2onnx", package="skl2onnx")
def one_hot(path: Path) -> Sequence[Feed]:
    """Export an encoder alone: text in, indicator columns out."""
    model = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(mixed(50)["colour"])
    save(to_onnx(model, initial_types=[("colour", StringTensorType([None, 1]))]), path)
    return [{"colour": np.array([["red"], ["unseen"]], dtype=object)}, {"colour": mixed(6, seed=6)["colour"]}]


def export_text(model: BaseEstimator, path: Path, options: dict[int, Any] | None = None) -> Sequence[Feed]:
    """Export a pipeline over sentences and draw requests for it."""
    kinds = [("text", StringTensorType([None]))]
    everywhere = {"locale": "C"}  # the default is a locale that small machines lack
    options = (options or {}) | {id(model.steps[0][1]): everywhere}
    save(to_onnx(model, initial_types=kinds, options=options), path)
    return [{"text": np.array(sentences(rows, seed=rows), dtype=object)} for rows in (1, 5, 20)]


def mixed(rows: int, *, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Draw a table of numbers, colours (text) and sizes (integers)."""
    rng = np.random.default_rng(seed)
    return {
        "numbers": rng.standard_normal((rows, 2)).astype(np.float32),
        "colour": rng.choice(["red", "green", "blue"], size=(rows, 1)).astype(object),
        "size": rng.integers(0, 4, size=(rows, 1)),
    }


if __name__ == "__main__":
    sys.exit(main("sklearn", sys.argv[1:]))
