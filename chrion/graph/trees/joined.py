"""Ensembles with the trees of others appended, and parts of ensembles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from chrion.graph.trees.checks import with_own_leaves
from chrion.graph.trees.ensemble import Array, TreeEnsemble


def joined(ensemble: TreeEnsemble, others: Sequence[TreeEnsemble]) -> TreeEnsemble:
    """Return an ensemble with the trees of others after its own ones.

    Base values, the aggregate, the transform and the labels are those of the first one. The others have no sets of
    members, and their targets are those of the first one.
    """
    every = [ensemble, *others]
    nodes = np.cumsum([0, *(len(own.features) for own in every)])
    leaves = np.cumsum([0, *(own.leaf_count for own in every)])

    def children(name: str) -> Array:
        parts = []
        for own, node, leaf in zip(every, nodes[:-1], leaves[:-1], strict=True):
            values = getattr(own, name)
            parts.append(np.where(values < 0, values - leaf, values + node))
        return np.concatenate(parts)

    def column(name: str) -> Array:
        first = getattr(ensemble, name)
        return np.concatenate([getattr(own, name) for own in every]).astype(first.dtype)

    values: dict[str, Any] = {name: children(name) for name in ("roots", "true", "false")}
    own = ("features", "rules", "thresholds", "missing_true", "entry_targets", "entry_weights")
    values |= {name: column(name) for name in own}
    values["entry_leaves"] = np.concatenate(
        [part.entry_leaves + leaf for part, leaf in zip(every, leaves[:-1], strict=True)]
    )
    return replace(ensemble, leaf_count=int(leaves[-1]), **values)


def part_of(ensemble: TreeEnsemble, trees: slice) -> TreeEnsemble:
    """Return the sums over some trees of an ensemble, as a regressor without base values."""
    part = with_own_leaves(replace(ensemble, roots=ensemble.roots[trees]))
    return replace(part, base=ensemble.base[:0], aggregate="SUM", transform="NONE", labels=None)
