"""Tables of target encoders updated with new rows, the old table as prior.

A target encoder replaces a category by the mean of the target among its rows. As ONNX it is a ``LabelEncoder`` from
texts or integers to numbers. A table counts as one if its numbers are fractions in the range of the target.

The new value of a category is ``(strength * old + sum of its targets) / (strength + its rows)``: the mean of its rows,
to which the old value adds as many rows as the strength says. A category without a row in the table has the default
value as its old one, and gains a row. Only contents change.

Leaves must not be fitted on rows whose own targets are in the table, since a rare category would then tell the target.
So the rows that leaves are fitted on are encoded by tables of the other rows: cross-fitting in five parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

Array = np.ndarray[Any, Any]
_KEYS = ("keys_strings", "keys_int64s")
#: The parts of cross-fitting.
FOLDS = 5


@dataclass(frozen=True, eq=False)
class Encoder:
    """A table of a target encoder in a model."""

    #: The node's index in the model, and the value that holds the categories.
    at: int
    source: str
    values: Mapping[Any, float]
    default: float

    def updated(self, categories: Array, y: Array, strength: float) -> dict[Any, float]:
        """Return the table with new rows.

        Args:
            categories: The category of each row.
            y: The target of each row.
            strength: The rows that an old value is worth.
        """
        names, codes, counts = np.unique(categories, return_inverse=True, return_counts=True)
        sums = np.bincount(codes, y, minlength=len(names))
        table = dict(self.values)
        for name, count, total in zip(names.tolist(), counts.tolist(), sums.tolist(), strict=True):
            old = self.values.get(name, self.default)
            table[name] = (strength * old + total) / (strength + count)
        return table


def find_encoders(model: onnx.ModelProto, before: int, low: float, high: float) -> list[Encoder]:
    """Return the tables of a model that look like those of target encoders.

    Args:
        model: The model.
        before: The index of the node that reads the encoded values.
        low: The least value of the target.
        high: Its greatest value.
    """
    found = []
    for at, node in enumerate(model.graph.node[:before]):
        if node.op_type != "LabelEncoder" or node.domain != "ai.onnx.ml":
            continue
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        keys: Sequence[Any] = next((attributes[name] for name in _KEYS if name in attributes), [])
        values = np.asarray(attributes.get("values_floats", []), np.float64)
        inside = len(values) and low <= values.min() and values.max() <= high and (values != np.floor(values)).any()
        if inside and len(keys) == len(values):
            try:
                names = [key.decode() if isinstance(key, bytes) else key for key in keys]
            except UnicodeDecodeError:  # no text of a table is such a key
                continue
            default = float(attributes.get("default_float", 0.0))
            found.append(Encoder(at, node.input[0], dict(zip(names, values.tolist(), strict=True)), default))
    return found


def with_tables(model: onnx.ModelProto, tables: Mapping[int, Mapping[Any, float]]) -> onnx.ModelProto:
    """Return a model with other tables, by the index of their node."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for at, table in tables.items():
        node = changed.graph.node[at]
        content = {"keys_strings" if isinstance(next(iter(table)), str) else "keys_int64s": list(table)}
        content["values_floats"] = list(table.values())
        kept = [a for a in node.attribute if a.name not in content]
        del node.attribute[:]
        node.attribute.extend([*kept, *(helper.make_attribute(name, value) for name, value in content.items())])
    return changed


def tables_of(
    encoders: Sequence[Encoder], categories: Sequence[Array], y: Array, rows: Array, strength: float
) -> dict[int, dict[Any, float]]:
    """Return the tables of encoders that some of the rows update.

    Args:
        encoders: The encoders.
        categories: The categories of all rows, by encoder.
        y: The target of all rows.
        rows: The rows that count, as a mask.
        strength: The rows that an old value is worth.
    """
    pairs = zip(encoders, categories, strict=True)
    return {encoder.at: encoder.updated(own[rows], y[rows], strength) for encoder, own in pairs}


def folds(rows: int, fitted: int) -> Iterator[tuple[Array, Array]]:
    """Yield which rows update a table, and which of all rows are encoded by it, as masks.

    Args:
        rows: The number of rows.
        fitted: The first so many update tables; they are encoded by tables of the others among them.
    """
    at = np.arange(rows)
    for fold in range(FOLDS):
        own = (at < fitted) & (at % FOLDS == fold)
        yield (at < fitted) & ~own, own
    yield at < fitted, at >= fitted
