"""Building blocks of transformers as plain operators: attention, normalisation, and activation."""

from __future__ import annotations

import numpy as np

from chrion.zoo.network import Network


class Transformer(Network):
    """A network on sequences, whose values have the shape [batch, steps, hidden].

    Args:
        seed: The seed of the weights.
        batch: The number of sequences.
        hidden: The width of a value.
        heads: The number of heads of each attention, each of width ``hidden / heads``.
        bias: Add a bias in the projections of attention.
    """

    def __init__(self, seed: int, batch: int, hidden: int, heads: int, *, bias: bool) -> None:
        super().__init__(seed)
        self.batch, self.hidden, self.heads, self.bias = batch, hidden, heads, bias

    def embed(self, ids: str, rows: int, stem: str) -> str:
        """Add an embedding with a table of normally distributed vectors."""
        return self.op("Gather", self.normal(stem, rows, self.hidden, deviation=1.0), ids, axis=0)

    def project(self, x: str, stem: str, gain: float = 1.0) -> str:
        """Add a dense layer of equal input and output width."""
        return self.dense(x, self.hidden, self.hidden, stem, bias=self.bias, gain=gain)

    def split_heads(self, x: str, *, transposed: bool = False) -> str:
        """Reshape a value of [batch, steps, hidden] to [batch, heads, steps, head width].

        Args:
            x: The value.
            transposed: Return [batch, heads, head width, steps] instead, the form of keys.
        """
        shape = self.integers(self.batch, -1, self.heads, self.hidden // self.heads)
        perm = [0, 2, 3, 1] if transposed else [0, 2, 1, 3]
        return self.op("Transpose", self.op("Reshape", x, shape), perm=perm)

    def attention(self, x: str, memory: str, added: str, *, scaled: bool) -> str:
        """Add multi-head attention.

        Args:
            x: The source of the queries.
            memory: The source of the keys and values: ``x`` itself, or the output of the encoder.
            added: A value that is added to the scores, a mask or a position bias; empty for none.
            scaled: Divide the scores by the square root of a head's width; otherwise the weights of the queries are
                smaller by that factor.
        """
        factor = (self.hidden // self.heads) ** -0.5
        queries = self.split_heads(self.project(x, "query", 1.0 if scaled else factor))
        keys = self.split_heads(self.project(memory, "key"), transposed=True)
        values = self.split_heads(self.project(memory, "value"))
        scores = self.op("MatMul", queries, keys)
        scores = self.op("Mul", scores, self.number(factor)) if scaled else scores
        scores = self.op("Add", scores, added) if added else scores
        context = self.op("MatMul", self.op("Softmax", scores, axis=-1), values)
        flat = self.op(
            "Reshape", self.op("Transpose", context, perm=[0, 2, 1, 3]), self.integers(self.batch, -1, self.hidden)
        )
        return self.project(flat, "output")

    def layer_norm(self, x: str) -> str:
        """Add a layer normalisation with scale and shift."""
        scale = self.constant(self.unique("scale"), np.ones(self.hidden, np.float32))
        return self.op("LayerNormalization", x, scale, self.normal("shift", self.hidden, deviation=0.02), epsilon=1e-6)

    def rms_norm(self, x: str) -> str:
        """Add a root mean square normalisation with scale."""
        mean = self.op("ReduceMean", self.op("Mul", x, x), axes=[-1])
        root = self.op("Sqrt", self.op("Add", mean, self.number(1e-6)))
        scale = self.constant(self.unique("scale"), np.ones(self.hidden, np.float32))
        return self.op("Mul", self.op("Div", x, root), scale)
