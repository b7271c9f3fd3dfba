"""DeepFM: click prediction with a factorisation machine and a deep network in parallel.

Guo et al., *DeepFM: a factorization-machine based neural network for CTR prediction* (2017), for the 26 categorical and
13 numerical fields of Criteo: embeddings of width 10, and three hidden layers of width 400. Every categorical field has
tables of its own, so the model has many small independent operators.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
from onnx import TensorProto

from chrion.zoo.network import Network, Spec


@dataclass(frozen=True, slots=True)
class DeepFmSpec(Spec):
    """Parameters of the network; the defaults are those published for Criteo, with tables of 10 000 rows."""

    batch: int = 1
    #: The number of categorical fields.
    fields: int = 26
    #: The number of numerical fields.
    numbers: int = 13
    #: The number of categories of each field.
    vocabulary: int = 10_000
    embedding: int = 10
    #: The number of hidden layers.
    layers: int = 3
    #: The width of a hidden layer.
    hidden: int = 400


def build_deepfm(spec: DeepFmSpec) -> onnx.ModelProto:
    """Build the network.

    Inputs are ``categories`` [batch, fields] (int64 below ``vocabulary``) and ``numbers`` [batch, numbers]; the output
    ``Y`` [batch, 1] is the probability of a click.
    """
    net = _DeepFm(spec.seed)
    categories = net.input("categories", [spec.batch, spec.fields], TensorProto.INT64)
    numbers = net.input("numbers", [spec.batch, spec.numbers])
    columns = [net.unique(f"category{at}") for at in range(spec.fields)]
    net.node("Split", [categories, net.integers(*[1] * spec.fields)], columns, axis=1)
    vectors = [net.embed(column, spec.vocabulary, spec.embedding) for column in columns]
    weights = [net.embed(column, spec.vocabulary, 1) for column in columns]
    first = net.op("Squeeze", net.op("Sum", *weights), net.integers(1))
    stacked = net.op("Concat", *vectors, axis=1)
    flat = net.op("Reshape", stacked, net.integers(spec.batch, -1))
    deep, width = net.op("Concat", flat, numbers, axis=1), spec.fields * spec.embedding + spec.numbers
    for at in range(spec.layers):
        deep, width = net.op("Relu", net.dense(deep, width, spec.hidden, f"deep{at}")), spec.hidden
    linear = net.dense(numbers, spec.numbers, 1, "first")
    logit = net.op("Sum", first, linear, net.pairs(stacked), net.dense(deep, width, 1, "last"))
    net.output(net.op("Sigmoid", logit), "Y", [spec.batch, 1])
    return net.model("deepfm")


class _DeepFm(Network):
    def embed(self, column: str, rows: int, width: int) -> str:
        """Add an embedding of [batch, 1, width]."""
        return self.op("Gather", self.normal("table", rows, width, deviation=0.1), column, axis=0)

    def pairs(self, vectors: str) -> str:
        """Add the sum of the products of all pairs of vectors, (sum^2 - sum of squares) / 2: [batch, 1]."""
        second = self.integers(1)
        squared = self.op("Mul", *[self.op("ReduceSum", vectors, second, keepdims=0)] * 2)
        squares = self.op("ReduceSum", self.op("Mul", vectors, vectors), second, keepdims=0)
        difference = self.op("ReduceSum", self.op("Sub", squared, squares), second, keepdims=1)
        return self.op("Mul", difference, self.number(0.5))
