"""Membership in sets as a lookup: a table of the integers of all sets, and each feature as a column of it.

Members are categories, which are integers: in ``TreeEnsemble`` onnxruntime accepts no others. Where a set has an
integer beyond the first ones, it truncates the feature before the comparison, as LightGBM does; here a feature has to
be equal to a member, as ONNX says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from chrion.graph.rewrite import Rewriter
from chrion.graph.trees.ensemble import Array, TreeEnsemble

#: The most integers between members: each of them, and those beside, are exact in float32.
_MOST_INTEGERS = 1 << 23


@dataclass(frozen=True, eq=False)
class SetTable:
    """The members of all sets of an ensemble.

    The first row has no member, and is that of the nodes without a set. The first and the last column are those of
    numbers that are no integers, or beyond all members.
    """

    #: Whether each integer is a member of each set, row by row, [sets + 1, columns].
    members: Array
    #: Where the row of each inner node begins in the table as one column.
    starts: Array
    #: The integer of the first column.
    first: int

    @classmethod
    def of(cls, ensemble: TreeEnsemble, most: int) -> SetTable:
        """Return the table of an ensemble.

        Args:
            ensemble: The ensemble.
            most: The most elements of a table.

        Raises:
            ValueError: A member is no integer, or members are too far apart.
        """
        every = np.concatenate([[0], *ensemble.members.values()]).astype(np.float64)
        every = every[~np.isnan(every)]  # which no feature is equal to
        if not (np.isfinite(every) & (np.floor(every) == every)).all():
            raise ValueError("tests membership in sets of numbers that are no integers")
        first, columns = int(every.min()) - 1, int(every.max() - every.min()) + 3
        if columns > _MOST_INTEGERS or columns * (len(ensemble.members) + 1) > most:
            raise ValueError("tests membership in sets with members too far apart for this form")
        members = np.zeros((len(ensemble.members) + 1, columns), bool)
        starts = np.zeros(len(ensemble.features), np.int32)
        for row, (node, own) in enumerate(ensemble.members.items(), start=1):
            members[row, own[~np.isnan(own)].astype(np.int64) - first] = True
            starts[node] = row * columns
        return cls(members, starts, first)

    def columns_of(self, rewriter: Rewriter, x: str, name: str, dtype: np.dtype[Any]) -> str:
        """Add the operators from features to their columns in the table, as int32.

        Args:
            rewriter: The model that is being rewritten.
            x: The features.
            name: The beginning of the names of new values.
            dtype: The type of the features.
        """

        def add(kind: str, inputs: list[str | Array], output: str, **attributes: int) -> str:
            return rewriter.add(kind, inputs, f"{name}/{output}", **attributes)

        last = self.first + self.members.shape[1] - 1
        near = add("Clip", [x, *(np.array(end, dtype) for end in (self.first, last))], "near")
        whole = add("Equal", [add("Floor", [near], "floor"), near], "whole")  # NaN is not equal to itself
        column = add("Sub", [near, np.array(self.first, dtype)], "from_first")
        known = add("Where", [whole, column, np.array(0, dtype)], "known")
        return add("Cast", [known], "column", to=TensorProto.INT32)
