"""Tree ensembles as differentiable networks: soft decisions, conjunctions and leaves (WindTunnel, section 5.2.2).

An inner node with the comparison ``x <= threshold`` becomes ``n = tanh((threshold - x) / temperature)``, which is 1 if
the comparison certainly holds and -1 if it does not. A leaf with a path of C nodes becomes
``l = tanh((sum of +n or -n on its path - C + 1) / temperature)``. A score is ``bias + sum of value / 2 * l``, with the
base and half of all values as bias. With signs in place of 0 and 1, dropout makes a unit neutral.

The paper has temperature 1 on features as they are. That destroys an ensemble whose features are not of unit scale,
since decisions are then undecided or constant. So the temperature of a node is a share of the deviation of its feature
among the rows that reach it. And a threshold moves to the middle between its neighbours in the data: an encoded
category is often equal to a threshold, which would leave its decision undecided.

What is trained are deviations from the ensemble, which are zero in the beginning:

- L1: values of leaves and the bias;
- L2: thresholds, in units of temperatures;
- L3: weights of all features in all decisions;
- L4: weights of all decisions in all leaves of a tree, and the biases of leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from chrion.graph.rewrite import RewriteError
from chrion.graph.trees import Rule, TreeEnsemble
from chrion.graph.trees.tensor_form import normalised, path_matrices

Array = np.ndarray[Any, Any]
LEVELS = ("L1", "L2", "L3", "L4")
#: The most weights between decisions and leaves.
_MOST_WEIGHTS = 1 << 26
#: The bias of a leaf that is always or never reached: beyond what float32 tells from a sign.
_ALWAYS = 30.0
#: Thresholds are finite, since infinity stands for a missing value.
_LARGEST = 3e38
#: A temperature is at least the distance between the values beside a threshold by this, since a decision between two
#: encoded values would otherwise be certain, and have no gradient.
_GAP = 4
#: The rows that temperatures and thresholds are taken from, at most.
_ROWS = 20_000


@dataclass(frozen=True, slots=True)
class Softness:
    """The temperatures of decisions and leaves; the paper's form is ``Softness(1.0, 1.0, relative=False)``."""

    #: Of decisions: the share of the deviation of the feature among the rows of the node.
    nodes: float = 0.1
    leaves: float = 1.0
    #: False if ``nodes`` is the temperature itself, and thresholds stay as they are.
    relative: bool = True


@dataclass(frozen=True, eq=False)
class SoftTrees:
    """An ensemble as a network; trees are filled up to the same number of nodes and leaves."""

    #: The ensemble, whose comparisons are normalised: their rules are LEQ, LT and EQ.
    ensemble: TreeEnsemble
    #: The targets that leaves have values for, and what sums over trees are multiplied with.
    targets: Sequence[int]
    scale: float
    #: The number of features.
    width: int
    #: Per decision, [trees, nodes]. A decision that missing values make true reads feature ``width + feature``, where
    #: they are minus infinity; for the others they are infinity.
    features: Array
    thresholds: Array
    temperatures: Array
    #: Whether the comparison is for equality, which stays as it is.
    exact: Array
    #: The sign of each decision on the path to each leaf, [trees, leaves, nodes], and 1 minus their number.
    paths: Array
    offsets: Array
    #: Half of the value of each leaf, [trees, leaves, targets], and which of them exist.
    values: Array
    entries: Array
    bias: Array
    leaf_temperature: float
    #: The unit of changes of values: their root mean square.
    unit: float
    #: Mean and deviation of the features, by which a decision on several features (L3) weighs them.
    centre: Array
    spread: Array
    #: The leaf of each target by tree and place, as one number, if each leaf has a target of its own: scores are then
    #: how far leaves are reached, times their values, whose last axis has length 1.
    leaf_of: Array | None = None

    def shapes(self, level: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters of a level by name."""
        trees, leaves, nodes = self.paths.shape
        own: list[dict[str, tuple[int, ...]]] = [
            {"values": self.values.shape, **({"bias": self.bias.shape} if self.leaf_of is None else {})},
            {"shifts": (trees, nodes)},
            {"mix": (trees, nodes, self.width)},
            {"paths": (trees, leaves, nodes), "offsets": (trees, leaves)},
        ]
        return {name: shape for part in own[: LEVELS.index(level) + 1] for name, shape in part.items()}

    def hardened(self, ensemble: TreeEnsemble, parameters: Mapping[str, Array]) -> tuple[TreeEnsemble, Array]:
        """Return an ensemble with values and thresholds of parameters of L1 or L2, and what to add to each score.

        Args:
            ensemble: The ensemble that this one was made from.
            parameters: The parameters by name; those that are missing are zero.
        """
        moved = self.temperatures.astype(np.float64) * parameters.get("shifts", 0.0)
        changes = self.unit * np.where(self.entries, parameters.get("values", 0.0), 0.0)
        of_leaf, target = ensemble.entry_leaves, np.searchsorted(self.targets, ensemble.entry_targets)
        values = changes[ensemble.leaf_trees[of_leaf], ensemble.leaf_places[of_leaf], target]
        thresholds = ensemble.thresholds + np.where(self.exact, 0, moved)[ensemble.node_trees, ensemble.node_places]
        tuned = replace(
            ensemble,
            thresholds=thresholds.astype(ensemble.dtype),
            entry_weights=(ensemble.entry_weights + 2 / self.scale * values).astype(ensemble.dtype),
        )
        return tuned, self.unit * parameters.get("bias", np.zeros(1)) - changes.sum(axis=(0, 1))


def soften(  # noqa: PLR0913 - what a pipeline says of its ensemble
    ensemble: TreeEnsemble,
    x: Array,
    *,
    targets: Sequence[int],
    scale: float = 1.0,
    base: Array | None = None,
    softness: Softness | None = None,
) -> SoftTrees:
    """Return an ensemble as a network.

    Args:
        ensemble: The ensemble; each leaf has an entry for all targets of its tree.
        x: Rows of features, from which temperatures are taken, [rows, features].
        targets: The targets that leaves have values for, in ascending order.
        scale: What sums over trees are multiplied with.
        base: The scores without trees, by target.
        softness: The temperatures.

    Raises:
        RewriteError: The ensemble has no such form.
    """
    softness = softness or Softness()
    ensemble = normalised(ensemble)
    _check(ensemble)
    rows = np.asarray(x[np.linspace(0, len(x) - 1, min(len(x), _ROWS)).astype(np.int64)], np.float64)
    centre, spread = feature_scales(rows)
    features = ensemble.features + np.where(ensemble.missing_true, rows.shape[1], 0)
    thresholds, temperatures = ensemble.thresholds.astype(np.float64), np.full(len(ensemble.features), softness.nodes)
    if softness.relative:
        thresholds, gaps = _between(ensemble, rows)
        temperatures = np.maximum(softness.nodes * _deviations(ensemble, rows, centre, spread), gaps / _GAP)
    values, entries, leaf_of = _leaf_values(ensemble, targets, scale / 2)
    total = 0 if leaf_of is not None else values.sum(axis=(0, 1))
    paths, _ = path_matrices(ensemble)
    length = np.abs(paths).sum(axis=2)[ensemble.leaf_trees, ensemble.leaf_places]
    finite = np.nan_to_num(thresholds, nan=-_LARGEST, posinf=_LARGEST, neginf=-_LARGEST)
    return SoftTrees(
        ensemble=ensemble,
        targets=targets,
        scale=scale,
        width=rows.shape[1],
        features=ensemble.node_table(features.astype(np.int32)),
        thresholds=ensemble.node_table(finite.astype(np.float32)),
        temperatures=ensemble.node_table(temperatures.astype(np.float32), 1),
        exact=ensemble.node_table(ensemble.rules == Rule.EQ),
        paths=paths,
        offsets=ensemble.leaf_table(np.where(length > 0, 1 - length, np.float32(_ALWAYS)), -_ALWAYS),
        values=values.astype(np.float32),
        entries=entries,
        bias=np.asarray((0 if base is None else base) + total, np.float32),
        leaf_temperature=softness.leaves,
        unit=float(np.sqrt(np.mean(values[entries] ** 2))) or 1.0,
        centre=centre.astype(np.float32),
        spread=spread.astype(np.float32),
        leaf_of=leaf_of,
    )


def _leaf_values(ensemble: TreeEnsemble, targets: Sequence[int], scale: float) -> tuple[Array, Array, Array | None]:
    """Return values of leaves, which of them exist, and the leaf of each target; see :class:`SoftTrees`."""
    if not ensemble.has_leaf_targets:
        values = ensemble.leaf_table(scale * ensemble.leaf_weights[:, targets].astype(np.float64))
        return values, ensemble.leaf_table(ensemble.leaf_entries[:, targets]), None
    own, weights = ensemble.entry_leaves, np.zeros((ensemble.leaf_count, 1))
    weights[own, 0] = scale * ensemble.entry_weights
    values, entries = ensemble.leaf_table(weights), ensemble.leaf_table(np.isin(np.arange(len(weights)), own)[:, None])
    leaf_of = np.zeros(len(targets), np.int64)
    leaf_of[ensemble.entry_targets] = ensemble.leaf_trees[own] * values.shape[1] + ensemble.leaf_places[own]
    return values, entries, leaf_of


def _check(ensemble: TreeEnsemble) -> None:
    if ensemble.members:
        raise RewriteError("tests membership in sets, which has no soft form")
    if (ensemble.missing_true & (ensemble.rules == Rule.EQ)).any():
        raise RewriteError("tests for equality or missing values, which has no soft form")
    if not len(ensemble.features):
        raise RewriteError("has no comparisons, so that there is nothing to soften")
    nodes, leaves = (int(places.max()) + 1 for places in (ensemble.node_places, ensemble.leaf_places))
    if ensemble.trees * nodes * leaves > _MOST_WEIGHTS:
        raise RewriteError(
            f"has too many leaves for a soft form: {ensemble.trees} trees of up to {leaves}",
            hint="the level L1 has no limit",
        )


def feature_scales(rows: Array) -> tuple[Array, Array]:
    """Return the mean and the deviation of the finite values of each feature; 0 and 1 where there are none."""
    finite = np.isfinite(rows)
    count = np.maximum(finite.sum(axis=0), 1)
    centre = np.where(finite, rows, 0).sum(axis=0) / count
    spread = np.sqrt((np.where(finite, rows - centre, 0) ** 2).sum(axis=0) / count)
    return centre, np.where(spread > 0, spread, 1.0)


def _deviations(ensemble: TreeEnsemble, rows: Array, centre: Array, spread: Array) -> Array:
    """Return the deviation of each node's feature among the rows that reach it; of all rows where these are equal."""
    nodes = len(ensemble.features)
    count, total, squares = np.zeros(nodes), np.zeros(nodes), np.zeros(nodes)
    scaled = (rows - centre) / spread
    for reached, own in ensemble.visits(rows):
        values = scaled[reached, ensemble.features[own]]
        finite = np.isfinite(values)
        own, values = own[finite], values[finite]  # noqa: PLW2901 - those that count
        count += np.bincount(own, minlength=nodes)
        total += np.bincount(own, values, minlength=nodes)
        squares += np.bincount(own, values**2, minlength=nodes)
    mean = total / np.maximum(count, 1)
    variance = squares / np.maximum(count, 1) - mean**2
    relative = np.where(variance > 1e-8, np.sqrt(np.maximum(variance, 0)), 1.0)
    return np.asarray(relative * spread[ensemble.features])


def _between(ensemble: TreeEnsemble, rows: Array) -> tuple[Array, Array]:
    """Return thresholds in the middle between the nearest values of their feature on both sides, and their distance."""
    moved = ensemble.thresholds.astype(np.float64)
    gaps = np.zeros(len(moved))
    for feature in ensemble.split_features.tolist():
        values = np.unique(rows[np.isfinite(rows[:, feature]), feature])
        for rule, side in ((Rule.LEQ, "right"), (Rule.LT, "left")):
            own = np.flatnonzero((ensemble.features == feature) & (ensemble.rules == rule))
            below = np.searchsorted(values, moved[own], side=side)  # type: ignore[call-overload] # one of two texts
            inside = (below > 0) & (below < len(values))
            own, below = own[inside], below[inside]
            moved[own] = (values[below - 1] + values[below]) / 2
            gaps[own] = values[below] - values[below - 1]
    return moved, gaps
