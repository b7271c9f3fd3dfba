"""An ensemble of decision trees, whichever operator it was read from.

The inner nodes of all trees are numbered together, and so are the leaves. A child is an inner node (its number) or a
leaf (``~number``, which is negative). Every inner node and every leaf has one parent or is the root of one tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Rule(IntEnum):
    """Comparison of a feature with the threshold of an inner node; the numbers are those of ``TreeEnsemble``."""

    LEQ = 0
    LT = 1
    GTE = 2
    GT = 3
    EQ = 4
    NEQ = 5
    #: The feature is a member of a set.
    MEMBER = 6


@dataclass(frozen=True, eq=False)
class TreeEnsemble:
    """An ensemble of decision trees."""

    #: The root of each tree.
    roots: Array
    #: Per inner node: the feature that it compares, its rule, its threshold, and its children.
    features: Array
    rules: Array
    thresholds: Array
    true: Array
    false: Array
    #: Per inner node: whether a feature that is NaN leads to the true child, whatever the rule.
    missing_true: Array
    #: The sets of the inner nodes with the rule MEMBER.
    members: Mapping[int, Array]
    leaf_count: int
    #: What leaves add to targets: the leaf, the target and the weight of each entry.
    entry_leaves: Array
    entry_targets: Array
    entry_weights: Array
    #: The number of targets: outputs of a regressor, classes of a classifier.
    targets: int
    #: Added to the aggregates: as many as targets or none; classifiers of two classes may have one.
    base: Array
    #: SUM, AVERAGE, MIN or MAX.
    aggregate: str = "SUM"
    #: NONE, LOGISTIC, SOFTMAX, SOFTMAX_ZERO or PROBIT.
    transform: str = "NONE"
    #: The classes of a classifier, which are integers or texts; None for a regressor.
    labels: tuple[int, ...] | tuple[str, ...] | None = None
    #: The type of thresholds and weights: float32, or float64 for operators on float64.
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.float32))

    @property
    def trees(self) -> int:
        """The number of trees."""
        return len(self.roots)

    @property
    def has_leaf_targets(self) -> bool:
        """Whether each target belongs to a leaf of its own, so that targets say which leaves a row reaches."""
        entries = (self.entry_leaves, self.entry_targets)
        return len(self.entry_weights) == self.targets > 1 and all(
            len(np.unique(own)) == self.targets for own in entries
        )

    @cached_property
    def levels(self) -> tuple[Array, ...]:
        """The inner nodes at each depth, from the roots on.

        Raises:
            ValueError: A node has several parents, as in a cycle.
        """
        found: list[Array] = []
        parents = np.zeros(len(self.features), np.int64)
        level = self.roots[self.roots >= 0]
        while len(level):
            np.add.at(parents, level, 1)
            if parents.max() > 1:
                raise ValueError("a node has several parents")
            found.append(level)
            children = np.concatenate([self.true[level], self.false[level]])
            level = children[children >= 0]
        return tuple(found)

    @property
    def depth(self) -> int:
        """The number of comparisons on the longest path."""
        return len(self.levels)

    @cached_property
    def node_trees(self) -> Array:
        """The tree of each inner node."""
        trees = np.zeros(len(self.features), np.int64)
        inner = self.roots >= 0
        trees[self.roots[inner]] = np.flatnonzero(inner)
        for level in self.levels:
            for children in (self.true[level], self.false[level]):
                trees[children[children >= 0]] = trees[level[children >= 0]]
        return trees

    @cached_property
    def leaf_trees(self) -> Array:
        """The tree of each leaf."""
        trees = np.zeros(self.leaf_count, np.int64)
        single = self.roots < 0
        trees[~self.roots[single]] = np.flatnonzero(single)
        for children in (self.true, self.false):
            trees[~children[children < 0]] = self.node_trees[children < 0]
        return trees

    @cached_property
    def node_places(self) -> Array:
        """The place of each inner node among those of its tree."""
        return _places(self.node_trees, self.trees)

    @cached_property
    def leaf_places(self) -> Array:
        """The place of each leaf among those of its tree."""
        return _places(self.leaf_trees, self.trees)

    def node_table(self, values: Array, missing: float = 0) -> Array:
        """Return values of inner nodes by tree, [trees, most nodes, ...]; trees with fewer nodes are filled up."""
        return _by_tree(values, missing, (self.node_trees, self.node_places), self.trees)

    def leaf_table(self, values: Array, missing: float = 0) -> Array:
        """Return values of leaves by tree, [trees, most leaves, ...]; trees with fewer leaves are filled up."""
        return _by_tree(values, missing, (self.leaf_trees, self.leaf_places), self.trees)

    @cached_property
    def leaf_weights(self) -> Array:
        """The weight of each leaf for each target, [leaves, targets]; 0 where a leaf has no entry."""
        weights = np.zeros((self.leaf_count, self.targets), self.dtype)
        weights[self.entry_leaves, self.entry_targets] = self.entry_weights
        return weights

    @cached_property
    def leaf_entries(self) -> Array:
        """Whether each leaf has an entry for each target, [leaves, targets]."""
        entries = np.zeros((self.leaf_count, self.targets), bool)
        entries[self.entry_leaves, self.entry_targets] = True
        return entries

    @cached_property
    def split_features(self) -> Array:
        """The features that any node compares, in ascending order."""
        return np.unique(self.features)

    def leaves_of(self, x: Array) -> Array:
        """Return the leaf of each row in each tree, [rows, trees].

        Args:
            x: The features, [rows, features]. They are compared in the type of the thresholds.

        Raises:
            IndexError: A node compares a feature that ``x`` does not have.
        """
        values, at = self._at_roots(x)
        for _ in self._descend(values, at):
            pass
        return ~at

    def visits(self, x: Array) -> Iterator[tuple[Array, Array]]:
        """Yield rows and the inner nodes that they reach, level by level; see :meth:`leaves_of`."""
        return self._descend(*self._at_roots(x))

    def _at_roots(self, x: Array) -> tuple[Array, Array]:
        """Return the features in the type of the thresholds, and the root of each tree for each row."""
        values = np.asarray(x).astype(self.dtype, copy=False)
        return values, np.broadcast_to(self.roots, (len(values), self.trees)).copy()

    def _descend(self, values: Array, at: Array) -> Iterator[tuple[Array, Array]]:
        """Descend by a level at a time: change the node or leaf ``at`` which each row is in each tree, in place."""
        for _ in range(self.depth):
            rows, trees = np.nonzero(at >= 0)
            nodes = at[rows, trees]
            yield rows, nodes
            taken = self._decide(values[rows, self.features[nodes]], nodes)
            at[rows, trees] = np.where(taken, self.true[nodes], self.false[nodes])

    def _decide(self, values: Array, nodes: Array) -> Array:
        """Return whether values lead to the true children of nodes."""
        thresholds, rules = self.thresholds[nodes], self.rules[nodes]
        taken = np.isnan(values) & self.missing_true[nodes]
        for rule, compare in _COMPARISONS.items():
            chosen = rules == rule
            taken[chosen] |= compare(values[chosen], thresholds[chosen])
        for node in np.unique(nodes[rules == Rule.MEMBER]):
            chosen = nodes == node
            taken[chosen] |= np.isin(values[chosen], self.members[int(node)])
        return taken


def _places(trees: Array, count: int) -> Array:
    order, sizes = np.argsort(trees, kind="stable"), np.bincount(trees, minlength=count)
    places = np.empty(len(trees), np.int64)
    places[order] = np.arange(len(trees)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return places


def _by_tree(values: Array, missing: float, at: tuple[Array, Array], trees: int) -> Array:
    table = np.full((trees, int(at[1].max()) + 1, *values.shape[1:]), missing, values.dtype)
    table[at] = values
    return table


_COMPARISONS = {
    Rule.LEQ: np.less_equal,
    Rule.LT: np.less,
    Rule.GTE: np.greater_equal,
    Rule.GT: np.greater,
    Rule.EQ: np.equal,
    Rule.NEQ: np.not_equal,
}
