"""Checks of tree ensembles, and their normal form: no unreachable node, and a leaf of its own for each path."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from chrion.graph.trees.ensemble import TreeEnsemble

#: Aggregates and transforms in the order of their numbers in ``TreeEnsemble``, as onnxruntime reads them: ONNX numbers
#: SOFTMAX 1 and LOGISTIC 2.
AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
TRANSFORMS = ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT")
#: The largest number of targets: onnxruntime has 32 bits for it.
_LARGEST = (1 << 31) - 1
#: The most weights if each leaf had one for each target, as a table of them has.
_MOST_WEIGHTS = 1 << 26


def with_own_leaves(ensemble: TreeEnsemble) -> TreeEnsemble:
    """Return the ensemble with inner nodes that are reached only, and a leaf of its own for each reference to one."""
    count = len(ensemble.features)
    used = np.zeros(count, bool)
    for level in ensemble.levels:
        used[level] = True
    number = np.cumsum(used) - 1
    sides = (ensemble.roots, ensemble.true[used], ensemble.false[used])
    leaves = [~side[side < 0] for side in sides]
    old = np.concatenate(leaves)
    starts = np.cumsum([0, *(len(own) for own in leaves)])
    sizes = np.bincount(ensemble.entry_leaves, minlength=ensemble.leaf_count)
    counts = sizes[old]
    first = np.repeat((np.cumsum(sizes) - sizes)[old] - (np.cumsum(counts) - counts), counts)
    entries = np.argsort(ensemble.entry_leaves, kind="stable")[first + np.arange(counts.sum())]
    renumbered = []
    for side, own, start in zip(sides, leaves, starts[:-1], strict=True):
        changed = side.copy()
        changed[side < 0] = ~(start + np.arange(len(own)))
        changed[side >= 0] = number[side[side >= 0]]
        renumbered.append(changed)
    values: dict[str, Any] = {
        "roots": renumbered[0],
        "true": renumbered[1],
        "false": renumbered[2],
        "members": {int(number[node]): own for node, own in ensemble.members.items() if used[node]},
        "leaf_count": len(old),
        "entry_leaves": np.repeat(np.arange(len(old)), counts),
        "entry_targets": ensemble.entry_targets[entries],
        "entry_weights": ensemble.entry_weights[entries],
    }
    for name in ("features", "rules", "thresholds", "missing_true"):
        values[name] = getattr(ensemble, name)[used]
    return replace(ensemble, **values)


def check_ensemble(ensemble: TreeEnsemble) -> None:
    """Check an ensemble.

    Raises:
        ValueError: It is malformed, or ONNX leaves its result open.
    """
    _check_structure(ensemble)
    _check_weights(ensemble)
    if ensemble.aggregate not in AGGREGATES:
        raise ValueError(f"unknown aggregate_function {ensemble.aggregate!r}")
    if ensemble.transform not in TRANSFORMS:
        raise ValueError(f"unknown post_transform {ensemble.transform!r}")


def _check_structure(ensemble: TreeEnsemble) -> None:
    reached = sum(len(level) for level in ensemble.levels)
    if reached < len(ensemble.features):
        raise ValueError(f"{len(ensemble.features) - reached} of its nodes are in no tree")
    children = np.concatenate([ensemble.roots, ensemble.true, ensemble.false])
    leaves = ~children[children < 0]
    if len(leaves) != ensemble.leaf_count or len(np.unique(leaves)) < len(leaves):
        raise ValueError("a leaf has several parents or none")


def _check_weights(ensemble: TreeEnsemble) -> None:
    if not 0 < ensemble.targets <= _LARGEST:
        raise ValueError(f"it has {ensemble.targets} targets or classes")
    if ensemble.targets * max(ensemble.leaf_count, ensemble.trees) > _MOST_WEIGHTS:
        raise ValueError(f"it has too many leaves for {ensemble.targets} targets or classes")
    pairs = ensemble.entry_leaves * ensemble.targets + ensemble.entry_targets
    if len(np.unique(pairs)) < len(pairs):
        raise ValueError("a leaf has several weights for one target")
    if ensemble.targets == 1 and len(pairs) < ensemble.leaf_count:
        raise ValueError("a leaf has no weight")
