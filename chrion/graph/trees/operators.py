"""Reading and writing of the operators of ``ai.onnx.ml`` that hold tree ensembles.

These are ``TreeEnsembleRegressor`` and ``TreeEnsembleClassifier`` (versions 1 to 4), and ``TreeEnsemble`` (version 5).
The former number nodes within a tree and mark leaves; the latter numbers inner nodes and leaves of all trees apart.

An ensemble that is malformed, or whose result ONNX leaves open, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from chrion.graph.rewrite import RewriteError
from chrion.graph.trees.checks import AGGREGATES, TRANSFORMS, check_ensemble, with_own_leaves
from chrion.graph.trees.ensemble import Array, Rule, TreeEnsemble
from chrion.graph.unsafe_trees import CLASSIFIER, ENSEMBLE, LEAF, NodeRows, checked_attributes

_FLOATS = {onnx.TensorProto.FLOAT: np.dtype(np.float32), onnx.TensorProto.DOUBLE: np.dtype(np.float64)}
#: The rules by the modes of regressors and classifiers.
_RULES = {f"BRANCH_{rule.name}": rule for rule in Rule}


def target_count(node: onnx.NodeProto) -> int:
    """Return the number of scores that a node returns for a row: targets of a regressor, classes of a classifier."""
    counts = {a.name: max(len(a.strings), len(a.ints), a.i) for a in node.attribute}
    if node.op_type == CLASSIFIER:
        return counts.get("classlabels_strings", 0) or counts.get("classlabels_int64s", 0)
    return counts.get("n_targets", 0)


def read_ensemble(node: onnx.NodeProto, dtype: np.dtype[Any] | None = None) -> TreeEnsemble:
    """Return the ensemble of a node.

    Args:
        node: A node for which :func:`chrion.graph.unsafe_trees.is_tree_ensemble` is true.
        dtype: The type in which onnxruntime compares: float64 for an input of float64. By default it is the type of the
            attributes.

    Raises:
        RewriteError: The ensemble is malformed, or it has what Chrion does not read. The message names the operator.
    """
    try:
        attributes = checked_attributes(node)
        ensemble = (_read_ensemble if node.op_type == ENSEMBLE else _read_classic)(node, attributes, dtype)
        check_ensemble(ensemble)
    except (TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise RewriteError(f"is malformed: {error}", node) from error
    return ensemble


def write_ensemble(ensemble: TreeEnsemble, like: onnx.NodeProto) -> onnx.NodeProto:
    """Return a node of an ensemble: of the type of another node, with its name, inputs and outputs.

    Numbers of nodes are new, and statistics of training (``nodes_hitrates``) are left out.

    Raises:
        RewriteError: The type of the node cannot express the ensemble.
    """
    if (like.op_type == CLASSIFIER) != (ensemble.labels is not None):
        raise RewriteError("only classifiers have labels", like)
    written = onnx.NodeProto(op_type=like.op_type, domain=like.domain, name=like.name, doc_string=like.doc_string)
    written.input.extend(like.input)
    written.output.extend(like.output)
    attributes = _ensemble_attributes(ensemble, like) if like.op_type == ENSEMBLE else _classic(ensemble, like)
    for name, value in attributes.items():
        if isinstance(value, np.ndarray):
            written.attribute.append(helper.make_attribute(name, numpy_helper.from_array(value, name)))
        elif not isinstance(value, Sequence) or len(value):  # an empty list has no type
            written.attribute.append(helper.make_attribute(name, value))
    return written


def _column(attributes: Mapping[str, Any], name: str) -> Array:
    """Return an attribute that is a list of integers."""
    return np.asarray(attributes.get(name, []), np.int64)


def _floats(attributes: Mapping[str, Any], name: str) -> Array:
    """Return an attribute that is a list of numbers, or the tensor of this name with ``_as_tensor``."""
    given = attributes.get(name)
    if given is None or not len(given):
        given = attributes.get(f"{name}_as_tensor", np.zeros(0, np.float32))
    array = np.asarray(given)
    if array.dtype not in _FLOATS.values():
        raise ValueError(f"{name} is {array.dtype}, expected float32 or float64")
    return array.ravel()


def _read_classic(node: onnx.NodeProto, attributes: Mapping[str, Any], dtype: np.dtype[Any] | None) -> TreeEnsemble:
    """Read a regressor or a classifier: inner nodes and leaves in one table, and each tree's root is its first row."""
    modes = attributes.get("nodes_modes", [])
    count = len(modes)
    if not count:
        raise ValueError("it has no nodes")
    trees, numbers = (_column(attributes, f"nodes_{name}") for name in ("treeids", "nodeids"))
    values, rows = _floats(attributes, "nodes_values"), NodeRows(trees, numbers)
    starts = np.flatnonzero(np.diff(trees, prepend=trees[0] - 1))
    if len(np.unique(trees)) < len(starts):
        raise ValueError("the nodes of a tree do not follow each other")
    leaf = np.array([mode == LEAF for mode in modes])

    def children(name: str) -> Array:
        """Return the row of the child of each row; a leaf is its own."""
        found = np.arange(count)
        found[~leaf] = rows.find(name, trees[~leaf], _column(attributes, name)[~leaf])
        return found

    missing = np.zeros(count, bool)
    given = _column(attributes, "nodes_missing_value_tracks_true")
    missing[: min(count, len(given))] = given[:count] == 1
    table = _Rows(
        modes=modes,
        features=_column(attributes, "nodes_featureids"),
        values=values,
        true=children("nodes_truenodeids"),
        false=children("nodes_falsenodeids"),
        missing=missing,
    )
    sets = table.join_chains(np.flatnonzero(~leaf))
    joined = np.zeros(count, bool)
    joined[list(table.joined)] = True
    inner = np.flatnonzero(~leaf & ~joined)
    #: The child that each row is: the number of an inner node, or of a leaf.
    child = np.where(leaf, ~(np.cumsum(leaf) - 1), np.cumsum(~leaf & ~joined) - 1)
    classifier = node.op_type == CLASSIFIER
    targets, labels = _targets(attributes, classifier=classifier)
    entries = _entries(attributes, "class" if classifier else "target", rows, child)
    base = _floats(attributes, "base_values")
    return TreeEnsemble(
        roots=child[starts],
        features=table.features[inner],
        rules=np.array([Rule.MEMBER if at in sets else _RULES[modes[at]] for at in inner.tolist()], np.uint8),
        thresholds=values[inner].astype(dtype or values.dtype),
        true=child[table.true[inner]],
        false=child[table.false[inner]],
        missing_true=missing[inner],
        members={int(child[at]): np.array(own, dtype or values.dtype) for at, own in sets.items()},
        leaf_count=int(leaf.sum()),
        entry_leaves=entries[0],
        entry_targets=entries[1],
        entry_weights=entries[2].astype(dtype or values.dtype),
        targets=targets,
        base=base.astype(dtype or values.dtype),
        aggregate="SUM" if classifier else str(attributes.get("aggregate_function", "SUM")),
        transform=str(attributes.get("post_transform", "NONE")),
        labels=labels,
        dtype=dtype or values.dtype,
    )


@dataclass(eq=False)
class _Rows:
    """The rows of a table of nodes."""

    modes: Sequence[str]
    features: Array
    values: Array
    #: The rows of the children.
    true: Array
    false: Array
    missing: Array
    #: The rows that others have taken in.
    joined: set[int] = field(default_factory=set)

    def join_chains(self, inner: Array) -> dict[int, list[float]]:
        """Join the comparisons with each value of a set, which lead to one child, and return the sets by row.

        Converters write the splits of LightGBM by categories as such chains, so that nodes have several parents.
        """
        counts = np.bincount(np.concatenate([self.true[inner], self.false[inner]]), minlength=len(self.true))
        sets: dict[int, list[float]] = {}
        if not len(inner) or counts.max() < 2:
            return sets
        for row in inner.tolist():
            own = sets.pop(row, [float(self.values[row])])
            while row not in self.joined and self._continues(row, after := int(self.false[row])) and counts[after] == 1:
                own += sets.pop(after, [float(self.values[after])])
                self.missing[row] |= self.missing[after]
                self.false[row] = self.false[after]
                self.joined.add(after)
            if len(own) > 1:
                sets[row] = own
        return sets

    def _continues(self, row: int, after: int) -> bool:
        """Return whether another row compares the same feature for equality, and leads to the same child."""
        equal = self.modes[row] == self.modes[after] == f"BRANCH_{Rule.EQ.name}"
        same = self.features[row] == self.features[after] and self.true[row] == self.true[after]
        return equal and row != after and bool(same)


def _targets(attributes: Mapping[str, Any], *, classifier: bool) -> tuple[int, tuple[Any, ...] | None]:
    """Return the number of targets, and the labels of a classifier."""
    if not classifier:
        return int(attributes.get("n_targets", 0)), None
    texts = attributes.get("classlabels_strings", [])
    labels = tuple(texts) if len(texts) else tuple(_column(attributes, "classlabels_int64s").tolist())
    return len(labels), labels


def _entries(attributes: Mapping[str, Any], kind: str, rows: NodeRows, child: Array) -> tuple[Array, Array, Array]:
    """Return the leaf, the target and the weight of each entry; entries of inner nodes have no effect."""
    ids, trees, numbers = (_column(attributes, f"{kind}_{name}") for name in ("ids", "treeids", "nodeids"))
    children = child[rows.find(f"{kind}_nodeids", trees, numbers)]
    kept = children < 0
    return ~children[kept], ids[kept], _floats(attributes, f"{kind}_weights")[kept]


def _read_ensemble(_: onnx.NodeProto, attributes: Mapping[str, Any], dtype: np.dtype[Any] | None) -> TreeEnsemble:
    """Read a ``TreeEnsemble``; a tree that is a single leaf is a node whose children are one leaf."""
    splits, weights = _floats(attributes, "nodes_splits"), _floats(attributes, "leaf_weights")
    count = len(splits)
    rules = np.asarray(attributes.get("nodes_modes", []), np.uint8).ravel()
    children, is_leaf = [], []
    for side in ("true", "false"):
        ids, leaves = (_column(attributes, f"nodes_{side}{kind}") for kind in ("nodeids", "leafs"))
        children.append(np.where(leaves, ~ids, ids))
        is_leaf.append(leaves != 0)
    roots = _column(attributes, "tree_roots")
    if not len(roots):
        raise ValueError("it has no trees")
    single = is_leaf[0] & is_leaf[1] & (children[0] == children[1])
    roots = np.where(single[roots], children[0][roots], roots)
    targets = _column(attributes, "leaf_targetids")
    missing = _column(attributes, "nodes_missing_value_tracks_true")
    kind = dtype or splits.dtype
    return with_own_leaves(
        TreeEnsemble(
            roots=roots,
            features=_column(attributes, "nodes_featureids"),
            rules=rules,
            thresholds=splits.astype(kind),
            true=children[0],
            false=children[1],
            missing_true=(missing == 1) if len(missing) == count else np.zeros(count, bool),
            members=_members(attributes, rules, kind),
            leaf_count=len(weights),
            entry_leaves=np.arange(len(weights)),
            entry_targets=targets,
            entry_weights=weights.astype(kind),
            targets=int(attributes.get("n_targets", 0)),
            base=np.zeros(0, kind),
            aggregate=_named(attributes, "aggregate_function", AGGREGATES, 1),
            transform=_named(attributes, "post_transform", TRANSFORMS, 0),
            dtype=kind,
        )
    )


def _named(attributes: Mapping[str, Any], name: str, names: Sequence[str], default: int) -> str:
    number = int(attributes.get(name, default))
    if not 0 <= number < len(names):
        raise ValueError(f"{name} is {number}, expected 0 to {len(names) - 1}")
    return names[number]


def _members(attributes: Mapping[str, Any], rules: Array, dtype: np.dtype[Any]) -> dict[int, Array]:
    """Return the sets of the nodes that test membership; each set ends with a NaN."""
    values = np.asarray(attributes.get("membership_values", np.zeros(0, dtype))).astype(dtype).ravel()
    sets = np.split(values, np.flatnonzero(np.isnan(values)))
    nodes = np.flatnonzero(rules == Rule.MEMBER).tolist()
    return {node: own[~np.isnan(own)] for node, own in zip(nodes, sets, strict=False)}


def _classic(ensemble: TreeEnsemble, like: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of a regressor or classifier: each tree's inner nodes, level by level, and its leaves."""
    nodes, node_trees, depths = _chained(ensemble)
    inner, leaves = len(nodes.features), ensemble.leaf_count
    depth = np.append(depths, np.full(leaves, ensemble.depth))
    trees = np.concatenate([node_trees, ensemble.leaf_trees])
    order = np.lexsort((depth, trees))
    first = np.searchsorted(trees[order], np.arange(ensemble.trees))
    numbers = np.empty(inner + leaves, np.int64)
    numbers[order] = np.arange(inner + leaves) - first[trees[order]]

    def column(values: Any, missing: Any) -> Any:
        """Return a value of each inner node, and another one for leaves, in the order of the table."""
        whole = np.concatenate([np.asarray(values), np.full(leaves, missing, np.asarray(values).dtype)])
        return whole[order]

    def position(children: Array) -> Array:
        return numbers[np.where(children < 0, inner + ~children, children)]

    modes = [f"BRANCH_{Rule(rule).name}" for rule in nodes.rules.tolist()] + [LEAF] * leaves
    kind = "class" if ensemble.labels is not None else "target"
    entries = np.lexsort((ensemble.entry_targets, numbers[inner + ensemble.entry_leaves]))
    entries = entries[np.argsort(ensemble.leaf_trees[ensemble.entry_leaves[entries]], kind="stable")]
    entry_leaves = ensemble.entry_leaves[entries]
    content: dict[str, Any] = {
        "post_transform": ensemble.transform,
        "nodes_treeids": trees[order].tolist(),
        "nodes_nodeids": numbers[order].tolist(),
        "nodes_featureids": column(nodes.features, 0).tolist(),
        "nodes_modes": [modes[at] for at in order.tolist()],
        "nodes_truenodeids": column(position(nodes.true), 0).tolist(),
        "nodes_falsenodeids": column(position(nodes.false), 0).tolist(),
        f"{kind}_treeids": ensemble.leaf_trees[entry_leaves].tolist(),
        f"{kind}_nodeids": numbers[inner + entry_leaves].tolist(),
        f"{kind}_ids": ensemble.entry_targets[entries].tolist(),
    }
    if nodes.missing_true.any():
        content["nodes_missing_value_tracks_true"] = column(nodes.missing_true.astype(np.int64), 0).tolist()
    doubles = ensemble.dtype == np.float64 and any(a.name.endswith("_as_tensor") for a in like.attribute)
    for name, values in (
        ("nodes_values", column(nodes.thresholds, 0)),
        (f"{kind}_weights", ensemble.entry_weights[entries]),
        ("base_values", ensemble.base),
    ):
        if len(values):
            content |= {f"{name}_as_tensor": values} if doubles else {name: values.tolist()}
    if ensemble.labels is None:
        return content | {"n_targets": ensemble.targets, "aggregate_function": ensemble.aggregate}
    texts = any(isinstance(label, str) for label in ensemble.labels)
    return content | {"classlabels_strings" if texts else "classlabels_int64s": list(ensemble.labels)}


def _chained(ensemble: TreeEnsemble) -> tuple[TreeEnsemble, Array, Array]:
    """Return an ensemble in which nodes that test membership are chains of comparisons with each value.

    Beside it are the tree and the depth of each inner node; nodes have several parents.
    """
    depths = np.zeros(len(ensemble.features))
    for at, level in enumerate(ensemble.levels):
        depths[level] = at
    thresholds, rules, false = ensemble.thresholds.copy(), ensemble.rules.copy(), ensemble.false.copy()
    of: list[int] = []  # of further comparisons, the node that they belong to
    values: list[float] = []
    after: list[int] = []
    for node, own in sorted(ensemble.members.items()):
        rules[node] = Rule.EQ
        thresholds[node] = own[0] if len(own) else np.nan
        if len(own) > 1:
            first = len(false) + len(of)
            of += [node] * (len(own) - 1)
            values += own[1:].tolist()
            after += [*range(first + 1, first + len(own) - 1), int(false[node])]
            false[node] = first
    chained = replace(
        ensemble,
        features=np.append(ensemble.features, ensemble.features[of]),
        rules=np.append(rules, rules[of]),
        thresholds=np.append(thresholds, np.array(values, thresholds.dtype)),
        true=np.append(ensemble.true, ensemble.true[of]),
        false=np.append(false, np.array(after, false.dtype)),
        missing_true=np.append(ensemble.missing_true, ensemble.missing_true[of]),
        members={},
    )
    return chained, np.append(ensemble.node_trees, ensemble.node_trees[of]), np.append(depths, depths[of] + 0.5)


def _ensemble_attributes(ensemble: TreeEnsemble, like: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of a ``TreeEnsemble``; a tree of one leaf gets a node with this leaf twice."""
    if len(ensemble.base):
        raise RewriteError("has no base values", like)
    entries = np.argsort(ensemble.entry_leaves)
    if not np.array_equal(ensemble.entry_leaves[entries], np.arange(ensemble.leaf_count)):
        raise RewriteError("has one weight for each leaf", like)
    single = np.flatnonzero(ensemble.roots < 0)
    extra, count = ensemble.roots[single], len(ensemble.features)
    roots = ensemble.roots.copy()
    roots[single] = count + np.arange(len(single))
    content: dict[str, Any] = {
        "n_targets": ensemble.targets,
        "aggregate_function": AGGREGATES.index(ensemble.aggregate),
        "post_transform": TRANSFORMS.index(ensemble.transform),
        "tree_roots": roots.tolist(),
        "nodes_featureids": [*ensemble.features.tolist(), *[0] * len(single)],
        "nodes_splits": np.concatenate([ensemble.thresholds, np.zeros(len(single), ensemble.dtype)]),
        "nodes_modes": np.concatenate([ensemble.rules, np.zeros(len(single), np.uint8)]),
        "leaf_targetids": ensemble.entry_targets[entries].tolist(),
        "leaf_weights": ensemble.entry_weights[entries],
    }
    for side, children in (("true", ensemble.true), ("false", ensemble.false)):
        whole = np.concatenate([children, extra])
        content[f"nodes_{side}nodeids"] = np.where(whole < 0, ~whole, whole).tolist()
        content[f"nodes_{side}leafs"] = (whole < 0).astype(np.int64).tolist()
    if ensemble.missing_true.any():
        content["nodes_missing_value_tracks_true"] = [
            *ensemble.missing_true.astype(np.int64).tolist(),
            *[0] * len(single),
        ]
    if ensemble.members:
        sets = [np.append(ensemble.members[node], np.nan) for node in sorted(ensemble.members)]
        content["membership_values"] = np.concatenate(sets).astype(ensemble.dtype)
    return content
