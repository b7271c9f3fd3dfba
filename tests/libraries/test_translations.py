"""Everything that ``chrion.translate`` converts has scikit-learn's own results, on random fitted objects."""

from __future__ import annotations

import importlib
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import chrion
from chrion.errors import OptionError
from property_tests import examples
from random_trees import run

pytest.importorskip("skl2onnx", reason="no skl2onnx in this environment")
pd = pytest.importorskip("pandas", reason="no pandas in this environment")

ROWS = 150
SEEDS = st.integers(0, 2**32)


def sk(name: str) -> Any:
    """Return a module of scikit-learn."""
    return importlib.import_module(f"sklearn.{name}")


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out the warnings of the libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def numbers(rng: np.random.Generator, rows: int, features: int) -> Any:
    """Return float32 columns of many kinds: smooth, few values, constant, large, or of small deviation."""
    x = rng.standard_normal((rows, features))
    for at in range(features):
        kind = rng.integers(6)
        if kind == 0:
            x[:, at] = np.round(2 * x[:, at])
        elif kind == 1:
            x[:, at] = 3.0
        elif kind == 2:
            x[:, at] = 1000 + 100 * x[:, at]
        elif kind == 3:
            x[:, at] *= 0.01
    return x.astype(np.float32)


def missing(rng: np.random.Generator, x: Any, *, whole: bool) -> Any:
    """Return columns with values that are missing, and perhaps one in which all are."""
    x = np.where(rng.random(x.shape) < 0.15, np.nan, x).astype(np.float32)
    if whole:
        x[:, 0] = np.nan
    return x


def translated(fitted: Any, rows: Any) -> list[Any]:
    """Return the outputs of the translated object; rows are a frame, or float32 numbers."""
    with quiet():
        model = chrion.translate(fitted)
    onnx.checker.check_model(model, full_check=True)
    frame = rows if hasattr(rows, "columns") else pd.DataFrame(rows, columns=[i.name for i in model.graph.input])
    feeds = {}
    for info in model.graph.input:
        text = info.type.tensor_type.elem_type == onnx.TensorProto.STRING
        feeds[info.name] = frame[[info.name]].to_numpy(object if text else np.float32)
    return run(model, feeds)


def splines(preprocessing: Any, draw: random.Random, extrapolation: str) -> Any:
    """Return splines; scikit-learn's own of degree 0 fail outside of the fitted range."""
    return preprocessing.SplineTransformer(
        draw.randint(4, 8),
        draw.randint(1, 3),
        knots=draw.choice(["uniform", "quantile"]),
        extrapolation=extrapolation,
        include_bias=draw.random() < 0.5,
        sparse_output=draw.random() < 0.3,
    )


TRANSFORMERS: dict[str, Callable[[Any, random.Random], Any]] = {
    "scale": lambda p, _: p.StandardScaler(),
    "range": lambda p, draw: p.MinMaxScaler(clip=draw.random() < 0.5),
    "largest": lambda p, _: p.MaxAbsScaler(),
    "robust": lambda p, _: p.RobustScaler(),
    "norm": lambda p, draw: p.Normalizer(draw.choice(["l1", "l2", "max"])),
    "binary": lambda p, draw: p.Binarizer(threshold=draw.choice([0.0, 0.5, 3.0])),
    "polynomial": lambda p, draw: p.PolynomialFeatures(
        draw.choice([2, 3]), interaction_only=draw.random() < 0.5, include_bias=draw.random() < 0.5
    ),
    "impute": lambda _, draw: sk("impute").SimpleImputer(
        strategy=draw.choice(["mean", "median", "most_frequent"]), keep_empty_features=True
    ),
    "bins": lambda p, draw: p.KBinsDiscretizer(
        draw.randint(2, 9),
        encode=draw.choice(["onehot", "onehot-dense", "ordinal"]),
        strategy=draw.choice(["uniform", "quantile", "kmeans"]),
    ),
    "splines": lambda p, draw: splines(p, draw, draw.choice(["constant", "linear", "continue", "periodic"])),
    "quantiles": lambda p, draw: p.QuantileTransformer(n_quantiles=draw.choice([1, 2, 10, 60, 1000])),
    "components": lambda *_: sk("decomposition").PCA(2),
    "uncentred components": lambda _, draw: sk("decomposition").TruncatedSVD(
        2, algorithm=draw.choice(["arpack", "randomized"])
    ),
    "leaves": lambda _, draw: sk("ensemble").RandomTreesEmbedding(
        draw.choice([1, 5]), max_depth=draw.randint(1, 4), sparse_output=draw.random() < 0.7
    ),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
@given(seed=SEEDS)
@examples(40)
def test_transformers_have_the_values_of_scikit_learn(name: str, seed: int) -> None:
    """Values inside and outside of the fitted range are equal up to the rounding of float32."""
    rng, draw = np.random.default_rng(seed), random.Random(seed)
    x, rows = (numbers(np.random.default_rng(seed), ROWS, 3) for _ in range(2))
    rows[::3] *= np.float32(rng.choice([0.5, 1.3]))
    if name == "impute":
        x, rows = (missing(rng, values, whole=draw.random() < 0.3) for values in (x, rows))
    with quiet():
        fitted = TRANSFORMERS[name](sk("preprocessing"), draw).fit(x)
        expected = fitted.transform(rows.astype(np.float64))
    expected = expected.toarray() if hasattr(expected, "toarray") else expected
    [found] = translated(fitted, rows)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * max(1e-2, float(np.abs(expected).max())))


def test_a_thousand_quantiles_are_translated() -> None:
    """A search of few operators finds them, also equal ones; other distributions are refused."""
    rng = np.random.default_rng(0)
    x, rows = (rng.standard_normal((count, 3)).astype(np.float32) for count in (3000, 500))
    x[:, 1], rows[:, 1] = np.round(2 * x[:, 1]), np.round(4 * rows[:, 1]) / 2
    x[:, 2] = rows[:250, 2] = 3.0
    rows[0] = np.nan
    quantiles = sk("preprocessing").QuantileTransformer
    fitted = quantiles(n_quantiles=1000).fit(x)
    np.testing.assert_allclose(translated(fitted, rows)[0], fitted.transform(rows.astype(np.float64)), atol=1e-6)
    assert len(chrion.translate(fitted).graph.node) < 100
    with pytest.raises(OptionError, match=r"^QuantileTransformer: output_distribution='normal' has no operators"):
        chrion.translate(quantiles(n_quantiles=9, output_distribution="normal").fit(x))


@given(seed=SEEDS)
@examples(40)
def test_clusters_are_those_of_scikit_learn(seed: int) -> None:
    """The nearest centre is the label, and scores are the distances to all; ties may be decided otherwise."""
    rng = np.random.default_rng(seed)
    x, rows = numbers(rng, ROWS, 3), numbers(rng, ROWS, 3)
    with quiet():
        clusters = sk("cluster").KMeans(int(rng.integers(1, 9)), n_init=1, random_state=seed).fit(x)
    label, scores = translated(clusters, rows)
    distances = clusters.transform(rows)
    largest = max(1.0, float(np.abs(rows).max()))
    np.testing.assert_allclose(scores, distances, atol=1e-3 * largest)
    two = np.sort(np.column_stack([distances, np.full(ROWS, np.inf)]), axis=1)
    sure = two[:, 1] - two[:, 0] > 1e-3 * largest
    assert (label[sure] == clusters.predict(rows)[sure]).all()


@given(seed=SEEDS)
@examples(20)
def test_distances_to_centres_are_features(seed: int) -> None:
    """K-means before a classifier, beside another transformer, and in a pipeline of its own; at the end are labels."""
    rng = np.random.default_rng(seed)
    x, rows = numbers(rng, ROWS, 3), numbers(rng, ROWS, 3)
    make, classifier = sk("pipeline").make_pipeline, sk("linear_model").LogisticRegression
    kinds = sk("cluster").KMeans, sk("cluster").MiniBatchKMeans
    first, second = (kind(int(rng.integers(1, 6)), n_init=1, random_state=seed) for kind in kinds)
    scaler = sk("preprocessing").StandardScaler
    union = sk("pipeline").make_union(make(scaler(), first), sk("decomposition").PCA(2))
    with quiet():
        fitted = make(union, second, classifier()).fit(x, np.arange(ROWS) % 3)
        clusters = make(scaler(), kinds[0](3, n_init=1, random_state=seed)).fit(x)
    np.testing.assert_allclose(translated(fitted, rows)[1], fitted.predict_proba(rows), atol=2e-3)
    assert len(chrion.translate(clusters).graph.output) == 2
    search = sk("model_selection").GridSearchCV
    for estimator in (kinds[0](n_init=1), make(scaler(), kinds[0](n_init=1))):
        with quiet():
            searched = search(estimator, {}, cv=2).fit(x)
        assert [info.name for info in chrion.translate(searched).graph.output] == ["label", "scores"]


@given(seed=SEEDS)
@examples(40)
def test_splines_without_missing_values_are_zero_where_a_value_is_missing(seed: int) -> None:
    """A spline that encodes missing values as zeros does so in ONNX."""
    rng, draw = np.random.default_rng(seed), random.Random(seed)
    splines = sk("preprocessing").SplineTransformer
    if "handle_missing" not in splines().get_params():
        pytest.skip("this scikit-learn has no splines for missing values")
    x = missing(rng, numbers(rng, ROWS, 2), whole=False)
    fitted = splines(draw.randint(4, 6), 2, handle_missing="zeros").fit(x)
    np.testing.assert_allclose(translated(fitted, x)[0], fitted.transform(x), atol=1e-4)


def draw_words(rng: np.random.Generator, rows: int, count: int) -> Any:
    """Return texts, some of them empty or not ASCII."""
    words = np.array(["", "a", "b c", "né", "7", *(f"w{at}" for at in range(60))], object)
    return rng.choice(words[:count], rows)


@pytest.mark.parametrize("name", ["OneHotEncoder", "OrdinalEncoder", "TargetEncoder"])
@given(seed=SEEDS)
@examples(40)
def test_encoders_of_texts_have_the_values_of_scikit_learn(name: str, seed: int) -> None:
    """Known and unseen texts, and a column with one text alone, are encoded alike."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"a": draw_words(rng, ROWS, int(rng.integers(1, 60))), "b": draw_words(rng, ROWS, 3)})
    rows = pd.DataFrame({"a": draw_words(rng, 50, 65), "b": draw_words(rng, 50, 4)})
    options: dict[str, Any] = {
        "OneHotEncoder": {"handle_unknown": "ignore", "sparse_output": False},
        "OrdinalEncoder": {"handle_unknown": "use_encoded_value", "unknown_value": -1},
    }.get(name, {})
    y = rng.integers(0, 2, ROWS) if name == "TargetEncoder" else None
    if y is not None:
        y[:2] = 0, 1
    with quiet():
        fitted = getattr(sk("preprocessing"), name)(**options).fit(frame, y)
    np.testing.assert_allclose(translated(fitted, rows)[0], fitted.transform(rows), atol=1e-6)


MODELS: dict[str, Callable[[random.Random], Any]] = {
    "tree": lambda draw: sk("tree").DecisionTreeClassifier(max_depth=draw.randint(1, 20)),
    "forest": lambda draw: sk("ensemble").RandomForestClassifier(
        draw.choice([1, 5, 20]), max_depth=draw.randint(1, 20)
    ),
    "extra trees": lambda draw: sk("ensemble").ExtraTreesRegressor(draw.choice([1, 5]), max_depth=draw.randint(1, 20)),
    "boosting": lambda draw: sk("ensemble").GradientBoostingClassifier(n_estimators=draw.choice([1, 10])),
    "boosted numbers": lambda draw: sk("ensemble").GradientBoostingRegressor(n_estimators=draw.choice([1, 10])),
    "logistic": lambda _: sk("linear_model").LogisticRegression(),
    "ridge": lambda _: sk("linear_model").Ridge(),
    "vectors": lambda draw: sk("svm").SVC(kernel=draw.choice(["linear", "rbf", "poly"])),
    "vectors of numbers": lambda draw: sk("svm").SVR(kernel=draw.choice(["linear", "rbf"])),
    "naive Bayes": lambda _: sk("naive_bayes").GaussianNB(),
    "naive Bayes of bits": lambda draw: sk("naive_bayes").BernoulliNB(
        alpha=draw.choice([0.1, 1.0]), binarize=draw.choice([0.0, 0.3]), fit_prior=draw.random() < 0.5
    ),
    "naive Bayes of counts": lambda draw: sk("pipeline").make_pipeline(
        sk("preprocessing").MinMaxScaler((0, 9)),
        sk("naive_bayes").MultinomialNB(alpha=draw.choice([0.1, 1.0]), fit_prior=draw.random() < 0.5),
    ),
}


@pytest.mark.parametrize("name", MODELS)
@given(seed=SEEDS)
@examples(20)
def test_models_have_the_predictions_of_scikit_learn(name: str, seed: int) -> None:
    """Classes that are texts or numbers, two or more of them, and numbers are predicted alike."""
    draw = random.Random(seed)
    model = MODELS[name](draw)
    scaled = sk("pipeline").make_pipeline(sk("preprocessing").StandardScaler(), model)
    agree(model if hasattr(model, "max_depth") else scaled, seed)  # rounding may change branches


ENSEMBLES: dict[str, Callable[[Any, random.Random], Any]] = {
    "votes": lambda e, draw: e.VotingClassifier(
        parts(e), voting="soft", weights=draw.choice([None, [1.0, 2.0]]), flatten_transform=False
    ),
    "votes with one dropped": lambda e, _: e.VotingClassifier(
        [*parts(e), ("none", "drop")], voting="soft", weights=[1.0, 2.0, 5.0]
    ),
    "mean": lambda e, draw: e.VotingRegressor(numbers_parts(e), weights=draw.choice([None, [1.0, 3.0]])),
    "stack": lambda e, draw: e.StackingClassifier(parts(e), cv=2, passthrough=draw.random() < 0.5),
    "leaves": lambda e, _: sk("pipeline").make_pipeline(
        e.RandomTreesEmbedding(5, max_depth=3), sk("linear_model").LogisticRegression()
    ),
    "leaves of numbers": lambda e, _: sk("pipeline").make_pipeline(
        e.RandomTreesEmbedding(5, max_depth=3), sk("linear_model").Ridge()
    ),
    "stack of numbers": lambda e, _: e.StackingRegressor(numbers_parts(e), cv=2),
    "stack of stacks": lambda e, _: e.StackingClassifier(
        [*parts(e), ("votes", e.VotingClassifier(parts(e), voting="soft"))],
        e.GradientBoostingClassifier(n_estimators=3),
        cv=2,
    ),
}


def parts(ensemble: Any) -> list[tuple[str, Any]]:
    """Return classifiers of several kinds."""
    return [
        ("histograms", ensemble.HistGradientBoostingClassifier(max_iter=5)),
        ("forest", ensemble.RandomForestClassifier(5, max_depth=4)),
    ]


def numbers_parts(ensemble: Any) -> list[tuple[str, Any]]:
    """Return regressors of several kinds."""
    return [
        ("histograms", ensemble.HistGradientBoostingRegressor(max_iter=5)),
        ("boosting", ensemble.GradientBoostingRegressor(n_estimators=5)),
    ]


@pytest.mark.parametrize("name", ENSEMBLES)
@given(seed=SEEDS)
@examples(5)
def test_several_ensembles_in_a_model_have_the_predictions_of_scikit_learn(name: str, seed: int) -> None:
    """Votes and stacks of ensembles of trees are converted as a whole."""
    agree(ENSEMBLES[name](sk("ensemble"), random.Random(seed)), seed)


def agree(estimator: Any, seed: int) -> None:
    """Fit an estimator on random numbers, and check that its translation predicts the same."""
    rng = np.random.default_rng(seed)
    x = numbers(rng, ROWS, 4)
    z = x[:, 0] * x[:, 1] + rng.standard_normal(ROWS)
    classifier = sk("base").is_classifier(estimator)
    if classifier:
        classes = int(rng.integers(2, 5))
        z = np.digitize(z, np.quantile(z, np.linspace(0, 1, classes + 1)[1:-1]))
        z = np.array(["no", "yes", "maybe", "7"])[z] if rng.random() < 0.5 else z - 1
    with quiet():
        fitted = estimator.fit(x, z)
        label = fitted.predict(x)
        scores = fitted.predict_proba(x) if hasattr(fitted, "predict_proba") else None
    found = translated(fitted, x)
    if not classifier:
        np.testing.assert_allclose(found[0].ravel(), label, rtol=1e-3, atol=1e-3 * max(1, float(np.abs(label).max())))
        return
    sure = np.ones(ROWS, bool)
    if scores is not None:
        np.testing.assert_allclose(found[1], scores, atol=1e-3)
        best = np.sort(scores, axis=1)
        sure = best[:, -1] - best[:, -2] > 1e-3
    assert (found[0][sure] == label[sure]).all() or scores is None


def mixed(rng: np.random.Generator, rows: int, words: int) -> Any:
    """Return a frame with texts, codes and numbers, some of them missing."""
    return pd.DataFrame(
        {
            "size": missing(rng, numbers(rng, rows, 1), whole=False)[:, 0],
            "city": draw_words(rng, rows, words),
            "code": rng.integers(0, 12, rows).astype(np.float32) * 3,
        }
    )


@given(seed=SEEDS)
@examples(40)
def test_histograms_with_categories_have_the_predictions_of_scikit_learn(seed: int) -> None:
    """Texts and numbers that are categories, missing and unseen ones, and both links of regressors are translated."""
    rng, draw = np.random.default_rng(seed), random.Random(seed)
    frame = mixed(rng, 400, 40)
    z = np.isin(frame["city"].to_numpy(), ["a", "w3", "w20", ""]) * 2.0 + (frame["code"].to_numpy() % 2) + 0.1
    z = z + np.nan_to_num(frame["size"].to_numpy()) ** 2 * 0.01
    kind = draw.choice(["two", "several", "squared_error", "poisson", "gamma"])
    categorical = draw.choice([["city", "code"], ["city"]])
    common = {
        "categorical_features": categorical,
        "max_iter": draw.choice([1, 10]),
        "max_depth": draw.choice([1, 5, None]),
    }
    ensemble = sk("ensemble")
    with quiet():
        if kind in {"two", "several"}:
            y = (z > 1) if kind == "two" else np.digitize(z, [0.9, 1.9])
            fitted = ensemble.HistGradientBoostingClassifier(**common).fit(frame, y.astype(int))
        else:
            fitted = ensemble.HistGradientBoostingRegressor(**common, loss=kind).fit(frame, z)
    rows = mixed(rng, 200, 65)
    rows["code"] += rng.integers(0, 2, 200)
    expected = fitted.predict_proba(rows) if hasattr(fitted, "classes_") else fitted.predict(rows)
    np.testing.assert_allclose(translated(fitted, rows)[-1].reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)


def test_histograms_of_codes_follow_an_encoder() -> None:
    """Categories may be codes of an encoder before, as in examples of scikit-learn, and no feature may be a number."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": draw_words(rng, 300, 30), "b": draw_words(rng, 300, 5)})
    y = np.isin(frame["a"], ["w1", "w9"]) ^ (frame["b"] == "7")
    encoder = sk("preprocessing").OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    trees = sk("ensemble").HistGradientBoostingClassifier(categorical_features=[0, 1], max_iter=10, min_samples_leaf=5)
    fitted = sk("pipeline").make_pipeline(encoder, trees).fit(frame, y.astype(int))
    np.testing.assert_allclose(translated(fitted, frame)[1], fitted.predict_proba(frame), atol=1e-5)
    alone = sk("ensemble").HistGradientBoostingClassifier(categorical_features=[0, 1], max_iter=3).fit(frame, y)
    np.testing.assert_allclose(translated(alone, frame)[1], alone.predict_proba(frame), atol=1e-5)
