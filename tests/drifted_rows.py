"""Ensembles of 21 trees, and rows of which the classes have drifted away from them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np

from chrion.graph.trees import TreeEnsemble
from random_trees import FEATURES, random_ensemble

NAMES = [f"f{at}" for at in range(FEATURES)]
ROWS = 3000


def ensemble(kind: str, targets: int = 1, **changes: Any) -> TreeEnsemble:
    """Return an ensemble of 20 trees without base values."""
    made = random_ensemble(random.Random(7), kind, trees=21, depth=4, targets=targets)
    return replace(
        made, **{"aggregate": "SUM", "transform": "NONE", "base": np.zeros(0, np.float32), "labels": None} | changes
    )


def binary(**changes: Any) -> TreeEnsemble:
    """Return a classifier of two classes whose weights are all for one of them, as LightGBM's."""
    made = ensemble("TreeEnsembleRegressor")
    weights = np.random.default_rng(3).standard_normal(made.leaf_count).astype(np.float32) / 2
    return replace(made, targets=2, labels=(0, 1), entry_weights=weights, **{"transform": "LOGISTIC"} | changes)


def rows_of(seed: int = 0, rows: int = ROWS) -> Any:
    """Return features."""
    return np.random.default_rng(seed).standard_normal((rows, FEATURES)).astype(np.float32) * 1.5


def drifted(model: TreeEnsemble, amount: float, rows: int = ROWS, seed: int = 0) -> Any:
    """Return a table of two classes drawn from a binary classifier whose leaves have changed."""
    rng = np.random.default_rng(seed)
    x = rows_of(seed, rows)
    weights = model.entry_weights + amount * rng.standard_normal(model.leaf_count)
    margin = weights[model.leaves_of(x)].sum(axis=1)
    y = (rng.random(rows) < 1 / (1 + np.exp(-margin))).astype(np.int64)
    import pyarrow as pa  # noqa: PLC0415 - optional

    return pa.table({**dict(zip(NAMES, x.T, strict=True)), "y": y})
