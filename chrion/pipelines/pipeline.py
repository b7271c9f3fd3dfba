"""A pipeline as an ONNX model: what makes its features, its tree ensemble, arithmetic operators, and its scores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from chrion.errors import DataError, ModelError
from chrion.graph.model import TensorInfo
from chrion.graph.ort_sessions import first_line
from chrion.graph.reading import read_model, serialise
from chrion.graph.rewrite import RewriteError, needed_nodes, refusals_of
from chrion.graph.trees import TreeEnsemble, is_tree_ensemble, read_ensemble, write_ensemble
from chrion.pipelines import leaves
from chrion.pipelines.leaves import Loss
from chrion.pipelines.table import BATCH_ROWS, TEXT, Feeder, Table
from chrion.pipelines.tail import MOVES, Kind, Source, Tail, find_tail, tail_after

Array = np.ndarray[Any, Any]
#: The inputs of a model by name.
Feeds = dict[str, Array]
#: The largest number of leaves: their numbers are passed as float32.
_MOST_LEAVES = 1 << 24
#: How far apart equal scores may be.
_TIE = 1e-6
#: The name of the value that holds the leaves.
_LEAVES = "chrion/leaves"


class Pipeline:
    """A model with one tree ensemble, or with arithmetic operators (:mod:`chrion.pipelines.tail`), or with both.

    Args:
        source: A file, its bytes, or a ModelProto.

    Attributes:
        proto: The model.
        has_trees: Whether there is an ensemble; else ``node``, ``ensemble``, ``targets`` and ``base`` are missing.
        node: The node of the ensemble.
        ensemble: The ensemble; each leaf has an entry for all targets of its tree, or each leaf has a target.
        tail: The operators that follow the features or the ensemble; None if the ensemble's scores are the results.
        sources: The value with the features, or several that they consist of, and
        place: the index of the first node after them.
        labels: The classes; None for numbers.
        loss: The loss that its scores are fitted with.
        targets: The targets that leaves have weights for, in the order of raw scores; all of them before a tail.
        base: Raw scores without any tree.
        inputs: The inputs of the model.

    Raises:
        ModelError: The model cannot be read or run, or its trees cannot be fine-tuned; the message says why.
    """

    def __init__(self, source: str | Path | bytes | onnx.ModelProto) -> None:
        self.proto, _ = read_model(source)
        self.name = str(source) if isinstance(source, str | Path) else self.proto.graph.name or "model"
        if any(t.data_location == onnx.TensorProto.EXTERNAL for t in self.proto.graph.initializer):
            raise ModelError(f"{self.name}: fine-tuning needs a model in one file, but it has external weights")
        nodes = self.proto.graph.node
        found = [at for at, node in enumerate(nodes) if is_tree_ensemble(node)]
        if len(found) > 1:
            raise ModelError(f"{self.name}: fine-tuning needs one tree ensemble, found {len(found)}")
        self.session = _open(self.proto, self.name)
        self.inputs = [TensorInfo(i.name, i.type, tuple(i.shape)) for i in self.session.get_inputs()]
        #: The columns of the first table, in whose order a single input has its features.
        self._features: list[str] = []
        #: Whether float64 values were found in place of features.
        self._is_wide = False
        self.has_trees = bool(found)
        self.tail: Tail | None = None
        self.place = found[0] if found else len(nodes)
        with refusals_of(self.name):
            if found:
                self.node = nodes[self.place]
                self.sources = [self.node.input[0]]
                self._read_trees()
            else:
                self.tail = self._found_tail()
                self.sources = [own.name for own in self.tail.sources]
                self.place = 1 + max(
                    (at for at, own in enumerate(nodes) if not set(own.output).isdisjoint(self.sources)), default=-1
                )
        if self.tail:
            self.labels = self.tail.labels
            self.loss = leaves.SQUARED if self.labels is None else leaves.SOFTMAX

    def _read_trees(self) -> None:
        """Read the ensemble, and what follows it.

        Raises:
            RewriteError: It cannot be fine-tuned.
        """
        ensemble = _with_one_score(read_ensemble(self.node, self._dtype()))
        if ensemble.aggregate not in {"SUM", "AVERAGE"}:
            raise RewriteError(f"has the aggregate {ensemble.aggregate}, which leaves cannot be fitted for", self.node)
        try:
            tail = tail_after(self.proto, [Source(self.node.output[0])]) if ensemble.labels is None else None
        except RewriteError:
            if ensemble.targets > 1:
                raise
            tail = None
        if tail and not MOVES.issuperset(node.op_type for node in tail.nodes):
            self.tail = tail
        self.ensemble = ensemble if self.tail and ensemble.has_leaf_targets else _completed(ensemble)
        self.targets = np.arange(ensemble.targets) if self.tail else np.unique(self.ensemble.entry_targets)
        self.base = _base(self.ensemble, self.targets)
        if not self.tail:
            self.labels = self.ensemble.labels
            self.loss = _loss(self.ensemble, self.node)

    def _found_tail(self) -> Tail:
        try:
            return find_tail(self.proto, self._kind_of)
        except RewriteError:
            if self._is_wide:
                raise RewriteError(
                    "computes scores of float64 features", hint="fine-tuning needs float32; convert the model"
                ) from None
            raise

    def _kind_of(self, name: str) -> Kind:
        given = {info.name: info for info in self.inputs}
        found = given.get(name) or _open(self._until_trees([name]), self.name).get_outputs()[0]
        self._is_wide |= found.type == "tensor(double)"
        return found.type, found.shape

    def texts(self, columns: Sequence[str], target: str) -> list[str]:
        """Return the columns of a table that are texts: inputs, and the target if the classes are texts."""
        labels = self.labels
        own = [info.name for info in self.inputs if info.type == TEXT]
        if len(self.inputs) == 1 and own and own[0] not in columns:  # a single input of all features
            own = [name for name in columns if name != target]
        return [*own, *([target] if labels and isinstance(labels[0], str) else [])]

    def _dtype(self) -> np.dtype[Any] | None:
        """Return the type that onnxruntime compares in, if it is not that of the attributes."""
        source = self.node.input[0]
        given = {info.name: info.type for info in self.inputs}
        kind = given.get(source) or _open(self._until_trees([source]), self.name).get_outputs()[0].type
        return np.dtype(np.float64) if kind == "tensor(double)" else None

    @property
    def scale(self) -> float:
        """What the sums over trees are multiplied with."""
        return 1 / self.ensemble.trees if self.ensemble.aggregate == "AVERAGE" else 1.0

    @property
    def classes(self) -> int:
        """The number of classes; 0 of a regressor."""
        return len(self.labels or ())

    def encode(self, values: Array, where: str) -> Array:
        """Return the class of each value of the target, or the number.

        Raises:
            DataError: A value is missing, or it is none of the classes or no number.
        """
        labels = self.labels
        if labels is None:
            try:
                numbers = np.asarray(values, np.float64)
            except (TypeError, ValueError) as error:
                raise DataError(f"{where}: expected numbers, found {values.dtype}") from error
            if not np.isfinite(numbers).all():
                raise DataError(f"{where}: a value is missing or not finite")
            return numbers
        numbers_of = {label: at for at, label in enumerate(labels)}
        texts = isinstance(labels[0], str)
        found = [numbers_of.get(str(value) if texts else value, -1) for value in values.tolist()]
        if -1 in found:
            odd = values.tolist()[found.index(-1)]
            raise DataError(
                f"{where}: {odd!r} is none of the model's classes", hint=f"they are {', '.join(map(repr, labels))}"
            )
        return np.array(found, np.float64)

    def leaf_runner(
        self, given: Collection[str] = (), ensemble: TreeEnsemble | None = None
    ) -> Callable[[Feeds], Array]:
        """Return a function that returns the entries that rows reach, [rows, columns]; see :attr:`columns`.

        Args:
            given: Values before the ensemble that are among the feeds instead of being computed.
            ensemble: The ensemble with other thresholds; its own ones if None.
        """
        trees, lookup = self._target_trees(), self._lookup()
        session = _open(self._leaf_model(given, ensemble or self.ensemble), self.name)

        def run(feeds: Feeds) -> Array:
            found = self.run(session, feeds)[0].astype(np.int64)
            return np.concatenate([row[found[:, own]] for row, own in zip(lookup, trees, strict=True)], axis=1)

        return run

    def feature_runner(
        self, model: onnx.ModelProto | None = None, given: Collection[str] = ()
    ) -> Callable[[Feeds], Array]:
        """Return a function that returns the features, [rows, features].

        Args:
            model: A model with other tables before the ensemble, in place of this one.
            given: As for :meth:`leaf_runner`.
        """
        run = self.value_runner(self.sources, model, given)
        if not self.tail or not self.tail.looks_up:
            return lambda feeds: run(feeds)[0]
        return lambda feeds: np.concatenate(
            [own.reshape(len(own), -1).astype(np.float32) for own in run(feeds)], axis=1
        )

    @property
    def columns(self) -> Sequence[slice]:
        """The columns of :meth:`leaf_runner` by target."""
        counts = [len(trees) for trees in self._target_trees()]
        return [slice(sum(counts[:at]), sum(counts[: at + 1])) for at in range(len(counts))]

    def _target_trees(self) -> list[Array]:
        """Return the trees that have weights for each target."""
        of_entries = self.ensemble.leaf_trees[self.ensemble.entry_leaves]
        return [np.unique(of_entries[self.ensemble.entry_targets == target]) for target in self.targets]

    def _lookup(self) -> Array:
        """Return the entry of each leaf by target, [targets, leaves]; -1 if there is none."""
        ensemble = self.ensemble
        lookup = np.full((len(self.targets), ensemble.leaf_count), -1, np.int32)
        place = np.searchsorted(self.targets, ensemble.entry_targets)
        lookup[place, ensemble.entry_leaves] = np.arange(len(ensemble.entry_leaves))
        return lookup

    def _leaf_model(self, given: Collection[str], ensemble: TreeEnsemble) -> onnx.ModelProto:
        """Return the model with an ensemble in place of its own that returns the number of the leaf in each tree."""
        numbered = replace(
            ensemble,
            entry_leaves=np.arange(ensemble.leaf_count),
            entry_targets=ensemble.leaf_trees,
            entry_weights=np.arange(ensemble.leaf_count).astype(ensemble.dtype),
            targets=ensemble.trees,
            base=ensemble.base[:0],
            aggregate="SUM",
            transform="NONE",
            labels=None,
        )
        kind = self.node.op_type if self.node.op_type == "TreeEnsemble" else "TreeEnsembleRegressor"
        like = onnx.NodeProto(op_type=kind, domain=self.node.domain, name="leaves", input=self.node.input[:1])
        like.output.append(_LEAVES)
        changed = self._until_trees([_LEAVES], given=given)
        changed.graph.node.append(write_ensemble(numbered, like))
        return changed

    def _until_trees(
        self, outputs: Iterable[str], model: onnx.ModelProto | None = None, given: Collection[str] = ()
    ) -> onnx.ModelProto:
        """Return what makes the features of a model, with other outputs, and with some values as inputs."""
        changed = onnx.ModelProto()
        changed.CopyFrom(model or self.proto)
        kept = [node for node in changed.graph.node[: self.place] if not set(node.output) & set(given)]
        del changed.graph.node[:]
        changed.graph.node.extend(kept)
        changed.graph.input.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in given)
        del changed.graph.output[:]
        for name in outputs:
            changed.graph.output.add().name = name
        return changed

    def value_runner(
        self, names: Sequence[str], model: onnx.ModelProto | None = None, given: Collection[str] = ()
    ) -> Callable[[Feeds], list[Array]]:
        """Return a function that returns values up to the features; see :meth:`feature_runner`."""
        fed = {*given, *(info.name for info in self.inputs)}
        inner = [name for name in names if name not in fed]
        session = _open(self._until_trees(inner, model, given), self.name) if inner else None

        def run(feeds: Feeds) -> list[Array]:
            found = feeds | (dict(zip(inner, self.run(session, feeds), strict=True)) if session else {})
            return [found[name] for name in names]

        return run

    def score_runner(self, model: onnx.ModelProto | None = None) -> Callable[[Feeds], Array]:
        """Return a function that returns the results of the model: [rows, classes], or [rows] of numbers.

        Args:
            model: A model in place of this one.
        """
        session = self.session if model is None else _open(model, self.name)
        return lambda feeds: self._as_scores(self.run(session, feeds))

    def tail_values(self, feeds: Feeds) -> dict[str, Array]:
        """Return what the operators after the features or the ensemble compute, by name."""
        changed, names = onnx.ModelProto(), [node.output[-1] for node in self.tail.nodes] if self.tail else []
        changed.CopyFrom(self.proto)
        del changed.graph.output[:]
        for name in names:
            changed.graph.output.add().name = name
        return dict(zip(names, self.run(_open(changed, self.name), feeds), strict=True))

    def label_runner(self, model: onnx.ModelProto | None = None) -> Callable[[Feeds], Array]:
        """Return a function that returns whether labels have the largest scores, [rows, outputs that may be labels].

        Args:
            model: A model in place of this one.
        """
        session = self.session if model is None else _open(model, self.name)
        numbers, own = {label: at for at, label in enumerate(self.labels or ())}, (model or self.proto).graph
        computed = [
            at
            for at, info in enumerate(session.get_outputs()[:-1])
            if numbers
            and info.type.startswith(("tensor(int", "tensor(uint", "tensor(bool", "tensor(string"))
            and not MOVES.issuperset(node.op_type for node in needed_nodes(own.node, [info.name]))
        ]

        def run(feeds: Feeds) -> Array:
            outputs = self.run(session, feeds)
            scores = self._as_scores(outputs)
            found = np.zeros((len(scores), len(computed)), bool)
            for column, at in enumerate(computed):
                if outputs[at].size == len(scores):
                    classes = np.array([numbers.get(label, -1) for label in outputs[at].ravel().tolist()])
                    reached = scores[np.arange(len(scores)), classes] >= scores.max(axis=1) - _TIE
                    found[:, column] = reached & (classes >= 0)
            return found

        return run

    def _as_scores(self, outputs: Sequence[Any]) -> Array:
        last = outputs[-1]
        if isinstance(last, list):  # a sequence of maps from classes to probabilities
            last = np.array([[row[label] for label in self.labels or ()] for row in last])
        scores = np.asarray(last, np.float64)
        if self.classes == 2 and scores.size == len(scores):  # the probability of the second class
            return np.stack([1 - scores.ravel(), scores.ravel()], axis=1)
        return scores.reshape(len(scores), -1) if self.classes else scores.reshape(-1)

    def with_ensemble(self, model: onnx.ModelProto, ensemble: TreeEnsemble) -> onnx.ModelProto:
        """Return a model with another ensemble in place of its own."""
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        node = changed.graph.node[self.place]
        node.CopyFrom(write_ensemble(ensemble, node))
        return changed

    def with_constants(self, ensemble: TreeEnsemble, constants: Array) -> TreeEnsemble:
        """Return an ensemble that adds a constant to the raw score of each target; one tree has it in all leaves."""
        weights = ensemble.entry_weights.astype(np.float64)
        of_tree = ensemble.leaf_trees[ensemble.entry_leaves]
        for target, value in zip(self.targets, constants, strict=True):
            own = ensemble.entry_targets == target
            weights[own & (of_tree == of_tree[own].min())] += value / self.scale
        return replace(ensemble, entry_weights=weights.astype(ensemble.dtype))

    def feeds(self, table: Table, target: str) -> Iterator[Feeds]:
        """Yield the inputs of the model for some rows at a time."""
        feeder = Feeder(self.inputs, table, target, self._features)
        self._features = self._features or feeder.columns
        for batch in table.batches(feeder.columns, BATCH_ROWS):
            yield feeder.feeds(batch)

    def run(self, session: ort.InferenceSession, feeds: Feeds) -> list[Any]:
        """Return the outputs of a session for feeds, which may have more than its inputs."""
        used = {info.name for info in session.get_inputs()}
        try:
            return list(session.run(None, {name: values for name, values in feeds.items() if name in used}))
        except Exception as error:
            raise DataError(f"{self.name}: it does not run on the data: {first_line(error)}") from error


def _open(model: onnx.ModelProto, where: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4  # exporters declare shapes of outputs for one row
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # the calls are few and long
    try:
        return ort.InferenceSession(serialise(model, where), options, providers=["CPUExecutionProvider"])
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{where}: onnxruntime refuses it: {first_line(error)}") from error


def _with_one_score(ensemble: TreeEnsemble) -> TreeEnsemble:
    """Return a classifier whose two classes have opposite scores, as CatBoost's, with those of the second class alone.

    The probabilities are the same: the logistic function of the one is 1 less that of the other.
    """
    scored = len(np.unique(ensemble.entry_targets))
    of_both = ensemble.labels is not None and ensemble.targets == scored == 2 and ensemble.transform == "LOGISTIC"
    if not of_both or ensemble.base.any() or not (ensemble.leaf_weights[:, 0] == -ensemble.leaf_weights[:, 1]).all():
        return ensemble
    kept = ensemble.entry_targets == 1
    return replace(
        ensemble,
        entry_leaves=ensemble.entry_leaves[kept],
        entry_targets=np.zeros(kept.sum(), ensemble.entry_targets.dtype),
        entry_weights=ensemble.entry_weights[kept],
    )


def _completed(ensemble: TreeEnsemble) -> TreeEnsemble:
    """Return the ensemble with an entry of each leaf for all targets that its tree has entries for."""
    if ensemble.leaf_count > _MOST_LEAVES:
        raise RewriteError("its trees have too many leaves to be fine-tuned")
    wanted = np.zeros((ensemble.trees, ensemble.targets), bool)
    wanted[ensemble.leaf_trees[ensemble.entry_leaves], ensemble.entry_targets] = True
    leaves_of, targets = np.nonzero(wanted[ensemble.leaf_trees])
    return replace(
        ensemble,
        entry_leaves=leaves_of,
        entry_targets=targets,
        entry_weights=ensemble.leaf_weights[leaves_of, targets],
    )


def _loss(ensemble: TreeEnsemble, node: onnx.NodeProto) -> Loss:
    """Return the loss for the scores of an ensemble.

    Raises:
        RewriteError: There is none.
    """
    scored = len(np.unique(ensemble.entry_targets))
    if ensemble.labels is None:
        if ensemble.targets > 1:
            raise RewriteError("has several targets, which fine-tuning does not support", node)
        return leaves.SQUARED
    two, positive = ensemble.targets == 2, bool((ensemble.entry_weights >= 0).all())
    if two and scored == 1 and len(ensemble.base) < 2:
        if ensemble.transform == "LOGISTIC":
            return leaves.LOGISTIC
        if ensemble.transform == "NONE" and positive:
            return leaves.PROBABILITY
    elif scored == ensemble.targets > 2 and ensemble.transform == "SOFTMAX":
        return leaves.SOFTMAX
    elif scored == ensemble.targets > 1 and ensemble.transform == "NONE" and positive:
        return leaves.BRIER
    raise RewriteError(f"has no loss for {ensemble.targets} classes and the transform {ensemble.transform}", node)


def _base(ensemble: TreeEnsemble, targets: Array) -> Array:
    """Return the raw scores without any tree, by target; onnxruntime adds a single base value to class 0 alone."""
    base = np.zeros(ensemble.targets)
    base[: len(ensemble.base)] = ensemble.base
    return base[targets]
