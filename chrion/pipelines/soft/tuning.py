"""A pipeline tuned in its soft form, from the trees that tuned leaves make.

It is trained on the rows to fit; the rows to choose with say after how many epochs to stop. Then it is trained for as
many epochs on both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from chrion.common.version import __version__
from chrion.graph.reading import serialise
from chrion.graph.rewrite import RewriteError
from chrion.graph.trees import TreeEnsemble
from chrion.pipelines.guard import are_same
from chrion.pipelines.leaves import SQUARED
from chrion.pipelines.pipeline import Pipeline
from chrion.pipelines.rows import Rows
from chrion.pipelines.soft.arithmetic import ArithmeticNetwork
from chrion.pipelines.soft.embeddings import embedded
from chrion.pipelines.soft.export import with_embeddings, with_soft_trees
from chrion.pipelines.soft.features import Features
from chrion.pipelines.soft.network import Network, ScoreNetwork
from chrion.pipelines.soft.soft_trees import Softness, SoftTrees, soften
from chrion.pipelines.soft.training import Checkpoint, Trained, Training, TrainingOptions
from chrion.pipelines.tail import Tail, arithmetic_refusals

Array = np.ndarray[Any, Any]
#: The rows that a network is compared with its pipeline on.
_CHECKED = 256


@dataclass(frozen=True, slots=True)
class SoftOptions:
    """What is tuned of the soft form, and how."""

    level: str = "L2"
    #: ``all``, tables of categories only (``encoders``), or trees only (``leaves``).
    scope: str = "all"
    softness: Softness = field(default_factory=Softness)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    seed: int = 0
    #: Where states are kept; None to keep none.
    checkpoint: Path | None = None


@dataclass(frozen=True, eq=False)
class Start:
    """A pipeline to begin with: its model with tables of encoders, and the weights of leaves if they were fitted."""

    model: onnx.ModelProto
    weights: Array | None = None


@dataclass(frozen=True, eq=False)
class SoftPipeline:
    """A tuned pipeline in its soft form."""

    model: onnx.ModelProto
    pipeline: Pipeline
    #: The trees as a network; None if there are none.
    trees: SoftTrees | None
    network: ScoreNetwork
    features: Features
    parameters: Mapping[str, Array]
    #: See :class:`chrion.pipelines.soft.training.Trained`.
    epochs: int = 0
    curve: tuple[tuple[float, float], ...] = ()
    interrupted: bool = False

    def raw(self, rows: slice) -> Array:
        """Return the raw scores of rows, [rows, targets]."""
        return np.asarray(self.network.scores(self.parameters, self.features, rows), np.float64)

    def predict(self, raw: Array) -> Array:
        """Return probabilities [rows, classes], or numbers [rows]."""
        return np.asarray(self.network.probabilities(raw), np.float64)

    def exported(self, constants: Array) -> onnx.ModelProto:
        """Return the model, with constants added to the raw scores of its trees."""
        model, parameters, loss = self.model, self.parameters, self.pipeline.loss
        if isinstance(self.network, ArithmeticNetwork) and self.pipeline.tail:
            weights = {name: np.asarray(own) for name, own in self.network.weights(parameters).items()}
            model, loss = self.pipeline.tail.with_weights(model, weights), SQUARED
        elif self.trees:
            bias = parameters.get("bias", np.zeros(len(constants))) + constants / self.trees.unit
            parameters = {**parameters, "bias": bias.astype(np.float32)}
        embeddings = self.features.embeddings
        if self.trees:
            return with_soft_trees(model, self.trees, parameters, loss, embeddings)
        width = self.features.fixed.shape[1]
        return with_embeddings(model, self.pipeline.sources[0], width, embeddings) if embeddings else model

    def hardened(self, ensemble: TreeEnsemble) -> tuple[TreeEnsemble, Array] | None:
        """Return the trees with what was trained, and what to add to their scores; None if they cannot have it.

        Args:
            ensemble: The ensemble that was softened.
        """
        if not self.trees or self.features.embeddings or not set(self.parameters) <= set(self.trees.shapes("L2")):
            return None
        return self.trees.hardened(ensemble, self.parameters)

    def trained(self, found: Trained) -> SoftPipeline:
        """Return the pipeline with what a training found."""
        return replace(
            self,
            features=self.features.with_tables(found.tables),
            parameters=found.parameters,
            epochs=found.epoch,
            curve=found.curve,
            interrupted=found.interrupted,
        )


def tune_soft(
    rows: Rows, first: Start, whole: Start, options: SoftOptions, progress: Callable[[int, int], None]
) -> SoftPipeline:
    """Return the pipeline in its soft form, tuned.

    Args:
        rows: The rows.
        first: The pipeline whose leaves were fitted on the rows to fit.
        whole: The same on the rows to choose with, too.
        options: What is tuned, and how.
        progress: Is told the number of epochs done, and of all.

    Raises:
        RewriteError: The trees have no soft form.
        OptionError: A library is missing, or the file with the state is of another training.
    """
    soft = as_soft(rows, first, options)
    checkpoint = Checkpoint(options.checkpoint, _identity(rows, soft, options))
    training = _training(rows, soft, options)
    best = training.run(rows.fit, rows.chosen, checkpoint=checkpoint, name="first", progress=progress)
    soft = soft.trained(best)
    if best.interrupted or not best.epoch:
        return soft if best.interrupted else replace(as_soft(rows, whole, options), curve=best.curve)
    try:
        both = as_soft(rows, whole, options)
        found = _training(rows, both, options).run(
            rows.tuned, epochs=best.epoch, checkpoint=checkpoint, name="whole", progress=progress
        )
    except KeyboardInterrupt:  # between epochs, the training itself returns
        return replace(soft, interrupted=True)
    if found.interrupted:
        return replace(soft, interrupted=True)
    return replace(both.trained(found), curve=best.curve)


def as_soft(rows: Rows, start: Start, options: SoftOptions) -> SoftPipeline:
    """Return a pipeline in its soft form, as it is."""
    pipeline = rows.pipeline
    x = rows.features(start.model)
    features = Features(x)
    if options.scope != "leaves" and not (pipeline.tail and pipeline.tail.looks_up):
        features = embedded(rows, x, pipeline.feature_runner(start.model))
    trees = _softened(pipeline, x[rows.tuned], start, options.softness) if pipeline.has_trees else None
    dropout, unit = options.training.dropout, float(rows.y[rows.tuned].std()) or 1.0
    network: ScoreNetwork
    if pipeline.tail:
        with arithmetic_refusals():
            network = ArithmeticNetwork(pipeline.tail, trees, x[rows.tuned], pipeline.loss, unit, dropout)
    elif trees:
        network = Network(trees, pipeline.loss, dropout)
    soft = SoftPipeline(start.model, pipeline, trees, network, features, {})
    if pipeline.tail:
        _check(soft, pipeline.tail, rows, x)
    return soft


@arithmetic_refusals()
def _check(soft: SoftPipeline, tail: Tail, rows: Rows, x: Array) -> None:
    """Compare operators in JAX with onnxruntime on a few rows.

    Raises:
        RewriteError: They return other scores, unless trees before them do.
    """
    pipeline = soft.pipeline
    feeds = {name: values[:_CHECKED] for name, values in next(iter(rows.feeds())).items()}
    expected = pipeline.score_runner(soft.model)(feeds)
    found = soft.predict(soft.raw(slice(0, len(expected))))
    if soft.trees or are_same(found, expected):
        return
    ours, theirs = tail.values(np, {}, x[: len(expected)]), pipeline.tail_values(feeds)
    for node in tail.nodes:
        value = theirs[node.output[-1]]
        if not are_same(ours[node.output[-1]], value):
            raise RewriteError("has other results when it is differentiated", node)
    raise RewriteError("cannot be differentiated: a network of it has other scores")


def _softened(pipeline: Pipeline, x: Array, start: Start, softness: Softness) -> SoftTrees:
    ensemble = pipeline.ensemble
    if start.weights is not None:
        ensemble = replace(ensemble, entry_weights=start.weights.astype(ensemble.dtype))
    targets = pipeline.targets.tolist()
    return soften(ensemble, x, targets=targets, scale=pipeline.scale, base=pipeline.base, softness=softness)


def _training(rows: Rows, soft: SoftPipeline, options: SoftOptions) -> Training:
    shapes, tables = soft.network.shapes(options.level), soft.network.tables
    if options.scope != "all":
        shapes = {name: own for name, own in shapes.items() if (name in tables) == (options.scope == "encoders")}
    return Training(soft.network, shapes, (soft.features, rows.y), options.training, options.seed)


def _identity(rows: Rows, soft: SoftPipeline, options: SoftOptions) -> str:
    """Return a digest of what a training depends on."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(serialise(rows.pipeline.proto, rows.pipeline.name))
    digest.update(repr((__version__, rows.sizes, replace(options, checkpoint=None))).encode())
    for values in (rows.y, soft.features.fixed):
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()
