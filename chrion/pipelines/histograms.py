"""Converter of HistGradientBoosting, which skl2onnx cannot convert with current versions of protobuf.

Thresholds are rounded down to float32, so that float32 features take the same branches as in scikit-learn.

A split by categories sends a set of them to the left. ONNX has that in one of its operators for trees only, and not for
classifiers. So each set becomes a feature of its own, 0 for its members and 1 for other categories, which a table holds
by category; unseen and missing categories have a row too. Trees keep their size, and test whether the feature is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import helper

from chrion.errors import OptionError
from chrion.graph.trees import Rule, TreeEnsemble, write_ensemble
from chrion.pipelines.converter_nodes import NodeWriter, not_above

Array = np.ndarray[Any, Any]
#: The losses of a regressor by what their predictions are of raw scores.
_LINKS = {"squared_error": "", "absolute_error": "", "quantile": "", "poisson": "Exp", "gamma": "Exp"}


def is_histogram(part: Any) -> bool:
    """Return whether an estimator is a HistGradientBoosting one."""
    return type(part).__name__ in {"HistGradientBoostingClassifier", "HistGradientBoostingRegressor"}


def categories_of(model: Any) -> Mapping[int, Array]:
    """Return the categories of the features of a HistGradientBoosting estimator that have some, in order of codes."""
    if getattr(model, "is_categorical_", None) is None:
        return {}
    known = model._preprocessor.named_transformers_["encoder"].categories_  # noqa: SLF001 - it has no public access
    pairs = zip(np.flatnonzero(model.is_categorical_).tolist(), known, strict=True)
    return {feature: _present(categories) for feature, categories in pairs}


def convert_histograms(scope: Any, operator: Any, container: Any) -> None:
    """Convert a HistGradientBoosting estimator."""
    model, write = operator.raw_operator, NodeWriter(scope, container)
    columns = _Columns(write, operator.inputs, model.n_features_in_)
    splits = _Splits(model)
    ensemble = histogram_ensemble(model, splits, columns.numbers)
    features = [columns.features] if columns.features else []
    features += [columns.members(own) for own in splits.tables]
    if not features:  # trees without splits, of texts alone
        features = [columns.members(_Table(0, np.array([""]), np.zeros((2, 1), np.float32)))]
    source = write.add("Concat", features, axis=1) if len(features) > 1 else features[0]
    kind = "TreeEnsembleRegressor" if ensemble.labels is None else "TreeEnsembleClassifier"
    outputs = [output.full_name for output in operator.outputs]
    link = "" if ensemble.labels is not None else _LINKS[model.loss]
    scores = [scope.get_unique_variable_name("raw")] if link else outputs
    node = write_ensemble(ensemble, helper.make_node(kind, [source], ["y"], domain="ai.onnx.ml"))
    attributes: Mapping[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    name = scope.get_unique_operator_name(kind)
    container.add_node(kind, source, scores, op_domain="ai.onnx.ml", op_version=1, name=name, **attributes)
    if link:
        write.add(link, scores, outputs[0])


@dataclass(frozen=True, eq=False)
class _Table:
    """The sets of one feature: by category, and for any other one, what its features are."""

    feature: int
    categories: Array
    #: [categories + 1, sets]: 0 if it goes to the left, else 1; the last row is that of other categories.
    rows: Array


class _Splits:
    """The splits of a model by categories, equal ones once.

    Attributes:
        tables: The sets, by feature.
        place: The number of the set of each categorical node, in the order of nodes: sets are numbered table by table.
    """

    def __init__(self, model: Any) -> None:
        categories = categories_of(model)
        order = _order(model)
        trees = [tree for row in model._predictors for tree in row]  # noqa: SLF001 - it has no public access
        features, sets = [], []
        for tree in trees:
            own = tree.nodes[(tree.nodes["is_categorical"] != 0) & (tree.nodes["is_leaf"] == 0)]
            bits = np.ascontiguousarray(tree.raw_left_cat_bitsets)[own["bitset_idx"]] if len(own) else None
            if bits is None:
                continue
            members = np.unpackbits(bits.astype("<u4").view(np.uint8), axis=1, bitorder="little")
            features.append(order[own["feature_idx"]])
            sets.append(np.concatenate([members, own["missing_go_to_left"][:, None]], axis=1) == 0)
        self.tables: list[_Table] = []
        self.place = np.zeros(sum(map(len, features)), np.int64)
        if not features:
            return
        every, right = np.concatenate(features), np.concatenate(sets)
        first = 0
        for feature in np.unique(every).tolist():
            chosen = every == feature
            known = len(categories[feature])
            unique, which = np.unique(
                right[chosen][:, [*range(known), right.shape[1] - 1]], axis=0, return_inverse=True
            )
            self.tables.append(_Table(feature, categories[feature], unique.T.astype(np.float32)))
            self.place[chosen] = first + which.ravel()
            first += len(unique)


class _Columns:
    """The features of a model, which are in one or several inputs.

    Attributes:
        features: The value that holds the numbers, [rows, features]; empty if there are none.
        numbers: The place of each feature in it; -1 for texts.
    """

    def __init__(self, write: NodeWriter, inputs: Sequence[Any], features: int) -> None:
        self._write = write
        self._at: list[tuple[str, int, bool]] = []
        parts, places, width = [], [], 0
        for variable in inputs:
            texts = type(variable.type).__name__ == "StringTensorType"
            count = features if len(inputs) == 1 else 1
            value = variable.full_name if texts else write.floats(variable)
            self._at += [(value, at, texts) for at in range(count)]
            places += [-1] * count if texts else list(range(width, width + count))
            if not texts:
                parts.append(value)
                width += count
        self.numbers = np.array(places)
        self.features = write.add("Concat", parts, axis=1) if len(parts) > 1 else parts[0] if parts else ""

    def members(self, table: _Table) -> str:
        """Return the features of the sets of a table, [rows, sets]."""
        value, at, texts = self._at[table.feature]
        column = self._write.add("Gather", [value, np.array([at])], axis=1)
        keys = _keys(table, texts=texts)
        rows = list(range(len(table.categories)))
        row = self._write.add(
            "LabelEncoder", [column], domain="ai.onnx.ml", values_int64s=rows, default_int64=len(rows), **keys
        )
        found = self._write.add("Gather", [table.rows, row])
        return self._write.add("Squeeze", [found, np.array([1])])


def _keys(table: _Table, *, texts: bool) -> dict[str, Any]:
    if texts:
        return {"keys_strings": [str(category).encode() for category in table.categories.tolist()]}
    keys = table.categories.astype(np.float64).astype(np.float32)
    if len(np.unique(keys)) < len(keys):
        raise OptionError(f"feature {table.feature}: two of its categories are the same number in float32")
    return {"keys_floats": keys.tolist()}


def _present(categories: Array) -> Array:
    """Return categories without a missing one, which is the last."""
    missing = len(categories) and (categories[-1] is None or categories[-1] != categories[-1])
    return categories[:-1] if missing else categories


def _order(model: Any) -> Array:
    """Return the features in the order of the trees, in which those with categories precede."""
    categorical = getattr(model, "is_categorical_", None)
    if categorical is None:
        return np.arange(model.n_features_in_)
    return np.concatenate([np.flatnonzero(categorical), np.flatnonzero(~categorical)])


def histogram_ensemble(model: Any, splits: _Splits, numbers: Array) -> TreeEnsemble:
    """Return the trees of a fitted HistGradientBoosting estimator.

    Args:
        model: The estimator.
        splits: Its splits by categories.
        numbers: The place of each feature among the numbers, which the sets of categories follow.

    Raises:
        OptionError: It has a loss of one's own.
    """
    classes = getattr(model, "classes_", None)
    if classes is None and model.loss not in _LINKS:
        raise OptionError(f"{type(model).__name__}: the loss {model.loss!r} cannot be translated")
    trees = [(target, tree.nodes) for row in model._predictors for target, tree in enumerate(row)]  # noqa: SLF001 - it has no public access
    counts = [len(nodes) for _, nodes in trees]
    nodes = np.concatenate([own for _, own in trees])
    first = np.repeat(np.cumsum([0, *counts[:-1]]), counts)
    leaf = nodes["is_leaf"].astype(bool)
    #: The number of each node as a child.
    child = np.where(leaf, ~(np.cumsum(leaf) - 1), np.cumsum(~leaf) - 1)
    inner = ~leaf
    thresholds = not_above(nodes["num_threshold"][inner])
    features = numbers[_order(model)[nodes["feature_idx"][inner]]]
    by_set = nodes["is_categorical"][inner].astype(bool)
    thresholds[by_set] = 0.5
    features[by_set] = (numbers >= 0).sum() + splits.place
    several = classes is not None and len(classes) > 2
    labels = None if classes is None else tuple(classes.tolist())
    if labels is not None and not isinstance(labels[0], str):
        labels = tuple(int(label) for label in labels)
    return TreeEnsemble(
        roots=child[np.cumsum([0, *counts[:-1]])],
        features=features,
        rules=np.full(int(inner.sum()), Rule.LEQ, np.uint8),
        thresholds=thresholds,
        true=child[(first + nodes["left"])[inner]],
        false=child[(first + nodes["right"])[inner]],
        missing_true=nodes["missing_go_to_left"][inner].astype(bool) & ~by_set,
        members={},
        leaf_count=int(leaf.sum()),
        entry_leaves=np.arange(int(leaf.sum())),
        entry_targets=np.repeat([target for target, _ in trees], counts)[leaf],
        entry_weights=nodes["value"][leaf].astype(np.float32),
        targets=1 if labels is None else len(labels),
        base=np.ravel(model._baseline_prediction).astype(np.float32),  # noqa: SLF001 - it has no public access
        transform="NONE" if labels is None else "SOFTMAX" if several else "LOGISTIC",
        labels=labels,
    )


def ensemble_of_numbers(model: Any) -> TreeEnsemble:
    """Return the trees of a fitted HistGradientBoosting estimator all of whose features are numbers."""
    return histogram_ensemble(model, _Splits(model), np.arange(model.n_features_in_))
