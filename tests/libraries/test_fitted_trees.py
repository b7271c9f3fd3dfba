"""Trees that libraries have fitted: read, written, as tensors, translated and tuned, with the libraries' own results.

The tests need scikit-learn and skl2onnx, and LightGBM, XGBoost and onnxmltools for their models, which ``.ci/run``
installs. In other environments they are skipped.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

import chrion
from chrion.errors import OptionError
from chrion.graph.trees import FORMS, is_tree_ensemble, read_ensemble, write_ensemble
from chrion.graph.trees.tensor_form import with_tensor_trees
from chrion.pipelines import leaves
from chrion.pipelines.leaves import LeafProblem, refit
from random_trees import run

pytest.importorskip("skl2onnx", reason="no skl2onnx in this environment")
pd = pytest.importorskip("pandas", reason="no pandas in this environment")
pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries themselves warn

ROWS, FEATURES = 1200, 6


def data(task: str, *, missing: bool = False) -> tuple[Any, Any]:
    """Return features in float32, some of them small integers, and a target."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, FEATURES)).astype(np.float32)
    x[:, 4:] = np.round(2 * x[:, 4:])
    z = x[:, 0] * x[:, 1] + x[:, 2] + np.abs(x[:, 4])
    if missing:
        x[rng.random(x.shape) < 0.1] = np.nan
    if task == "numbers":
        return x, z.astype(np.float64)
    return x, (z > 0).astype(int) if task == "two" else np.digitize(z, [-0.5, 0.5, 1.5])


def fitted(package: str, name: str, task: str, *, missing: bool = False, **options: Any) -> tuple[Any, Any]:
    """Return a fitted estimator, and the features that it was fitted on."""
    module = pytest.importorskip(package, reason=f"no {package} in this environment")
    x, y = data(task, missing=missing)
    return getattr(module, name)(**options).fit(x, y), x


def converted(estimator: Any, package: str) -> onnx.ModelProto:
    """Return the model that the converter of a library makes; one that the library cannot convert is translated."""
    if package.startswith("sklearn"):
        return chrion.translate(estimator)
    tools = pytest.importorskip("onnxmltools", reason="no onnxmltools in this environment")
    kinds = importlib.import_module("onnxmltools.convert.common.data_types")
    inputs = [("x", kinds.FloatTensorType([None, FEATURES]))]
    if package == "lightgbm":
        return tools.convert_lightgbm(estimator, initial_types=inputs, zipmap=False)
    return tools.convert_xgboost(estimator, initial_types=inputs)


SMALL = {"n_estimators": 20, "max_depth": 4}
CASES: dict[str, tuple[str, str, str, bool, dict[str, Any]]] = {
    "forest": ("sklearn.ensemble", "RandomForestClassifier", "two", False, SMALL),
    "forest of several classes": ("sklearn.ensemble", "RandomForestClassifier", "several", False, SMALL),
    "forest of numbers": ("sklearn.ensemble", "ExtraTreesRegressor", "numbers", False, SMALL),
    "one tree": ("sklearn.tree", "DecisionTreeClassifier", "several", False, {"max_depth": 12}),
    "a single leaf": ("sklearn.ensemble", "GradientBoostingRegressor", "numbers", False, {"max_leaf_nodes": 2}),
    "boosting": ("sklearn.ensemble", "GradientBoostingClassifier", "two", False, SMALL),
    "boosting of several classes": ("sklearn.ensemble", "GradientBoostingClassifier", "several", False, SMALL),
    "histograms": ("sklearn.ensemble", "HistGradientBoostingClassifier", "two", True, {"max_iter": 20}),
    "histograms of several": ("sklearn.ensemble", "HistGradientBoostingClassifier", "several", True, {"max_iter": 9}),
    "histograms of numbers": ("sklearn.ensemble", "HistGradientBoostingRegressor", "numbers", True, {"max_iter": 20}),
    "LightGBM": ("lightgbm", "LGBMClassifier", "two", True, {"n_estimators": 20, "verbose": -1}),
    "LightGBM of several": ("lightgbm", "LGBMClassifier", "several", True, {"n_estimators": 9, "verbose": -1}),
    "LightGBM of numbers": ("lightgbm", "LGBMRegressor", "numbers", True, {"n_estimators": 20, "verbose": -1}),
    "XGBoost": ("xgboost", "XGBClassifier", "two", True, SMALL),
    "XGBoost of several": ("xgboost", "XGBClassifier", "several", True, SMALL),
    "XGBoost of numbers": ("xgboost", "XGBRegressor", "numbers", True, SMALL),
}


def feeds_of(model: onnx.ModelProto, x: Any) -> dict[str, Any]:
    """Return features as one input, or as one a column."""
    names = [value.name for value in model.graph.input]
    return {names[0]: x} if len(names) == 1 else {name: x[:, [at]] for at, name in enumerate(names)}


@pytest.mark.parametrize("case", CASES)
def test_trees_of_libraries_keep_their_results(case: str) -> None:
    """Read and written, and in both tensor forms, a model has the library's own predictions."""
    package, name, task, missing, options = CASES[case]
    estimator, x = fitted(package, name, task, missing=missing, **options)
    model, rows = converted(estimator, package), x[:200]
    expected = estimator.predict(rows) if task == "numbers" else estimator.predict_proba(rows)
    plain = run(model, feeds_of(model, rows))
    np.testing.assert_allclose(plain[-1].reshape(expected.shape), expected, atol=1e-4)
    again = onnx.ModelProto()
    again.CopyFrom(model)
    for node in filter(is_tree_ensemble, again.graph.node):
        node.CopyFrom(write_ensemble(read_ensemble(node), node))
    np.testing.assert_array_equal(run(again, feeds_of(model, rows))[-1], plain[-1])
    for form in FORMS:
        tensors = with_tensor_trees(model, form, {n.input[0]: "tensor(float)" for n in model.graph.node})
        found = run(tensors, feeds_of(model, rows))
        np.testing.assert_allclose(found[-1], plain[-1], atol=1e-5)
        assert (np.asarray(found[0]) == np.asarray(plain[0])).all() or task == "numbers"


def test_a_pipeline_of_mixed_columns_is_translated() -> None:
    """Texts, missing numbers, bins and unseen categories have scikit-learn's probabilities; inputs are columns."""
    compose = importlib.import_module("sklearn.compose")
    ensemble, impute, pre = (importlib.import_module(f"sklearn.{n}") for n in ("ensemble", "impute", "preprocessing"))
    make_pipeline = importlib.import_module("sklearn.pipeline").make_pipeline
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "city": rng.choice(["Bern", "Rome", "Oslo"], ROWS),
            "size in m2": np.where(rng.random(ROWS) < 0.1, np.nan, rng.standard_normal(ROWS)).astype(np.float32),
            "age": rng.integers(0, 90, ROWS).astype(np.float32),
        }
    )
    y = np.where((frame["age"] > 40) ^ (frame["city"] == "Rome"), "yes", "no")
    encoder = pre.OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    parts = [
        ("texts", encoder, ["city"]),
        ("numbers", make_pipeline(impute.SimpleImputer(), pre.StandardScaler()), ["size in m2"]),
        ("bins", pre.KBinsDiscretizer(8), ["age"]),
    ]
    pipeline = make_pipeline(
        compose.ColumnTransformer(parts, sparse_threshold=0), ensemble.HistGradientBoostingClassifier(max_iter=10)
    ).fit(frame, y)
    model = chrion.translate(pipeline)
    assert [value.name for value in model.graph.input] == ["city", "size in m2", "age"]
    rows = frame[:100].copy()
    rows.loc[:5, "city"] = "Paris"
    feeds = {
        "city": rows[["city"]].to_numpy(object),
        "size in m2": rows[["size in m2"]].to_numpy(np.float32),
        "age": rows[["age"]].to_numpy(np.float32),
    }
    label, probabilities = run(model, feeds)
    np.testing.assert_allclose(probabilities, pipeline.predict_proba(rows), atol=1e-5)
    assert (label == pipeline.predict(rows)).all()
    assert pipeline[0].named_transformers_["bins"].encode == "onehot"


@pytest.mark.parametrize("estimator", ["GradientBoostingClassifier", "HistGradientBoostingClassifier"])
def test_columns_may_have_the_names_of_inner_values(estimator: str) -> None:
    """Columns that are called as values of the converter change no result; those that are called as outputs fail."""
    ensemble, pre = (importlib.import_module(f"sklearn.{name}") for name in ("ensemble", "preprocessing"))
    make_pipeline = importlib.import_module("sklearn.pipeline").make_pipeline
    x, y = data("two")
    fitted_trees = make_pipeline(pre.StandardScaler(), getattr(ensemble, estimator)()).fit(x, y)
    plain = chrion.translate(fitted_trees)
    inner = {name for node in plain.graph.node for name in node.output if name not in {"label", "probabilities"}}
    inner -= {"all_columns"}
    names = [*[*sorted(inner), *(f"c{at}" for at in range(FEATURES))][: FEATURES - 1], "all_columns"]
    frame = pd.DataFrame(x, columns=names)
    model = chrion.translate(make_pipeline(pre.StandardScaler(), getattr(ensemble, estimator)()).fit(frame, y))
    assert [info.name for info in model.graph.input] == names
    onnx.checker.check_model(model)
    expected = run(plain, feeds_of(plain, x[:50]))[1]
    np.testing.assert_array_equal(run(model, feeds_of(model, x[:50]))[1], expected)
    bad = frame.rename(columns={names[0]: "label"})
    with pytest.raises(OptionError, match="column 'label': an output of the model has this name"):
        chrion.translate(make_pipeline(pre.StandardScaler(), getattr(ensemble, estimator)()).fit(bad, y))


@pytest.mark.parametrize("estimator", ["GradientBoostingClassifier", "HistGradientBoostingClassifier"])
@pytest.mark.parametrize("classes", [(0.0, 1.0), (2.0, 7.0, 9.0)])
def test_classes_may_be_floats(estimator: str, classes: tuple[float, ...]) -> None:
    """They become integers."""
    x, y = data("two" if len(classes) == 2 else "several")
    module = importlib.import_module("sklearn.ensemble")
    labels = np.array(classes)[y % len(classes)]
    fitted_trees = getattr(module, estimator)().fit(x, labels)
    model = chrion.translate(fitted_trees)
    label, probabilities = run(model, feeds_of(model, x[:50]))
    assert label.dtype == np.int64
    assert label.tolist() == fitted_trees.predict(x[:50]).tolist()
    np.testing.assert_allclose(probabilities, fitted_trees.predict_proba(x[:50]), atol=1e-5)


@pytest.mark.parametrize(
    "name", ["GradientBoostingClassifier", "HistGradientBoostingClassifier", "RandomForestClassifier"]
)
def test_a_translated_pipeline_with_a_target_encoder_is_tuned(name: str) -> None:
    """After the rates of categories have changed places, the table is updated, and the tuned model is better."""
    pytest.importorskip("pyarrow", reason="no pyarrow in this environment")
    ensemble, pre, compose = (importlib.import_module(f"sklearn.{n}") for n in ("ensemble", "preprocessing", "compose"))

    def rows(seed: int) -> tuple[Any, Any]:
        rng = np.random.default_rng(seed)
        city, rates = rng.integers(0, 30, 2500), rng.permutation(np.linspace(-2, 2, 30))
        frame = pd.DataFrame({"size": rng.standard_normal(2500).astype(np.float32), "city": city.astype(str)})
        odds = frame["size"] + rates[city]
        return frame, np.where(rng.random(2500) < 1 / (1 + np.exp(-odds)), "yes", "no")

    frame, y = rows(0)
    encoder = compose.ColumnTransformer([("n", "passthrough", ["size"]), ("c", pre.TargetEncoder(), ["city"])])
    trees = getattr(ensemble, name)(**{"max_iter" if name.startswith("Hist") else "n_estimators": 15}, max_depth=4)
    pipeline = importlib.import_module("sklearn.pipeline").make_pipeline(encoder, trees).fit(frame, y)
    later, labels = rows(1)
    _, report = chrion.finetune(chrion.translate(pipeline), later.assign(y=labels), scope="encoders")
    assert (report.adopted, len(report.priors)) == (True, 1)
    assert report.gain.low > 0.1


@pytest.mark.parametrize(
    ("make", "about"),
    [
        (lambda *_: "pipeline.pkl", "expected a fitted scikit-learn estimator, found str"),
        (lambda pre, _: pre.StandardScaler(), "StandardScaler: not fitted"),
        (lambda _, e: e.RandomForestClassifier(2).fit(np.ones((9, 2)), np.full(9, "a")), "fitted on one class, 'a'"),
        (lambda pre, _: pre.FunctionTransformer(np.sin).fit(np.ones((20, 2))), "cannot be translated"),
        (
            lambda _, e: e.HistGradientBoostingRegressor(categorical_features=[0], min_samples_leaf=1).fit(
                np.array([[2.0**24], [2.0**24 + 1]] * 20), [0.0, 1.0] * 20
            ),
            "feature 0: two of its categories are the same number in float32",
        ),
    ],
)
def test_what_cannot_be_translated_is_named(make: Callable[[Any, Any], Any], about: str) -> None:
    """The message is one line."""
    modules = (importlib.import_module(f"sklearn.{name}") for name in ("preprocessing", "ensemble"))
    with pytest.raises(OptionError) as refusal:
        chrion.translate(make(*modules))
    assert about in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_what_follows_a_step_without_converter_is_translated() -> None:
    """The message says how, and the other steps have scikit-learn's results."""
    pre, ensemble = (importlib.import_module(f"sklearn.{name}") for name in ("preprocessing", "ensemble"))
    x, y = data("two")
    steps = pre.FunctionTransformer(np.sinh), ensemble.GradientBoostingClassifier(n_estimators=5)
    pipeline = importlib.import_module("sklearn.pipeline").make_pipeline(*steps).fit(x, y)
    with pytest.raises(OptionError, match=r"FunctionTransformer.*translate the rest, as pipeline\[1:\]"):
        chrion.translate(pipeline)
    model, rows = chrion.translate(pipeline[1:]), np.sinh(x[:50])
    np.testing.assert_allclose(run(model, feeds_of(model, rows))[1], pipeline.predict_proba(x[:50]), atol=1e-5)


@pytest.mark.parametrize("task", ["two", "four", "numbers"])
@pytest.mark.parametrize(("package", "prefix"), [("lightgbm", "LGBM"), ("xgboost", "XGB")])
def test_pipelines_that_end_in_boosted_trees_are_translated(package: str, prefix: str, task: str) -> None:
    """The last step has the converter of onnxmltools, and results are those of the library."""
    library = pytest.importorskip(package, reason=f"no {package} in this environment")
    pytest.importorskip("onnxmltools", reason="no onnxmltools in this environment")
    impute, pipelines = (importlib.import_module(f"sklearn.{name}") for name in ("impute", "pipeline"))
    x, y = data(task, missing=True)
    kind = getattr(library, prefix + ("Regressor" if task == "numbers" else "Classifier"))
    pipeline = pipelines.make_pipeline(impute.SimpleImputer(strategy="median"), kind(n_estimators=8, max_depth=4)).fit(
        x, y
    )
    model = chrion.translate(pipeline)
    found = run(model, feeds_of(model, x[:200]))
    if task == "numbers":
        np.testing.assert_allclose(found[0][:, 0], pipeline.predict(x[:200]), rtol=1e-4, atol=1e-4)
    else:
        assert [info.name for info in model.graph.output] == ["label", "probabilities"]
        np.testing.assert_array_equal(found[0], pipeline.predict(x[:200]))
        np.testing.assert_allclose(found[1], pipeline.predict_proba(x[:200]), atol=1e-5)


def test_boosted_trees_without_their_converters_name_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step and the command that installs onnxmltools are named."""
    estimator, _ = fitted("lightgbm", "LGBMClassifier", "two", n_estimators=2)
    monkeypatch.setattr("skl2onnx._supported_operators.sklearn_operator_name_map", {})
    for name in ("onnxmltools", *(name for name in sys.modules if name.startswith("onnxmltools."))):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(OptionError, match=r"LGBMClassifier: .* needs .*onnxmltools \(pip install onnxmltools\)"):
        chrion.translate(estimator)


def test_refit_is_that_of_lightgbm() -> None:
    """For the same rows, weights are those of ``Booster.refit`` with its default decay."""
    lgb = pytest.importorskip("lightgbm", reason="no LightGBM in this environment")
    x, y = data("numbers")
    old = lgb.train({"objective": "regression", "verbose": -1, "num_leaves": 8, "boost_from_average": False},
                    lgb.Dataset(x, y), 10)  # fmt: skip
    target = y + x[:, 3]
    expected = old.refit(x, target, decay_rate=0.9).predict(x)
    numbers = old.predict(x, pred_leaf=True).astype(int)
    values = [[old.get_leaf_output(tree, leaf) for leaf in range(8)] for tree in range(10)]
    problem = LeafProblem(
        reached=numbers + 8 * np.arange(10),
        columns=[slice(0, 10)],
        y=target,
        base=np.zeros(1),
        scale=1.0,
        loss=leaves.SQUARED,
        original=np.ravel(values),
    )
    np.testing.assert_allclose(problem.predict(refit(problem, 0.1)), expected, atol=1e-4)
