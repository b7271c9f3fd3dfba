"""``GroupQueryAttention`` of com.microsoft as plain operators.

The fused operator has buffers of its own for each request, so requests that decode run one after another. As plain
operators (Ainslie et al., *GQA: training generalized multi-query transformer models from multi-head checkpoints*, 2023)
the caches are concatenations, which grow in place (``cache_append``), and requests that decode run in
one call (``pooled_cache``).

The queries of the heads that share keys and values are rows of one matrix, so that these are read once. Rotation
(Su et al., *RoFormer*, 2021) stays one operator.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from chrion.generation.rewrites.decoder import (
    LOGITS,
    MASK,
    POSITIONS,
    DecoderSignature,
    equal_but_for_rounding,
    random_cache,
)
from chrion.graph.loader import reassemble
from chrion.graph.model import Graph
from chrion.graph.ort_sessions import first_line, open_analysis
from chrion.graph.rewrite import MICROSOFT, defined_names, int_attribute, replace_nodes, split_node, standard_opset

Array = np.ndarray[Any, Any]
log = logging.getLogger(__name__)

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


def expand_grouped_attention(graph: Graph, signature: DecoderSignature) -> tuple[Graph, DecoderSignature]:
    """Return a decoder without ``GroupQueryAttention`` and its signature, which has ``position_ids``.

    The decoder is returned as it is if one of its fused operators does something else, such as attention to the last
    tokens only, or if the results differ by more than rounding.

    Args:
        graph: A decoder of opset 13 or later.
        signature: Its inputs and outputs.
    """
    found = [node for node in graph.model.graph.node if _is_grouped(node)]
    taken = POSITIONS not in signature.inputs and POSITIONS in defined_names(graph.model.graph)
    if not found or taken or MASK not in signature.inputs or signature.cache_type != np.float32:
        return graph, signature
    if obstacle := next((text for node in found if (text := _obstacle(node, signature))), ""):
        log.info("%s: attention stays fused: %s", graph.name, obstacle)
        return graph, signature
    model = _Expansion(graph.model, signature).model
    expanded = signature
    if POSITIONS not in signature.inputs:
        model.graph.input.append(helper.make_tensor_value_info(POSITIONS, TensorProto.INT64, [None, None]))
        expanded = replace(signature, inputs=(*signature.inputs, POSITIONS))
    try:
        rewritten = reassemble(graph, model)
        equal = _equal_results(graph, signature, rewritten, expanded)
    except Exception as error:  # noqa: BLE001 - onnxruntime raises many types
        log.info("%s: attention stays fused: %s", graph.name, first_line(error))
        return graph, signature
    if not equal:
        log.info("%s: attention stays fused: as plain operators its results differ", graph.name)
        return graph, signature
    return rewritten, expanded


def _is_grouped(node: onnx.NodeProto) -> bool:
    return node.op_type == "GroupQueryAttention" and node.domain == MICROSOFT


def _obstacle(node: onnx.NodeProto, signature: DecoderSignature) -> str:
    """Return why a fused operator is not expanded; empty if it is."""
    for attribute in node.attribute:
        name, value = attribute.name, helper.get_attribute_value(attribute)
        harmless = value == 1 if name == "causal" else value in _OFF
        if name not in _ATTRIBUTES and not harmless:
            return f"{node.name!r} has {name} = {value}"
    if any(node.input[_INPUTS:]) or any(node.output[3:]) or len(node.input) < 7 or len(node.output) < 3:
        return f"{node.name!r} has inputs or outputs beside the usual ones"
    if not set(node.input[3:5]) <= {*signature.past} or not set(node.output[1:3]) <= {*signature.present}:
        return f"{node.name!r} reads or writes other values than the cache"
    return ""


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


class _Expansion:
    """The nodes of a decoder under construction.

    Args:
        model: The decoder.
        signature: Its inputs and outputs.
    """

    def __init__(self, model: onnx.ModelProto, signature: DecoderSignature) -> None:
        self._opset = standard_opset(model)
        self._caches = dict(zip(signature.past, signature.cache_shapes, strict=True))
        #: The columns of tables.
        self._columns = {t.name: t.dims[1] for t in model.graph.initializer if len(t.dims) == 2}
        self._nodes: list[onnx.NodeProto] = []
        self._added: dict[str, onnx.TensorProto] = {}
        self._masks: dict[int, str] = {}
        self._positions = self._as_int64(POSITIONS, signature.type_of(POSITIONS))
        for node in model.graph.node:
            if _is_grouped(node):
                self._expand(node)
            else:
                self._nodes.append(node)
        self.model = replace_nodes(model, self._nodes, self._added)

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
            split = self._add("Reshape", [source, self._constant([0, -1, shared, width])], f"{prefix}{past}/split")
            new = self._add("Transpose", [split], f"{prefix}{past}/new", perm=[0, 2, 1, 3])
            self._add("Concat", [past, new], present, axis=2)  # [B, K, P + L, W]
        split = self._constant([0, -1, shared, sizes.group, width])
        arranged = self._add("Reshape", [queries, split], f"{prefix}split")
        arranged = self._add("Transpose", [arranged], f"{prefix}arranged", perm=[0, 2, 3, 1, 4])
        rows = self._add("Reshape", [arranged, self._constant([0, shared, -1, width])], f"{prefix}rows")
        scores = self._scores(node, rows, sizes, prefix)
        weights = self._add("Softmax", [scores], f"{prefix}weights", axis=-1)
        context = self._add("MatMul", [weights, node.output[2]], f"{prefix}context")  # [B, K, H / K * L, W]
        grouped = self._constant([0, shared, sizes.group, -1, width])
        context = self._add("Reshape", [context, grouped], f"{prefix}grouped")
        context = self._add("Transpose", [context], f"{prefix}joined", perm=[0, 3, 1, 2, 4])
        self._add("Reshape", [context, self._constant([0, -1, sizes.heads * width])], node.output[0])

    def _separate(self, inputs: list[str], sizes: _Sizes, prefix: str) -> list[str]:
        """Return queries, keys and values, which one input may have side by side."""
        if inputs[1]:
            return inputs
        parts = [f"{prefix}{part}" for part in ("queries", "keys", "values")]
        widths = [heads * sizes.width for heads in (sizes.heads, sizes.shared, sizes.shared)]
        node, added = split_node(inputs[0], parts, f"{prefix}parts", self._opset, widths, -1)
        self._nodes.append(node)
        self._added |= added
        return parts

    def _rotated(self, node: onnx.NodeProto, source: str, heads: int, width: int, output: str) -> str:
        """Add a rotation of [B, L, heads * W], of as many elements of a head as the tables are for."""
        inputs = [*node.input, *[""] * _INPUTS]
        positions = inputs[_INPUTS - 1] or self._positions
        rotated = 2 * self._columns.get(inputs[7], width // 2)
        return self._add(
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
        floats = {a.name: float(a.f) for a in node.attribute if a.type == onnx.AttributeProto.FLOAT}
        scale, cap = floats.get("scale", 0.0) or sizes.width**-0.5, floats.get("softcap", 0.0)
        keys = self._add("Transpose", [node.output[1]], f"{prefix}columns", perm=[0, 1, 3, 2])
        scores = self._add("MatMul", [rows, keys], f"{prefix}products")
        scores = self._add("Mul", [scores, self._number(scale)], f"{prefix}scores")
        if cap:
            scores = self._add(
                "Tanh", [self._add("Div", [scores, self._number(cap)], f"{prefix}ratio")], f"{prefix}tanh"
            )
            scores = self._add("Mul", [scores, self._number(cap)], f"{prefix}capped")
        return self._add("Add", [scores, self._mask(sizes.group)], f"{prefix}visible")

    def _mask(self, group: int) -> str:
        """Return what is added to the scores, [B, 1, H / K * L, P + L]: 0 for the tokens up to a query's own."""
        if group not in self._masks:
            name = f"{_PREFIX}mask/{group}/"
            lengths = self._add("Shape", [MASK], f"{name}lengths")
            total = self._add("Gather", [lengths, self._constant(1)], f"{name}total", axis=0)
            columns = self._add("Range", [self._constant(0), total, self._constant(1)], f"{name}columns")
            tiled = self._add("Concat", [self._positions] * group, f"{name}positions", axis=1)
            own = self._add("Unsqueeze", [tiled, self._constant([1, 3])], f"{name}own")
            seen = self._add("LessOrEqual", [columns, own], f"{name}seen")
            hidden = self._number(float(np.finfo(np.float32).min))
            self._masks[group] = self._add("Where", [seen, self._number(0.0), hidden], f"{name}added")
        return self._masks[group]

    def _as_int64(self, name: str, kind: np.dtype[Any]) -> str:
        return name if kind == np.int64 else self._add("Cast", [name], f"{_PREFIX}{name}", to=TensorProto.INT64)

    def _add(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self._nodes.append(helper.make_node(kind, inputs, [output], name=f"{_PREFIX}node/{output}", **attributes))
        return output

    def _constant(self, value: int | list[int]) -> str:
        return self._weight(np.array(value, np.int64))

    def _number(self, value: float) -> str:
        return self._weight(np.array(value, np.float32))

    def _weight(self, array: Array) -> str:
        name = f"{_PREFIX}constant/{array.dtype}/{array.tolist()}"
        self._added[name] = numpy_helper.from_array(array, name)
        return name


def _equal_results(graph: Graph, signature: DecoderSignature, expanded: Graph, other: DecoderSignature) -> bool:
    """Return whether two forms of a decoder have the same results, except for rounding."""
    results = [_run_trials(graph, signature), _run_trials(expanded, other)]
    return all(equal_but_for_rounding(signature, *pair) for pair in zip(*results, strict=True))


def _run_trials(graph: Graph, signature: DecoderSignature) -> list[Array]:
    session = open_analysis(graph.model, graph.weights_folder, graph.name)
    found: list[Array] = []
    for new, past in _TRIALS:
        ids = np.arange(1, new + 1) % signature.vocabulary
        feed = signature.feed(ids, past) | random_cache(signature, past)
        found += session.run([LOGITS, *signature.present], feed)
    return found
