"""Fine-tuning of pipelines: tuned where rows drift, kept where they do not, and refused in one line."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import chrion
from chrion.errors import ChrionError, DataError, ModelError, OptionError, SpaceError
from chrion.graph.trees import TreeEnsemble, joined, read_ensemble
from chrion.pipelines.leaves import fit_leaves
from chrion.pipelines.measures import compare
from command_line import Chrion, assert_refused
from drifted_rows import NAMES, ROWS, binary, drifted, ensemble, rows_of
from random_trees import run, tree_model

pa = pytest.importorskip("pyarrow", reason="no pyarrow in this environment")
csv = pytest.importorskip("pyarrow.csv")
pytest.importorskip("scipy", reason="no SciPy in this environment")
parquet = pytest.importorskip("pyarrow.parquet")


def test_leaves_are_tuned_to_rows_that_have_drifted() -> None:
    """The tuned model is adopted, has the same structure, and does what the report says on the held-out rows."""
    model = tree_model(binary(), "TreeEnsembleClassifier")
    table = drifted(binary(), 1.0)
    tuned, report = chrion.finetune(model, table)
    assert (report.adopted, report.rows) == (True, (1920, 480, 600))
    assert report.gain.low > 0 > report.loss.high
    before, after = (read_ensemble(m.graph.node[0]) for m in (model, tuned))
    for name in ("roots", "features", "rules", "thresholds", "true", "false"):
        np.testing.assert_array_equal(getattr(before, name).shape, getattr(after, name).shape)
    held = np.stack([table[name].to_numpy() for name in NAMES], axis=1)[-600:]
    y = table["y"].to_numpy()[-600:]
    losses = [-np.log(run(m, {"x": held})[1][np.arange(600), y]).mean() for m in (model, tuned)]
    names = [own.name for own in report.compared]
    assert names[:2] == ["original", "tuned"]
    assert "refit" in names
    assert [own.measures.loss for own in report.compared[:2] if own.measures] == pytest.approx(losses, abs=1e-5)
    assert run(tuned, {"x": held})[0].shape == (600,)
    original, *others = report.to_json()["compared"]
    assert original["difference"] is None
    for own in (own for own in others if own["measures"]):
        for name, interval in own["difference"].items():
            assert interval["value"] == pytest.approx(own["measures"][name] - original["measures"][name], abs=1e-9)
            assert interval["low"] < interval["value"] < interval["high"]


def test_equal_calls_have_equal_results() -> None:
    """The tuned model is the same byte for byte."""
    model, table = tree_model(binary(), "TreeEnsembleClassifier"), drifted(binary(), 1.0)
    first, second = (chrion.finetune(model, table)[0].SerializeToString() for _ in range(2))
    assert first == second


@pytest.mark.parametrize("seed", range(3))
def test_the_original_is_kept_without_drift(seed: int) -> None:
    """Rows of the original's own distribution leave the model as it was."""
    model = tree_model(binary(), "TreeEnsembleClassifier")
    kept, report = chrion.finetune(model, drifted(binary(), 0.0, seed=seed))
    assert not report.adopted
    assert kept.SerializeToString() == model.SerializeToString()


def test_prior_shift_is_named() -> None:
    """Held-out rows with another share of the class are reported as such."""
    made = binary()
    table = drifted(made, 0.0, rows=6000)
    y = table["y"].to_numpy()
    zeros, ones = np.flatnonzero(y == 0), np.flatnonzero(y == 1)
    order = np.concatenate([np.sort([*zeros[: len(zeros) // 2], *ones]), zeros[len(zeros) // 2 :]])
    _, report = chrion.finetune(tree_model(made, "TreeEnsembleClassifier"), table.take(pa.array(order)))
    assert report.prior_shift is not None
    assert report.prior_shift[0] > report.prior_shift[1]
    assert report.shift_line.startswith("prior shift: ")


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "regressor": ("TreeEnsembleRegressor", {}),
    "large values": ("TreeEnsembleRegressor", {}),
    "average": ("TreeEnsembleRegressor", {"aggregate": "AVERAGE", "base": np.ones(1, np.float32)}),
    "version 5": ("TreeEnsemble", {}),
    "softmax": ("TreeEnsembleClassifier", {"targets": 3, "transform": "SOFTMAX", "labels": ("a", "b", "c")}),
    "forest": ("TreeEnsembleClassifier", {"targets": 3, "labels": (2, 5, 9)}),
}


@pytest.mark.parametrize("case", CASES)
def test_all_kinds_of_ensembles_are_tuned(case: str) -> None:
    """Regressors, averages, version 5, several classes with a softmax, and the averaged probabilities of forests."""
    kind, changes = CASES[case]
    rng, x, scale = np.random.default_rng(1), rows_of(1), 1.0
    if case == "large values":  # prices: float32 has steps of 0.03 there
        changes, scale = {"base": np.full(1, 400_000, np.float32)}, 1e5
    made = ensemble(kind, **changes)
    made = replace(made, entry_weights=(scale * made.entry_weights).astype(np.float32))
    if case == "softmax":
        made = replace(made, entry_leaves=np.arange(made.leaf_count), entry_targets=made.leaf_trees % 3)
        made = replace(made, entry_weights=rng.standard_normal(made.leaf_count).astype(np.float32))
    if case == "forest":
        probabilities = rng.dirichlet(np.ones(3), made.leaf_count).astype(np.float32) / made.trees
        places = {"entry_leaves": np.repeat(np.arange(made.leaf_count), 3), "entry_weights": probabilities.ravel()}
        made = replace(made, entry_targets=np.tile(np.arange(3), made.leaf_count), **places)
    truth = rng.standard_normal((made.leaf_count, 3))[made.leaves_of(x)].sum(axis=1)
    if made.labels:
        y = np.array(made.labels)[(truth + rng.gumbel(size=truth.shape)).argmax(axis=1)]
    else:
        y = scale * (truth[:, 0] + 0.1 * rng.standard_normal(ROWS))
    table = pa.table({**dict(zip(NAMES, x.T, strict=True)), "target": y})
    tuned, report = chrion.finetune(tree_model(made, kind), table, "target")
    assert report.adopted, report.reason
    assert report.measures == (("auc", "log_loss") if made.labels else ("r2", "mae"))
    if case == "forest":
        scores = run(tuned, {"x": x})[1]
        assert scores.min() >= 0
        np.testing.assert_allclose(scores.sum(axis=1), 1, atol=1e-5)


def test_opposite_scores_of_two_classes_are_tuned_as_one() -> None:
    """CatBoost writes each leaf for both classes: the tuned model is that of the second class's scores alone."""
    one = binary()
    both = replace(
        one,
        entry_leaves=np.repeat(one.entry_leaves, 2),
        entry_targets=np.tile([0, 1], len(one.entry_leaves)),
        entry_weights=np.stack([-one.entry_weights, one.entry_weights], axis=1).ravel(),
    )
    kind, table, x = "TreeEnsembleClassifier", drifted(one, 0.7), rows_of(5, 50)
    np.testing.assert_allclose(run(tree_model(both, kind), {"x": x})[1], run(tree_model(one, kind), {"x": x})[1], 1e-5)
    tuned, expected = (chrion.finetune(tree_model(made, kind), table) for made in (both, one))
    assert tuned[1].adopted
    np.testing.assert_allclose(*(run(model, {"x": x})[1] for model, _ in (tuned, expected)), atol=1e-5)


def encoded() -> onnx.ModelProto:
    """Return a pipeline of one input a column: numbers, and a text that is looked up in a table."""
    made = binary()
    node = tree_model(made, "TreeEnsembleClassifier").graph.node[0]
    node.input[0] = "all"
    columns = [*NAMES[:-1], "city"]
    lookup = helper.make_node(
        "LabelEncoder", ["city"], ["code"], "cities", domain="ai.onnx.ml", keys_strings=["Bern", "Rome"],
        values_floats=[-1.0, 1.0], default_float=0.0,
    )  # fmt: skip
    joined = helper.make_node("Concat", [*NAMES[:-1], "code"], ["all"], "join", axis=1)
    kinds = [TensorProto.FLOAT] * 4 + [TensorProto.STRING]
    graph = helper.make_graph(
        [lookup, joined, node],
        "pipeline",
        [helper.make_tensor_value_info(name, kind, [None, 1]) for name, kind in zip(columns, kinds, strict=True)],
        [
            helper.make_tensor_value_info("label", TensorProto.INT64, [1]),
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, 2]),
        ],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def mixed_table(rows: int = ROWS) -> Any:
    """Return rows for :func:`encoded`: texts with missing and unknown ones, and a number with missing ones."""
    rng, made = np.random.default_rng(5), binary()
    x = rows_of(5, rows)
    city = rng.integers(0, 4, rows)
    x[:, -1] = np.array([-1.0, 1.0, 0.0, 0.0])[city]
    x[::50, 0] = np.nan
    margin = -made.entry_weights[made.leaves_of(x)].sum(axis=1)
    columns = dict(zip(NAMES[:-1], x.T, strict=False))
    names = np.array(["Bern", "Rome", "Oslo", None], object)[city]
    y = (rng.random(rows) < 1 / (1 + np.exp(-margin))).astype(bool)
    return pa.table({**columns, "city": names, "y": y, "unused": np.zeros(rows)})


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_files_of_mixed_columns_are_read_in_batches(suffix: str, tmp_path: Path) -> None:
    """A Parquet file of small row groups and a CSV file have the results of the table in memory."""
    table, path = mixed_table(), tmp_path / f"new.{suffix}"
    if suffix == "parquet":
        parquet.write_table(table, path, row_group_size=700)
    else:
        csv.write_csv(table, path)
    _, expected = chrion.finetune(encoded(), table)
    _, found = chrion.finetune(encoded(), path)
    assert found.adopted
    assert replace(found, seconds=0.0) == replace(expected, seconds=0.0)


def test_given_held_out_rows_decide() -> None:
    """With rows for validation, all of the data are fitted; rows that have not drifted keep the original."""
    model = tree_model(binary(), "TreeEnsembleClassifier")
    _, report = chrion.finetune(model, drifted(binary(), 1.0), validation=drifted(binary(), 0.0, seed=9))
    assert (report.rows, report.adopted) == ((2400, 600, 3000), False)
    assert report.loss.value > 0


def test_columns_of_held_out_rows_may_have_another_order() -> None:
    """The features of an input that has all of them are found by the names of their columns in the data."""
    model, data, held = tree_model(binary(), "TreeEnsembleClassifier"), drifted(binary(), 1.0), drifted(binary(), 1.0)
    _, report = chrion.finetune(model, data, validation=held)
    _, turned = chrion.finetune(model, data, validation=held.select(held.column_names[::-1]))
    assert turned.gain == report.gain
    with pytest.raises(DataError, match="no column 'f0'"):
        chrion.finetune(model, data, validation=held.drop_columns(["f0"]))


def test_texts_of_numbers_stay_texts(tmp_path: Path) -> None:
    """Codes with leading zeros in a CSV file are the same categories as in the model; other encodings are refused."""
    rng = np.random.default_rng(0)
    model = with_target_encoder()
    keys = next(a for a in model.graph.node[0].attribute if a.name == "keys_strings")
    keys.strings[:] = [b"007", b"008", b"009", b"010"]
    code = rng.choice(["007", "008", "009", "010"], 5000)
    y = (rng.random(5000) < 0.5).astype(np.int64)
    path = tmp_path / "codes.csv"
    path.write_text("city,y\n" + "".join(f"{c},{v}\n" for c, v in zip(code, y, strict=True)))
    tuned, _ = chrion.finetune(model, path, scope="encoders")
    found = next(a for a in tuned.graph.node[0].attribute if a.name == "keys_strings")
    assert list(found.strings) == [b"007", b"008", b"009", b"010"]
    path.write_bytes("city,y\ncaf\xe9,1\n".encode("latin-1"))
    with pytest.raises(DataError, match="cannot be read"):
        chrion.finetune(model, path)


def test_the_command_writes_a_model_that_is_better(cli: Chrion) -> None:
    """The file is the tuned model; standard output has the table, or one JSON object."""
    onnx.save(encoded(), "pipeline.onnx")
    parquet.write_table(mixed_table(), "new.parquet")
    words = ["finetune", "pipeline.onnx", "--data", "new.parquet", "-o", "better.onnx"]
    code, out, _ = cli(*words)
    assert code == 0
    assert "written: better.onnx, the model of the row 'tuned': better in AUC and log loss" in out
    assert "tuned vs. original, mean of all times: AUC +" in out
    assert "\n*: differs from the original beyond chance; --json has the intervals of 95 %\n" in out
    stars = [
        next(line for line in out.splitlines() if line.startswith(name)).count("*") for name in ("original ", "tuned ")
    ]
    assert stars[0] == 0 < stars[1]
    assert onnx.load("better.onnx").graph.node[0].op_type == "LabelEncoder"
    onnx.checker.check_model("better.onnx", full_check=True)
    code, out, _ = cli(*words, "--force", "--json")
    assert json.loads(out)["written"] == "better.onnx"
    assert_refused(cli(*words), "the file exists")


def test_the_command_writes_nothing_if_the_original_is_kept(cli: Chrion, tmp_path: Path) -> None:
    """The exit code is 3, and there is no file."""
    onnx.save(tree_model(binary(), "TreeEnsembleClassifier"), "pipeline.onnx")
    csv.write_csv(drifted(binary(), 0.0), "same.csv")
    code, out, _ = cli("finetune", "pipeline.onnx", "--data", "same.csv", "-o", "better.onnx")
    assert code == 3
    assert "kept the original: " in out
    assert not (tmp_path / "better.onnx").exists()


def with_target_encoder(default: float = 0.5) -> onnx.ModelProto:
    """Return a pipeline of a number and a target-encoded text, with one tree on the encoded value."""
    made = replace(
        binary(),
        roots=np.array([0]),
        features=np.array([0, 0, 0]),
        rules=np.zeros(3, np.uint8),
        thresholds=np.array([0.5, 0.25, 0.75], np.float32),
        true=np.array([1, ~0, ~2]),
        false=np.array([2, ~1, ~3]),
        missing_true=np.zeros(3, bool),
        leaf_count=4,
        entry_leaves=np.arange(4),
        entry_targets=np.zeros(4, np.int64),
        entry_weights=np.array([-2, -0.5, 0.5, 2], np.float32),
    )
    node = tree_model(made, "TreeEnsembleClassifier").graph.node[0]
    node.input[0] = "code"
    lookup = helper.make_node(
        "LabelEncoder", ["city"], ["code"], "cities", domain="ai.onnx.ml", keys_strings=["a", "b", "c", "d"],
        values_floats=[0.1, 0.4, 0.6, 0.9], default_float=default,
    )  # fmt: skip
    graph = helper.make_graph(
        [lookup, node],
        "encoded",
        [helper.make_tensor_value_info("city", TensorProto.STRING, [None, 1])],
        [
            helper.make_tensor_value_info("label", TensorProto.INT64, [None]),
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, [None, 2]),
        ],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def test_tables_of_target_encoders_are_updated_with_the_old_ones_as_prior() -> None:
    """The rates of categories have changed places, and a new one gains a row; trees stay as they are."""
    rng = np.random.default_rng(0)
    rates = {"a": 0.85, "b": 0.15, "c": 0.6, "d": 0.1, "new": 0.9}
    city = rng.choice(list(rates), 5000)
    y = (rng.random(5000) < np.array([rates[name] for name in city])).astype(np.int64)
    model = with_target_encoder()
    tuned, report = chrion.finetune(model, pa.table({"city": city, "y": y}), scope="encoders")
    assert (report.adopted, report.ridge) == (True, None)
    [prior] = report.priors
    mean = y[:4000].mean()
    attributes = {a.name: helper.get_attribute_value(a) for a in tuned.graph.node[0].attribute}
    found = dict(zip([key.decode() for key in attributes["keys_strings"]], attributes["values_floats"], strict=True))
    old = {"a": 0.1, "b": 0.4, "c": 0.6, "d": 0.9, "new": 0.5}
    for name, value in found.items():
        own = y[:4000][city[:4000] == name]
        total = prior.old * len(own) * old[name] + prior.mean * mean + own.sum()
        assert value == pytest.approx(total / (prior.old * len(own) + prior.mean + len(own)), abs=1e-6)
    assert attributes["default_float"] == 0.5
    assert [a.name for a in tuned.graph.node[1].attribute].count("nodes_values") == 1
    _, both = chrion.finetune(model, pa.table({"city": city, "y": y}))
    assert (len(both.priors), both.adopted) == (1, True)


@pytest.mark.parametrize("held", ["as before", "wider"])
def test_held_out_numbers_do_not_decide_which_tables_are_updated(held: str) -> None:
    """A table of 0.1 to 0.9 is none of means of numbers from 0.3 to 0.7, whatever range later numbers have."""
    model, rng = with_target_encoder(), np.random.default_rng(0)
    made = replace(read_ensemble(model.graph.node[1]), targets=1, labels=None, transform="NONE")
    trees = tree_model(made, "TreeEnsembleRegressor")
    model.graph.node[1].CopyFrom(trees.graph.node[0])
    model.graph.node[1].input[0] = "code"
    del model.graph.output[:]
    model.graph.output.extend(trees.graph.output)
    city = rng.choice(["a", "b", "c", "d"], 5000)
    y = np.where(city == "a", 0.7, 0.3)
    if held == "wider":
        y[-2:] = 0.0, 1.0
    _, report = chrion.finetune(model, pa.table({"city": city, "y": y}), scope="encoders")
    assert (report.priors, report.adopted) == ((), False)


def test_rare_categories_do_not_leak_their_targets_into_leaves() -> None:
    """Categories that occur twice and say nothing do not make a model that is worse on held-out rows."""
    rng = np.random.default_rng(1)
    city = np.array([f"c{at}" for at in rng.integers(0, 2000, 5000)])
    y = (rng.random(5000) < 0.5).astype(np.int64)
    _, report = chrion.finetune(with_target_encoder(), pa.table({"city": city, "y": y}))
    tuned = report.compared[1].measures
    assert tuned is not None
    assert tuned.loss < 0.71  # that of a coin is 0.693; the original's weights for half are -0.5


def test_old_rows_make_a_model_with_its_own_encoder_to_compare_with(cli: Chrion) -> None:
    """It knows the rates of categories that the pipeline lacks: 0.95 or 0.05, so that theory's AUC is 0.95."""
    pytest.importorskip("lightgbm", reason="no LightGBM in this environment")
    rng = np.random.default_rng(0)

    def rows(number: int) -> Any:
        city = rng.integers(0, 300, number)
        y = rng.random(number) < np.where(city % 2, 0.95, 0.05)
        return pa.table({"city": [f"c{at}" for at in city], "y": y.astype(np.int64)})

    new, old = rows(1500), rows(20_000)
    _, report = chrion.finetune(with_target_encoder(), new, old=old)
    auc = {own.name: own.measures.gain for own in report.compared if own.measures}
    assert auc["old and new rows"] == pytest.approx(0.95, abs=0.03)
    assert auc["new rows only"] == pytest.approx(0.5, abs=0.05)
    without = chrion.finetune(with_target_encoder(), new)[1]
    kept = [own for own in report.compared if own.name != "old and new rows"]
    assert kept == [*without.compared]  # old rows have no part in anything else
    onnx.save(with_target_encoder(), "pipeline.onnx")
    parquet.write_table(new, "new.parquet")
    csv.write_csv(old.rename_columns(["town", "y"]), "old.csv")
    words = ("finetune", "pipeline.onnx", "--data", "new.parquet", "-o", "better.onnx", "--old", "old.csv")
    assert_refused(cli(*words), "old.csv: no column 'city'")


def test_methods_that_are_left_out_have_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many rows none is compared; a forest of two classes is neither refitted nor continued."""
    table = drifted(binary(), 1.0)

    def notes(made: TreeEnsemble) -> dict[str, str]:
        _, report = chrion.finetune(tree_model(made, "TreeEnsembleClassifier"), table, scope="leaves")
        return {own.name: own.note for own in report.compared if not own.measures and "lightgbm" not in own.note}

    probabilities = np.random.default_rng(1).random(binary().leaf_count).astype(np.float32) / binary().trees
    forest = replace(binary(transform="NONE"), entry_weights=probabilities)
    assert notes(forest) == dict.fromkeys(("refit", "continued"), "for boosted trees of two classes, and for numbers")
    assert not notes(binary())
    monkeypatch.setattr("chrion.pipelines.finetuning.MOST_ROWS", ROWS - 1)
    assert notes(binary()) == dict.fromkeys(("refit", "continued", "new rows only"), "for at most 2 999 rows")


def with_prior_shift(rows: int = 6000) -> Any:
    """Return rows of a binary classifier of which three quarters of the second class are left out."""
    table = drifted(binary(), 0.0, rows=rows)
    y, rng = table["y"].to_numpy(), np.random.default_rng(0)
    return table.take(pa.array(np.flatnonzero((y == 0) | (rng.random(rows) < 0.25))))


def test_scores_are_moved_to_a_known_base_rate() -> None:
    """After a prior shift alone, the odds of all rows change by one factor, and no rank does."""
    model, table = tree_model(binary(), "TreeEnsembleClassifier"), with_prior_shift()
    rate = float(np.mean(table["y"].to_numpy()))
    moved, report = chrion.finetune(model, table, base_rate=rate)
    assert (report.adopted, report.level) == (True, "L1")
    assert report.loss.high < 0
    x = rows_of(7, 1000)
    before, after = (run(m, {"x": x})[1].astype(np.float64) for m in (model, moved))
    if report.ridge is None:
        ratios = np.log(after[:, 1] / after[:, 0]) - np.log(before[:, 1] / before[:, 0])
        np.testing.assert_allclose(ratios, ratios.mean(), atol=1e-3)
        assert ratios.mean() == pytest.approx(np.log(0.25), abs=0.2)
    assert after[:, 1].mean() < before[:, 1].mean() - 0.05


def test_a_base_rate_weights_the_measures() -> None:
    """Rows whose rate is not the known one count by their class: a later month has the rate that is given."""
    model, table = tree_model(binary(), "TreeEnsembleClassifier"), drifted(binary(), 0.0, rows=6000)
    moved, report = chrion.finetune(model, table, base_rate={0: 0.9, 1: 0.1})
    assert report.adopted
    later = with_prior_shift(20_000)
    x = np.stack([later[name].to_numpy() for name in NAMES], axis=1)
    y, rng = later["y"].to_numpy(), np.random.default_rng(0)
    wanted = (y == 0) | (rng.random(len(y)) < (y == 0).sum() / 9 / (y == 1).sum())
    losses = [-np.log(run(m, {"x": x[wanted]})[1][np.arange(wanted.sum()), y[wanted]]).mean() for m in (model, moved)]
    assert losses[1] < losses[0]


def test_a_tuned_model_must_beat_the_original_with_moved_scores() -> None:
    """Leaves fitted to rows that are too certain rank later ones better, but moving scores alone has a lower loss."""
    made, rng = binary(), np.random.default_rng(0)
    other = replace(made, entry_weights=made.entry_weights + 0.5 * rng.standard_normal(made.leaf_count))
    sharp, flat = (replace(other, entry_weights=factor * other.entry_weights) for factor in (6.0, 0.8))
    data, later = drifted(sharp, 0.0), drifted(flat, 0.0, rows=6000, seed=1)
    model = tree_model(made, "TreeEnsembleClassifier")
    _, report = chrion.finetune(model, data, validation=later, base_rate=0.03)
    measures = {own.name: own.measures for own in report.compared}
    tuned, returned = measures["without new trees"], measures["tuned"]
    assert tuned
    assert returned
    assert tuned.gain > returned.gain + 0.01
    assert tuned.loss > returned.loss
    assert (report.adopted, report.ridge, report.gain.value) == (True, None, pytest.approx(0, abs=1e-4))


@pytest.mark.parametrize(
    ("rate", "about"),
    [
        (1.2, "shares between 0 and 1"),
        ({0: 0.5}, "expected a share for each class"),
        ({0: 0.5, 1: 0.7}, "shares between 0 and 1 that add up to 1"),
        (float("nan"), "shares between 0 and 1"),
        ("0.1", "expected a share for each class, found '0.1'"),
        ({0: "a", 1: "b"}, "expected a number for each class"),
    ],
)
def test_wrong_base_rates_are_refused(rate: Any, about: str) -> None:
    """The message has what was expected."""
    with pytest.raises(OptionError, match=about):
        chrion.finetune(tree_model(binary(), "TreeEnsembleClassifier"), drifted(binary(), 0.0), base_rate=rate)


@pytest.mark.parametrize(
    ("level", "path", "about"), [("L1", "state.npz", "no state to keep"), ("L2", "none/state.npz", "no folder none")]
)
def test_a_checkpoint_that_cannot_be_written_is_refused_at_once(level: str, path: str, about: str) -> None:
    """Before the model or the data are read."""
    with pytest.raises(OptionError, match=about):
        chrion.finetune("no model", "no data", target="y", level=level, checkpoint=path)


def test_a_model_without_odds_has_no_base_rate() -> None:
    """A regressor's scores cannot be moved to a share of a class."""
    model = tree_model(ensemble("TreeEnsembleRegressor"), "TreeEnsembleRegressor")
    with pytest.raises(OptionError, match="cannot be moved"):
        chrion.finetune(model, drifted(binary(), 0.0), base_rate=0.5)


def test_large_tables_are_in_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Results are those of tables in memory, no file is left, and a full disk is an error of one line."""
    model, table = tree_model(binary(), "TreeEnsembleClassifier"), drifted(binary(), 1.0)
    expected, _ = chrion.finetune(model, table)
    monkeypatch.setattr("chrion.pipelines.scratch.MOST_IN_MEMORY", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found, _ = chrion.finetune(model, table)
    assert found.SerializeToString() == expected.SerializeToString()
    assert not list(tmp_path.iterdir())
    full = shutil._ntuple_diskusage(10, 9, 1)  # type: ignore[attr-defined] # noqa: SLF001 - the type has no public name
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(SpaceError, match=r"no space in .* of tables of rows are written there") as refusal:
        chrion.finetune(model, table)
    assert "\n" not in str(refusal.value)


def all_texts() -> onnx.ModelProto:
    """Return a pipeline with one input of two texts, each of which is looked up in a table."""
    made = binary()
    node = tree_model(made, "TreeEnsembleClassifier").graph.node[0]
    node.input[0] = "wide"
    lookup = helper.make_node(
        "LabelEncoder", ["x"], ["codes"], "codes", domain="ai.onnx.ml", keys_strings=["007", "008", "009"],
        values_floats=[-1.0, 0.0, 1.0], default_float=3.0,
    )  # fmt: skip
    wide = helper.make_node("Concat", ["codes", "codes", "codes"], ["wide"], "wide", axis=1)
    graph = helper.make_graph(
        [lookup, wide, node],
        "texts",
        [helper.make_tensor_value_info("x", TensorProto.STRING, [None, 2])],
        [
            helper.make_tensor_value_info("label", TensorProto.INT64, [None]),
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, [None, 2]),
        ],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def test_a_single_input_of_texts_has_texts_of_numbers(tmp_path: Path) -> None:
    """Codes with leading zeros in a CSV file stay the categories of the model."""
    rng, path = np.random.default_rng(0), tmp_path / "codes.csv"
    codes = rng.choice(["007", "008", "009"], (3000, 2))
    y = (rng.random(3000) < np.where(codes[:, 0] == "007", 0.9, 0.1)).astype(int)
    path.write_text("a,b,y\n" + "".join(f"{a},{b},{v}\n" for (a, b), v in zip(codes, y, strict=True)))
    _, report = chrion.finetune(all_texts(), path)
    frame = pa.table({"a": codes[:, 0], "b": codes[:, 1], "y": y})
    assert replace(report, seconds=0.0) == replace(chrion.finetune(all_texts(), frame)[1], seconds=0.0)
    assert report.adopted


def test_an_interrupt_keeps_the_best_until_then() -> None:
    """Ctrl-C while trees are grown returns the model with tuned leaves, and the report says so."""
    pytest.importorskip("sklearn", reason="no scikit-learn in this environment")
    model, table = tree_model(binary(), "TreeEnsembleClassifier"), drifted(binary(), 1.0)

    def interrupt(_done: int, _total: int, name: str) -> None:
        if name == "new trees":
            raise KeyboardInterrupt

    _, report = chrion.finetune(model, table, progress=interrupt)
    assert (report.interrupted, report.adopted, report.trees) == (True, True, 0)
    assert report.ridge is not None


def test_an_interrupt_of_other_methods_keeps_the_decision() -> None:
    """Ctrl-C while other methods are measured returns the tuned model."""
    model, table = tree_model(binary(), "TreeEnsembleClassifier"), drifted(binary(), 1.0)

    def interrupt(_done: int, _total: int, name: str) -> None:
        if name == "other methods":
            raise KeyboardInterrupt

    tuned, report = chrion.finetune(model, table, progress=interrupt)
    assert (report.interrupted, report.adopted) == (True, True)
    expected, whole = chrion.finetune(model, table)
    assert tuned.SerializeToString() == expected.SerializeToString()
    assert set(report.compared) < set(whole.compared)


def interrupted_at(call: int, function: Callable[..., Any]) -> Mock:
    """Return a function that does the same, but for one call, in which the user interrupts it."""
    calls = count(1)

    def run(*given: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return function(*given)

    return Mock(side_effect=run)


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupt_of_the_comparison_keeps_the_tuned_model(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the comparison repeats it for the most recent rows, and the tuned model is returned."""
    model, table = tree_model(binary(), "TreeEnsembleClassifier"), drifted(binary(), 1.0)
    monkeypatch.setattr("chrion.pipelines.guard.compare", interrupted_at(at, compare))
    tuned, report = chrion.finetune(model, table)
    assert (report.interrupted, report.adopted) == (True, True)
    monkeypatch.undo()
    assert tuned.SerializeToString() == chrion.finetune(model, table)[0].SerializeToString()


def test_levels_that_vary_with_time_are_not_taken_for_a_property_of_the_rows() -> None:
    """Leaves that are tuned to rows with good and bad days, more of them bad, keep the original's mean probability."""
    made = binary()
    x, rng = rows_of(rows=6000), np.random.default_rng(5)
    weights = made.entry_weights + 0.8 * rng.standard_normal(made.leaf_count)
    day = np.repeat(np.tile([1.4, 1.4, -1.0], 20), 100)
    y = (rng.random(6000) < 1 / (1 + np.exp(-weights[made.leaves_of(x)].sum(axis=1) - day))).astype(np.int64)
    model = tree_model(made, "TreeEnsembleClassifier")
    tuned, report = chrion.finetune(model, pa.table({**dict(zip(NAMES, x.T, strict=True)), "y": y}))
    assert (report.adopted, report.trees) == (True, 0)
    before, after = (run(m, {"x": x})[1][:, 1].mean() for m in (model, tuned))
    assert after - before < (y.mean() - before) / 2


def test_earlier_times_make_the_difference_more_certain() -> None:
    """The tuning is repeated at earlier times, unless the held-out rows are given; so its interval is narrower."""
    model, table = tree_model(binary(), "TreeEnsembleClassifier"), drifted(binary(), 0.5)
    recent = chrion.finetune(model, table.slice(0, 2400), validation=table.slice(2400))[1]
    repeated = chrion.finetune(model, table)[1]
    assert repeated.rows == recent.rows
    assert repeated.loss.high - repeated.loss.low < 0.8 * (recent.loss.high - recent.loss.low)


@pytest.mark.parametrize("fits", [3, 5])
def test_an_interrupt_between_ridges_keeps_the_best_of_them(fits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a fit returns the leaves of the fits before, which are better than the original, too."""
    fit = interrupted_at(fits, fit_leaves)
    monkeypatch.setattr("chrion.pipelines.finetuning.fit_leaves", fit)
    _, report = chrion.finetune(tree_model(binary(), "TreeEnsembleClassifier"), drifted(binary(), 1.0))
    assert (report.interrupted, report.adopted, fit.call_count) == (True, True, fits)
    assert report.ridge == [10_000, 3000, 1000, 300][fits - 2]


@pytest.mark.parametrize("kind", ["binary", "numbers", "softmax"])
def test_new_trees_are_appended_where_they_are_better(kind: str) -> None:
    """A feature that no tree splits on begins to matter: at most a tenth of new trees, proven by the held-out rows."""
    pytest.importorskip("sklearn", reason="no scikit-learn in this environment")
    made, x, rng = binary(), rows_of(2, 6000), np.random.default_rng(2)
    made = joined(made, [replace(made, entry_weights=-made.entry_weights)] * 1)
    name = "TreeEnsembleClassifier"
    if kind != "binary":
        made = ensemble("TreeEnsembleRegressor")
        made = joined(made, [made, made])
        name = "TreeEnsembleRegressor"
    if kind == "softmax":
        name, kinds = "TreeEnsembleClassifier", {"targets": 3, "labels": (0, 1, 2), "transform": "SOFTMAX"}
        made = replace(made, entry_leaves=np.arange(made.leaf_count), entry_targets=made.leaf_trees % 3, **kinds)
    made = replace(made, features=made.features % 4)
    signal = 3 * np.sign(x[:, 4])
    if kind == "numbers":
        y = made.entry_weights[made.leaves_of(x)].sum(axis=1) + signal + 0.1 * rng.standard_normal(len(x))
    elif kind == "binary":
        y = (rng.random(len(x)) < 1 / (1 + np.exp(-signal))).astype(int)
    else:
        y = np.where(signal > 0, rng.integers(0, 2, len(x)), rng.integers(1, 3, len(x)))
    table = pa.table({**dict(zip(NAMES, x.T, strict=True)), "y": y})
    tuned, report = chrion.finetune(tree_model(made, name), table)
    assert report.adopted
    assert 0 < report.trees <= made.trees / 10
    after = read_ensemble(tuned.graph.node[0])
    assert after.trees == made.trees + report.trees
    assert 4 in after.features
    assert report.to_json()["trees"] == report.trees


@pytest.mark.parametrize("rows", [ROWS, 1920])
def test_columns_without_values_gain_no_splits(rows: int) -> None:
    """A sensor that fails, in all rows or in those to fit, does not keep trees from growing on other features."""
    pytest.importorskip("sklearn", reason="no scikit-learn in this environment")
    made = replace(binary(), features=binary().features % 3)
    x, rng = rows_of(), np.random.default_rng(0)
    x[:rows, 3] = np.nan
    y = (rng.random(ROWS) < 1 / (1 + np.exp(-3 * np.sign(x[:, 4])))).astype(int)
    table = pa.table({**dict(zip(NAMES, x.T, strict=True)), "y": y})
    tuned, report = chrion.finetune(tree_model(made, "TreeEnsembleClassifier"), table)
    features = read_ensemble(tuned.graph.node[0]).features
    assert (report.adopted, report.trees > 0, 4 in features, 3 in features) == (True, True, True, False)


def two_ensembles() -> onnx.ModelProto:
    """Return a model with a second tree ensemble."""
    model = tree_model(binary(), "TreeEnsembleClassifier")
    node = model.graph.node.add()
    node.CopyFrom(model.graph.node[0])
    node.output[:] = ["other", "more"]
    node.name = "second"
    return model


def halved() -> onnx.ModelProto:
    """Return a model that changes the scores of its trees."""
    model = tree_model(ensemble("TreeEnsembleRegressor"), "TreeEnsembleRegressor")
    model.graph.node.append(helper.make_node("Tanh", ["scores"], ["y"]))
    model.graph.output[0].name = "y"
    return model


SMALL = {**{name: [0.0] for name in NAMES}, "y": [0]}


@pytest.mark.parametrize(
    ("model", "data", "kind", "about"),
    [
        (binary, SMALL, DataError, "1 rows are too few"),
        (binary, {name: [0.0] for name in NAMES}, DataError, "no column 'y'"),
        (binary, {**SMALL, "y": [7]}, DataError, "7 is none of the model's classes"),
        (binary, {**SMALL, "y": [None]}, DataError, "none of the model's classes"),
        (binary, {**SMALL, "more": [0.0]}, DataError, "6 columns beside 'y', but input 'x' has 5 features"),
        (binary, {**SMALL, "f0": ["text"]}, DataError, "column 'f0': expected tensor(float)"),
        (binary, "missing.parquet", DataError, "missing.parquet: cannot be read"),
        (binary, "rows.xlsx", DataError, "unknown format '.xlsx'"),
        (binary, 5, DataError, "data: cannot be read"),
        (lambda: binary(transform="PROBIT"), SMALL, ModelError, "has no loss for 2 classes"),
        (two_ensembles, SMALL, ModelError, "needs one tree ensemble, found 2"),
        (lambda: ensemble("TreeEnsembleRegressor", aggregate="MAX"), SMALL, ModelError, "has the aggregate MAX"),
        (lambda: b"no model", SMALL, ModelError, "not an ONNX model"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(
    model: Any, data: Any, kind: type[ChrionError], about: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says what is wrong with the model or with the data."""
    monkeypatch.chdir(tmp_path)
    made = model()
    if isinstance(made, TreeEnsemble):
        made = tree_model(made, "TreeEnsembleClassifier" if made.labels else "TreeEnsembleRegressor")
    if isinstance(data, dict):
        count = 1 if "too few" in about else 1000
        data = pa.table({name: values * count for name, values in data.items()})
    with pytest.raises(kind) as refusal:
        chrion.finetune(made, data)
    assert about in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_scores_that_are_changed_after_the_trees_are_refused() -> None:
    """A model with an activation after its trees would be fitted with the wrong loss."""
    table = pa.table({**dict(zip(NAMES, rows_of().T, strict=True)), "y": np.zeros(ROWS)})
    with pytest.raises(ModelError, match="what follows its trees changes their scores"):
        chrion.finetune(halved(), table)


def test_an_unknown_scope_is_refused() -> None:
    """The message has the values that are supported."""
    with pytest.raises(OptionError, match="scope: expected one of all, encoders, leaves, found 'thresholds'"):
        chrion.finetune(tree_model(binary(), "TreeEnsembleClassifier"), pa.table(SMALL), scope="thresholds")


@pytest.mark.parametrize("damage", ["cut", "empty", "text"])
def test_damaged_files_are_refused_in_one_line(damage: str, cli: Chrion, tmp_path: Path) -> None:
    """A truncated file, an empty one, and a text that is no Parquet file."""
    onnx.save(tree_model(binary(), "TreeEnsembleClassifier"), "pipeline.onnx")
    parquet.write_table(drifted(binary(), 1.0), "new.parquet")
    content = (tmp_path / "new.parquet").read_bytes()
    damaged = {"cut": content[: len(content) // 2], "empty": b"", "text": b"a,b\n1,2\n"}[damage]
    (tmp_path / "new.parquet").write_bytes(damaged)
    assert_refused(
        cli("finetune", "pipeline.onnx", "--data", "new.parquet", "-o", "better.onnx"), "new.parquet: cannot be read"
    )
