"""DLRM: click prediction from large embedding tables and small dense networks.

Naumov et al., *Deep learning recommendation model for personalization and recommendation systems* (2019): a bottom
network on the numerical fields, one embedding table for each categorical field, the inner products of all pairs of
their vectors, and a top network. The fields and their numbers of categories are those of Criteo's Kaggle data; as with
the published code's ``--max-ind-range``, no table has more rows than the parameter ``rows``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from chrion.zoo.network import Network, Spec
from chrion.zoo.weights_file import WeightsFile

#: The numbers of categories of the 26 categorical fields of Criteo's Kaggle data.
CATEGORIES = (
    *(1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194),
    *(27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
#: The number of numerical fields.
_NUMBERS = 13


@dataclass(frozen=True, slots=True)
class DlrmSpec(Spec):
    """Parameters of the network; the defaults are those published for Criteo's Kaggle data, but for ``rows``."""

    batch: int = 1
    #: The largest number of rows of a table; smaller fields keep their own number.
    rows: int = 100_000
    #: The width of an embedding.
    embedding: int = 16
    #: The categories of each field of a request, whose vectors are summed.
    lookups: int = 1
    #: The width of the first hidden layers; those after them have a half, and in the bottom network an eighth of it.
    hidden: int = 512


def build_dlrm(spec: DlrmSpec, store: WeightsFile | None = None) -> onnx.ModelProto:
    """Build the network.

    Inputs are ``numbers`` [batch, 13] and ``categories`` [batch, 26, lookups] (int64); every category is taken modulo
    the rows of its table. The output ``Y`` [batch, 1] is the probability of a click.
    """
    net = _Dlrm(spec.seed, store)
    numbers = net.input("numbers", [spec.batch, _NUMBERS])
    categories = net.input("categories", [spec.batch, len(CATEGORIES), spec.lookups], TensorProto.INT64)
    widths = [spec.hidden, max(1, spec.hidden // 2), max(1, spec.hidden // 8), spec.embedding]
    bottom = net.layers(numbers, [_NUMBERS, *widths], "bottom")
    columns = [net.unique(f"category{at}") for at in range(len(CATEGORIES))]
    net.node("Split", [categories, net.integers(*[1] * len(columns))], columns, axis=1)
    tables = zip(columns, CATEGORIES, strict=True)
    vectors = [net.pool(column, min(count, spec.rows), spec.embedding) for column, count in tables]
    flat = net.op("Concat", bottom, net.interact([bottom, *vectors], spec.batch), axis=1)
    pairs = len(columns) * (len(columns) + 1) // 2
    deep = net.layers(flat, [spec.embedding + pairs, spec.hidden, max(1, spec.hidden // 2)], "top")
    logit = net.dense(deep, max(1, spec.hidden // 2), 1, "last")
    net.output(net.op("Sigmoid", logit), "Y", [spec.batch, 1])
    return net.model("dlrm")


class _Dlrm(Network):
    def layers(self, x: str, widths: list[int], stem: str) -> str:
        """Add dense layers with ReLU, of the given input and output widths."""
        for at, (width, target) in enumerate(itertools.pairwise(widths)):
            x = self.op("Relu", self.dense(x, width, target, f"{stem}{at}", gain=2**0.5))
        return x

    def pool(self, column: str, rows: int, width: int) -> str:
        """Add a table and the sum of its rows that a column of [batch, 1, lookups] names: [batch, width]."""
        table = self.normal("table", rows, width, deviation=0.5)
        row = self.op("Mod", column, self.integers(rows))
        return self.op("ReduceSum", self.op("Gather", table, row, axis=0), self.integers(1, 2), keepdims=0)

    def interact(self, vectors: list[str], batch: int) -> str:
        """Add the inner products of all pairs of vectors of [batch, width]: [batch, pairs]."""
        count = len(vectors)
        stacked = self.op("Concat", *(self.op("Unsqueeze", v, self.integers(1)) for v in vectors), axis=1)
        products = self.op("MatMul", stacked, self.op("Transpose", stacked, perm=[0, 2, 1]))
        flat = self.op("Reshape", products, self.integers(batch, count * count))
        rows, columns = np.tril_indices(count, -1)
        pairs = self.constant("pairs", (rows * count + columns).astype(np.int64))
        return self.op("Gather", flat, pairs, axis=1)
