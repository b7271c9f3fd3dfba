"""Encoded categories found in a pipeline: tables with what its encoders make of each category (WindTunnel, 5.2.3).

One-hot, hash, binary, two-hot and target encoders have one thing in common: some features depend on one column of
categories alone. So encoders are not recognised by their operators. The part of the pipeline before the trees is run
for each category, in two rows that differ in all else; the features that change with the category and not with the rest
are its row. All rows of the data must then have the features that the tables say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from chrion.pipelines.pipeline import Feeds, Pipeline
from chrion.pipelines.rows import Rows
from chrion.pipelines.soft.features import Embedding, Features
from chrion.pipelines.table import BATCH_ROWS, TEXT

Array = np.ndarray[Any, Any]
#: Operators that read categories.
_ENCODERS = frozenset({"CategoryMapper", "LabelEncoder", "OneHotEncoder"})
#: The most features of all categories of a column.
_MOST_VALUES = 1 << 27
_INTEGERS = frozenset({"tensor(int64)", "tensor(int32)"})


def embedded(rows: Rows, fixed: Array, encode: Callable[[Feeds], Array]) -> Features:
    """Return the features of rows with tables for encoded categories.

    Args:
        rows: The rows.
        fixed: Their features, [rows, features].
        encode: Returns the features of rows by their columns.
    """
    found = []
    contexts = _contexts(rows)
    for source, column, values in _categories(rows):
        keys, codes = np.unique(values, return_inverse=True)
        if 1 < len(keys) <= _MOST_VALUES // fixed.shape[1]:
            tables = [_encoded(context, source, column, keys, encode) for context in contexts]
            found.append((source, column, keys, codes, tables[0], _changing(tables)))
    claimed = np.zeros(fixed.shape[1], np.int64)
    for *_, own in found:
        claimed[own] += 1
    embeddings = []
    for source, column, keys, codes, table, own in found:
        kept = np.array([at for at in own if claimed[at] == 1 and _holds(table[:, at], codes, fixed[:, at])], np.int64)
        if len(kept):
            embeddings.append(Embedding(source, column, keys.tolist(), kept, table[:, kept], codes))
    return Features(fixed, embeddings)


def _categories(rows: Rows) -> list[tuple[str, int, Array]]:
    """Return the columns of categories: their input, their column in it, and their values."""
    names = _category_inputs(rows.pipeline)
    parts: dict[str, list[Array]] = {name: [] for name in names}
    for feeds in rows.feeds() if names else ():
        for name in names:
            parts[name].append(feeds[name])
    whole = {name: np.concatenate(own) for name, own in parts.items()}
    return [(name, at, values[:, at]) for name, values in whole.items() for at in range(values.shape[1])]


def _category_inputs(pipeline: Pipeline) -> list[str]:
    encoded = {name for node in pipeline.proto.graph.node if node.op_type in _ENCODERS for name in node.input}
    return [i.name for i in pipeline.inputs if i.type == TEXT or (i.type in _INTEGERS and i.name in encoded)]


def _contexts(rows: Rows) -> list[Feeds]:
    """Return two rows, the first and the last one of the data."""
    first, last = next(iter(rows.feeds())), deque(rows.feeds(), maxlen=1)[0]
    return [{name: v[:1] for name, v in first.items()}, {name: v[-1:] for name, v in last.items()}]


def _encoded(context: Feeds, source: str, column: int, keys: Array, encode: Callable[[Feeds], Array]) -> Array:
    """Return the features of a row with each of the categories in place of its own, [categories, features]."""
    parts = []
    for at in range(0, len(keys), BATCH_ROWS):
        own = keys[at : at + BATCH_ROWS]
        feeds = {name: np.repeat(values, len(own), axis=0) for name, values in context.items()}
        feeds[source] = feeds[source].copy()
        feeds[source][:, column] = own
        parts.append(np.asarray(encode(feeds), np.float32))
    return np.concatenate(parts)


def _changing(tables: list[Array]) -> Array:
    """Return the features that change with the category, and are the same in both tables."""
    first, second = tables
    same = (first == second).all(axis=0) & np.isfinite(first).all(axis=0)
    return np.flatnonzero(same & (first != first[:1]).any(axis=0))


def _holds(values: Array, codes: Array, feature: Array) -> bool:
    return bool((values[codes] == feature).all())
