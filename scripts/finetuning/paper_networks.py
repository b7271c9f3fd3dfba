"""The pipelines of Yu (2022) as differentiable networks: the rows "W.T." of table 5.3, and tables 5.4 to 5.6.

The factorisation machine of Pipe3 reads how far leaves are reached, from 0 to 1 (section 5.4.1). Trees of Pipe2 and the
machine are trained together with the tables of encoders. The learning rate, which the text chooses from a grid for each
data set, is one here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnxmltools import convert_lightgbm
from onnxmltools.convert.common.data_types import FloatTensorType

from chrion.graph.trees import TreeEnsemble, write_ensemble
from chrion.pipelines.leaves import LOGISTIC
from chrion.pipelines.pipeline import Pipeline
from chrion.pipelines.soft import Softness
from chrion.pipelines.soft.arithmetic import ArithmeticNetwork
from chrion.pipelines.soft.features import Embedding, Features
from chrion.pipelines.soft.network import Network, ScoreNetwork
from chrion.pipelines.soft.soft_trees import SoftTrees, soften
from chrion.pipelines.soft.training import Training, TrainingOptions
from chrion.pipelines.translate import translate
from finetuning.click_logs import Splits
from finetuning.encodings import Encoder
from finetuning.paper_pipelines import LEAVES

Array = np.ndarray[Any, Any]
_DROPOUT, _RATE, _COLD_WEIGHTS = 0.1, 1e-3, 0.01
#: A factorisation machine of scores z, of which each is 1 or 0 (Rendle 2010, lemma 3.1).
_MACHINE = """
<ir_version: 8, opset_import: ["": 18, "ai.onnx.ml": 3]>
machine (float[N, M] x) => (float[N, 1] probability)
<float two = {2}, float half = {0.5}, int64[1] axes = {1}>
{
    first = MatMul(z, linear)
    sums = MatMul(z, factors)
    squares = Pow(sums, two)
    all = ReduceSum(squares, axes)
    ones = Pow(z, two)
    weights = Pow(factors, two)
    products = MatMul(ones, weights)
    own = ReduceSum(products, axes)
    twice = Sub(all, own)
    pairs = Mul(twice, half)
    both = Add(first, pairs)
    margin = Add(both, bias)
    probability = Sigmoid(margin)
}
"""

#: The form of the text.
PRINTED = Softness(1.0, 1.0, relative=False)


@dataclass(frozen=True, slots=True)
class Form:
    """What is tuned, and from where.

    Attributes:
        level: The level of the trees; empty to tune nothing.
        pipe: The pipeline: logistic regression, trees, or trees and a factorisation machine of their leaves.
        tables: Whether the tables of encoders are tuned (table 5.4).
        warm: Whether weights are those of the pipeline, or random (table 5.5).
        softness: The temperatures.
    """

    level: str = "L4"
    pipe: int = 2
    tables: bool = True
    warm: bool = True
    softness: Softness = PRINTED


NODES = Softness()
FORMS = {
    "W.T. Pipe1": Form(pipe=1),
    "W.T. Pipe2": Form(),
    "W.T. Pipe2, node temperatures": Form(softness=NODES),
    "Pipe2 softened, untuned": Form("", softness=NODES),
    "W.T. Pipe2, L1": Form("L1"),
    "W.T. Pipe2, L2": Form("L2"),
    "W.T. Pipe2, L3": Form("L3"),
    "W.T. Pipe2, trees alone": Form(tables=False),
    "W.T. Pipe2, cold": Form(warm=False),
    "W.T. Pipe3": Form(pipe=3),
    "W.T. Pipe3, node temperatures": Form(pipe=3, softness=NODES),
    "W.T. Pipe3, cold": Form(pipe=3, warm=False),
}


class Networks:
    """The pipelines on one preprocessing, as networks.

    Args:
        splits: The rows.
        encoder: The preprocessing.
        x: The features of the rows to train, to choose and to test with.
        y: Their classes.
        seed: The seed of training and of cold starts.
        epochs: The most epochs of a training.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - as documented
        self, splits: Splits, encoder: Encoder, x: Sequence[Array], y: Sequence[Array], seed: int, epochs: int
    ) -> None:
        self._x = np.concatenate(x)
        self._y = np.concatenate(y).astype(np.float32)
        self._codes = np.concatenate([encoder.codes(o) for o in (splits.train, splits.validation, splits.test)])
        self._ends = np.cumsum([len(own) for own in x]).tolist()
        self._vectors, self._numbers = encoder.vectors, splits.train.numbers.shape[1]
        self._seed, self._options = seed, TrainingOptions(rate=_RATE, epochs=epochs)

    def predicted(
        self, forms: Mapping[str, Form], booster: Any, logistic: Any = None, machine: Any = None
    ) -> Iterator[tuple[str, Array]]:
        """Yield the name of each form, and the probability of class 1 of the rows to test with.

        Args:
            forms: The forms by name.
            booster: The trees of LightGBM.
            logistic: The logistic regression, for Pipe1.
            machine: The :class:`FactorisationMachine` of the leaves of the trees, for Pipe3.
        """
        declared = [("x", FloatTensorType([None, self._x.shape[1]]))]
        trees = Pipeline(convert_lightgbm(booster, initial_types=declared, zipmap=False))
        for name, form in forms.items():
            pipeline = trees if form.pipe == 2 else Pipeline(translate(logistic)) if form.pipe == 1 else None
            yield name, self._predict(form, pipeline or self._machine(form, trees.ensemble, booster, machine))

    def _machine(self, form: Form, ensemble: TreeEnsemble, booster: Any, machine: Any) -> Pipeline:
        """Return the pipeline of trees and a factorisation machine of their leaves."""
        rng, train, weights = np.random.default_rng(self._seed), self._x[: self._ends[0]], machine.weights
        if not form.warm:
            weights = {name: _COLD_WEIGHTS * rng.standard_normal(own.shape) for name, own in weights.items()}
        return Pipeline(
            machine_model(ensemble, weights, leaf_places(booster.predict(train, pred_leaf=True), ensemble, train))
        )

    def _predict(self, form: Form, pipeline: Pipeline) -> Array:
        rng = np.random.default_rng(self._seed)
        train, trees = self._x[: self._ends[0]], None
        if pipeline.has_trees:
            targets, base = pipeline.targets.tolist(), pipeline.base
            trees = soften(pipeline.ensemble, train, targets=targets, base=base, softness=form.softness)
            trees = trees if form.warm else cold(trees, rng)
        network: ScoreNetwork
        if pipeline.tail:
            network = ArithmeticNetwork(pipeline.tail, trees, train, pipeline.loss, 1.0, _DROPOUT)
        elif trees:
            network = Network(trees, LOGISTIC, _DROPOUT)
        features = Features(self._x, self._tables(form, rng))
        parameters: dict[str, Array] = {}
        if form.level:
            data = features, self._y
            training = Training(network, network.shapes(form.level), data, self._options, self._seed)
            found = training.run(slice(0, self._ends[0]), slice(self._ends[0], self._ends[1]))
            parameters, features = dict(found.parameters), features.with_tables(found.tables)
        raw = network.scores(parameters, features, slice(self._ends[1], self._ends[2]))
        return np.asarray(network.probabilities(raw), np.float64)[:, 1]

    def _tables(self, form: Form, rng: np.random.Generator) -> list[Embedding]:
        """Return a table for each column of categories."""
        found, first = [], self._numbers
        for at, vectors in enumerate(self._vectors if form.tables else []):
            table = np.asarray(vectors if form.warm else rng.standard_normal(vectors.shape), np.float32)
            columns = np.arange(first, first + table.shape[1])
            first += table.shape[1]
            found.append(Embedding(f"c{at}", at, [], columns, table, self._codes[:, at]))
        return found


def leaf_places(reached: Array, ensemble: TreeEnsemble, x: Array) -> Array:
    """Return the place in its tree, as soft trees have it, of each leaf of LightGBM, [trees, leaves]; -1 if unknown.

    Args:
        reached: The leaves of LightGBM that rows reach, [rows, trees].
        ensemble: The same trees.
        x: The features of the rows.
    """
    places = np.full((ensemble.trees, LEAVES), -1)
    places[np.arange(ensemble.trees), reached.reshape(len(x), -1)] = ensemble.leaf_places[ensemble.leaves_of(x)]
    return places


def machine_model(ensemble: TreeEnsemble, weights: Mapping[str, Array], places: Array) -> onnx.ModelProto:
    """Return trees with a score for each leaf, and a factorisation machine of these scores, as a model.

    Args:
        ensemble: The trees.
        weights: The weights of the machine by name; see :class:`FactorisationMachine`.
        places: The places of the leaves that the machine reads; see :func:`leaf_places`.
    """
    count = ensemble.leaf_count
    own, leaves = np.nonzero(places >= 0)
    at, features = ensemble.leaf_table(np.arange(count))[own, places[own, leaves]], own * LEAVES + leaves
    linear, factors = np.zeros((count, 1)), np.zeros((count, weights["factors"].shape[1]))
    linear[at, 0], factors[at] = weights["linear"][features], weights["factors"][features]
    ones = replace(
        ensemble,
        entry_leaves=np.arange(count),
        entry_targets=np.arange(count),
        entry_weights=np.ones(count, np.float32),
        targets=count,
        base=np.zeros(0, np.float32),
        transform="NONE",
        labels=None,
    )
    model = onnx.parser.parse_model(_MACHINE)
    like = onnx.helper.make_node("TreeEnsembleRegressor", ["x"], ["z"], "trees", domain="ai.onnx.ml")
    model.graph.node.insert(0, write_ensemble(ones, like))
    for name, value in (("linear", linear), ("factors", factors), ("bias", weights["bias"])):
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    return model


def cold(trees: SoftTrees, rng: np.random.Generator) -> SoftTrees:
    """Return trees of the same shape with random thresholds and values; features and paths stay, and ones."""
    thresholds = trees.thresholds.copy()
    for feature in np.unique(trees.features):
        own = trees.features == feature
        thresholds[own] = rng.permutation(thresholds[own])
    if trees.leaf_of is not None:
        return replace(trees, thresholds=thresholds)
    values = np.where(trees.entries, trees.unit * rng.standard_normal(trees.values.shape), 0).astype(np.float32)
    return replace(trees, thresholds=thresholds, values=values, bias=values.sum(axis=(0, 1)))
