"""Soft trees: against the paper's formulas, finite differences, onnxruntime, and the ensemble that they come from."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chrion.errors import OptionError
from chrion.graph.rewrite import RewriteError
from chrion.graph.trees import Rule, TreeEnsemble, write_ensemble
from chrion.pipelines import leaves
from chrion.pipelines.leaves import Loss
from chrion.pipelines.soft.export import with_soft_trees
from chrion.pipelines.soft.network import Network
from chrion.pipelines.soft.soft_trees import LEVELS, Softness, SoftTrees, soften
from property_tests import examples
from random_trees import FEATURES, random_ensemble, random_rows, run, tree_model

pytest.importorskip("jax", reason="no JAX in this environment")
pytest.importorskip("optax", reason="no optax in this environment")

CLASSIFIER = "TreeEnsembleClassifier"
#: The paper's form.
PRINTED = Softness(1.0, 1.0, relative=False)
KINDS: dict[str, tuple[str, Loss, dict[str, Any]]] = {
    "numbers": ("TreeEnsembleRegressor", leaves.SQUARED, {}),
    "version 5": ("TreeEnsemble", leaves.SQUARED, {}),
    "two classes": (CLASSIFIER, leaves.LOGISTIC, {"targets": 2, "labels": (0, 1), "transform": "LOGISTIC"}),
    "several": (CLASSIFIER, leaves.SOFTMAX, {"targets": 3, "labels": ("a", "b", "c"), "transform": "SOFTMAX"}),
    "forest": (CLASSIFIER, leaves.BRIER, {"targets": 3, "labels": (4, 5, 6)}),
    "forest of two": (CLASSIFIER, leaves.PROBABILITY, {"targets": 2, "labels": (4, 5)}),
}  # fmt: skip


def made(
    seed: int, kind: str, *, trees: int = 3, rules: tuple[Rule, ...] = (Rule.LEQ, Rule.LT, Rule.GT)
) -> TreeEnsemble:
    """Return a random ensemble: one target a leaf, or all of them in a forest."""
    _, loss, changes = KINDS[kind]
    rng = np.random.default_rng(seed)
    found = random_ensemble(random.Random(seed), "TreeEnsembleRegressor", trees=trees, depth=3, targets=1)
    several = changes.get("targets", 1) > 2
    count = found.leaf_count
    places = {
        "entry_leaves": np.arange(count),
        "entry_targets": found.leaf_trees % 3 if several else np.zeros(count, int),
    }
    weights = rng.standard_normal(count)
    if loss is leaves.PROBABILITY:
        weights = rng.random(count) / trees
    if loss is leaves.BRIER:
        places = {"entry_leaves": np.repeat(np.arange(count), 3), "entry_targets": np.tile(np.arange(3), count)}
        weights = rng.dirichlet(np.ones(3), count).ravel() / trees
    return replace(
        found,
        rules=rng.choice(np.array(rules, np.uint8), len(found.features)),
        thresholds=rng.standard_normal(len(found.features)).astype(np.float32),
        entry_weights=weights.astype(np.float32),
        **{"aggregate": "SUM", "transform": "NONE", "base": np.zeros(0, np.float32), "labels": None} | places | changes,
    )


def softened(ensemble: TreeEnsemble, softness: Softness | None = None, rows: int = 500) -> SoftTrees:
    """Return the soft form for normal features."""
    targets = np.unique(ensemble.entry_targets).tolist()
    x = np.random.default_rng(1).standard_normal((rows, FEATURES)).astype(np.float32)
    return soften(ensemble, x, targets=targets, softness=softness)


def parameters_of(trees: SoftTrees, level: str, seed: int, size: float = 0.3) -> dict[str, Any]:
    """Return random parameters."""
    rng = np.random.default_rng(seed)
    shapes = trees.shapes(level)
    return {name: (size * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def printed(ensemble: TreeEnsemble, x: Any) -> Any:
    """Return the scores of the paper's formulas, a leaf at a time; all rules are LEQ."""
    total = np.zeros(len(x))

    def walk(node: int, literals: list[Any]) -> None:
        if node < 0:
            leaf = np.tanh(sum(literals) - len(literals) + 1) if literals else np.ones(len(x))
            total[:] += ensemble.entry_weights[~node] / 2 * (1 + leaf)
            return
        decision = np.tanh(x[:, ensemble.features[node]].astype(np.float64) - ensemble.thresholds[node])
        walk(int(ensemble.true[node]), [*literals, -decision])
        walk(int(ensemble.false[node]), [*literals, decision])

    for root in ensemble.roots.tolist():
        walk(root, [])
    return total


@given(seed=st.integers(0, 2**32 - 1))
@examples(20)
def test_the_printed_form_is_that_of_the_paper(seed: int) -> None:
    """With temperature 1, scores are those of the formulas for decisions, conjunctions and trees."""
    ensemble = replace(made(seed, "numbers", rules=(Rule.LEQ,)), missing_true=np.zeros(1, bool))
    ensemble = replace(ensemble, missing_true=np.zeros(len(ensemble.features), bool))
    if not len(ensemble.features):
        return
    x = np.random.default_rng(seed).standard_normal((40, FEATURES)).astype(np.float32)
    network = Network(softened(ensemble, PRINTED), leaves.SQUARED)
    np.testing.assert_allclose(np.asarray(network.raw({}, x))[:, 0], printed(ensemble, x), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32 - 1))
@examples(10)
def test_cold_decisions_are_those_of_the_ensemble(kind: str, seed: int) -> None:
    """At low temperatures scores are onnxruntime's, for missing and infinite features, too."""
    ensemble = made(seed, kind)
    name, loss, _ = KINDS[kind]
    if not len(ensemble.features):
        return
    x = random_rows(random.Random(seed), 60)
    x[np.isin(x, ensemble.thresholds)] += 0.25  # a soft decision at a threshold is undecided
    network = Network(softened(ensemble, Softness(1e-5, 0.05, relative=False)), loss)
    found = np.asarray(network.probabilities(np.asarray(network.raw({}, x))))
    expected = run(tree_model(ensemble, name), {"x": x})[-1]
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-4)


def expected_width(ensemble: TreeEnsemble) -> int:
    """Return the number of scores of a row."""
    return ensemble.targets if ensemble.labels else 1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32 - 1))
@examples(5)
def test_the_exported_model_is_the_function(kind: str, level: str, seed: int) -> None:
    """ONNX's checker accepts it, and onnxruntime returns what JAX does, for missing values and equalities, too."""
    name, loss, _ = KINDS[kind]
    ensemble = made(seed, kind, rules=(Rule.LEQ, Rule.GTE, Rule.EQ))
    ensemble = replace(ensemble, missing_true=ensemble.missing_true & (ensemble.rules != Rule.EQ))
    if not len(ensemble.features):
        return
    trees = softened(ensemble)
    parameters = parameters_of(trees, level, seed)
    network = Network(trees, loss)
    x = random_rows(random.Random(seed), 50)
    model = with_soft_trees(tree_model(ensemble, name), trees, parameters, loss)
    for output in model.graph.output:  # the model of the test has no shapes
        output.type.tensor_type.shape.dim.add().dim_param = "rows"
    model.graph.output[-1].type.tensor_type.shape.dim.add().dim_value = expected_width(ensemble)
    onnx.checker.check_model(model, full_check=True)
    outputs = run(model, {"x": x})
    expected = np.asarray(network.probabilities(np.asarray(network.raw(parameters, x))))
    np.testing.assert_allclose(outputs[-1].reshape(expected.shape), expected, atol=2e-5)
    if len(outputs) > 1:
        labels = np.array(ensemble.labels)[outputs[-1].argmax(axis=1)]
        assert outputs[0].tolist() == labels.tolist()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["numbers", "two classes", "several", "forest"])
@given(seed=st.integers(0, 2**32 - 1))
@examples(5)
def test_gradients_are_those_of_finite_differences(kind: str, level: str, seed: int) -> None:
    """The derivative of the loss along a random direction is the difference quotient."""
    import jax  # noqa: PLC0415 - optional

    ensemble = made(seed, kind)
    if not len(ensemble.features):
        return
    rng, loss = np.random.default_rng(seed), KINDS[kind][1]
    trees = softened(ensemble, Softness(1.0, 1.0))
    network = Network(trees, loss)
    x = rng.standard_normal((30, FEATURES)).astype(np.float32)
    y = (rng.standard_normal(30) if loss is leaves.SQUARED else rng.integers(0, ensemble.targets, 30)).astype(
        np.float32
    )

    def value(parameters: Any) -> Any:
        return network.losses(network.raw(parameters, x), y).mean()

    at, along = parameters_of(trees, level, seed, 0.1), parameters_of(trees, level, seed + 1, 1.0)
    slopes = jax.grad(value)(at)
    step = 3e-3
    ends = [value({name: at[name] + sign * step * along[name] for name in at}) for sign in (1, -1)]
    slope = sum(float((np.asarray(slopes[name]) * along[name]).sum()) for name in at)
    assert slope == pytest.approx(float(ends[0] - ends[1]) / 2 / step, rel=0.03, abs=3e-3)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32 - 1))
@examples(10)
def test_untrained_trees_are_handed_back_unchanged(kind: str, seed: int) -> None:
    """The ensemble of zero parameters is the original one, byte for byte."""
    ensemble = made(seed, kind)
    if not len(ensemble.features):
        return
    trees = softened(ensemble)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in trees.shapes("L2").items()}
    found, constants = trees.hardened(ensemble, zeros)
    like = tree_model(ensemble, KINDS[kind][0]).graph.node[0]
    assert write_ensemble(found, like).SerializeToString() == like.SerializeToString()
    assert not constants.any()


@given(seed=st.integers(0, 2**32 - 1))
@examples(10)
def test_trained_trees_are_handed_back(seed: int) -> None:
    """The hard trees of L2 have the scores of cold soft trees with the same parameters."""
    ensemble = made(seed, "numbers")
    if not len(ensemble.features):
        return
    trees = softened(ensemble, Softness(1e-4, 0.05, relative=False))
    parameters = parameters_of(trees, "L2", seed, 300.0)
    parameters = {name: own / (1 if name == "shifts" else 1000) for name, own in parameters.items()}
    hard, constants = trees.hardened(ensemble, parameters)
    x = np.random.default_rng(seed).standard_normal((200, FEATURES)).astype(np.float32)
    found = hard.entry_weights[hard.leaves_of(x)].sum(axis=1) + constants[0]
    expected = np.asarray(Network(trees, leaves.SQUARED).raw(parameters, x))[:, 0]
    assert np.mean(np.abs(found - expected) < 1e-3) > 0.95  # the rest are rows at a threshold
    assert np.abs(hard.thresholds - ensemble.thresholds).max() > 1e-3


def test_temperatures_follow_the_scale_of_features() -> None:
    """Features in other units give the same soft scores; in the printed form they do not."""
    ensemble = replace(made(4, "numbers"), missing_true=np.zeros(1, bool))
    ensemble = replace(ensemble, missing_true=np.zeros(len(ensemble.features), bool))
    units = np.array([1e-3, 1, 1e3, 1e6, 10], np.float32)
    x = np.random.default_rng(2).standard_normal((400, FEATURES)).astype(np.float32)
    other = replace(ensemble, thresholds=(ensemble.thresholds * units[ensemble.features]).astype(np.float32))

    def scores(own: TreeEnsemble, rows: Any, softness: Softness) -> Any:
        return np.asarray(Network(soften(own, rows, targets=[0], softness=softness), leaves.SQUARED).raw({}, rows))

    first, second = scores(ensemble, x, Softness()), scores(other, x * units, Softness())
    np.testing.assert_allclose(second, first, atol=1e-3)
    assert np.abs(scores(other, x * units, PRINTED) - scores(ensemble, x, PRINTED)).max() > 0.1


def test_thresholds_that_are_equal_to_data_are_decided() -> None:
    """An encoded category, 0 or 1, with a threshold at 0 has the score of the hard tree."""
    ensemble = replace(
        made(0, "numbers"), roots=np.array([0]), features=np.array([0]), rules=np.array([Rule.LEQ], np.uint8),
        thresholds=np.zeros(1, np.float32), true=np.array([~0]), false=np.array([~1]), missing_true=np.zeros(1, bool),
        leaf_count=2, entry_leaves=np.arange(2), entry_targets=np.zeros(2, int),
        entry_weights=np.array([-1, 3], np.float32),
    )  # fmt: skip
    x = np.random.default_rng(0).integers(0, 2, (100, 1)).astype(np.float32)
    found = np.asarray(
        Network(soften(ensemble, x, targets=[0], softness=Softness(0.1, 0.2)), leaves.SQUARED).raw({}, x)
    )[:, 0]
    np.testing.assert_allclose(found, np.where(x[:, 0] > 0, 3, -1), atol=0.01)


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"members": {0: np.ones(1, np.float32)}}, "tests membership in sets"),
        ({"roots": np.array([~0]), "features": np.zeros(0, int), "rules": np.zeros(0, np.uint8), "leaf_count": 1,
          "thresholds": np.zeros(0, np.float32), "true": np.zeros(0, int), "false": np.zeros(0, int),
          "missing_true": np.zeros(0, bool), "entry_leaves": np.zeros(1, int), "entry_targets": np.zeros(1, int),
          "entry_weights": np.ones(1, np.float32)}, "has no comparisons"),
    ],
)  # fmt: skip
def test_trees_without_a_soft_form_are_refused(changes: dict[str, Any], about: str) -> None:
    """The message says what they have or lack."""
    with pytest.raises(RewriteError, match=about):
        softened(replace(made(1, "numbers"), **changes))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without JAX, the message has the command that installs it."""
    monkeypatch.setitem(__import__("sys").modules, "jax", None)
    with pytest.raises(OptionError, match=r"need the packages jax and optax.*chrion\[finetune\]"):
        Network(softened(made(1, "numbers")), leaves.SQUARED)
