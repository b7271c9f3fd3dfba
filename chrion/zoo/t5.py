"""Transformers of an encoder and a decoder, such as T5.

Raffel et al., *Exploring the limits of transfer learning with a unified text-to-text transformer* (2020): pre-norm
blocks without bias, relative position biases in buckets, and a vocabulary shared by input and output. The model makes
one pass over a whole target sequence, without a cache between steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from chrion.zoo.attention import Transformer
from chrion.zoo.network import Spec, check_heads

_BUCKETS, _MAX_DISTANCE = 32, 128


@dataclass(frozen=True, slots=True)
class T5Spec(Spec):
    """Parameters of the network; the defaults are those of T5-small."""

    batch: int = 1
    #: Steps of the source sequence.
    seq: int = 128
    #: Steps of the target sequence.
    target: int = 32
    #: The blocks of the encoder, and those of the decoder.
    layers: int = 6
    hidden: int = 512
    heads: int = 8
    #: The width between the two dense layers of a block.
    inner: int = 2048
    vocabulary: int = 32_128

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        check_heads(self.hidden, self.heads)


def build_t5(spec: T5Spec) -> onnx.ModelProto:
    """Build the network.

    Inputs are ``ids`` [batch, seq] and ``target`` [batch, target] (int64); the output is ``Y`` [batch, target,
    vocabulary].
    """
    net = _T5(spec.seed, spec.batch, spec.hidden, spec.heads, bias=False)
    ids = net.input("ids", [spec.batch, spec.seq], TensorProto.INT64)
    target = net.input("target", [spec.batch, spec.target], TensorProto.INT64)
    table = net.normal("words", spec.vocabulary, spec.hidden, deviation=1.0)
    x, y = (net.op("Gather", table, words, axis=0) for words in (ids, target))
    with net.scope("encoder"):
        bias = net.positions(relative_buckets(spec.seq, bidirectional=True))
        for at in range(spec.layers):
            with net.scope(f"block{at}"):
                x = net.dense_block(net.attention_block(x, "", bias), spec.inner)
        x = net.rms_norm(x)
    with net.scope("decoder"):
        mask = np.triu(np.full((spec.target, spec.target), -1e9, np.float32), 1)[None, None]
        bias = net.positions(relative_buckets(spec.target, bidirectional=False))
        bias = net.op("Add", bias, net.constant("causal_mask", mask))
        for at in range(spec.layers):
            with net.scope(f"block{at}"):
                y = net.attention_block(net.attention_block(y, "", bias), x, "")
                y = net.dense_block(y, spec.inner)
        y = net.op("Mul", net.rms_norm(y), net.number(spec.hidden**-0.5))
    logits = net.op("MatMul", y, net.op("Transpose", table, perm=[1, 0]))
    net.output(logits, "Y", [spec.batch, spec.target, spec.vocabulary])
    return net.model("t5")


def relative_buckets(steps: int, *, bidirectional: bool) -> npt.NDArray[np.int64]:
    """Return the bucket of each pair (query, key) of steps: one per short distance, logarithmic for long distances."""
    distance = np.arange(steps)[:, None] - np.arange(steps)[None, :]
    buckets = _BUCKETS // 2 if bidirectional else _BUCKETS
    ahead = np.where(distance < 0, buckets, 0) if bidirectional else 0
    far = np.abs(distance) if bidirectional else np.maximum(distance, 0)
    exact = buckets // 2
    spread = np.log(np.maximum(far, 1) / exact) / np.log(_MAX_DISTANCE / exact) * (buckets - exact)
    return np.asarray(ahead + np.where(far < exact, far, np.minimum(exact + spread.astype(int), buckets - 1)), np.int64)


class _T5(Transformer):
    def positions(self, buckets: npt.NDArray[Any]) -> str:
        """Add the position bias of the scores of each head: [1, heads, steps, steps]."""
        table = self.normal("positions", _BUCKETS, self.heads, deviation=0.5)
        bias = self.op("Gather", table, self.constant(self.unique("buckets"), buckets), axis=0)
        return self.op("Unsqueeze", self.op("Transpose", bias, perm=[2, 0, 1]), self.integers(0))

    def attention_block(self, x: str, memory: str, added: str) -> str:
        """Add unscaled attention to ``memory``, or self-attention if that is empty, and a residual connection."""
        with self.scope("other" if memory else "self"):
            normal = self.rms_norm(x)
            return self.op("Add", x, self.attention(normal, memory or normal, added, scaled=False))

    def dense_block(self, x: str, inner: int) -> str:
        """Add two dense layers with a ReLU between them, and a residual connection."""
        wide = self.op("Relu", self.dense(self.rms_norm(x), self.hidden, inner, "wide", bias=False))
        return self.op("Add", x, self.dense(wide, inner, self.hidden, "narrow", bias=False))
