"""Attention of every kind as plain operators, the one form that caches, parts and pools start from.

``GroupQueryAttention`` of com.microsoft and ONNX's ``Attention`` have buffers of their own for each request, so that
requests that decode run one after another. As plain operators (Ainslie et al., *GQA: training generalized multi-query
transformer models from multi-head checkpoints*, 2023) the caches are concatenations, which grow in place
(``cache_append``), and requests that decode run in one call (``pooled_cache``).

The queries of the heads that share keys and values are rows of one matrix, so that these are read once. Rotation
(Su et al., *RoFormer*, 2021) stays one operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from chrion.generation.rewrites.computed_positions import with_positions
from chrion.generation.rewrites.decoder import (
    LOGITS,
    MASK,
    POSITIONS,
    DecoderSignature,
    equal_but_for_rounding,
    random_cache,
)
from chrion.generation.rewrites.observation import Decoder
from chrion.graph.ort_sessions import first_line, open_analysis
from chrion.graph.rewrite import MICROSOFT, STANDARD, RewriteError, Rewriter, float_attribute, int_attribute

Array = np.ndarray[Any, Any]
_PREFIX = "attention/"
#: The attributes of ``GroupQueryAttention`` that are known; ``qk_norm_epsilon`` matters only beside inputs that are
#: refused.
_GROUPED = frozenset(
    {"num_heads", "kv_num_heads", "scale", "softcap", "do_rotary", "rotary_interleaved", "qk_norm_epsilon"}
)
#: Those of ``Attention``; the last two matter only for an output that is refused, and for rounding.
_STANDARD = frozenset({"q_num_heads", "kv_num_heads", "scale", "softcap", "qk_matmul_output_mode", "softmax_precision"})
#: The values with which other attributes have no effect; onnxruntime writes defaults into the models that it saves.
_OFF = (0, -1, b"NONE", b"")
#: The inputs of ``GroupQueryAttention`` that are known: queries, keys, values, past keys and values, two lengths, two
#: tables, and positions; and those of ``Attention``: queries, keys, values, a mask, and past keys and values.
_GROUPED_INPUTS, _STANDARD_INPUTS = 10, 6
#: New and past tokens of a comparison with the fused operator.
_TRIALS = ((5, 0), (3, 4), (1, 8))


def expand_attention(decoder: Decoder) -> Decoder:
    """Return a decoder of opset 13 or later without ``GroupQueryAttention`` and ``Attention``.

    If it had the former it gets ``position_ids``.

    Raises:
        RewriteError: A fused operator does something else, such as attention to the last tokens only, or the results
            differ by more than rounding.
        ModelError: onnxruntime refuses the decoder.
    """
    fused = [node for node in decoder.model.graph.node if _is_grouped(node) or _is_standard(node)]
    if not fused:
        return decoder
    for node in fused:
        _check(node, decoder)
    signature, inputs = decoder.signature, [*decoder.model.graph.input]
    if any(map(_is_grouped, fused)):
        signature, inputs = with_positions(decoder)
    expanded = replace(decoder, model=_Expansion(decoder, signature).finish(inputs), signature=signature)
    try:
        results = zip(_run_trials(expanded), _run_trials(decoder), strict=True)
    except Exception as error:
        raise RewriteError(first_line(error)) from error
    if not all(equal_but_for_rounding(signature, *pair) for pair in results):
        raise RewriteError("has other results as plain operators", fused[0])
    return expanded


def _is_grouped(node: onnx.NodeProto) -> bool:
    return node.op_type == "GroupQueryAttention" and node.domain == MICROSOFT


def _is_standard(node: onnx.NodeProto) -> bool:
    return node.op_type == "Attention" and node.domain in STANDARD


def _check(node: onnx.NodeProto, decoder: Decoder) -> None:
    """Raise an error for a fused operator that is not expanded."""
    signature, grouped = decoder.signature, _is_grouped(node)
    if grouped and (MASK not in signature.inputs or signature.cache_type != np.float32):
        raise RewriteError(f"is expanded with an input {MASK!r} and a cache of floats only", node)
    for attribute in node.attribute:
        name, value = attribute.name, helper.get_attribute_value(attribute)
        harmless = value == 1 if name == "causal" else value in _OFF
        if name not in (_GROUPED if grouped else _STANDARD) and not harmless:
            raise RewriteError(f"has {name} = {value}", node)
    past, count = (slice(3, 5), _GROUPED_INPUTS) if grouped else (slice(4, 6), _STANDARD_INPUTS)
    if any(node.input[count:]) or any(node.output[3:]) or (grouped and len(node.input) < 7):
        raise RewriteError("has inputs or outputs beside the usual ones", node)
    caches = dict(zip(signature.past, signature.present, strict=True))
    written = [name for name in node.output[1:3] if name]
    if [caches.get(name) for name in node.input[past] if name] != written or (grouped and len(written) < 2):
        raise RewriteError("reads or writes other values than the cache", node)
    if not grouped and (len(decoder.seen.shapes[node.input[0]]) != 4 or not any(node.input[3:4])):
        raise RewriteError("has no mask, or queries that are not [batch, heads, tokens, width]", node)


class _Expansion(Rewriter):
    """The nodes of a decoder under construction.

    The shapes are those of B requests with L new and P past tokens, H heads of queries in K groups, and width W.

    Args:
        decoder: The decoder.
        signature: Its inputs and outputs, with ``position_ids``.
    """

    def __init__(self, decoder: Decoder, signature: DecoderSignature) -> None:
        super().__init__(decoder.model)
        self._decoder = decoder
        self._caches = dict(zip(signature.past, signature.cache_shapes, strict=True))
        #: The columns of tables.
        self._columns = {t.name: t.dims[1] for t in decoder.model.graph.initializer if len(t.dims) == 2}
        #: What is added to scores, by condition.
        self._masks: dict[str, str] = {}
        self._positions = POSITIONS
        if signature.type_of(POSITIONS) != np.int64:
            self._positions = self.add("Cast", [POSITIONS], f"{_PREFIX}{POSITIONS}", to=TensorProto.INT64)
        for node in decoder.model.graph.node:
            if _is_grouped(node):
                self._expand_grouped(node)
            elif _is_standard(node):
                self._expand_standard(node)
            else:
                self.nodes.append(node)

    def _expand_standard(self, node: onnx.NodeProto) -> None:
        """Add the nodes in place of ``Attention``."""
        seen, (queries, *caches) = self._decoder.seen, node.input[:3]
        for at, past in enumerate(filter(None, node.input[4:6])):
            caches[at] = self.add("Concat", [past, caches[at]], node.output[1 + at], axis=2)
        sizes = (seen.shapes[queries][1], *seen.shapes[node.input[1]][1::2])
        mask = self._hide(node.input[3]) if seen.types.get(node.input[3]) == np.bool_ else node.input[3]
        self._attend(node, queries, caches, mask, [size.fixed if size else 0 for size in sizes], node.output[0])

    def _expand_grouped(self, node: onnx.NodeProto) -> None:
        """Add the nodes in place of ``GroupQueryAttention``."""
        heads, (shared, width) = int_attribute(node, "num_heads", 0), self._caches[node.input[3]]
        prefix = f"{_PREFIX}{node.output[0]}/"
        values = [*node.input[:3]]
        if not values[1]:  # queries, keys and values are side by side
            values = [f"{prefix}{part}" for part in ("queries", "keys", "values")]
            widths = [heads * width, shared * width, shared * width]
            self.split(node.input[0], values, widths, -1, f"{prefix}parts")
        if int_attribute(node, "do_rotary", 0):
            values[0] = self._rotated(node, values[0], heads, width, f"{prefix}queries/rotated")
            values[1] = self._rotated(node, values[1], shared, width, f"{prefix}keys/rotated")
        for at, count in enumerate((heads, shared, shared)):
            split = self.add("Reshape", [values[at], [0, -1, count, width]], f"{prefix}{at}/split")
            values[at] = self.add("Transpose", [split], f"{prefix}{at}/heads", perm=[0, 2, 1, 3])
        for past, new, present in zip(node.input[3:5], values[1:], node.output[1:3], strict=True):
            self.add("Concat", [past, new], present, axis=2)  # [B, K, P + L, W]
        sizes, mask = (heads, shared, width), self._earlier_tokens()
        context = self._attend(node, values[0], node.output[1:3], mask, sizes, f"{prefix}context")
        context = self.add("Transpose", [context], f"{prefix}joined", perm=[0, 2, 1, 3])
        self.add("Reshape", [context, [0, -1, heads * width]], node.output[0])

    def _rotated(self, node: onnx.NodeProto, source: str, heads: int, width: int, output: str) -> str:
        """Add a rotation of [B, L, heads * W], of as many elements of a head as the tables are for."""
        inputs = [*node.input, *[""] * _GROUPED_INPUTS]
        positions = inputs[_GROUPED_INPUTS - 1] or self._positions
        rotated = 2 * self._columns.get(inputs[7], width // 2)
        return self.add(
            "RotaryEmbedding",
            [source, positions, *inputs[7:9]],
            output,
            domain=MICROSOFT,
            num_heads=heads,
            rotary_embedding_dim=rotated if rotated < width else 0,
            interleaved=int_attribute(node, "rotary_interleaved", 0),
        )

    def _attend(  # noqa: PLR0913, PLR0917 - all that attention reads
        self, node: onnx.NodeProto, queries: str, caches: Sequence[str], mask: str, sizes: Sequence[int], output: str
    ) -> str:
        """Add attention to all tokens, [B, H, L, W].

        Args:
            node: The fused operator.
            queries: The queries, [B, H, L, W].
            caches: The keys and the values of all tokens, [B, K, P + L, W].
            mask: What is added to scores.
            sizes: H, K and W.
            output: The name of the result.
        """
        heads, shared, width = sizes
        prefix = f"{_PREFIX}{node.output[0]}/"
        scale, cap = (float_attribute(node, name, 0.0) for name in ("scale", "softcap"))
        rows = self.add("Reshape", [queries, [0, shared, -1, width]], f"{prefix}rows")  # [B, K, H / K * L, W]
        keys = self.add("Transpose", [caches[0]], f"{prefix}columns", perm=[0, 1, 3, 2])
        scores = self.add("MatMul", [rows, keys], f"{prefix}products")
        scores = self.add("Mul", [scores, self._number(scale or width**-0.5)], f"{prefix}scores")
        if cap:
            ratio = self.add("Div", [scores, self._number(cap)], f"{prefix}ratio")
            scores = self.add("Mul", [self.add("Tanh", [ratio], f"{prefix}tanh"), self._number(cap)], f"{prefix}capped")
        scores = self.add("Reshape", [scores, [0, heads, -1, 0]], f"{prefix}by-head")  # [B, H, L, P + L]
        scores = self.add("Add", [scores, mask], f"{prefix}visible")
        weights = self.add("Softmax", [scores], f"{prefix}weights", axis=-1)
        weights = self.add("Reshape", [weights, [0, shared, -1, 0]], f"{prefix}weights-of-rows")
        sums = self.add("MatMul", [weights, caches[1]], f"{prefix}sums")
        return self.add("Reshape", [sums, [0, heads, -1, width]], output)

    def _earlier_tokens(self) -> str:
        """Return what is added to scores, [B, 1, L, P + L]: 0 for the tokens up to a query's own."""
        seen = f"{_PREFIX}seen"
        if seen not in self._masks:
            lengths = self.add("Shape", [MASK], f"{seen}/lengths")
            total = self.add("Gather", [lengths, 1], f"{seen}/total", axis=0)
            columns = self.add("Range", [0, total, 1], f"{seen}/columns")
            own = self.add("Unsqueeze", [self._positions, [1, 3]], f"{seen}/own")
            self.add("LessOrEqual", [columns, own], seen)
        return self._hide(seen)

    def _hide(self, condition: str) -> str:
        """Return what is added to scores: 0 where a condition is true."""
        if condition not in self._masks:
            lowest = np.finfo(self._decoder.signature.cache_type).min
            shown, hidden = self._number(0.0), self._number(float(lowest))
            self._masks[condition] = self.add("Where", [condition, shown, hidden], f"{_PREFIX}{condition}/added")
        return self._masks[condition]

    def _number(self, value: float) -> Array:
        return np.array(value, self._decoder.signature.cache_type)


def _run_trials(decoder: Decoder) -> list[Array]:
    signature = decoder.signature
    session = open_analysis(decoder.model, decoder.graph.weights_folder, decoder.graph.name)
    results: list[Array] = []
    for new, past in _TRIALS:
        ids = np.arange(1, new + 1) % signature.vocabulary
        results += session.run([LOGITS, *signature.present], signature.feed(ids, past) | random_cache(signature, past))
    return results
