"""Decoders with a cache of keys and values, such as GPT-2 and Llama.

Radford et al., *Language models are unsupervised multitask learners* (2019): learned positions, LayerNorm and GELU.
Touvron et al., *Llama 2: open foundation and fine-tuned chat models* (2023): see :mod:`chrion.zoo.decoder`.

Inputs and outputs have the names and the layout of the exports of optimum and transformers: ``input_ids``,
``attention_mask``, ``position_ids`` and ``past_key_values.N.{key,value}`` [batch, heads of keys and values, past, head
width] to ``logits`` [batch, tokens, vocabulary] and ``present.N.{key,value}``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from chrion.errors import OptionError
from chrion.zoo.decoder import MASKED, Decoder, check_decoder_heads, rotary_angles
from chrion.zoo.network import Spec, check_heads
from chrion.zoo.weights_file import WeightsFile

_BATCH, _TOKENS, _PAST, _TOTAL = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"
_PLAIN_OPSET, _ATTENTION_OPSET = 17, 23
_ROTATED = 16  # the step of the width of a head that GroupQueryAttention rotates


@dataclass(frozen=True, slots=True)
class GptDecoderSpec(Spec):
    """Parameters of a decoder like GPT-2; by default it has 18 MB of weights."""

    #: ``plain`` operators, ONNX's ``Attention`` (``onnx``), or com.microsoft's ``GroupQueryAttention`` (``grouped``).
    attention: str = "plain"
    layers: int = 4
    hidden: int = 256
    heads: int = 4
    #: The width between the two dense layers of a block.
    inner: int = 1024
    vocabulary: int = 2048
    #: Maximum tokens of a request.
    context: int = 1024

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        check_heads(self.hidden, self.heads)


@dataclass(frozen=True, slots=True)
class LlamaDecoderSpec(Spec):
    """Parameters of a decoder like Llama 2; by default it has 15 MB of weights."""

    #: As in :class:`GptDecoderSpec`.
    attention: str = "plain"
    layers: int = 4
    hidden: int = 256
    heads: int = 8
    #: The heads of keys and values; each serves ``heads / kv_heads`` heads of queries.
    kv_heads: int = 2
    #: The width between the dense layers of a block.
    inner: int = 688
    vocabulary: int = 2048
    #: Maximum tokens of a request.
    context: int = 1024

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        check_decoder_heads(self.hidden, self.heads, self.kv_heads)
        width = self.hidden // self.heads
        if self.attention == "grouped" and width % _ROTATED:
            raise OptionError(f"heads: GroupQueryAttention rotates heads of a multiple of {_ROTATED}, found {width}")


def build_gpt_decoder(spec: GptDecoderSpec, store: WeightsFile | None = None) -> onnx.ModelProto:
    """Build a decoder like GPT-2."""
    net = _CachedDecoder(spec, spec.heads, store)
    positions = net.normal("positions", spec.context, spec.hidden, deviation=0.1)
    x = net.op("Add", net.embed("input_ids", spec.vocabulary), net.op("Gather", positions, "position_ids", axis=0))
    for at in range(spec.layers):
        with net.scope(f"block{at}"):
            parts = [net.unique(f"part{part}") for part in range(3)]
            qkv = net.dense(net.layer_norm(x), spec.hidden, 3 * spec.hidden, "qkv")
            net.node("Split", [qkv, net.integers(*[spec.hidden] * 3)], parts, axis=-1)
            heads = parts if net.flat else [net.split_heads(part, spec.heads) for part in parts]
            attended = net.cached_attention(at, heads, bias=True)
            x = net.op("Add", x, attended)
            wide = net.gelu(net.dense(net.layer_norm(x), spec.hidden, spec.inner, "wide"))
            x = net.op("Add", x, net.dense(wide, spec.inner, spec.hidden, "narrow"))
    return net.finish(net.layer_norm(x), "gpt2-decoder")


def build_llama_decoder(spec: LlamaDecoderSpec, store: WeightsFile | None = None) -> onnx.ModelProto:
    """Build a decoder like Llama 2."""
    net = _CachedDecoder(spec, spec.kv_heads, store)
    net.rotate_grouped()
    rotation = None if net.flat else net.rotation_at("position_ids", spec.context)
    x = net.embed("input_ids", spec.vocabulary)
    for at in range(spec.layers):
        with net.scope(f"block{at}"):
            normal = net.rms_norm(x)
            if rotation is None:
                sizes = {"query": spec.heads, "key": spec.kv_heads, "value": spec.kv_heads}
                heads = [net.dense(normal, spec.hidden, n * net.width, stem, bias=False) for stem, n in sizes.items()]
            else:
                heads = [net.queries(normal, rotation), *net.keys_and_values(normal, rotation)]
            x = net.feed_forward(net.op("Add", x, net.cached_attention(at, heads, bias=False)), spec.inner)
    return net.finish(net.rms_norm(x), "llama-decoder")


class _CachedDecoder(Decoder):
    """A decoder under construction, with its inputs and what its layers share.

    Args:
        spec: The parameters.
        kv_heads: The heads of keys and values.
        store: The file of large weights; None to keep all weights in the model.
    """

    def __init__(self, spec: GptDecoderSpec | LlamaDecoderSpec, kv_heads: int, store: WeightsFile | None) -> None:
        # A batch of 0 in Reshape is that of the data.
        super().__init__(spec.seed, 0, spec.hidden, spec.heads, kv_heads, store=store)
        self.spec = spec
        #: True if attention takes [batch, tokens, width] in place of heads.
        self.flat = spec.attention == "grouped"
        self.tables: list[str] = []
        for name, length in (("input_ids", _TOKENS), ("attention_mask", _TOTAL), ("position_ids", _TOKENS)):
            self.input(name, [_BATCH, length], TensorProto.INT64)
        for at in range(spec.layers):
            for part in ("key", "value"):
                self.input(f"past_key_values.{at}.{part}", [_BATCH, kv_heads, _PAST, self.width])
        if self.flat:
            self._lengths()
        else:
            self._mask()

    def rotate_grouped(self) -> None:
        """Add the tables with which GroupQueryAttention rotates."""
        angles = rotary_angles(self.spec.context, self.width)
        if self.flat:
            self.tables = [self.constant("cos_table", np.cos(angles)), self.constant("sin_table", np.sin(angles))]

    def cached_attention(self, layer: int, heads: Sequence[str], *, bias: bool) -> str:
        """Add the attention of a layer to its cache and its own tokens, and its output projection.

        Args:
            layer: The number of the layer.
            heads: Queries, keys and values.
            bias: Add a bias in the output projection.
        """
        names = [f"{kind}.{layer}.{part}" for kind in ("past_key_values", "present") for part in ("key", "value")]
        shape: list[int | str] = [_BATCH, self.kv_heads, _TOTAL, self.width]
        self.outputs += [onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in names[2:]]
        context = self._context(heads, names)
        return self.dense(context, self.hidden, self.hidden, "output", bias=bias)

    def finish(self, x: str, name: str) -> onnx.ModelProto:
        """Add the logits and return the model."""
        logits = self.dense(x, self.hidden, self.spec.vocabulary, "head", bias=False)
        self.output(logits, "logits", [_BATCH, _TOKENS, self.spec.vocabulary])
        self.outputs.insert(0, self.outputs.pop())
        return self.model(name, opset=_ATTENTION_OPSET if self.spec.attention == "onnx" else _PLAIN_OPSET)

    def layer_norm(self, x: str) -> str:
        """Add a layer normalisation with scale and shift."""
        scale = self.constant(self.unique("scale"), np.ones(self.hidden, np.float32))
        return self.op("LayerNormalization", x, scale, self.normal("shift", self.hidden, deviation=0.02), epsilon=1e-5)

    def rms_norm(self, x: str) -> str:
        """Add a root mean square normalisation, as one operator where the version of ONNX has it.

        Elsewhere it has the operators of transformers' exports, which onnxruntime fuses.
        """
        scale = self.constant(self.unique("scale"), np.ones(self.hidden, np.float32))
        if self.spec.attention == "onnx":
            return self.op("RMSNormalization", x, scale, epsilon=1e-5)
        mean = self.op("ReduceMean", self.op("Pow", x, self.number(2.0)), axes=[-1])
        root = self.op("Sqrt", self.op("Add", mean, self.number(1e-5)))
        return self.op("Mul", self.op("Div", x, root), scale)

    def _mask(self) -> None:
        """Add what is added to scores, [batch, 1, tokens, total]: 0 for the tokens up to a query's own."""
        first, one = self.constant("zero", np.array(0)), self.constant("one", np.array(1))
        lengths = [self.op("Shape", name, start=1, end=2) for name in ("attention_mask", "input_ids")]
        total, tokens = (self.op("Squeeze", length, self.integers(0)) for length in lengths)
        columns = self.op("Range", first, total, one)
        rows = self.op("Range", self.op("Sub", total, tokens), total, one)
        visible = self.op("LessOrEqual", columns, self.op("Unsqueeze", rows, self.integers(1)))
        given = self.op("Cast", self.op("Unsqueeze", "attention_mask", self.integers(1, 2)), to=TensorProto.BOOL)
        self.mask = self.op("Where", self.op("And", visible, given), self.number(0.0), self.number(MASKED))
        if self.spec.attention == "plain":  # a group of heads has an axis of its own
            self.mask = self.op("Unsqueeze", self.mask, self.integers(2))

    def _lengths(self) -> None:
        """Add the numbers of tokens as GroupQueryAttention expects them."""
        length = self.op("ReduceSum", "attention_mask", self.integers(1), keepdims=0)
        self.last = self.op("Cast", self.op("Sub", length, self.integers(1)), to=TensorProto.INT32)
        total = self.op("Squeeze", self.op("Shape", "attention_mask", start=1, end=2), self.integers(0))
        self.total = self.op("Cast", total, to=TensorProto.INT32)

    def _context(self, heads: Sequence[str], names: Sequence[str]) -> str:
        """Add attention, with the names of the past and present keys and values: [batch, tokens, hidden]."""
        past, present = names[:2], names[2:]
        if self.spec.attention == "plain":
            for at in range(2):
                self.node("Concat", [past[at], heads[at + 1]], [present[at]], axis=2)
            return self.context(heads[0], present[0], present[1], self.mask)
        context = self.unique("context")
        if self.spec.attention == "onnx":
            self.node("Attention", [*heads, self.mask, *past], [context, *present])
            return self.op(
                "Reshape", self.op("Transpose", context, perm=[0, 2, 1, 3]), self.integers(0, -1, self.hidden)
            )
        self.node(
            "GroupQueryAttention",
            [*heads, *past, self.last, self.total, *self.tables],
            [context, *present],
            domain="com.microsoft",
            num_heads=self.heads,
            kv_num_heads=self.kv_heads,
            do_rotary=int(bool(self.tables)),
        )
        return context
