"""Features of many rows, of which encoded categories are looked up in tables that can be trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(eq=False)
class Embedding:
    """A table with a row for each category: what encoders make of it (WindTunnel, section 5.2.3).

    Categories that an encoder cannot tell apart, as those in one bucket of a hash encoder, have rows of their own.
    """

    #: The input of the model, and its column.
    source: str
    column: int
    #: The categories, texts or integers.
    keys: Sequence[Any]
    #: The features that are encoded, and their values, [categories, features].
    features: Array
    table: Array
    #: The category of each row of the data.
    codes: Array


@dataclass(eq=False)
class Features:
    """The features of rows, [rows, features], with tables for some of them."""

    fixed: Array
    embeddings: list[Embedding] = field(default_factory=list)

    def __call__(self, rows: slice | Array) -> Array:
        """Return the features of some rows."""
        found = np.array(self.fixed[rows], np.float32)
        for own in self.embeddings:
            found[:, own.features] = own.table[own.codes[rows]]
        return found

    def with_tables(self, tables: Sequence[Array]) -> Features:
        """Return the features with other tables."""
        changed = [replace(own, table=table) for own, table in zip(self.embeddings, tables, strict=True)]
        return Features(self.fixed, changed)
