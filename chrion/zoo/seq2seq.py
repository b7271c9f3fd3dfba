"""Translation with stacks of LSTM layers and attention.

Luong et al., *Effective approaches to attention-based neural machine translation* (2015): an encoder and a decoder of
four layers of 1000 cells, and global attention with the general score (Equation 8), without input feeding. The whole
target sequence is an input, so that every layer is one folded operator over all steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from chrion.zoo.network import Network, Spec


@dataclass(frozen=True, slots=True)
class Seq2SeqSpec(Spec):
    """Parameters of the network; the defaults are the published ones, for sentences of 50 words."""

    batch: int = 1
    #: Steps of the source sequence.
    seq: int = 50
    #: Steps of the target sequence.
    target: int = 50
    #: The layers of the encoder, and those of the decoder.
    layers: int = 4
    #: The cells of a layer, and the width of an embedding.
    hidden: int = 1000
    vocabulary: int = 50_000


def build_seq2seq(spec: Seq2SeqSpec) -> onnx.ModelProto:
    """Build the network.

    Inputs are ``ids`` [seq, batch] and ``target`` [target, batch] (int64); the output is ``Y`` [batch, target,
    vocabulary].
    """
    net = _Seq2Seq(spec.seed)
    source = net.embed(net.input("ids", [spec.seq, spec.batch], TensorProto.INT64), spec)
    decoded = net.embed(net.input("target", [spec.target, spec.batch], TensorProto.INT64), spec)
    for layer in range(spec.layers):
        with net.scope(f"layer{layer}"):
            zero = net.constant(net.unique("zero"), np.zeros((1, spec.batch, spec.hidden), np.float32))
            source, states = net.lstm(source, (zero, zero), spec.hidden)
            decoded, _ = net.lstm(decoded, states, spec.hidden)
    keys = net.op("Transpose", source, perm=[1, 2, 0])
    queries = net.op("Transpose", decoded, perm=[1, 0, 2])
    scores = net.op("MatMul", net.dense(queries, spec.hidden, spec.hidden, "score", bias=False), keys)
    memory = net.op("Transpose", source, perm=[1, 0, 2])
    context = net.op("MatMul", net.op("Softmax", scores, axis=-1), memory)
    both = net.op("Concat", context, queries, axis=2)
    attended = net.op("Tanh", net.dense(both, 2 * spec.hidden, spec.hidden, "attended", bias=False))
    net.output(
        net.dense(attended, spec.hidden, spec.vocabulary, "words"), "Y", [spec.batch, spec.target, spec.vocabulary]
    )
    return net.model("seq2seq")


class _Seq2Seq(Network):
    def embed(self, ids: str, spec: Seq2SeqSpec) -> str:
        """Add an embedding of [steps, batch, hidden]."""
        return self.op("Gather", self.normal("table", spec.vocabulary, spec.hidden, deviation=1.0), ids, axis=0)

    def lstm(self, x: str, states: tuple[str, str], hidden: int) -> tuple[str, tuple[str, str]]:
        """Add a layer; return its output [steps, batch, hidden] and its final states."""
        rows, deviation = 4 * hidden, hidden**-0.5
        weights = [self.normal(slot, 1, rows, hidden, deviation=deviation) for slot in "WR"]
        bias = self.normal("B", 1, 2 * rows, deviation=deviation)
        outputs = [self.unique(f"lstm/{name}") for name in ("Y", "h", "c")]
        self.node("LSTM", [x, *weights, bias, "", *states], outputs, hidden_size=hidden)
        return self.op("Squeeze", outputs[0], self.integers(1)), (outputs[1], outputs[2])
