"""``GroupQueryAttention`` of com.microsoft as plain operators.

The fused operator has buffers of its own for each request, so requests that decode run one after another. As plain
operators (Ainslie et al., *GQA: training generalized multi-query transformer models from multi-head checkpoints*, 2023)
the caches are concatenations, which grow in place (``cache_append``), and requests that decode run in
one call (``pooled_cache``).

The queries of the heads that share keys and values are rows of one matrix, so that these are read once. Rotation
(Su et al., *RoFormer*, 2021) stays one operator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from chrion.generation.rewrites.computed_positions import with_positions
from chrion.generation.rewrites.decoder import LOGITS, MASK, POSITIONS, equal_but_for_rounding, random_cache
from chrion.generation.rewrites.observation import Decoder
from chrion.graph.ort_sessions import first_line, open_analysis
from chrion.graph.rewrite import MICROSOFT, RewriteError, Rewriter, float_attribute, int_attribute

Array = np.ndarray[Any, Any]

_PREFIX = "grouped/"
#: The attributes that are known; ``qk_norm_epsilon`` matters only beside inputs that are refused.
_ATTRIBUTES = frozenset(
    {"num_heads", "kv_num_heads", "scale", "softcap", "do_rotary", "rotary_interleaved", "qk_norm_epsilon"}
)
#: The values with which other attributes have no effect; onnxruntime writes defaults into the models that it saves.
_OFF = (0, -1, b"NONE", b"")
#: The inputs that are known: queries, keys, values, past keys and values, two lengths, two tables, and positions.
_INPUTS = 10
#: New and past tokens of a comparison with the fused operator.
_TRIALS = ((5, 0), (3, 4), (1, 8))


def expand_grouped_attention(decoder: Decoder) -> Decoder:
    """Return a decoder of opset 13 or later without ``GroupQueryAttention``, and with ``position_ids``.

    Raises:
        RewriteError: A fused operator does something else, such as attention to the last tokens only, or the results
            differ by more than rounding.
        ModelError: onnxruntime refuses the decoder.
    """
    fused = [node for node in decoder.model.graph.node if _is_grouped(node)]
    if not fused:
        return decoder
    if MASK not in decoder.signature.inputs or decoder.signature.cache_type != np.float32:
        raise RewriteError(f"is expanded with an input {MASK!r} and a cache of floats only", fused[0])
    for node in fused:
        _check(node, decoder)
    signature, inputs = with_positions(decoder)
    expanded = replace(decoder, model=_Expansion(decoder).finish(inputs), signature=signature)
    try:
        results = zip(_run_trials(expanded), _run_trials(decoder), strict=True)
    except Exception as error:
        raise RewriteError(first_line(error)) from error
    if not all(equal_but_for_rounding(signature, *pair) for pair in results):
        raise RewriteError("has other results as plain operators", fused[0])
    return expanded


def _is_grouped(node: onnx.NodeProto) -> bool:
    return node.op_type == "GroupQueryAttention" and node.domain == MICROSOFT


def _check(node: onnx.NodeProto, decoder: Decoder) -> None:
    """Raise a refusal for a fused operator that is not expanded."""
    for attribute in node.attribute:
        name, value = attribute.name, helper.get_attribute_value(attribute)
        harmless = value == 1 if name == "causal" else value in _OFF
        if name not in _ATTRIBUTES and not harmless:
            raise RewriteError(f"has {name} = {value}", node)
    if any(node.input[_INPUTS:]) or any(node.output[3:]) or len(node.input) < 7 or len(node.output) < 3:
        raise RewriteError("has inputs or outputs beside the usual ones", node)
    if not {*node.input[3:5]} <= {*decoder.signature.past} or not {*node.output[1:3]} <= {*decoder.signature.present}:
        raise RewriteError("reads or writes other values than the cache", node)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The heads of queries, those of keys and values, and the width of a head."""

    heads: int
    shared: int
    width: int

    @property
    def group(self) -> int:
        """The heads of queries for each head of keys and values."""
        return self.heads // self.shared


class _Expansion(Rewriter):
    """The nodes of a decoder under construction."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder.model)
        signature = decoder.signature
        self._caches = dict(zip(signature.past, signature.cache_shapes, strict=True))
        #: The columns of tables.
        self._columns = {t.name: t.dims[1] for t in decoder.model.graph.initializer if len(t.dims) == 2}
        self._masks: dict[int, str] = {}
        self._positions = POSITIONS
        if signature.type_of(POSITIONS) != np.int64:
            self._positions = self.add("Cast", [POSITIONS], f"{_PREFIX}{POSITIONS}", to=TensorProto.INT64)
        for node in decoder.model.graph.node:
            if _is_grouped(node):
                self._expand(node)
            else:
                self.nodes.append(node)

    def _expand(self, node: onnx.NodeProto) -> None:
        """Add the nodes in place of a fused operator.

        The shapes are those of B requests with L new and P past tokens, H heads of queries in K groups, and width W.
        """
        shared, width = self._caches[node.input[3]]
        sizes = _Sizes(int_attribute(node, "num_heads", 0), shared, width)
        prefix = f"{_PREFIX}{node.output[0]}/"
        queries, keys, values = self._separate(list(node.input[:3]), sizes, prefix)
        if int_attribute(node, "do_rotary", 0):
            queries = self._rotated(node, queries, sizes.heads, width, f"{prefix}queries/rotated")
            keys = self._rotated(node, keys, shared, width, f"{prefix}keys/rotated")
        for source, past, present in zip((keys, values), node.input[3:5], node.output[1:3], strict=True):
            split = self.add("Reshape", [source, [0, -1, shared, width]], f"{prefix}{past}/split")
            new = self.add("Transpose", [split], f"{prefix}{past}/new", perm=[0, 2, 1, 3])
            self.add("Concat", [past, new], present, axis=2)  # [B, K, P + L, W]
        arranged = self.add("Reshape", [queries, [0, -1, shared, sizes.group, width]], f"{prefix}split")
        arranged = self.add("Transpose", [arranged], f"{prefix}arranged", perm=[0, 2, 3, 1, 4])
        rows = self.add("Reshape", [arranged, [0, shared, -1, width]], f"{prefix}rows")
        scores = self._scores(node, rows, sizes, prefix)
        weights = self.add("Softmax", [scores], f"{prefix}weights", axis=-1)
        context = self.add("MatMul", [weights, node.output[2]], f"{prefix}context")  # [B, K, H / K * L, W]
        grouped = [0, shared, sizes.group, -1, width]
        context = self.add("Reshape", [context, grouped], f"{prefix}grouped")
        context = self.add("Transpose", [context], f"{prefix}joined", perm=[0, 3, 1, 2, 4])
        self.add("Reshape", [context, [0, -1, sizes.heads * width]], node.output[0])

    def _separate(self, inputs: list[str], sizes: _Sizes, prefix: str) -> list[str]:
        """Return queries, keys and values, which one input may have side by side."""
        if inputs[1]:
            return inputs
        parts = [f"{prefix}{part}" for part in ("queries", "keys", "values")]
        widths = [heads * sizes.width for heads in (sizes.heads, sizes.shared, sizes.shared)]
        self.split(inputs[0], parts, widths, -1, f"{prefix}parts")
        return parts

    def _rotated(self, node: onnx.NodeProto, source: str, heads: int, width: int, output: str) -> str:
        """Add a rotation of [B, L, heads * W], of as many elements of a head as the tables are for."""
        inputs = [*node.input, *[""] * _INPUTS]
        positions = inputs[_INPUTS - 1] or self._positions
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

    def _scores(self, node: onnx.NodeProto, rows: str, sizes: _Sizes, prefix: str) -> str:
        """Add the scores of queries [B, K, H / K * L, W] and present keys, with the later tokens hidden."""
        scale = float_attribute(node, "scale", 0.0) or sizes.width**-0.5
        cap = float_attribute(node, "softcap", 0.0)
        keys = self.add("Transpose", [node.output[1]], f"{prefix}columns", perm=[0, 1, 3, 2])
        scores = self.add("MatMul", [rows, keys], f"{prefix}products")
        scores = self.add("Mul", [scores, scale], f"{prefix}scores")
        if cap:
            scores = self.add("Tanh", [self.add("Div", [scores, cap], f"{prefix}ratio")], f"{prefix}tanh")
            scores = self.add("Mul", [scores, cap], f"{prefix}capped")
        return self.add("Add", [scores, self._mask(sizes.group)], f"{prefix}visible")

    def _mask(self, group: int) -> str:
        """Return what is added to the scores, [B, 1, H / K * L, P + L]: 0 for the tokens up to a query's own."""
        if group not in self._masks:
            name = f"{_PREFIX}mask/{group}/"
            lengths = self.add("Shape", [MASK], f"{name}lengths")
            total = self.add("Gather", [lengths, 1], f"{name}total", axis=0)
            columns = self.add("Range", [0, total, 1], f"{name}columns")
            tiled = self.add("Concat", [self._positions] * group, f"{name}positions", axis=1)
            own = self.add("Unsqueeze", [tiled, [1, 3]], f"{name}own")
            seen = self.add("LessOrEqual", [columns, own], f"{name}seen")
            hidden = float(np.finfo(np.float32).min)
            self._masks[group] = self.add("Where", [seen, 0.0, hidden], f"{name}added")
        return self._masks[group]


def _run_trials(decoder: Decoder) -> list[Array]:
    signature = decoder.signature
    session = open_analysis(decoder.model, decoder.graph.weights_folder, decoder.graph.name)
    results: list[Array] = []
    for new, past in _TRIALS:
        ids = np.arange(1, new + 1) % signature.vocabulary
        results += session.run([LOGITS, *signature.present], signature.feed(ids, past) | random_cache(signature, past))
    return results
