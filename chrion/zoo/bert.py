"""Transformer encoders such as BERT.

Devlin et al., *BERT: pre-training of deep bidirectional transformers* (2019): post-norm blocks of attention and two
dense layers with GELU.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
from onnx import TensorProto

from chrion.zoo.attention import Transformer
from chrion.zoo.network import Spec, check_heads


@dataclass(frozen=True, slots=True)
class BertSpec(Spec):
    """Parameters of the encoder; the defaults are those of BERT-base."""

    batch: int = 1
    #: Steps of a sequence.
    seq: int = 128
    layers: int = 12
    hidden: int = 768
    heads: int = 12
    #: The width between the two dense layers of a block.
    inner: int = 3072
    vocabulary: int = 30_522

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        check_heads(self.hidden, self.heads)


def build_bert(spec: BertSpec) -> onnx.ModelProto:
    """Build the network.

    Inputs are ``ids`` and ``segments`` [batch, seq] (int64) and ``mask`` [batch, seq] (1.0 for a word, 0.0 for
    padding); the output is ``Y`` [batch, seq, hidden].
    """
    net = Transformer(spec.seed, spec.batch, spec.hidden, spec.heads, bias=True)
    shape = [spec.batch, spec.seq]
    words = net.embed(net.input("ids", shape, TensorProto.INT64), spec.vocabulary, "words")
    segments = net.embed(net.input("segments", shape, TensorProto.INT64), 2, "segments")
    positions = net.normal("positions", spec.seq, spec.hidden, deviation=1.0)
    x = net.layer_norm(net.op("Add", net.op("Add", words, segments), positions))
    hidden = net.op("Sub", net.number(1.0), net.input("mask", shape))
    mask = net.op("Mul", net.op("Unsqueeze", hidden, net.integers(1, 2)), net.number(-1e4))
    for at in range(spec.layers):
        with net.scope(f"block{at}"):
            attended = net.attention(x, x, mask, scaled=True)
            x = net.layer_norm(net.op("Add", attended, x))
            wide = net.gelu(net.dense(x, spec.hidden, spec.inner, "wide"))
            x = net.layer_norm(net.op("Add", net.dense(wide, spec.inner, spec.hidden, "narrow"), x))
    net.output(x, "Y", [spec.batch, spec.seq, spec.hidden])
    return net.model("bert")
