"""Decoders such as Llama, in one pass over a whole sequence, without a cache between steps.

See :mod:`chrion.zoo.decoder` for the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
from onnx import TensorProto

from chrion.zoo.decoder import Decoder, check_decoder_heads
from chrion.zoo.network import Spec
from chrion.zoo.weights_file import WeightsFile


@dataclass(frozen=True, slots=True)
class LlamaSpec(Spec):
    """Parameters of the network; the defaults are the sizes of SmolLM2-135M (Allal et al., 2025)."""

    batch: int = 1
    #: Steps of the sequence.
    seq: int = 128
    layers: int = 30
    hidden: int = 576
    #: Heads of the queries.
    heads: int = 9
    #: Heads of the keys and values.
    kv_heads: int = 3
    #: The width between the dense layers of a block.
    inner: int = 1536
    vocabulary: int = 49_152

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        check_decoder_heads(self.hidden, self.heads, self.kv_heads)


def build_llama(spec: LlamaSpec, store: WeightsFile | None = None) -> onnx.ModelProto:
    """Build the network.

    The input is ``ids`` [batch, seq] (int64 below ``vocabulary``); the output ``Y`` [batch, seq, vocabulary] has the
    logits of the next words.
    """
    net = Decoder(spec.seed, spec.batch, spec.hidden, spec.heads, spec.kv_heads, store=store)
    x = net.embed(net.input("ids", [spec.batch, spec.seq], TensorProto.INT64), spec.vocabulary)
    rotation, mask = net.rotation(spec.seq), net.causal_mask(spec.seq)
    for at in range(spec.layers):
        with net.scope(f"block{at}"):
            x = net.feed_forward(net.self_attention(x, rotation, mask), spec.inner)
    logits = net.dense(net.rms_norm(x), spec.hidden, spec.vocabulary, "head", bias=False)
    net.output(logits, "Y", [spec.batch, spec.seq, spec.vocabulary])
    return net.model("llama")
