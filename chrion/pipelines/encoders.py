"""Tables of target encoders updated with new rows, the old table as prior.

A target encoder replaces a category by the mean of the target among its rows. As ONNX it is a ``LabelEncoder`` from
texts or integers to numbers. A table counts as one if its numbers are fractions in the range of the target.

The new value of a category is the mean of the targets of its rows, with its old value and the mean of all rows as
prior (:class:`Prior`): of each table, the prior with which parts of the rows predict the others best. The old value
counts a multiple of the category's rows, since frequent categories have mostly been frequent before, and since encoders
give rare ones extreme values that tell little. Old values are moved to the new mean target first, and new ones back, so
that thresholds of trees keep their meaning; the leaves take the change of the mean. New categories have the default as
their old value, and gain a row. Only contents change.

Leaves must not be fitted on rows whose own targets are in the table, since a rare category would then tell the target.
So the rows that leaves are fitted on are encoded by tables of the other rows: cross-fitting in five parts, each of rows
that follow each other, since what happens on one day happens to many rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

Array = np.ndarray[Any, Any]
_KEYS = ("keys_strings", "keys_int64s")
#: The parts of cross-fitting.
FOLDS = 5
#: How often an old value may count for each row of its category, and the rows that the mean of all may count.
_OLD, _MEANS = (10.0, 3.0, 1.0, 0.3, 0.0), (1000.0, 300.0, 100.0, 30.0, 10.0, 3.0)
#: Fractions are at least this in a logarithm.
_LEAST = 1e-6
#: The steps in which a factor of odds is found.
_STEPS = 20


@dataclass(frozen=True, eq=False)
class Encoder:
    """A table of a target encoder in a model."""

    #: The node's index in the model, the value that holds the categories, and that which holds their numbers.
    at: int
    source: str
    output: str
    values: Mapping[Any, float]
    default: float


@dataclass(frozen=True, slots=True)
class _Shift:
    """A change of all odds by a factor, or of all numbers by a term."""

    change: float
    fractions: bool

    def forth(self, values: Array) -> Array:
        """Return values after the change."""
        return _with_odds(values, self.change) if self.fractions else values + self.change

    def back(self, values: Array) -> Array:
        """Return values before the change."""
        return _with_odds(values, 1 / self.change) if self.fractions else values - self.change


def _with_odds(values: Array, factor: float) -> Array:
    return np.asarray(values * factor / (1 - values + values * factor))


@dataclass(frozen=True, slots=True)
class Prior:
    """What counts beside the new rows of a category.

    Attributes:
        old: How often its old value counts for each of its new rows.
        mean: How many rows the mean of all new rows counts.
    """

    old: float
    mean: float

    def values(self, old: Array, mean: float, counts: Array, sums: Array) -> Array:
        """Return the values of categories with old values, numbers of rows, and sums of their targets."""
        return np.asarray(
            (self.old * counts * old + self.mean * mean + sums) / (self.old * counts + self.mean + counts)
        )


#: The priors to choose from; None keeps all values.
PRIORS: Sequence[Prior | None] = (None, *(Prior(old, mean) for old in _OLD for mean in _MEANS))


@dataclass(frozen=True, eq=False)
class UpdatedTable:
    """A table with new values, the value of each row, and the prior."""

    table: Mapping[Any, float]
    values: Array
    prior: Prior | None


class EncodedRows:
    """The categories of rows that a table encodes, and their targets.

    Args:
        encoder: The encoder.
        categories: The categories.
        codes: The category of each row.
        y: The target of each row.
        fractions: Whether targets are 0 or 1.
        moved: Whether a change of the mean target is left to the leaves.
        share: How much of the change of a value is kept.

    Attributes:
        encoder: The encoder.
    """

    def __init__(  # noqa: PLR0913 - as documented
        self,
        encoder: Encoder,
        categories: Sequence[Any],
        codes: Array,
        y: Array,
        *,
        fractions: bool,
        moved: bool,
        share: float = 1.0,
    ) -> None:
        self.encoder, self._categories, self._codes, self._y = encoder, categories, codes, y
        self._fractions, self._moved, self._share = fractions, moved, share
        self._old = np.array([encoder.values.get(name, encoder.default) for name in categories], np.float64)

    def updated(self, fitted: int) -> UpdatedTable:
        """Return the table that the first so many rows update.

        The values of these rows are those of tables of the others among them.
        """
        codes, y = self._codes[:fitted], self._y[:fitted]
        part, shape = np.arange(fitted) * FOLDS // fitted, (FOLDS, len(self._categories))
        counts, sums = (
            np.bincount(part * shape[1] + codes, own, math.prod(shape)).reshape(shape) for own in (np.ones(fitted), y)
        )
        all_counts, all_sums = counts.sum(axis=0), sums.sum(axis=0)
        shift = self._shift(all_counts, all_sums)
        moved, mean = shift.forth(self._old), float(y.mean())

        def values(prior: Prior | None, counts: Array, sums: Array) -> Array:
            """Return the new values after the change; NaN for those that stay."""
            found = np.full(counts.shape, np.nan)
            return found if prior is None else np.where(counts > 0, prior.values(moved, mean, counts, sums), found)

        def losses(prior: Prior | None) -> float:
            found = values(prior, all_counts - counts, all_sums - sums)
            return self._loss(np.where(np.isnan(found), moved, found), counts, sums)

        priors = PRIORS if self.encoder.values else PRIORS[1:]  # an empty table has nothing to keep
        prior = priors[int(np.argmin([losses(prior) for prior in priors]))]
        of_parts, whole = values(prior, all_counts - counts, all_sums - sums), values(prior, all_counts, all_sums)
        table, parts = (np.where(np.isnan(own), self._old, self._kept(shift.back(own))) for own in (whole, of_parts))
        rows = table[self._codes]
        rows[:fitted] = parts[part, codes]
        changed = {self._categories[at]: float(table[at]) for at in np.flatnonzero(all_counts).tolist()}
        return UpdatedTable({**self.encoder.values, **changed}, rows.astype(np.float32), prior)

    def _kept(self, values: Array) -> Array:
        """Return the old values with a share of their change."""
        return self._old + self._share * (values - self._old)

    def _shift(self, counts: Array, sums: Array) -> _Shift:
        """Return the change of the mean target from old values to rows."""
        rows, mean = counts.sum(), sums.sum() / counts.sum()
        if not self._moved or (self._fractions and not 0 < mean < 1):
            return _Shift(1.0 if self._fractions else 0.0, self._fractions)
        if not self._fractions:
            return _Shift(float(mean - counts @ self._old / rows), self._fractions)
        shift = _Shift(1.0, self._fractions)
        for _ in range(_STEPS):
            found = np.clip(counts @ shift.forth(self._old) / rows, _LEAST, 1 - _LEAST)
            shift = _Shift(float(shift.change * mean * (1 - found) / (found * (1 - mean))), self._fractions)
        return shift

    def _loss(self, found: Array, counts: Array, sums: Array) -> float:
        """Return the loss of rows for which a value is found, by their numbers and the sums of their targets."""
        if not self._fractions:
            return float((counts * found**2 - 2 * sums * found).sum())
        kept = np.clip(found, _LEAST, 1 - _LEAST)
        return float(-(sums * np.log(kept) + (counts - sums) * np.log(1 - kept)).sum())


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
        default = float(attributes.get("default_float", 0.0))
        every = np.append(values, default)
        inside = len(values) and low <= every.min() and every.max() <= high and (values != np.floor(values)).any()
        if inside and len(keys) == len(values):
            try:
                names = [key.decode() if isinstance(key, bytes) else key for key in keys]
            except UnicodeDecodeError:  # no text of a table is such a key
                continue
            found.append(
                Encoder(at, node.input[0], node.output[0], dict(zip(names, values.tolist(), strict=True)), default)
            )
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
