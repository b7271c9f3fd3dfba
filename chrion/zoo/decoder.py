"""Building blocks of decoders such as Llama, as plain operators.

Touvron et al., *LLaMA: open and efficient foundation language models* (2023): rotary position embeddings (Su et al.,
2021), grouped-query attention (Ainslie et al., 2023), root mean square normalisation, and SwiGLU (Shazeer, 2020).
Values have the shape [batch, steps, hidden], those of heads [batch, heads, steps, width]. No block assumes a number of
steps, and keys and values are separate from the attention that reads them, so a caller may insert a cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chrion.errors import OptionError
from chrion.zoo.network import Network, check_heads
from chrion.zoo.weights_file import WeightsFile

#: The score of a step that attention must not see.
MASKED = -1e9


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """Cosines and sines of rotary position embeddings: values that broadcast to [batch, heads, steps, width / 2]."""

    cos: str
    sin: str


class Decoder(Network):
    """A network of decoder blocks.

    Args:
        seed: The seed of the weights.
        batch: The number of sequences.
        hidden: The width of a value.
        heads: The number of heads of the queries, each of width ``hidden / heads``.
        kv_heads: The number of heads of the keys and values; each serves ``heads / kv_heads`` heads of the queries.
        store: The file of large weights; None to keep all weights in the model.
    """

    def __init__(  # noqa: PLR0913 - the sizes that all blocks share
        self, seed: int, batch: int, hidden: int, heads: int, kv_heads: int, *, store: WeightsFile | None = None
    ) -> None:
        super().__init__(seed, store)
        self.batch, self.hidden, self.heads, self.kv_heads = batch, hidden, heads, kv_heads
        self.width = hidden // heads

    def embed(self, ids: str, rows: int) -> str:
        """Add an embedding of words: [batch, steps, hidden]."""
        return self.op("Gather", self.normal("words", rows, self.hidden, deviation=1.0), ids, axis=0)

    def rms_norm(self, x: str) -> str:
        """Add a root mean square normalisation with scale."""
        mean = self.op("ReduceMean", self.op("Mul", x, x), axes=[-1])
        root = self.op("Sqrt", self.op("Add", mean, self.number(1e-5)))
        scale = self.constant(self.unique("scale"), np.ones(self.hidden, np.float32))
        return self.op("Mul", self.op("Div", x, root), scale)

    def rotation(self, steps: int) -> RotaryTables:
        """Add the constant rotation of the steps 0 to ``steps - 1``."""
        angles = rotary_angles(steps, self.width)[None, None]
        return RotaryTables(self.constant("cos", np.cos(angles)), self.constant("sin", np.sin(angles)))

    def rotation_at(self, positions: str, limit: int) -> RotaryTables:
        """Add the rotation of given positions.

        Args:
            positions: Positions below ``limit``: [batch, steps] (int64).
            limit: The number of positions.
        """
        angles = rotary_angles(limit, self.width)
        tables = (self.constant("cos_table", np.cos(angles)), self.constant("sin_table", np.sin(angles)))
        cos, sin = (
            self.op("Unsqueeze", self.op("Gather", table, positions, axis=0), self.integers(1)) for table in tables
        )
        return RotaryTables(cos, sin)

    def rotate(self, x: str, rotation: RotaryTables) -> str:
        """Rotate each pair of elements ``i`` and ``i + width / 2`` of every head by the angle of its position."""
        halves = [self.unique("half") for _ in range(2)]
        self.node("Split", [x, self.integers(*[self.width // 2] * 2)], halves, axis=-1)
        first, second = halves
        return self.op(
            "Concat",
            self.op("Sub", self.op("Mul", first, rotation.cos), self.op("Mul", second, rotation.sin)),
            self.op("Add", self.op("Mul", second, rotation.cos), self.op("Mul", first, rotation.sin)),
            axis=-1,
        )

    def queries(self, x: str, rotation: RotaryTables) -> str:
        """Add the queries of attention: [batch, heads, steps, width]."""
        return self.rotate(self._heads(x, self.heads, "query"), rotation)

    def keys_and_values(self, x: str, rotation: RotaryTables) -> tuple[str, str]:
        """Add the keys and the values of attention, both [batch, kv_heads, steps, width]."""
        return self.rotate(self._heads(x, self.kv_heads, "key"), rotation), self._heads(x, self.kv_heads, "value")

    def attend(self, queries: str, keys: str, values: str, mask: str) -> str:
        """Add grouped-query attention, as :meth:`context` does, and its output projection: [batch, steps, hidden]."""
        return self.dense(self.context(queries, keys, values, mask), self.hidden, self.hidden, "output", bias=False)

    def context(self, queries: str, keys: str, values: str, mask: str) -> str:
        """Add grouped-query attention: [batch, steps, hidden].

        Args:
            queries: [batch, heads, steps, width].
            keys: [batch, kv_heads, keys, width].
            values: [batch, kv_heads, keys, width].
            mask: A value that is added to the scores, which broadcasts to [batch, kv_heads, group, steps, keys].
        """
        group = self.heads // self.kv_heads
        split = self.integers(self.batch, self.kv_heads, group, -1, self.width)
        shared = self.integers(2)
        keys = self.op("Transpose", self.op("Unsqueeze", keys, shared), perm=[0, 1, 2, 4, 3])
        scores = self.op("MatMul", self.op("Reshape", queries, split), keys)
        scores = self.op("Add", self.op("Mul", scores, self.number(self.width**-0.5)), mask)
        context = self.op("MatMul", self.op("Softmax", scores, axis=-1), self.op("Unsqueeze", values, shared))
        joined = self.op("Transpose", context, perm=[0, 3, 1, 2, 4])
        return self.op("Reshape", joined, self.integers(self.batch, -1, self.hidden))

    def causal_mask(self, steps: int) -> str:
        """Add the constant mask of attention that sees no later step."""
        mask = np.triu(np.full((steps, steps), MASKED, np.float32), 1)
        return self.constant("causal_mask", mask[None, None, None])

    def self_attention(self, x: str, rotation: RotaryTables, mask: str) -> str:
        """Add causal self-attention without a cache, with normalisation and a residual connection."""
        with self.scope("attention"):
            normal = self.rms_norm(x)
            keys, values = self.keys_and_values(normal, rotation)
            return self.op("Add", x, self.attend(self.queries(normal, rotation), keys, values, mask))

    def feed_forward(self, x: str, inner: int) -> str:
        """Add SwiGLU with normalisation and a residual connection."""
        with self.scope("feed_forward"):
            return self.op("Add", x, self.swiglu(self.rms_norm(x), inner))

    def swiglu(self, x: str, inner: int) -> str:
        """Add SwiGLU: ``(silu(x W1) * (x W3)) W2``, with matrices of width ``inner`` and no bias."""
        gate = self.dense(x, self.hidden, inner, "gate", bias=False)
        silu = self.op("Mul", gate, self.op("Sigmoid", gate))
        up = self.dense(x, self.hidden, inner, "up", bias=False)
        return self.dense(self.op("Mul", silu, up), inner, self.hidden, "down", bias=False)

    def _heads(self, x: str, count: int, stem: str) -> str:
        return self.split_heads(self.dense(x, self.hidden, count * self.width, stem, bias=False), count)

    def split_heads(self, x: str, count: int) -> str:
        """Return a value of [batch, steps, count * width] as [batch, count, steps, width]."""
        split = self.op("Reshape", x, self.integers(self.batch, -1, count, self.width))
        return self.op("Transpose", split, perm=[0, 2, 1, 3])


def check_decoder_heads(hidden: int, heads: int, kv_heads: int) -> None:
    """Check the numbers of heads of grouped-query attention with rotary embeddings.

    Raises:
        OptionError: A number of heads does not divide what it shares out, or a head has an odd width.
    """
    check_heads(hidden, heads)
    if heads % kv_heads:
        raise OptionError(f"kv_heads: {kv_heads} does not divide the {heads} heads")
    if hidden // heads % 2:
        raise OptionError(f"heads: a width of {hidden // heads} per head is odd", hint="rotary embeddings need pairs")


def rotary_angles(positions: int, width: int) -> npt.NDArray[np.float32]:
    """Return the angles of rotary embeddings, ``position * 10000 ** (-2 i / width)``: [positions, width / 2]."""
    frequencies = 10_000.0 ** (-np.arange(0, width, 2) / width)
    return (np.arange(positions)[:, None] * frequencies[None, :]).astype(np.float32)
