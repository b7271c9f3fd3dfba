"""The three preprocessings of Yu (2022), section 5.4.1: Pre1, Pre2 and Pre3.

| | categories that are kept | numbers | code of a category |
| --- | --- | --- | --- |
| Pre1 | at least 25 rows | as they are | binary: its number in bits |
| Pre2 | at least 25 rows | as they are | two-hot: ones at the two digits of its number in the base of a square root |
| Pre3 | at least 10 rows, without the rarest 1 % | also as one of 32 bins | two-hot, and the mean of the target |

The text defines neither two-hot nor the numbers of categories. Categories are numbered by their rows here, the most
frequent one first; number 0 are dropped, missing and unseen ones. Bins are quantiles, and are categories. Means have
20 rows of the whole mean added, and rows to train with get those of the other rows, in five parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from finetuning.click_logs import Rows

Array = np.ndarray[Any, Any]
_BINS, _PRIOR_ROWS, _FOLDS = 32, 20, 5


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a preprocessing does."""

    least_rows: int
    dropped_share: float
    two_hot: bool
    bins: bool
    means: bool


SCHEMES = {
    "Pre1": Scheme(25, 0.0, two_hot=False, bins=False, means=False),
    "Pre2": Scheme(25, 0.0, two_hot=True, bins=False, means=False),
    "Pre3": Scheme(10, 0.01, two_hot=True, bins=True, means=True),
}


class Encoder:
    """A preprocessing that is fitted on rows.

    Args:
        scheme: What it does.
        rows: The rows to train with.

    Attributes:
        sizes: The numbers of categories of each column, which begin with that of dropped ones.
    """

    def __init__(self, scheme: Scheme, rows: Rows) -> None:
        self._scheme = scheme
        self._edges = np.nanquantile(rows.numbers, np.linspace(0, 1, _BINS + 1)[1:-1], axis=0) if scheme.bins else None
        columns = self._columns(rows)
        self._numbers = [_numbered(column, scheme) for column in columns.T]
        self.sizes = [int(numbers.max(initial=0)) + 1 for numbers in self._numbers]
        self._mean = float(rows.y.mean())
        self._codes, self._y = self.codes(rows), rows.y.astype(np.float64)

    def codes(self, rows: Rows) -> Array:
        """Return the number of each category, [rows, columns]."""
        columns = self._columns(rows)
        found = [_looked_up(numbers, column) for numbers, column in zip(self._numbers, columns.T, strict=True)]
        return np.stack(found, axis=1) if found else np.zeros((len(rows), 0), np.int64)

    @cached_property
    def vectors(self) -> list[Array]:
        """The vectors of the categories of each column, [categories, width]; the first row is 0."""
        return [_two_hot(size) if self._scheme.two_hot else _binary(size) for size in self.sizes]

    def encode(self, rows: Rows, *, trained: bool = False) -> Array:
        """Return the features of rows: numbers, vectors, and means.

        Args:
            rows: The rows.
            trained: Whether they are the rows that the preprocessing is fitted on.
        """
        codes = self.codes(rows)
        parts = [rows.numbers, *(own[codes[:, at]] for at, own in enumerate(self.vectors))]
        if self._scheme.means:
            parts.append(self._cross_fitted() if trained else self._means(codes, np.ones(len(self._y), bool)))
        return np.hstack(parts).astype(np.float32)

    def _columns(self, rows: Rows) -> Array:
        """Return the categories of rows, with the bins of numbers."""
        if self._edges is None:
            return rows.categories
        bins = [
            np.where(np.isnan(own), len(edges) + 1, np.searchsorted(edges, own, side="right"))
            for own, edges in zip(rows.numbers.T, self._edges.T, strict=True)
        ]
        return np.hstack([rows.categories, np.array(bins, np.int32).reshape(len(bins), len(rows)).T])

    def _means(self, codes: Array, used: Array) -> Array:
        """Return the means of the target of categories among the used rows."""
        columns = []
        for at, size in enumerate(self.sizes):
            own = self._codes[used, at]
            rows, hits = np.bincount(own, minlength=size), np.bincount(own, self._y[used], minlength=size)
            columns.append(((hits + _PRIOR_ROWS * self._mean) / (rows + _PRIOR_ROWS))[codes[:, at]])
        return np.stack(columns, axis=1)

    def _cross_fitted(self) -> Array:
        fold = np.arange(len(self._y)) % _FOLDS
        found = np.empty(self._codes.shape)
        for at in range(_FOLDS):
            found[fold == at] = self._means(self._codes[fold == at], fold != at)
        return found


def _numbered(column: Array, scheme: Scheme) -> Array:
    """Return the number of each category of a column; 0 of those that are dropped."""
    rows = np.bincount(column)
    order = np.argsort(-rows, kind="stable")
    present = int((rows > 0).sum())
    kept = order[: present - int(scheme.dropped_share * present)]
    kept = kept[rows[kept] >= scheme.least_rows]
    numbers = np.zeros(len(rows), np.int64)
    numbers[kept] = np.arange(1, len(kept) + 1)
    return numbers


def _looked_up(numbers: Array, column: Array) -> Array:
    known = column < len(numbers)
    return np.where(known, numbers[np.where(known, column, 0)] if len(numbers) else 0, 0)


def _binary(size: int) -> Array:
    """Return the bits of the numbers below a size."""
    return (np.arange(size)[:, None] >> np.arange(max(1, (size - 1).bit_length()))) & 1


def _two_hot(size: int) -> Array:
    """Return a one for each of the two digits of the numbers from 1 on, in the base of the root of their count."""
    base = max(1, int(np.ceil(np.sqrt(size - 1))))
    vectors = np.zeros((size, 2 * base), np.int8)
    numbers = np.arange(size - 1)
    vectors[1 + numbers, numbers // base] = 1
    vectors[1 + numbers, base + numbers % base] = 1
    return vectors
