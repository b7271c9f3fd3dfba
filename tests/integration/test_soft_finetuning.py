"""Fine-tuning of pipelines in their differentiable form: training, tables of categories, states, and the command."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import chrion
from chrion.errors import OptionError
from chrion.pipelines.pipeline import Pipeline
from chrion.pipelines.rows import Rows
from chrion.pipelines.soft import SoftOptions, SoftPipeline, Start, as_soft
from chrion.pipelines.soft.training import Checkpoint, TrainingOptions
from chrion.pipelines.soft.tuning import tune_soft
from chrion.pipelines.table import Table
from command_line import Chrion, assert_refused
from drifted_rows import NAMES, binary, drifted, ensemble, rows_of
from random_trees import run, tree_model

pa = pytest.importorskip("pyarrow", reason="no pyarrow in this environment")
parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("jax", reason="no JAX in this environment")
pytest.importorskip("optax", reason="no optax in this environment")

MODEL = "TreeEnsembleClassifier"
FEW = TrainingOptions(epochs=4, batch=256)


def moved(rows: int = 3000, seed: int = 0) -> Any:
    """Return rows of a binary classifier whose thresholds have moved."""
    made, rng, x = binary(), np.random.default_rng(seed), rows_of(seed, rows)
    other = replace(made, thresholds=made.thresholds + np.float32(0.4))
    margin = 2 * other.entry_weights[other.leaves_of(x)].sum(axis=1)
    y = (rng.random(rows) < 1 / (1 + np.exp(-margin))).astype(np.int64)
    return pa.table({**dict(zip(NAMES, x.T, strict=True)), "y": y})


@pytest.mark.parametrize("level", ["L3", "L4"])
def test_a_network_is_returned_where_it_is_better(level: str) -> None:
    """It has operators in place of the trees, labels and probabilities, a learning curve, and a cost."""
    model = tree_model(binary(), MODEL)
    tuned, report = chrion.finetune(model, moved(2000), level=level, validation=moved(4000, 9))
    assert (report.adopted, report.level) == (True, level), report.reason
    assert report.epochs <= len(report.curve)
    assert all(losses > 0 for epoch in report.curve for losses in epoch)
    assert report.cost is not None
    assert "cost of the differentiable form" in report.cost_line
    assert not any(node.op_type == MODEL for node in tuned.graph.node)
    x = rows_of(9, 50)
    label, scores = run(tuned, {"x": x})
    assert label.tolist() == scores.argmax(axis=1).tolist()
    np.testing.assert_allclose(scores.sum(axis=1), 1, atol=1e-5)
    assert "soft, not trained" in [own.name for own in report.compared]


def test_equal_calls_have_equal_results() -> None:
    """The network is the same byte for byte, and another one for another seed."""
    model, table = tree_model(binary(), MODEL), moved(2000)
    first, second, third = (chrion.finetune(model, table, level="L2", seed=seed)[0] for seed in (0, 0, 1))
    assert first.SerializeToString() == second.SerializeToString()
    assert first.SerializeToString() != third.SerializeToString()


def test_a_regressor_of_large_numbers_is_trained() -> None:
    """The steps of the training are in units of the values of leaves."""
    made = ensemble("TreeEnsembleRegressor")
    made = replace(made, entry_weights=(1e5 * made.entry_weights).astype(np.float32))
    x, rng = rows_of(3), np.random.default_rng(3)
    other = replace(made, thresholds=made.thresholds + np.float32(0.4))
    y = other.entry_weights[other.leaves_of(x)].sum(axis=1) + 1e4 * rng.standard_normal(len(x))
    _, report = chrion.finetune(
        tree_model(made, "TreeEnsembleRegressor"), pa.table({**dict(zip(NAMES, x.T, strict=True)), "y": y}), level="L2"
    )
    assert (report.adopted, report.measures) == (True, ("r2", "mae"))
    assert report.gain.low > 0


KEYS = [f"city {at}" for at in range(12)]


def encoders(kind: str) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto], int]:
    """Return the operators that encode a city, their weights, and their width."""
    if kind == "one-hot":
        node = helper.make_node(
            "OneHotEncoder", ["city"], ["raw"], "e", domain="ai.onnx.ml", cats_strings=KEYS, zeros=1
        )
        flat = helper.make_node("Reshape", ["raw", "flat_shape"], ["code"], "flat")
        return [node, flat], [numpy_helper.from_array(np.array([-1, 12]), "flat_shape")], 12
    if kind == "hash":
        nodes = [
            helper.make_node("MurmurHash3", ["city"], ["hash"], "hash", domain="com.microsoft", positive=1, seed=0),
            helper.make_node("Cast", ["hash"], ["long"], "long", to=TensorProto.INT64),
            helper.make_node("Mod", ["long", "buckets"], ["bucket"], "bucket"),
            helper.make_node("Reshape", ["bucket", "one"], ["flat"], "flat"),
            helper.make_node("Gather", ["eye", "flat"], ["code"], "code", axis=0),
        ]
        weights = {"buckets": np.array(5), "one": np.array([-1]), "eye": np.eye(5, dtype=np.float32)}
        return nodes, [numpy_helper.from_array(value, name) for name, value in weights.items()], 5
    digits = np.arange(13)
    table = (digits[:, None] >> np.arange(4)) & 1 if kind == "binary" else np.concatenate(
        [np.eye(4)[digits // 4], np.eye(4)[digits % 4]], axis=1
    )  # fmt: skip
    nodes = [
        helper.make_node("LabelEncoder", ["city"], ["number"], "number", domain="ai.onnx.ml", keys_strings=KEYS,
                         values_int64s=list(range(12)), default_int64=12),
        helper.make_node("Reshape", ["number", "one"], ["flat"], "flat"),
        helper.make_node("Gather", ["table", "flat"], ["code"], "code", axis=0),
    ]  # fmt: skip
    weights = {"one": np.array([-1]), "table": table.astype(np.float32)}
    return nodes, [numpy_helper.from_array(value, name) for name, value in weights.items()], table.shape[1]


def encoded(kind: str) -> onnx.ModelProto:
    """Return a pipeline of two numbers and an encoded city."""
    nodes, weights, width = encoders(kind)
    made, rng = binary(), np.random.default_rng(0)
    features = np.where(rng.random(len(made.features)) < 0.5, rng.integers(0, 2, len(made.features)), 0)
    city = rng.random(len(features)) < 0.6
    features = np.where(city, 2 + rng.integers(0, width, len(features)), features)
    made = replace(made, features=features, thresholds=np.where(city, 0, made.thresholds).astype(np.float32))
    made = replace(made, rules=np.zeros(len(features), np.uint8))
    trees = tree_model(made, MODEL).graph.node[0]
    trees.input[0] = "all"
    join = helper.make_node("Concat", ["a", "b", "code"], ["all"], "join", axis=1)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 1]) for name in "ab"]
    graph = helper.make_graph(
        [*nodes, join, trees],
        "encoded",
        [*inputs, helper.make_tensor_value_info("city", TensorProto.STRING, [None, 1])],
        [
            helper.make_tensor_value_info("label", TensorProto.INT64, [None]),
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, [None, 2]),
        ],
        weights,
    )
    opsets = [
        helper.make_opsetid("", 17),
        helper.make_opsetid("ai.onnx.ml", 3),
        helper.make_opsetid("com.microsoft", 1),
    ]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def cities(rows: int = 3000, seed: int = 0) -> Any:
    """Return rows with a class that depends on each city by itself."""
    rng = np.random.default_rng(seed)
    names, effects = np.array([*KEYS, "new"]), np.random.default_rng(5).normal(0, 2, 13)
    at = rng.integers(0, 13, rows)
    x = rng.standard_normal((rows, 2)).astype(np.float32)
    y = (rng.random(rows) < 1 / (1 + np.exp(-effects[at] - 0.3 * x[:, 0]))).astype(np.int64)
    return pa.table({"a": x[:, 0], "b": x[:, 1], "city": names[at], "y": y})


def rows_of_pipeline(model: onnx.ModelProto, table: Any) -> Rows:
    """Return the rows of a table for a pipeline."""
    return Rows(Pipeline(model), "y", [Table(table)])


@pytest.mark.parametrize("kind", ["one-hot", "hash", "binary", "two-hot"])
def test_encoders_become_tables_with_a_row_a_category(kind: str) -> None:
    """The untrained network with tables has the scores of that without, for cities that have no row, too."""
    model = encoded(kind)
    rows = rows_of_pipeline(model, cities())
    start = Start(model, rows.problem.original)
    soft = as_soft(rows, start, SoftOptions())
    [table] = soft.features.embeddings
    assert (table.keys, table.source) == ([*sorted(KEYS), "new"], "city")
    if kind == "hash":
        assert len(np.unique(table.table, axis=0)) < len(table.keys)
    fixed = as_soft(rows, start, SoftOptions(scope="leaves"))
    feeds = {"a": np.zeros((14, 1), np.float32), "b": np.ones((14, 1), np.float32)}
    feeds["city"] = np.array([[*KEYS, "new", "never seen"]], object).T
    zero = np.zeros(1)
    np.testing.assert_allclose(run(soft.exported(zero), feeds)[1], run(fixed.exported(zero), feeds)[1], atol=1e-6)


def test_categories_in_one_bucket_are_told_apart() -> None:
    """The trained tables have different rows for cities that the hash encoder does not distinguish."""
    rows = rows_of_pipeline(encoded("hash"), cities(6000))
    start = Start(rows.pipeline.proto, rows.problem.original)
    options = SoftOptions(training=replace(FEW, epochs=10))
    tuned = tune_soft(rows, start, start, options, lambda _done, _total: None)
    table = tuned.features.embeddings[0].table
    assert len(np.unique(table, axis=0)) == len(table)
    held = slice(rows.held.start, rows.held.stop)
    soft = as_soft(rows, start, options)
    y = rows.y[held].astype(int)
    before, after = (-np.log(own.predict(own.raw(held))[np.arange(len(y)), y]).mean() for own in (soft, tuned))
    assert after < before - 0.02


def test_only_rows_of_the_batch_change() -> None:
    """A table with a category that the rows to fit lack keeps its row."""
    table = cities(2000)
    city = table["city"].to_numpy(zero_copy_only=False).copy()
    city[:1300] = np.where(city[:1300] == KEYS[3], KEYS[4], city[:1300])
    table = table.set_column(2, "city", pa.array(city.tolist()))
    rows = rows_of_pipeline(encoded("two-hot"), table)
    start = Start(rows.pipeline.proto, rows.problem.original)
    soft = as_soft(rows, start, SoftOptions())
    before = [own.table.copy() for own in soft.features.embeddings]
    training_options = SoftOptions(training=replace(FEW, epochs=2, patience=9))
    from chrion.pipelines.soft.training import Training  # noqa: PLC0415 - after the check for JAX

    training = Training(soft.network, {}, (soft.features, rows.y), training_options.training, 0)
    found = training.run(slice(0, 1280), epochs=2)
    changed = (found.tables[0] != before[0]).any(axis=1)
    names = soft.features.embeddings[0].keys
    assert [name for name, own in zip(names, changed, strict=True) if not own] == [KEYS[3]]


def test_an_interrupted_training_continues_from_its_state(tmp_path: Path) -> None:
    """The parameters and tables are those of a training that was not interrupted, in both of its parts."""
    rows = rows_of_pipeline(encoded("binary"), cities())
    start = Start(rows.pipeline.proto, rows.problem.original)
    options = SoftOptions(training=FEW, checkpoint=tmp_path / "state.npz")
    whole = tune_soft(rows, start, start, replace(options, checkpoint=None), lambda _done, _total: None)
    calls = 0

    def interrupt(_done: int, _total: int) -> None:
        nonlocal calls
        calls += 1
        if calls in {3, 6}:
            raise KeyboardInterrupt

    first = tune_soft(rows, start, start, options, interrupt)
    second = tune_soft(rows, start, start, options, interrupt)
    assert first.interrupted
    assert second.interrupted
    last = tune_soft(rows, start, start, options, interrupt)
    assert not last.interrupted
    assert last.curve == whole.curve
    for name, values in whole.parameters.items():
        np.testing.assert_array_equal(last.parameters[name], values)
    np.testing.assert_array_equal(last.features.embeddings[0].table, whole.features.embeddings[0].table)


@pytest.mark.parametrize("content", [b"", b"no file of arrays", None])
def test_states_of_something_else_are_refused(content: bytes | None, tmp_path: Path) -> None:
    """A damaged file, and the state of another training."""
    path = tmp_path / "state.npz"
    if content is None:
        Checkpoint(path, "another").write("first", {"curve": np.zeros(1)})
    else:
        path.write_bytes(content)
    with pytest.raises(OptionError, match="state of a training"):
        chrion.finetune(tree_model(binary(), MODEL), moved(1000), level="L2", checkpoint=path)


def test_an_interrupt_keeps_the_best_network() -> None:
    """Ctrl-C in the training returns what is best until then, if it is better than the original."""
    calls = 0

    def interrupt(_done: int, _total: int, name: str) -> None:
        nonlocal calls
        calls += name.startswith("epoch")
        if calls == 6 and name.startswith("epoch"):
            raise KeyboardInterrupt

    _, report = chrion.finetune(tree_model(binary(), MODEL), moved(), level="L2", progress=interrupt)
    assert (report.interrupted, report.adopted, len(report.curve)) == (True, True, 5)


def test_an_interrupt_before_the_second_training_keeps_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the network of all rows is made returns the one of the rows to fit, trained."""
    rows = rows_of_pipeline(tree_model(binary(), MODEL), moved())
    start, options, read = Start(rows.pipeline.proto, rows.problem.original), SoftOptions(training=FEW), rows.features
    calls = 0

    def features(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return read(*given)

    monkeypatch.setattr(rows, "features", features)
    found = tune_soft(rows, start, start, options, lambda _done, _total: None)
    assert (found.interrupted, found.epochs > 0) == (True, True)
    monkeypatch.undo()
    losses = [
        rows.pipeline.loss.evaluate(own.raw(rows.held), rows.y[rows.held])[0]
        for own in (found, as_soft(rows, start, options))
    ]
    assert losses[0] < losses[1] - 1


def test_moved_thresholds_are_handed_back_as_trees() -> None:
    """Where the network is not proven better than trees that are, the model has these, and the same operators."""
    model = tree_model(binary(), MODEL)
    tuned, report = chrion.finetune(model, moved(), level="L2")
    assert (report.adopted, report.cost) == (True, None)
    assert [node.op_type for node in tuned.graph.node] == [node.op_type for node in model.graph.node]
    measures = {own.name: own.measures for own in report.compared}
    soft, original = measures["soft"], measures["original"]
    assert soft
    assert original
    assert soft.gain > original.gain


def test_trees_in_float64_are_handed_back() -> None:
    """Seconds since 1970 are no numbers in float32: the trees of a network compare them in float64, too."""
    made, x = ensemble("TreeEnsembleRegressor"), rows_of().astype(np.float64)
    early = made.features == 0
    thresholds = np.where(early, 1.7e9 + 30 * made.thresholds.astype(np.float64), made.thresholds)
    made = replace(made, thresholds=thresholds, entry_weights=made.entry_weights.astype(np.float64))
    x[:, 0] = 1.7e9 + np.round(30 * x[:, 0])
    y = -made.entry_weights[made.leaves_of(x)].sum(axis=1)
    model = tree_model(made, "TreeEnsemble", np.float64)
    _, report = chrion.finetune(model, pa.table({**dict(zip(NAMES, x.T, strict=True)), "y": y}), level="L2")
    assert report.adopted
    assert next(own.measures for own in report.compared if own.name == "soft, as trees")


def test_a_network_with_other_scores_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuned leaves are returned where the exported network does not compute what was trained; a note says so."""
    export = SoftPipeline.exported
    monkeypatch.setattr(SoftPipeline, "exported", lambda own, constants: export(own, constants + 1))
    _, report = chrion.finetune(tree_model(binary(), MODEL), drifted(binary(), 1.0), level="L2")
    assert (report.adopted, report.cost) == (True, None)
    notes = {own.name: own.note for own in report.compared if own.measures is None}
    assert "its model has other scores" in notes["soft"]


def test_options_of_networks_are_checked() -> None:
    """Unknown levels, and a state for trees."""
    model, table = tree_model(binary(), MODEL), moved(1000)
    with pytest.raises(OptionError, match="level: expected one of L1, L2, L3, L4, found 'L5'"):
        chrion.finetune(model, table, level="L5")
    with pytest.raises(OptionError, match="the level L1 has no state"):
        chrion.finetune(model, table, checkpoint="state.npz")


def test_the_command_writes_a_network_and_its_learning_curve(cli: Chrion, tmp_path: Path) -> None:
    """The cost is printed; without ``--soft`` a level of networks is refused."""
    pytest.importorskip("matplotlib", reason="no matplotlib in this environment")
    onnx.save(encoded("hash"), "pipeline.onnx")
    parquet.write_table(cities(), "new.parquet")
    words = ["finetune", "pipeline.onnx", "--data", "new.parquet", "-o", "better.onnx"]
    code, out, _ = cli(*words, "--soft", "--curve", "curve.png")
    assert code == 0
    assert "cost of the differentiable form: " in out
    assert "a network (L2, " in out
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert_refused(cli(*words, "--force", "--level", "L3"), "add --soft")
    assert_refused(cli(*words, "--force", "--curve", "c.png"), "trees have no learning curve")
    assert_refused(cli(*words, "--force", "--base-rate", "half"), "--base-rate: expected a share such as 0.2")


def test_trees_are_tuned_without_jax() -> None:
    """Neither the package nor a tuning of leaves imports JAX."""
    script = (
        "import sys, chrion; from chrion.pipelines import finetune; import chrion.pipelines.soft.tuning; "
        "assert not {'jax', 'optax', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)  # noqa: S603 - the interpreter itself


def test_no_drift_keeps_the_original() -> None:
    """A network of rows without drift is not returned."""
    _, report = chrion.finetune(tree_model(binary(), MODEL), drifted(binary(), 0.0, seed=1), level="L2")
    assert not report.adopted
