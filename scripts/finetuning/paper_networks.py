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
from onnxmltools import convert_lightgbm
from onnxmltools.convert.common.data_types import FloatTensorType

from chrion.graph.trees import TreeEnsemble
from chrion.pipelines.leaves import LOGISTIC, Loss
from chrion.pipelines.pipeline import Pipeline
from chrion.pipelines.soft import Softness
from chrion.pipelines.soft.features import Embedding, Features
from chrion.pipelines.soft.network import Network
from chrion.pipelines.soft.soft_trees import SoftTrees, soften
from chrion.pipelines.soft.training import Training, TrainingOptions
from finetuning.click_logs import Splits
from finetuning.encodings import Encoder
from finetuning.paper_pipelines import FACTORS, LEAVES

Array = np.ndarray[Any, Any]
_DROPOUT, _RATE, _COLD_FACTORS = 0.1, 1e-3, 0.01


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


class Machine(Network):
    """Soft trees and a factorisation machine of their leaves.

    The score is that of the trees, whose values are the machine's linear weights, and the sum over pairs of leaves.

    Args:
        trees: The trees.
        loss: What scores are fitted with.
        dropout: As for the network.
        factors: The factors of leaves, [trees, leaves, factors].
    """

    def __init__(self, trees: SoftTrees, loss: Loss, dropout: float, factors: Array) -> None:
        super().__init__(trees, loss, dropout)
        self._factors = factors.astype(np.float32)

    def raw(self, parameters: Mapping[str, Any], x: Any, key: Any = None) -> Any:
        """Return raw scores, [rows, 1]."""
        np_ = self._jax.numpy
        reached = self.reached(parameters, x, key)
        ones = (1 + reached) / 2
        factors = self._factors + parameters.get("factors", 0.0)
        sums = np_.einsum("tlf,tln->nf", factors, ones)
        own = np_.einsum("tl,tln->n", (factors**2).sum(axis=2), ones**2)
        return self.sums(parameters, reached) + ((sums**2).sum(axis=1) - own)[:, None] / 2


class Linear(Network):
    """A logistic regression of the features of soft trees.

    Args:
        trees: The trees, which have no part in the score.
        fitted: The regression, or another one of the same features.
    """

    def __init__(self, trees: SoftTrees, fitted: Any) -> None:
        imputer, scaler, regression = (step for _, step in fitted.steps)
        super().__init__(trees, LOGISTIC, _DROPOUT)
        self._means, self._scales = imputer.statistics_.astype(np.float32), scaler.scale_.astype(np.float32)
        self._weights, self._bias = regression.coef_.T.astype(np.float32), regression.intercept_.astype(np.float32)
        self.shapes = {"weights": self._weights.shape, "bias": self._bias.shape}

    def raw(self, parameters: Mapping[str, Any], x: Any, key: Any = None) -> Any:
        """Return raw scores, [rows, 1]."""
        np_ = self._jax.numpy
        scaled = self._drop(np_.where(np_.isnan(x), 0.0, x - self._means) / self._scales, key)
        weights = self._weights + parameters.get("weights", 0.0)
        return scaled @ weights + self._bias + parameters.get("bias", 0.0)


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
        pipeline = Pipeline(convert_lightgbm(booster, initial_types=declared, zipmap=False))
        for name, form in forms.items():
            yield name, self._predict(form, pipeline, booster, logistic, machine)

    def _predict(self, form: Form, pipeline: Pipeline, booster: Any, logistic: Any, machine: Any) -> Array:
        rng = np.random.default_rng(self._seed)
        train = self._x[: self._ends[0]]
        trees = soften(
            pipeline.ensemble, train, targets=pipeline.targets.tolist(), base=pipeline.base, softness=form.softness
        )
        trees = trees if form.warm else cold(trees, rng)
        network, shapes = Network(trees, LOGISTIC, _DROPOUT), trees.shapes(form.level or "L1")
        if form.pipe == 1:
            linear = Linear(trees, logistic)
            network, shapes = linear, linear.shapes
        if form.pipe == 3:
            factors = _COLD_FACTORS * rng.standard_normal((*trees.offsets.shape, FACTORS))
            if form.warm:
                places = leaf_places(booster.predict(train, pred_leaf=True), pipeline.ensemble, train)
                trees, factors = with_machine(trees, machine.weights, places)
            network, shapes = Machine(trees, LOGISTIC, _DROPOUT, factors), {**shapes, "factors": factors.shape}
        features = Features(self._x, self._tables(form, rng))
        parameters: dict[str, Array] = {}
        if form.level:
            data = features, self._y
            training = Training(network, shapes, data, self._options, self._seed)
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


def with_machine(trees: SoftTrees, weights: Mapping[str, Array], places: Array) -> tuple[SoftTrees, Array]:
    """Return soft trees with the linear weights of a factorisation machine as values, and its factors by leaf.

    Args:
        trees: The trees.
        weights: The weights of the machine by name; see :class:`FactorisationMachine`.
        places: The places of the leaves that the machine reads; see :func:`leaf_places`.
    """
    own, leaves = np.nonzero(places >= 0)
    at, features = (own, places[own, leaves]), own * LEAVES + leaves
    values = np.zeros_like(trees.values)
    values[*at, 0] = weights["linear"][features] / 2
    factors = np.zeros((*trees.offsets.shape, weights["factors"].shape[1]), np.float32)
    factors[at] = weights["factors"][features]
    unit = float(np.sqrt(np.mean(values[at] ** 2))) or 1.0
    return replace(trees, values=values, bias=weights["bias"] + values.sum(axis=(0, 1)), unit=unit), factors


def cold(trees: SoftTrees, rng: np.random.Generator) -> SoftTrees:
    """Return trees of the same shape with random thresholds and values; features and paths stay."""
    thresholds = trees.thresholds.copy()
    for feature in np.unique(trees.features):
        own = trees.features == feature
        thresholds[own] = rng.permutation(thresholds[own])
    values = np.where(trees.entries, trees.unit * rng.standard_normal(trees.values.shape), 0).astype(np.float32)
    return replace(trees, thresholds=thresholds, values=values, bias=values.sum(axis=(0, 1)))
