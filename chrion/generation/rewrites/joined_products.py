"""Products of one value with several weights as one product, with the weights side by side.

The queries, keys and values of attention are such products, and so are the two factors of a gated feed-forward layer
(SwiGLU: Shazeer, *GLU Variants Improve Transformer*, 2020). With one token a request, every product is a call of all
threads, which wait for each other at its end; one product is one call, and its columns can be divided more evenly.
Chrion's own operators read their inputs side by side in the result (``native/attention.c``, ``native/silu_and_mul.c``),
so that nothing splits it. onnxruntime computes the joined weights when it opens the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from chrion.generation.rewrites.arrangements import fixed_shape
from chrion.generation.rewrites.observation import Observation
from chrion.generation.rewrites.pooled_attention import DOMAIN, OPERATOR
from chrion.graph.rewrite import MICROSOFT, STANDARD, float_attribute, int_attribute, producers, readers, with_inputs

#: The operator that multiplies the halves of its input, the first one after SiLU.
GATE = "SiluAndMul"
#: The largest joined weights in bytes. onnxruntime does not compute larger constants when it opens a model, but in
#: every iteration (optimization.constant_folding_max_output_size_in_bytes).
LARGEST = 1 << 30
_PREFIX = "joined/"
#: The inputs of attention that may be one.
_QUERIES, _KEYS, _VALUES = range(3)


def join_products(
    nodes: Sequence[onnx.NodeProto], weights: Mapping[str, onnx.TensorProto], seen: Observation
) -> list[onnx.NodeProto]:
    """Return nodes in which attention, and gates with SiLU, read one product each where that is possible.

    Args:
        nodes: The nodes of a decoder with attention as one operator, in topological order. All of them remain but
            those that read joined products in place of their own ones.
        weights: The weights by name.
        seen: The sizes of the values.
    """
    products = _Products(nodes, weights, seen)
    joined: list[onnx.NodeProto] = []
    for node in nodes:
        joined += products.before_attention(node) or products.before_gate(node) or [node]
    return joined


class _Products:
    """The products of a decoder."""

    def __init__(
        self, nodes: Sequence[onnx.NodeProto], weights: Mapping[str, onnx.TensorProto], seen: Observation
    ) -> None:
        self._weights, self._seen = weights, seen
        self._producer, self._readers = producers(nodes), readers(nodes)
        #: Joined weights by the names of the separate ones: layers may share them.
        self._joined: dict[tuple[str, ...], str] = {}
        self._numbers = itertools.count()

    def before_attention(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return attention that reads queries, keys and values side by side, and their product; nothing if it stays."""
        if node.op_type != OPERATOR:
            return []
        names = node.input[_QUERIES : _VALUES + 1]
        heads, shared = (int_attribute(node, kind, 0) * int_attribute(node, "width", 0) for kind in ("heads", "shared"))
        widths = [self._row_width(name) for name in names]
        if widths != [heads, shared, shared]:  # such as those of each head side by side
            return []
        added: list[onnx.NodeProto] = []
        whole = self._before_split(names)
        if not whole:
            whole, added = self._product(names, [[node]] * len(names), widths)
        if not whole:
            return []
        return [*added, with_inputs(node, {_QUERIES: whole, _KEYS: "", _VALUES: ""})]

    def before_gate(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return the operator of ``silu(x * gate) * (x * up)`` and the product before it; nothing if it stays."""
        width = self._row_width(node.output[0]) if _is(node, "Mul") else 0
        for active, up in (node.input, node.input[::-1]) if width else ():
            gate, activation = self._before_silu(active)
            if gate and self._readers[active] == [node]:
                whole, added = self._product([gate, up], [activation, [node]], [width, width])
                if whole:
                    shape = fixed_shape(self._seen.shapes[node.output[0]])
                    own = helper.make_node(GATE, [whole], node.output, node.output[0], domain=DOMAIN, shape=shape)
                    return [*added, own]
        return []

    def _row_width(self, name: str) -> int:
        """Return the elements of a token, if all are along the last axis, otherwise 0."""
        shape = fixed_shape(self._seen.shapes.get(name, ()))
        return shape[-1] if len(shape) > 1 and all(size == 1 for size in shape[1:-1]) else 0

    def _before_silu(self, name: str) -> tuple[str, list[onnx.NodeProto]]:
        """Return the input of a SiLU and the nodes that compute it, or nothing."""
        node = self._producer.get(name)
        if node is None:
            return "", []
        if _is(node, "Swish") or (node.op_type == "QuickGelu" and node.domain == MICROSOFT):
            default = 1.0 if node.op_type == "Swish" else 1.702
            return (node.input[0], [node]) if float_attribute(node, "alpha", default) == 1.0 else ("", [])
        for gate, share in (node.input, node.input[::-1]) if _is(node, "Mul") else ():
            sigmoid = self._producer.get(share)
            if sigmoid is not None and _is(sigmoid, "Sigmoid") and sigmoid.input[0] == gate:
                return (gate, [sigmoid, node]) if self._readers[share] == [node] else ("", [])
        return "", []

    def _before_split(self, names: Sequence[str]) -> str:
        """Return the value of which others are all parts, in their order, along the last axis; or nothing."""
        node = self._producer.get(names[0])
        if node is None or not _is(node, "Split") or [*node.output] != [*names]:
            return ""
        rank = len(self._seen.shapes.get(node.input[0], ()))
        return node.input[0] if rank and int_attribute(node, "axis", 0) in {-1, rank - 1} else ""

    def _product(
        self, names: Sequence[str], read_by: Sequence[list[onnx.NodeProto]], widths: Sequence[int]
    ) -> tuple[str, list[onnx.NodeProto]]:
        """Return one product in place of several, and its nodes; nothing if they are not products of one value.

        Args:
            names: The products, maybe with biases.
            read_by: The nodes that may read each of them.
            widths: The elements of a token in each of them.
        """
        products = [product for name in names if (product := self._read(name)) is not None]
        if len(products) < len(names) or [self._readers[name] for name in names] != [*read_by]:
            return "", []
        sources, weights, biases = zip(*products, strict=True)
        rows = {self._weights[name].dims[0] for name in weights}
        if len({*sources}) > 1 or len(rows) > 1 or (any(biases) and not all(biases)):
            return "", []
        if [self._weights[name].dims[1] for name in weights] != [*widths]:
            return "", []
        if rows.pop() * sum(widths) * np.dtype(np.float32).itemsize > LARGEST:
            return "", []
        added: list[onnx.NodeProto] = []
        result = self._add("MatMul", [sources[0], self._concatenated(weights, 1, added)], added)
        if any(biases):
            result = self._add("Add", [result, self._concatenated(biases, 0, added)], added)
        return result, added

    def _read(self, name: str) -> tuple[str, str, str] | None:
        """Return what a product multiplies, its weights, and its bias or nothing; None if it is no product."""
        node, bias = self._producer.get(name), ""
        if node is not None and _is(node, "Add"):
            (bias, *_), biased = [one for one in node.input if self._is_weight(one, 1)] or [""], node
            others = [one for one in node.input if one != bias]
            node = self._producer.get(others[0]) if bias and len(others) == 1 else None
            if node is None or self._readers[node.output[0]] != [biased]:
                return None
        if node is None or not _is(node, "MatMul") or not self._is_weight(node.input[1], 2):
            return None
        if bias and self._weights[bias].dims[0] != self._weights[node.input[1]].dims[1]:
            return None
        return node.input[0], node.input[1], bias

    def _is_weight(self, name: str, rank: int) -> bool:
        tensor = self._weights.get(name)
        return tensor is not None and len(tensor.dims) == rank and tensor.data_type == TensorProto.FLOAT

    def _concatenated(self, names: tuple[str, ...], axis: int, added: list[onnx.NodeProto]) -> str:
        """Return weights side by side, computed by a node unless they are known."""
        if names not in self._joined:
            self._joined[names] = self._add("Concat", names, added, axis=axis)
        return self._joined[names]

    def _add(self, kind: str, inputs: Sequence[str], added: list[onnx.NodeProto], **attributes: Any) -> str:
        """Add a node, and return its output."""
        name = f"{_PREFIX}{next(self._numbers)}/{inputs[0]}"
        added.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name


def _is(node: onnx.NodeProto, kind: str) -> bool:
    return node.op_type == kind and node.domain in STANDARD
