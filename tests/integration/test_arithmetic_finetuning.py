"""Fine-tuning of linear models, and of arithmetic operators after trees, in their differentiable form."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import chrion
from chrion.errors import DataError, ModelError, OptionError
from chrion.graph.trees import write_ensemble
from chrion.pipelines.pipeline import Pipeline
from chrion.pipelines.rows import Rows
from chrion.pipelines.soft import Softness, SoftOptions, SoftPipeline, Start, as_soft
from chrion.pipelines.soft.training import TrainingOptions
from chrion.pipelines.table import Table
from command_line import Chrion, assert_refused
from drifted_rows import NAMES, ensemble, rows_of
from random_trees import FEATURES, run

pa = pytest.importorskip("pyarrow", reason="no pyarrow in this environment")
parquet = pytest.importorskip("pyarrow.parquet")
for library in ("jax", "optax", "sklearn", "skl2onnx"):
    pytest.importorskip(library, reason=f"no {library} in this environment")

COLUMNS = ["income", "age", "score", "city"]
CITIES = np.array(["Bern", "Oslo", "Rome"], object)
NONE = TrainingOptions(dropout=0.0)


def sklearn(name: str) -> Any:
    """Return a module of scikit-learn."""
    return importlib.import_module(f"sklearn.{name}")


def data(seed: int, rows: int = 1500, shift: float = 0.0) -> dict[str, Any]:
    """Return columns in units of their own, and three classes by a score that depends on all of them."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((rows, 3))
    numbers[:, 0] = 50_000 + 20_000 * numbers[:, 0]
    numbers[:, 2] = 1e-3 * numbers[:, 2]
    city = rng.integers(0, 3, rows)
    score = (numbers[:, 0] - 50_000) / 20_000 + (1 - shift) * numbers[:, 1] + 600 * numbers[:, 2]
    score += np.array([-1, 0, 1.0])[(city + round(2 * shift)) % 3]
    noisy = score + 0.7 * rng.logistic(size=rows)
    columns = dict(zip(COLUMNS, numbers.astype(np.float32).T, strict=False))
    return {**columns, "city": CITIES[city], "y": (noisy > -0.7).astype(int) + (noisy > 0.9), "number": 1e4 * score}


def steps(name: str) -> list[Any]:
    """Return the estimators of a pipeline after its encoders."""
    linear, naive = sklearn("linear_model"), sklearn("naive_bayes")
    pca = sklearn("decomposition").PCA
    return {
        "two classes": [linear.LogisticRegression(max_iter=500)],
        "three classes": [linear.LogisticRegression(max_iter=500)],
        "squares": [linear.LinearRegression()],
        "ridge": [linear.Ridge()],
        "projected": [pca(3), linear.LogisticRegression(max_iter=500)],
        "centres": [sklearn("cluster").KMeans(4, n_init=1, random_state=0), linear.LogisticRegression(max_iter=500)],
        "whitened": [pca(3, whiten=True), linear.LogisticRegression(max_iter=500)],
        "bayes": [naive.GaussianNB()],
        "discriminant": [sklearn("discriminant_analysis").LinearDiscriminantAnalysis()],
        "perceptron": [sklearn("neural_network").MLPClassifier((5,), max_iter=50, random_state=0)],
        "descent": [linear.SGDClassifier(loss="log_loss", random_state=0)],
        "normed": [sklearn("preprocessing").Normalizer(), linear.LogisticRegression(max_iter=500)],
        "calibrated": [sklearn("calibration").CalibratedClassifierCV(sklearn("svm").LinearSVC(), cv=2)],
        "calibrated classes": [sklearn("calibration").CalibratedClassifierCV(linear.LogisticRegression(), cv=2)],
        "one against others": [sklearn("multiclass").OneVsRestClassifier(linear.LogisticRegression())],
        "descent of classes": [linear.SGDClassifier(loss="log_loss", random_state=0)],
        "kernel": [sklearn("svm").SVC(probability=True, random_state=0)],
        "kernels of classes": [sklearn("svm").SVC(kernel="poly", degree=2, probability=True, random_state=0)],
        "kernel of numbers": [sklearn("svm").SVR(C=1e4)],
        "votes": [sklearn("svm").SVC()],
    }[name]


NUMBERS = {"squares", "ridge", "kernel of numbers"}
BINARY = {"two classes", "projected", "centres", "calibrated", "descent", "kernel", "votes"}
KINDS = [
    "two classes", "three classes", "squares", "ridge", "projected", "centres", "whitened", "bayes", "discriminant",
    "perceptron", "descent", "normed", "calibrated", "calibrated classes", "one against others", "descent of classes",
    "kernel", "kernels of classes", "kernel of numbers",
]  # fmt: skip


def target(kind: str, columns: dict[str, Any]) -> Any:
    """Return what a pipeline predicts; labels of three classes are texts."""
    if kind in NUMBERS:
        return columns["number"]
    return columns["y"] > 0 if kind in BINARY else np.array(["low", "mid", "top"])[columns["y"]]


@cache
def fitted(kind: str) -> onnx.ModelProto:
    """Return a pipeline with a one-hot encoder, a scaler and an imputer in front, as translated."""
    pandas, pre = pytest.importorskip("pandas"), sklearn("preprocessing")
    make = sklearn("pipeline").make_pipeline
    encoders = sklearn("compose").make_column_transformer(
        (pre.OneHotEncoder(handle_unknown="ignore", sparse_output=False), ["city"]), ("passthrough", COLUMNS[:3])
    )
    columns = data(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = make(encoders, sklearn("impute").SimpleImputer(), pre.StandardScaler(), *steps(kind))
        made.fit(pandas.DataFrame({name: columns[name] for name in COLUMNS}), target(kind, columns).astype(
            float if kind in NUMBERS else int if kind in BINARY else str))  # fmt: skip
        return chrion.translate(made)


def table(kind: str, columns: dict[str, Any]) -> Any:
    """Return a table of columns and the target of a pipeline."""
    y = target(kind, columns)
    return pa.table({**{name: columns[name] for name in COLUMNS}, "y": y.astype(int) if kind in BINARY else y})


def soft(model: onnx.ModelProto, rows: Any, scope: str = "all", **given: Any) -> tuple[Rows, SoftPipeline]:
    """Return the rows of a table, and the untrained network."""
    found = Rows(Pipeline(model), "y", [Table(rows)])
    return found, as_soft(found, Start(model), SoftOptions(scope=scope, training=NONE, **given))


def trained(own: SoftPipeline, seed: int, size: float = 0.05) -> SoftPipeline:
    """Return a network with random parameters of the level L1."""
    rng = np.random.default_rng(seed)
    shapes = own.network.shapes("L1")
    return replace(own, parameters={n: (size * rng.standard_normal(s)).astype(np.float32) for n, s in shapes.items()})


def scores(rows: Rows, model: onnx.ModelProto) -> Any:
    """Return the results of a model for the held-out rows."""
    return rows.held_scores(model)


@pytest.mark.parametrize("kind", KINDS)
def test_networks_are_the_models(kind: str) -> None:
    """Untrained and with random weights, JAX and onnxruntime agree, also on labels; zero steps change no byte."""
    rows, own = soft(fitted(kind), table(kind, data(1, 800)), "leaves")
    atol = 2e-5 * max(1, np.abs(rows.y).max())
    np.testing.assert_allclose(own.predict(own.raw(rows.held)), scores(rows, fitted(kind)), atol=atol)
    zero = np.zeros(1)
    assert own.exported(zero).SerializeToString() == fitted(kind).SerializeToString()
    moved = trained(own, 1)
    model = moved.exported(zero)
    onnx.checker.check_model(model, full_check=True)
    expected = moved.predict(moved.raw(rows.held))
    np.testing.assert_allclose(scores(rows, model), expected, atol=atol)
    assert np.abs(expected - own.predict(own.raw(rows.held))).max() > 10 * atol
    if rows.pipeline.classes:
        feeds = next(iter(rows.feeds()))
        labels, probabilities = run(model, {name: own[rows.held] for name, own in feeds.items()})
        top = np.sort(probabilities, axis=1)
        sure = top[:, -1] - top[:, -2] > 1e-5
        own_labels = np.array(rows.pipeline.labels)[probabilities.argmax(axis=1)]
        assert np.mean(own_labels[sure] == labels[sure]) >= (0.9 if "kernel" in kind else 1)  # else the labels of votes


SMOOTH = ["two classes", "three classes", "projected", "bayes", "normed", "kernel of numbers", "kernels of classes"]


@pytest.mark.parametrize("kind", SMOOTH)
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    """The derivative of the loss along a random direction is the difference quotient.

    Rows are left out whose probabilities jump, since onnxruntime couples them in another number of rounds.
    """
    import jax  # noqa: PLC0415 - optional

    rows, own = soft(fitted(kind), table(kind, data(1, 800)), "leaves")
    x, y = own.features(slice(0, 200)), rows.y[:200].astype(np.float32)

    def losses(parameters: Any) -> Any:
        return own.network.losses(own.network.raw(parameters, x), y)

    at, along = (trained(own, seed, size).parameters for seed, size in ((1, 0.05), (2, 1.0)))
    step = 1e-3
    low, middle, high = (losses({name: at[name] + by * along[name] for name in at}) for by in (-step, 0.0, step))
    smooth = np.asarray(abs(low + high - 2 * middle)) < (1e-4 if kind == "kernels of classes" else np.inf)
    assert smooth.mean() > 0.5
    slopes = jax.grad(lambda parameters: (losses(parameters) * smooth).mean())(dict(at))
    slope = sum(float((np.asarray(slopes[name]) * along[name]).sum()) for name in at)
    expected = float(np.asarray((high - low) * smooth).mean()) / 2 / step
    assert slope == pytest.approx(expected, rel=0.05, abs=5e-3)


@pytest.mark.parametrize("kind", ["two classes", "ridge", "projected"])
def test_a_linear_pipeline_is_adopted_after_drift(kind: str) -> None:
    """Weights change and the graph stays; columns in other units are tuned alike."""
    model = fitted(kind)
    tuned, report = chrion.finetune(model, table(kind, data(3, 4000, shift=0.5)), level="L2", scope="leaves")
    assert (report.adopted, report.level) == (True, "L2"), report.reason
    assert report.epochs > 0
    assert [node.op_type for node in tuned.graph.node] == [node.op_type for node in model.graph.node]
    assert tuned.SerializeToString() != model.SerializeToString()
    notes = {own.name: own.note for own in report.compared if own.measures is None}
    assert notes["refit"] == notes["continued"] == "needs trees whose scores are the results"
    assert report.cost is not None


def test_tables_of_encoders_are_trained() -> None:
    """The model looks cities up in a table, has labels that follow, and unseen cities are encoded as before."""
    model, later = fitted("three classes"), table("three classes", data(4, 4000, shift=0.5))
    tuned, report = chrion.finetune(model, later, level="L2", scope="encoders")
    assert report.adopted, report.reason
    assert sum(node.op_type == "LabelEncoder" for node in tuned.graph.node) == 1
    columns = {name: later[name].to_numpy(zero_copy_only=False)[:50].reshape(-1, 1) for name in COLUMNS}
    labels, found = run(tuned, columns)
    assert np.array(["low", "mid", "top"])[found.argmax(axis=1)].tolist() == labels.tolist()
    unseen = {**columns, "city": np.full((50, 1), "Bonn", object)}
    np.testing.assert_allclose(run(tuned, unseen)[1], run(model, unseen)[1], atol=1e-6)
    assert np.abs(found - run(model, columns)[1]).max() > 0.01


#: Matrix factorisation: two tables, an offset of each user, and a mean; probabilities, or numbers.
FACTORS = (
    "a = Gather(u, user) b = Gather(v, item) c = Mul(a, b) d = ReduceSum<keepdims=0>(c, axes) e = Gather(w, user) "
    "f = Add(d, e) g = Add(f, k)"
)
FACTOR_ENDS = {"classes": "p = Sigmoid(g)", "numbers": "p = Identity(g)"}
USERS, ITEMS, RANK = 40, 25, 3


def factors(kind: str, input_of_users: str = "int64[N, 1] user") -> onnx.ModelProto:
    """Return a matrix factorisation of integers, or of texts that an encoder numbers."""
    inputs = f"{input_of_users}, int64[N, 1] item"
    head = f'<ir_version: 8, opset_import: ["": 18, "ai.onnx.ml": 3]> g ({inputs}) => (float[N, 1] p)'
    model = onnx.parser.parse_model(f"{head} {{ {FACTORS} {FACTOR_ENDS[kind]} }}")
    if "string" in inputs:
        names = [f"user {at}" for at in range(USERS)]
        model.graph.node.insert(0, onnx.helper.make_node(
            "LabelEncoder", ["name"], ["user"], "names", domain="ai.onnx.ml", keys_strings=names,
            values_int64s=list(range(USERS)), default_int64=0))  # fmt: skip
    rng = np.random.default_rng(7)
    sizes = {"u": (USERS, RANK), "v": (ITEMS, RANK), "w": (USERS,), "k": (1,)}
    values: dict[str, Any] = {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    for name, value in {**values, "axes": np.array([2])}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


def ratings(kind: str, moved: float = 0.0, rows: int = 6000) -> Any:
    """Return rows of users and items with what the model predicts, after some items have moved."""
    rng = np.random.default_rng(8)
    user, item = rng.integers(0, USERS, rows), rng.integers(0, ITEMS, rows)
    named = {own.name: onnx.numpy_helper.to_array(own) for own in factors(kind).graph.initializer}
    v = named["v"] + moved * np.random.default_rng(9).standard_normal(named["v"].shape)
    score = (named["u"][user] * v[item]).sum(axis=1) + named["w"][user] + named["k"]
    y = (
        (rng.random(rows) < 1 / (1 + np.exp(-score))).astype(int)
        if kind == "classes"
        else score + rng.normal(size=rows)
    )
    names = np.array([f"user {at}" for at in range(USERS)], object)[user]
    return pa.table({"user": user, "name": names, "item": item, "y": y})


@pytest.mark.parametrize("users", ["int64[N, 1] user", "string[N, 1] name"])
@pytest.mark.parametrize("kind", FACTOR_ENDS)
def test_matrix_factorisations(kind: str, users: str) -> None:
    """Untrained and with random tables, JAX and onnxruntime agree; zero steps change no byte."""
    model = factors(kind, users)
    rows, own = soft(model, ratings(kind, rows=800))
    np.testing.assert_allclose(own.predict(own.raw(rows.held)), scores(rows, model), atol=2e-5)
    assert own.exported(np.zeros(1)).SerializeToString() == model.SerializeToString()
    moved = trained(own, 1)
    np.testing.assert_allclose(
        scores(rows, moved.exported(np.zeros(1))), moved.predict(moved.raw(rows.held)), atol=2e-5
    )
    assert own.network.tables == {"weight 0", "weight 1", "weight 2"}


def test_integers_in_one_dimension() -> None:
    """A model of embeddings as networks export it; a row of the table moves alike whether the sample has it or not."""
    model = parsed("a = Gather(u, user) b = MatMul(a, w) p = Add(b, c)", "float[N, 1] p", w=SLOPES[:3], c=HALF,
                   u=np.random.default_rng(3).standard_normal((20_000, 3)).astype(np.float32))  # fmt: skip
    info = model.graph.input[0]
    info.CopyFrom(onnx.helper.make_tensor_value_info("user", onnx.TensorProto.INT64, ["N"]))
    user = np.random.default_rng(4).integers(0, 20_000, 5000)
    rows, own = soft(model, pa.table({"user": user, "y": np.random.default_rng(5).standard_normal(5000)}))
    np.testing.assert_allclose(own.predict(own.raw(rows.held)), scores(rows, model), atol=2e-5)
    at = next(iter(own.network.tables))
    moved = own.network.weights({at: np.ones((20_000, 3), np.float32)})["u"] - own.network.weights({})["u"]
    assert np.ptp(np.asarray(moved)) < 1e-5


def test_a_matrix_factorisation_is_adopted() -> None:
    """Items that have moved get other rows, in the same graph; with the scope of encoders nothing else changes."""
    model = factors("numbers")
    for scope in ("all", "encoders"):
        tuned, report = chrion.finetune(model, ratings("numbers", moved=0.7), level="L2", scope=scope)
        assert report.adopted, report.reason
        assert [*tuned.graph.node] == [*model.graph.node]
        before, after = (
            {t.name: onnx.numpy_helper.to_array(t) for t in own.graph.initializer} for own in (model, tuned)
        )
        changed = {name for name in before if not np.array_equal(before[name], after[name])}
        assert changed == ({"u", "v", "w", "k"} if scope == "all" else {"u", "v", "w"})
        new = ratings("numbers", moved=0.7)
        feeds = {name: new[name].to_numpy()[-1000:, None] for name in ("user", "item")}
        errors = [run(own, feeds)[0][:, 0] - new["y"].to_numpy()[-1000:] for own in (model, tuned)]
        assert np.mean(errors[0] ** 2) > 1.8
        assert np.mean(errors[1] ** 2) < 1.3  # the noise has a variance of 1


def test_users_that_no_row_has_stay() -> None:
    """Rows of a table that the data do not look up are those of the original."""
    model, table_ = factors("numbers"), ratings("numbers", moved=0.7)
    known = table_.filter(pa.array(table_["user"].to_numpy() < 30))
    tuned, report = chrion.finetune(model, known, level="L2")
    assert report.adopted, report.reason
    before, after = ({t.name: onnx.numpy_helper.to_array(t) for t in own.graph.initializer} for own in (model, tuned))
    for name in ("u", "w"):
        assert np.array_equal(before[name][30:], after[name][30:])
        assert not np.array_equal(before[name][:30], after[name][:30])


def test_no_drift_keeps_a_linear_pipeline() -> None:
    """Rows of the model's own distribution leave it as it was, byte for byte."""
    model = fitted("two classes")
    kept, report = chrion.finetune(model, table("two classes", data(5, 3000)), level="L2")
    assert (report.adopted, report.level) == (False, "L2")
    assert kept.SerializeToString() == model.SerializeToString()


def with_leaves(after: str, *, leaf_targets: bool = True) -> onnx.ModelProto:
    """Return trees, with a score for each leaf or for each of two classes, and operators after them."""
    made = ensemble("TreeEnsembleRegressor")
    count = made.leaf_count if leaf_targets else 2
    targets = np.arange(made.leaf_count) if leaf_targets else made.leaf_trees % 2
    weights = np.ones(count) if leaf_targets else np.random.default_rng(1).standard_normal(made.leaf_count)
    made = replace(made, entry_leaves=np.arange(made.leaf_count), entry_targets=targets, targets=count,
                   entry_weights=weights.astype(np.float32), features=made.features % FEATURES,
                   missing_true=np.zeros(len(made.features), bool))  # fmt: skip
    head = '<ir_version: 8, opset_import: ["": 18, "ai.onnx.ml": 3]>'
    model = onnx.parser.parse_model(f"{head} g (float[N, {FEATURES}] x) => (float[N, K] p) {{ {after} }}")
    like = onnx.helper.make_node("TreeEnsembleRegressor", ["x"], ["z"], "trees", domain="ai.onnx.ml")
    model.graph.node.insert(0, write_ensemble(made, like))
    rng = np.random.default_rng(0)
    for name, shape in (("w", (count, 1)), ("v", (count, 4)), ("b", (1,))):
        value = (0.4 * rng.standard_normal(shape)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    for name, own in (("two", np.float32([2])), ("half", np.float32([0.5])), ("axes", np.array([1]))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(own, name))
    return model


#: A factorisation machine of leaves (Pipe3 of WindTunnel).
MACHINE = (
    "a = MatMul(z, w) c = MatMul(z, v) d = Pow(c, two) e = ReduceSum(d, axes) f = Pow(z, two) g = Pow(v, two) "
    "h = MatMul(f, g) i = ReduceSum(h, axes) j = Sub(e, i) k = Mul(j, half) l = Add(a, k) m = Add(l, b) p = Sigmoid(m)"
)


def leaf_rows(count: int = 3000) -> Any:
    """Return rows with a class that two features decide together."""
    x, rng = rows_of(1, count), np.random.default_rng(2)
    y = (rng.random(count) < 1 / (1 + np.exp(-2 * x[:, 0] * np.sign(x[:, 1])))).astype(int)
    return pa.table({**dict(zip(NAMES, x.T, strict=True)), "y": y})


@pytest.mark.parametrize("kind", ["machine", "softmax"])
def test_operators_after_trees(kind: str) -> None:
    """With cold decisions scores are onnxruntime's; random parameters are exported as JAX computes them."""
    model = with_leaves(MACHINE) if kind == "machine" else with_leaves("p = Softmax(z)", leaf_targets=False)
    if kind == "softmax":
        model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 2
    rows, own = soft(model, leaf_rows(1500), softness=Softness(1e-5, 0.05, relative=False))
    difference = np.abs(own.predict(own.raw(rows.held)) - scores(rows, model)).max(axis=1)
    assert np.mean(difference < 1e-3) > 0.98  # the rest are rows at a threshold
    for softness in (Softness(), Softness(1.0, 1.0)):
        own = trained(soft(model, leaf_rows(1500), softness=softness)[1], 3)
        np.testing.assert_allclose(scores(rows, own.exported(np.zeros(1))), own.predict(own.raw(rows.held)), atol=2e-5)


def test_a_factorisation_machine_of_leaves_is_adopted() -> None:
    """Its weights and its trees are tuned together; the exported model has neither trees nor other scores."""
    model, table_ = with_leaves(MACHINE), leaf_rows()
    with pytest.raises(ModelError, match=r"what follows its trees changes their scores.*--soft"):
        chrion.finetune(model, table_)
    tuned, report = chrion.finetune(model, table_, level="L2")
    assert report.adopted, report.reason
    assert not any("Tree" in node.op_type for node in tuned.graph.node)
    assert "soft, not trained" in [own.name for own in report.compared]
    assert report.cost
    assert report.cost[0] > 1


def decisions() -> onnx.ModelProto:
    """Return a model whose scores are distances from a plane."""
    model = onnx.ModelProto()
    model.CopyFrom(fitted("two classes"))
    node = next(node for node in model.graph.node if node.op_type == "LinearClassifier")
    next(own for own in node.attribute if own.name == "post_transform").s = b"NONE"
    return model


@pytest.mark.parametrize(
    ("make", "about"),
    [
        (decisions, "its scores are no probabilities"),
        (lambda: fitted("votes"), r"its scores are no probabilities \(calibrate the classifier\)"),
    ],
)
def test_what_has_no_differentiable_form_is_refused(make: Any, about: str) -> None:
    """Decision values, and an operator outside the table by its name."""
    with pytest.raises(ModelError, match=about) as refusal:
        chrion.finetune(make(), table("two classes", data(1)), level="L2")
    assert "\n" not in str(refusal.value)


def test_options_are_checked() -> None:
    """Leaves of a model without trees, and a base rate."""
    model, rows = fitted("two classes"), table("two classes", data(1))
    with pytest.raises(
        ModelError, match=r"leaves cannot be fitted: it has no trees \(add --soft; in Python, level='L2'\)"
    ):
        chrion.finetune(model, rows)
    with pytest.raises(OptionError, match="base_rate: the scores of this model cannot be moved"):
        chrion.finetune(model, rows, level="L2", base_rate=0.2)


def test_the_command_tunes_linear_models(cli: Chrion, tmp_path: Path) -> None:
    """With ``--soft`` the model is written; without it, the message says so, and a state continues."""
    onnx.save(fitted("two classes"), "linear.onnx")
    parquet.write_table(table("two classes", data(3, 4000, shift=0.5)), "new.parquet")
    words = ["finetune", "linear.onnx", "--data", "new.parquet", "-o", "better.onnx"]
    assert_refused(cli(*words), "linear.onnx: leaves cannot be fitted: it has no trees")
    code, out, _ = cli(*words, "--soft", "--checkpoint", "state.npz")
    assert code == 0
    assert "a network (L2, " in out
    assert "needs trees whose scores are the results" in out
    first = (tmp_path / "better.onnx").read_bytes()
    assert cli(*words, "--soft", "--checkpoint", "state.npz", "--force")[0] == 0
    assert (tmp_path / "better.onnx").read_bytes() == first


#: A calibrated classifier: its label is of the decision value (ML.NET), or of weights of its own.
DECIDED = {
    "a calibration": "a = MatMul(x, w) b = Add(a, c) g = Greater(b, zero) l = Cast<to=7>(g) e = Mul(b, one) "
    "f = Add(e, c2) p = Sigmoid(f)",
    "copied weights": "a = MatMul(x, w) b = Add(a, c) p = Sigmoid(b) d = MatMul(x, w2) e = Add(d, c2) "
    "g = Greater(e, zero) l = Cast<to=7>(g)",
    "the score": "a = MatMul(x, w) b = Add(a, c) p = Sigmoid(b) g = Greater(b, zero) l = Cast<to=7>(g)",
}


def parsed(body: str, outputs: str = "float[N, 1] p", opset: int = 18, **weights: Any) -> onnx.ModelProto:
    """Return a model of four features."""
    head = f'<ir_version: 8, opset_import: ["": {opset}, "ai.onnx.ml": 3]>'
    model = onnx.parser.parse_model(f"{head} g (float[N, 4] x) => ({outputs}) {{ {body} }}")
    for name, value in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    return model


SLOPES = np.array([[1], [-1], [0.5], [0]], np.float32)
NONE_ADDED, ZERO, HALF = np.zeros(1, np.float32), np.float32([0]), np.float32([0.5])


def four(seed: int = 1, rows: int = 2500, *, kind: str = "classes", slope: float = 1.0, shift: float = 0.0) -> Any:
    """Return rows of four features, of which the last one counts for the target only."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 4)).astype(np.float32)
    score = x @ SLOPES[:, 0] + slope * x[:, 3] + shift
    y = (rng.random(rows) < 1 / (1 + np.exp(-score))).astype(int) if kind == "classes" else score
    return pa.table({**{f"f{at}": own for at, own in enumerate(x.T)}, "y": y})


@pytest.mark.parametrize("kind", DECIDED)
def test_labels_follow_scores(kind: str) -> None:
    """A network whose labels have stayed behind is refused; one whose labels follow is adopted."""
    model = parsed(DECIDED[kind], "int64[N, 1] l, float[N, 1] p", w=SLOPES, c=NONE_ADDED, w2=SLOPES, c2=NONE_ADDED,
                   zero=ZERO, one=np.float32([[1]]))  # fmt: skip
    rows = four(shift=-1.5)
    tuned, report = chrion.finetune(model, rows, level="L2")
    x = np.stack([rows[f"f{at}"].to_numpy() for at in range(4)], axis=1)
    labels, scores_ = run(tuned, {"x": x})
    assert np.mean(labels == (scores_ > 0.5)) > 0.999
    notes = {own.name: own.note for own in report.compared}
    assert report.adopted == (kind == "the score"), report.reason
    assert report.adopted or notes["soft"] == "failed: its labels are not those of its scores"


@pytest.mark.parametrize("aggregate", ["MIN", "MAX"])
def test_trees_that_are_not_added_are_refused(aggregate: str) -> None:
    """Also before operators, since their network would add them."""
    model = with_leaves(MACHINE)
    next(own for own in model.graph.node[0].attribute if own.name == "aggregate_function").s = aggregate.encode()
    with pytest.raises(ModelError, match=f"TreeEnsembleRegressor 'trees' has the aggregate {aggregate}, which leaves"):
        Pipeline(model)


#: Ordinary ends of models; ``v`` is a vector, ``w`` a column.
ENDS = {
    "a vector": ("a = MatMul(x, v) b = Add(a, c) p = Identity(b)", "float[N] p"),
    "squeezed": ("a = MatMul(x, w) b = Add(a, c) p = Squeeze(b, axis)", "float[N] p"),
    "a sigmoid of a vector": ("a = MatMul(x, v) b = Add(a, c) p = Sigmoid(b)", "float[N] p"),
    "a squeezed sigmoid": ("a = MatMul(x, w) b = Add(a, c) d = Sigmoid(b) p = Squeeze(d, axis)", "float[N] p"),
    "a sigmoid of squeezed": ("a = MatMul(x, w) b = Add(a, c) d = Squeeze(b, axis) p = Sigmoid(d)", "float[N] p"),
    "a flat sigmoid": ("a = MatMul(x, w) b = Add(a, c) d = Sigmoid(b) p = Flatten(d)", "float[N, 1] p"),
    "a reshaped sigmoid": ("a = MatMul(x, w) b = Add(a, c) d = Sigmoid(b) p = Reshape(d, flat)", "float[N] p"),
    "a cast sigmoid": ("a = MatMul(x, w) b = Sigmoid(a) d = Identity(b) p = Cast<to=11>(d)", "double[N, 1] p"),
    "two targets": (
        "a=ai.onnx.ml.LinearRegressor<targets=2,coefficients=[0.5, 0.1, 0.0, 0.3, 0.1, 0.2, 0.3, 0.4]>(x) p=Softmax(a)",
        "float[N, 2] p",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENDS)
def test_ordinary_ends_of_models(kind: str) -> None:
    """Vectors, and probabilities of one class that are moved or cast, are those of onnxruntime, also if tuned."""
    body, outputs = ENDS[kind]
    model = parsed(body, outputs, v=SLOPES[:, 0], w=SLOPES, c=HALF, axis=np.array([1]), flat=np.array([-1]))
    numbers = kind in {"a vector", "squeezed"}
    rows, own = soft(model, four(rows=800, kind="numbers" if numbers else "classes"))
    assert rows.pipeline.classes == (0 if numbers else 2)
    np.testing.assert_allclose(own.predict(own.raw(rows.held)), scores(rows, model), atol=2e-5)
    moved = trained(own, 1, 0.3)
    expected = moved.predict(moved.raw(rows.held))
    np.testing.assert_allclose(scores(rows, moved.exported(np.zeros(1))), expected, atol=2e-5)
    assert np.abs(expected - scores(rows, model)).max() > 0.01


@pytest.mark.parametrize(
    ("body", "opset", "about"),
    [
        ("a = MatMul(x, w) b = Sigmoid(a) p = Slice(b, begin, end, , step)", 18, "g: cannot be differentiated: "),
        ("a = MatMul(x, w3) b = Unsqueeze<axes=[2]>(a) d = Softmax(b) e = Squeeze<axes=[2]>(d) p = MatMul(e, w1)", 11,
         "g: Softmax '.*' has other results when it is differentiated"),
    ],
)  # fmt: skip
def test_what_differs_from_onnxruntime_is_refused(body: str, opset: int, about: str) -> None:
    """Before the training, in one line; no exception of Python or JAX is seen."""
    w3 = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    model = parsed(body, opset=opset, w=SLOPES, w3=w3, w1=SLOPES[:3], begin=np.array([0, 0]),
                   end=np.array([2**62, 4]), step=np.array([1, 1]))  # fmt: skip
    with pytest.raises(ModelError, match=about) as refusal:
        chrion.finetune(model, four(rows=800), level="L2")
    assert "\n" not in str(refusal.value)


def test_missing_features_of_a_linear_model() -> None:
    """It has no scores for them, and the message speaks of the data."""
    rows = four(rows=800)
    first = np.where(np.arange(800) % 50 == 0, np.nan, rows["f0"].to_numpy()).astype(np.float32)
    model = parsed("a = MatMul(x, w) p = Sigmoid(a)", w=SLOPES)
    with pytest.raises(DataError, match="the features have missing values, which a linear model has no scores for"):
        chrion.finetune(model, rows.set_column(0, "f0", pa.array(first)), level="L2")


def doubled() -> onnx.ModelProto:
    """Return a linear model in float64."""
    model = parsed("a = MatMul(x, w) p = Sigmoid(a)", "double[N, 1] p", w=SLOPES.astype(np.float64))
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    return model


@pytest.mark.parametrize(
    ("make", "about"),
    [
        (lambda: parsed("a = MatMul(x, w) p = Sin(a)", w=SLOPES), r"^g: Sin '.*' is not differentiable$"),
        (
            lambda: parsed("a = Sin(x) p = Sigmoid(a)"),
            r"^g: Sin '.*' is not .* no weights follow it \(fine-tuning needs",
        ),
        (doubled, r"^g: computes scores of float64 features \(fine-tuning needs float32; convert the model\)$"),
    ],
)
def test_refusals_name_what_is_in_the_way(make: Any, about: str) -> None:
    """An operator, with a hint if there is no linear model at all, or the type of the features."""
    with pytest.raises(ModelError, match=about):
        Pipeline(make())


def test_only_outputs_of_integers_or_texts_have_labels() -> None:
    """A table of numbers beside the scores is none; one of integers is."""
    for values, kind, labels in ((np.float32([5, 7]), "float[1] q", None), (np.array([5, 7]), "int64[1] q", (5, 7))):
        model = parsed(
            "q = Gather(t, i) p = MatMul(x, w)", f"{kind}, float[N, 1] p", t=values, i=np.array([0]), w=SLOPES
        )
        assert Pipeline(model).labels == labels
