"""A check that the tree ensembles of a model do not end the process that opens it.

onnxruntime builds each tree by recursion, follows children until a leaf, and cannot report an error from its own
threads. So some ensembles overflow its stack, never end, or end the process; which ones depends on its version. This
check refuses them before a session is opened. It accepts what converters write, also nodes with several parents, as
chains of comparisons with the members of a set have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from chrion.errors import UnsafeModelError
from chrion.graph.external import nodes_of
from chrion.graph.rewrite import describe

Array = np.ndarray[Any, Any]

DOMAIN = "ai.onnx.ml"
REGRESSOR, CLASSIFIER, ENSEMBLE = "TreeEnsembleRegressor", "TreeEnsembleClassifier", "TreeEnsemble"
LEAF = "LEAF"
#: The modes of inner nodes, in the order of their numbers in ``TreeEnsemble``.
_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER")
_MEMBER = _MODES.index("BRANCH_MEMBER")
#: Features and nodes are numbered in 32 bits.
_LARGEST = (1 << 31) - 1
#: The most nodes on a path: 700 bytes of the stack each, measured with onnxruntime 1.31, in 8 MB.
_MOST_LEVELS = 4096


def is_tree_ensemble(node: onnx.NodeProto) -> bool:
    """Return whether a node holds a tree ensemble."""
    return node.domain == DOMAIN and node.op_type in {REGRESSOR, CLASSIFIER, ENSEMBLE}


def check_trees(proto: onnx.ModelProto, where: str) -> None:
    """Check the tree ensembles of a model, of its nested graphs and of its functions.

    Raises:
        UnsafeModelError: An ensemble would end the process; the message begins with ``where`` and names the operator.
    """
    for node in nodes_of(proto):
        if is_tree_ensemble(node):
            try:
                checked_attributes(node)
            except Exception as error:  # whatever an attribute may be
                found = str(error) if isinstance(error, TypeError | ValueError) else repr(error)
                reason = f"{where}: {describe(node)} cannot be run safely: {found}"
                raise UnsafeModelError(reason, hint="onnxruntime could end the process") from error


def checked_attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of an ensemble by name: lists of numbers and tensors as arrays, texts as str.

    Lists that belong together have equal lengths, and the nodes, leaves and targets that they name exist.

    Raises:
        TypeError: An attribute has another type.
        ValueError: An attribute occurs twice, has no value of its type, is in another file or outside a function, or
            names what does not exist; or the ensemble would end the process.
    """
    found = _attributes(node)
    (_check_ensemble if node.op_type == ENSEMBLE else _check_classic)(node, found)
    return found


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of an ensemble by name."""
    found = {}
    for attribute in node.attribute:
        if attribute.name in found:
            raise ValueError(f"{attribute.name} occurs twice")
        if attribute.ref_attr_name:
            raise ValueError(f"{attribute.name} is an argument of a function")
        found[attribute.name] = _value(attribute)
    return found


def _value(attribute: onnx.AttributeProto) -> Any:
    if attribute.type == onnx.AttributeProto.TENSOR:
        if attribute.t.data_location == onnx.TensorProto.EXTERNAL:
            raise ValueError(f"{attribute.name} is in another file")
        return numpy_helper.to_array(attribute.t)
    value = helper.get_attribute_value(attribute)
    if attribute.type == onnx.AttributeProto.FLOATS:
        return np.array(value, np.float32)
    if attribute.type == onnx.AttributeProto.INTS:
        return np.array(value, np.int64)
    if attribute.type == onnx.AttributeProto.STRINGS:
        return [text.decode() for text in value]
    return value.decode() if isinstance(value, bytes) else value


def _column(given: Mapping[str, Any], name: str, length: int) -> Array:
    """Return a list of integers of a given length."""
    column = given.get(name, np.zeros(0, np.int64))
    if not isinstance(column, np.ndarray) or column.dtype != np.int64 or column.ndim != 1:
        raise ValueError(f"{name} is no list of integers")
    if len(column) != length:
        raise ValueError(f"{name} has {len(column)} values, expected {length}")
    return column


def _numbers(given: Mapping[str, Any], name: str, length: int | None = None) -> int:
    """Return the length of a list of numbers, or of the tensor of this name with ``_as_tensor``."""
    found = sum(int(np.size(given[own])) for own in (name, f"{name}_as_tensor") if own in given)
    if length is not None and found != length:
        raise ValueError(f"{name} has {found} values, expected {length}")
    return found


def _check_range(name: str, values: Array, limit: int, of: str = "") -> None:
    if len(values) and not 0 <= values.min() <= values.max() < limit:
        wrong = values[(values < 0) | (values >= limit)][0]
        raise ValueError(f"{name} has {wrong}, expected at least 0 and below {limit}{of}")


def _check_descent(children: Array, inner: Array) -> None:
    """Check that every path from an inner node ends after few nodes.

    Args:
        children: The inner nodes that are children of each node, [nodes, 2]; -1 for leaves.
        inner: Whether each node is an inner one.
    """
    parents = np.bincount(children[inner][children[inner] >= 0], minlength=len(inner))
    level = np.flatnonzero(inner & (parents == 0))
    seen = levels = 0
    while len(level):  # each node once, after its last parent
        seen, levels = seen + len(level), levels + 1
        if levels > _MOST_LEVELS:
            raise ValueError(f"a path has more than {_MOST_LEVELS} nodes")
        reached, times = np.unique(children[level], return_counts=True)
        reached, times = reached[reached >= 0], times[reached >= 0]
        parents[reached] -= times
        level = reached[parents[reached] == 0]
    if seen < np.count_nonzero(inner):
        raise ValueError("its nodes form a cycle")


def _check_classic(node: onnx.NodeProto, given: Mapping[str, Any]) -> None:
    """Check a regressor or a classifier, whose nodes and leaves are numbered within a tree."""
    modes = given.get("nodes_modes", [])
    if not isinstance(modes, list):
        raise TypeError("nodes_modes is no list of texts")
    if unknown := set(modes) - {LEAF, *_MODES[:_MEMBER]}:
        raise ValueError(f"unknown mode {min(unknown)[:40]!r}")
    count = len(modes)
    inner = np.array([mode != LEAF for mode in modes], bool)
    names = ("treeids", "nodeids", "featureids", "truenodeids", "falsenodeids")
    trees, numbers, features, true, false = (_column(given, f"nodes_{name}", count) for name in names)
    _numbers(given, "nodes_values", count)
    _check_range("nodes_featureids", features[inner], _LARGEST)
    rows = NodeRows(trees, numbers)
    children = np.full((count, 2), -1, np.int64)
    for side, (name, wanted) in enumerate((("nodes_truenodeids", true), ("nodes_falsenodeids", false))):
        found = rows.find(name, trees[inner], wanted[inner])
        children[inner, side] = np.where(inner[found], found, -1)
    _check_descent(children, inner)
    kind = "class" if node.op_type == CLASSIFIER else "target"
    entries = _numbers(given, f"{kind}_weights")
    own = [_column(given, f"{kind}_{name}", entries) for name in ("treeids", "nodeids", "ids")]
    weighted = np.zeros(count, bool)
    weighted[rows.find(f"{kind}_nodeids", own[0], own[1])] = True
    targets = _classes(given) if kind == "class" else int(given.get("n_targets", 0))
    _check_range(f"{kind}_ids", own[2], targets, ", the number of targets or classes")
    base = _numbers(given, "base_values")
    if base not in {0, targets} and not (kind == "class" and targets <= 2 and base <= 2):
        raise ValueError(f"base_values has {base} values, expected {targets} or none")
    lacking = trees[~inner & ~weighted]
    if kind == "class" and targets > 2 and not base and not len(np.setdiff1d(trees, lacking)):
        raise ValueError("each tree has leaves without a weight, so that some rows have no score for any class")


def _classes(given: Mapping[str, Any]) -> int:
    """Return the number of classes of a classifier."""
    texts, numbers = given.get("classlabels_strings", []), given.get("classlabels_int64s", [])
    if not isinstance(texts, list):
        raise TypeError("classlabels_strings is no list of texts")
    if len(numbers):
        _column(given, "classlabels_int64s", len(numbers))
    if len(texts) == 1:
        raise ValueError("classlabels_strings has a single label, expected two or more")
    if len(texts) and len(numbers) and len(texts) != len(numbers):
        raise ValueError(f"it has {len(texts)} labels that are texts and {len(numbers)} that are numbers")
    return len(texts) or len(numbers)


class NodeRows:
    """The rows of a table of nodes, found by tree and number.

    Raises:
        ValueError: Two rows have the same tree and number.
    """

    def __init__(self, trees: Array, numbers: Array) -> None:
        _check_range("nodes_treeids", trees, _LARGEST)
        _check_range("nodes_nodeids", numbers, _LARGEST)
        keys = trees << 32 | numbers
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]
        if len(keys) and not np.diff(self._keys).all():
            raise ValueError("two of its nodes have the same number")

    def find(self, name: str, trees: Array, numbers: Array) -> Array:
        """Return the row of each node.

        Raises:
            ValueError: There is none; the message begins with a name.
        """
        _check_range(name, trees, _LARGEST)
        _check_range(name, numbers, _LARGEST)
        keys = trees << 32 | numbers
        at = np.searchsorted(self._keys, keys)
        known = at < len(self._keys)
        if not (known.all() and np.array_equal(self._keys[at], keys)):
            raise ValueError(f"{name} names a node that does not exist")
        return self._order[at]


def _check_ensemble(node: onnx.NodeProto, given: Mapping[str, Any]) -> None:
    """Check a ``TreeEnsemble``, whose inner nodes and leaves are numbered apart, for all trees together."""
    del node
    count, leaves = _numbers(given, "nodes_splits"), _numbers(given, "leaf_weights")
    targets = _column(given, "leaf_targetids", leaves)
    _check_range("leaf_targetids", targets, int(given.get("n_targets", 0)), ", the number of targets")
    _check_range("nodes_featureids", _column(given, "nodes_featureids", count), _LARGEST)
    children = np.full((count, 2), -1, np.int64)
    places = np.zeros((count, 2), np.int64)
    for side, name in enumerate(("true", "false")):
        ids = _column(given, f"nodes_{name}nodeids", count)
        leaf = _column(given, f"nodes_{name}leafs", count) != 0
        _check_range(f"nodes_{name}nodeids", ids[leaf], leaves, ", the number of leaves")
        _check_range(f"nodes_{name}nodeids", ids[~leaf], count, ", the number of nodes")
        children[:, side] = np.where(leaf, -1, ids)
        places[:, side] = ids
    roots = _column(given, "tree_roots", len(given.get("tree_roots", [])))
    _check_range("tree_roots", roots, count, ", the number of nodes")
    _check_descent(children, np.ones(count, bool))
    single = (children < 0).all(axis=1) & (places[:, 0] == places[:, 1])
    if np.bincount(np.concatenate([children[children >= 0], roots[~single[roots]]]), minlength=1).max() > 1:
        raise ValueError("a node is in several places")
    modes = np.asarray(given.get("nodes_modes", np.zeros(0, np.uint8))).ravel()
    if modes.dtype != np.uint8 or len(modes) != count:
        raise ValueError(f"nodes_modes has {len(modes)} values of {modes.dtype}, expected {count} of uint8")
    _check_range("nodes_modes", modes, len(_MODES))
    _check_members(given, int(np.count_nonzero(modes == _MEMBER)))


def _check_members(given: Mapping[str, Any], nodes: int) -> None:
    """Check that each node that tests membership has a set with a member."""
    if nodes:
        values = np.asarray(given.get("membership_values", np.zeros(0, np.float32))).ravel()
        ends = np.append(np.flatnonzero(np.isnan(values)), len(values))[:nodes]
        if len(ends) < nodes or (np.diff(ends, prepend=-1) < 2).any():
            raise ValueError(f"membership_values has no members for one of {nodes} nodes")
