"""Encoder and decoder like T5.

Raffel et al., *Exploring the limits of transfer learning with a unified text-to-text transformer* (2020): pre-norm
blocks without bias, scores that know relative positions by buckets, a vocabulary shared by input and output. One pass
over a whole target sequence; nothing is cached between steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from chrion.zoo.attention import Transformer
from chrion.zoo.bert import check_heads
from chrion.zoo.network import check_sizes

_BUCKETS, _FARTHEST = 32, 128


@dataclass(frozen=True, slots=True)
class T5Spec:
    """The defaults are T5-small."""

    batch: int = 1
    #: Steps of the source sequence.
    seq: int = 128
    #: Steps of the target sequence.
    target: int = 32
    #: Blocks of the encoder, and of the decoder.
    layers: int = 6
    hidden: int = 512
    heads: int = 8
    #: Width between the two dense layers of a block.
    inner: int = 2048
    vocabulary: int = 32_128
    seed: int = 0

    def __post_init__(self) -> None:
        check_sizes(self)
        check_heads(self.hidden, self.heads)


def build_t5(spec: T5Spec) -> onnx.ModelProto:
    """Build the network.

    Inputs ``ids`` [batch, seq] and ``target`` [batch, target] (int64), output ``Y`` [batch, target, vocabulary].
    """
    net = _T5(spec.seed, spec.batch, spec.hidden, spec.heads, bias=False)
    ids = net.input("ids", [spec.batch, spec.seq], TensorProto.INT64)
    target = net.input("target", [spec.batch, spec.target], TensorProto.INT64)
    table = net.normal("words", spec.vocabulary, spec.hidden, deviation=1.0)
    x, y = (net.op("Gather", table, words, axis=0) for words in (ids, target))
    with net.scope("encoder"):
        places = net.positions(relative_buckets(spec.seq, both_ways=True))
        for at in range(spec.layers):
            with net.scope(f"block{at}"):
                x = net.dense_block(net.attention_block(x, "", places), spec.inner)
        x = net.rms_norm(x)
    with net.scope("decoder"):
        past = np.triu(np.full((spec.target, spec.target), -1e9, np.float32), 1)[None, None]
        places = net.positions(relative_buckets(spec.target, both_ways=False))
        places = net.op("Add", places, net.constant("past", past))
        for at in range(spec.layers):
            with net.scope(f"block{at}"):
                y = net.attention_block(net.attention_block(y, "", places), x, "")
                y = net.dense_block(y, spec.inner)
        y = net.op("Mul", net.rms_norm(y), net.number(spec.hidden**-0.5))
    logits = net.op("MatMul", y, net.op("Transpose", table, perm=[1, 0]))
    net.output(logits, "Y", [spec.batch, spec.target, spec.vocabulary])
    return net.model("t5")


def relative_buckets(steps: int, *, both_ways: bool) -> npt.NDArray[np.int64]:
    """The bucket of each pair (asking, asked) of steps: near distances one each, far ones logarithmically fewer."""
    distance = np.arange(steps)[:, None] - np.arange(steps)[None, :]
    buckets = _BUCKETS // 2 if both_ways else _BUCKETS
    ahead = np.where(distance < 0, buckets, 0) if both_ways else 0
    far = np.abs(distance) if both_ways else np.maximum(distance, 0)
    exact = buckets // 2
    spread = np.log(np.maximum(far, 1) / exact) / np.log(_FARTHEST / exact) * (buckets - exact)
    return np.asarray(ahead + np.where(far < exact, far, np.minimum(exact + spread.astype(int), buckets - 1)), np.int64)


class _T5(Transformer):
    def positions(self, buckets: npt.NDArray[Any]) -> str:
        """What positions add to the scores of each head: [1, heads, steps, steps]."""
        table = self.normal("positions", _BUCKETS, self.heads, deviation=0.5)
        worth = self.op("Gather", table, self.constant(self.unique("buckets"), buckets), axis=0)
        return self.op("Unsqueeze", self.op("Transpose", worth, perm=[2, 0, 1]), self.integers(0))

    def attention_block(self, x: str, memory: str, added: str) -> str:
        """Attention to oneself or to ``memory``, with the residual; scores are not scaled."""
        with self.scope("other" if memory else "self"):
            normal = self.rms_norm(x)
            return self.op("Add", x, self.attention(normal, memory or normal, added, scaled=False))

    def dense_block(self, x: str, inner: int) -> str:
        """Two dense layers with ReLU between, and the residual."""
        wide = self.op("Relu", self.dense(self.rms_norm(x), self.hidden, inner, "wide", bias=False))
        return self.op("Add", x, self.dense(wide, inner, self.hidden, "narrow", bias=False))
