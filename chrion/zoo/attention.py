"""What transformers are made of, as plain operators: attention with separate projections, dense layers, residuals."""

from __future__ import annotations

import numpy as np

from chrion.zoo.network import Network


class Transformer(Network):
    """A network on sequences: values are [batch, steps, width].

    Args:
        seed: Of the weights.
        batch: Sequences at once.
        hidden: Width of a value.
        heads: Heads of each attention; they share ``hidden`` among them.
        bias: Whether dense layers add one.
    """

    def __init__(self, seed: int, batch: int, hidden: int, heads: int, *, bias: bool) -> None:
        super().__init__(seed)
        self.batch, self.hidden, self.heads, self.bias = batch, hidden, heads, bias

    def embedded(self, ids: str, rows: int, stem: str) -> str:
        """Rows of a table of normally distributed vectors."""
        return self.op("Gather", self.normal(stem, rows, self.hidden, deviation=1.0), ids, axis=0)

    def project(self, x: str, stem: str, gain: float = 1.0) -> str:
        """A dense layer that keeps the width."""
        return self.dense(x, self.hidden, self.hidden, stem, bias=self.bias, gain=gain)

    def split_heads(self, x: str, *, last: str = "steps") -> str:
        """[batch, heads, steps, width of a head]; with ``last="width"`` transposed, as keys are wanted."""
        shape = self.integers(self.batch, -1, self.heads, self.hidden // self.heads)
        perm = [0, 2, 1, 3] if last == "steps" else [0, 2, 3, 1]
        return self.op("Transpose", self.op("Reshape", x, shape), perm=perm)

    def attention(self, x: str, memory: str, added: str, *, scaled: bool) -> str:
        """Attention of ``x`` to ``memory``.

        Args:
            x: What asks.
            memory: What is asked; ``x`` itself, or the encoder's output.
            added: Added to the scores: a mask, or what positions are worth. Empty for nothing.
            scaled: Whether scores are divided by the root of a head's width; else the queries' weights are as small.
        """
        factor = (self.hidden // self.heads) ** -0.5
        queries = self.split_heads(self.project(x, "query", 1.0 if scaled else factor))
        keys = self.split_heads(self.project(memory, "key"), last="width")
        values = self.split_heads(self.project(memory, "value"))
        scores = self.op("MatMul", queries, keys)
        scores = self.op("Mul", scores, self.number(factor)) if scaled else scores
        scores = self.op("Add", scores, added) if added else scores
        read = self.op("MatMul", self.op("Softmax", scores, axis=-1), values)
        flat = self.op(
            "Reshape", self.op("Transpose", read, perm=[0, 2, 1, 3]), self.integers(self.batch, -1, self.hidden)
        )
        return self.project(flat, "output")

    def layer_norm(self, x: str) -> str:
        """Mean 0 and variance 1, then scaled and shifted."""
        scale = self.constant(self.unique("scale"), np.ones(self.hidden, np.float32))
        return self.op("LayerNormalization", x, scale, self.normal("shift", self.hidden, deviation=0.02), epsilon=1e-6)

    def rms_norm(self, x: str) -> str:
        """Mean square 1, then scaled."""
        mean = self.op("ReduceMean", self.op("Mul", x, x), axes=[-1])
        root = self.op("Sqrt", self.op("Add", mean, self.number(1e-6)))
        scale = self.constant(self.unique("scale"), np.ones(self.hidden, np.float32))
        return self.op("Mul", self.op("Div", x, root), scale)

    def gelu(self, x: str) -> str:
        """``x / 2 * (1 + erf(x / sqrt(2)))``."""
        inner = self.op("Erf", self.op("Div", x, self.number(2**0.5)))
        return self.op("Mul", self.op("Mul", x, self.op("Add", inner, self.number(1.0))), self.number(0.5))
