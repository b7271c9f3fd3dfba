"""Decoders whose keys and values are rows of a pool, for iterations of several requests in one call.

If every request of a batch has one new token, only the lengths of their caches differ. With attention as one operator
(``pooled_attention``) the lengths do not matter, and each token of a prompt is a row like a request
that decodes. Without it, such a batch is a rectangle as soon as the caches are padded, which the rewritten decoder does
by itself:

1. ``ScatterND`` writes the new keys and values of all requests to their rows of the pool. The pool is an input and an
   output in the same memory, so that nothing is copied.
2. ``Gather`` reads the rows of each request from that output, and so after they are written. Shorter requests repeat
   their last row, which ``attention_mask`` hides.

A row of the pool has the heads of a token one after the other. The decoder sees each head of a token as a row of its
own, so that ``Gather`` gives [batch, heads, total, width], the layout that it computes with: nothing is transposed.

Of a request it gets no more than the new token, the number of past ones and its first row, from which it computes the
mask, the position and all rows: nodes on small tensors take less time than calls of Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from chrion.generation.rewrites.arrangements import join_arrangements
from chrion.generation.rewrites.cache_append import AppendedDecoder
from chrion.generation.rewrites.decoder import IDS, LOGITS, MASK, POSITIONS, DecoderSignature
from chrion.generation.rewrites.joined_products import join_products
from chrion.generation.rewrites.last_logits import choose_rows
from chrion.generation.rewrites.observation import Size
from chrion.generation.rewrites.pooled_attention import (
    DOMAIN,
    PooledAttention,
    PooledLayer,
    PooledRows,
    shows_earlier_tokens,
)
from chrion.graph.rewrite import STANDARD, int_attribute, needed_nodes, replace_nodes

Array = np.ndarray[Any, Any]
_POOL = "pool/"
#: Inputs of [batch, 1]: the number of past tokens, and the first row of the pool.
PAST, START = _POOL + "past", _POOL + "start"
#: An input of [wanted]: the rows of the batch whose logits are computed.
WANTED = _POOL + "wanted"
#: The most past tokens of a request.
_MOST = _POOL + "most"


@dataclass(frozen=True)
class PooledDecoder:
    """A decoder of batches of one token a request."""

    model: onnx.ModelProto
    #: The inputs and the outputs of the pool [rows * heads, width], in the order of the signature's caches. There are
    #: no such outputs if the operator of ``pooled_attention`` writes to the inputs.
    pools: tuple[str, ...]
    written: tuple[str, ...]
    #: Inputs with the shape that past keys and values would have, by name: heads and width.
    past_shapes: Mapping[str, tuple[int, int]]
    #: The most tokens of a request if attention is that operator, otherwise 0.
    longest: int = 0
    #: True if a prompt may be as many rows as it has tokens. Only the logits of the rows in ``WANTED`` are computed.
    prompts: bool = False

    def serves_all(self, tokens: int) -> bool:
        """Return whether a call may have any requests of up to a number of tokens, which is 0 if there is no limit."""
        return self.prompts and 0 < tokens <= self.longest

    def feed(self, signature: DecoderSignature, past: Array) -> dict[str, Array]:
        """Return the inputs beside the caches for tokens of number 0 after some past ones, int64 [requests, 1]."""
        count = len(past)
        shapes = {
            name: np.array([count, heads, past.max(), width]) for name, (heads, width) in self.past_shapes.items()
        }
        return {IDS: np.zeros((count, 1), signature.type_of(IDS)), PAST: past, START: past * 0, **shapes}


def pool_caches(
    appended: AppendedDecoder, signature: DecoderSignature, *, joined: bool = True, weights: Path | None = None
) -> PooledDecoder | None:
    """Return a decoder that keeps its caches in a pool, or None if it cannot hide pads or reads its past otherwise.

    The caller has to check on examples that the decoder treats the requests of a batch independently.

    Args:
        appended: The decoder with caches that are inputs.
        signature: Its inputs and outputs.
        joined: Join operators that arrange the elements of a token, if requests are the first axis of all values.
        weights: The folder of the decoder's weights, to have attention as one operator; None is returned if it is not
            plain attention to all tokens before.
    """
    if MASK not in signature.inputs:
        return None
    shapes: dict[str, tuple[int, int]] = {}
    added: dict[str, onnx.TensorProto] = {}
    nodes = _rows(signature, added)
    sizes = dict(zip(signature.past, signature.cache_shapes, strict=True))
    pasts = dict(zip(appended.sources, signature.past, strict=True))
    depending: set[str] = set()  # on keys and values
    for node in appended.model.graph.node:
        past = next((pasts[name] for name in node.input if name in pasts), None)
        read = [name for name in node.input if name in sizes]
        if past is not None:  # the transposition of a cache that is an input
            new = appended.sources[node.input[0]]
            nodes += _through_pool(past, sizes[past], new, node.output[0], added)
            depending.add(node.output[0])
        elif not depending.isdisjoint(node.input) and weights is not None and node.op_type == "Shape":
            nodes += _computed_shape(node, appended.seen.shapes.get(node.input[0], ()), added) or [node]
        elif not read:
            nodes.append(node)
            depending.update(node.output if not depending.isdisjoint(node.input) else ())
        elif node.op_type == "Shape" and node.domain in STANDARD:
            nodes += _shape_of_past(node, sizes[read[0]], shapes)
        else:
            return None
    pools, written = (tuple(f"{_POOL}{kind}/{name}" for name in signature.past) for kind in ("before", "after"))
    nodes = needed_nodes(join_arrangements(nodes, appended.seen, added) if joined else nodes, [LOGITS, *written])
    pooled = _declared_decoder(
        appended.model, nodes, added, signature, PooledDecoder(appended.model, pools, written, shapes)
    )
    return pooled if weights is None else _with_operator(pooled, appended, signature, added, weights)


def _with_operator(
    pooled: PooledDecoder,
    appended: AppendedDecoder,
    signature: DecoderSignature,
    added: dict[str, onnx.TensorProto],
    weights: Path,
) -> PooledDecoder | None:
    """Return a decoder with attention as one operator, or None if it does something else."""
    layers = []
    for at in range(0, len(signature.past), 2):
        if len({*signature.cache_shapes[at : at + 2]}) > 1 or signature.cache_type != np.float32:
            return None
        keys, values = (
            PooledRows(present, f"{_POOL}new/{past}", pool)
            for present, past, pool in list(zip(signature.present, signature.past, pooled.pools, strict=True))[
                at : at + 2
            ]
        )
        layers.append(PooledLayer(keys, values, *signature.cache_shapes[at]))
    fused = PooledAttention(pooled.model.graph.node, layers, appended.seen, added, (PAST, START))
    if not fused.complete:
        return None
    longest = shows_earlier_tokens(
        pooled.model, fused.masks, signature, appended.seen, lambda past: pooled.feed(signature, past), weights
    )
    nodes = needed_nodes(fused.nodes, [LOGITS])
    others = {name for node in nodes if node.domain != DOMAIN for name in node.input}
    # What follows from the longest past of a batch may differ for a request by itself, maybe beyond what a trial shows.
    if not longest or not others.isdisjoint({*pooled.pools, *pooled.past_shapes, _MOST}):
        return None
    stored = {tensor.name: tensor for tensor in pooled.model.graph.initializer}
    nodes = needed_nodes(join_products(nodes, stored, appended.seen), [LOGITS])
    chosen = choose_rows(nodes, WANTED, appended.seen)
    result = replace(pooled, written=(), longest=longest, prompts=chosen is not None)
    return _declared_decoder(appended.model, nodes if chosen is None else chosen, added, signature, result)


def _rows(signature: DecoderSignature, added: dict[str, onnx.TensorProto]) -> list[onnx.NodeProto]:
    """Return the nodes that compute the mask, the positions and the rows of the pool."""
    nodes: list[onnx.NodeProto] = []

    def add(kind: str, inputs: Sequence[str | int | list[int] | Array], output: str, **attributes: Any) -> str:
        """Add a node; inputs that are no names become constants."""
        names = [value if isinstance(value, str) else _constant(added, value) for value in inputs]
        nodes.append(helper.make_node(kind, names, [output], name=output, **attributes))
        return output

    most = add("ReduceMax", [PAST], _MOST, keepdims=0)
    columns = add("Range", [0, add("Add", [most, 1], _POOL + "total"), 1], _POOL + "columns")
    seen = add("Less", [columns, add("Add", [PAST, 1], _POOL + "own-total")], _POOL + "seen")
    for name, source in ((MASK, seen), (POSITIONS, PAST)):
        if name in signature.inputs:
            add("Cast", [source], name, to=helper.np_dtype_to_tensor_dtype(signature.type_of(name)))
    last = add("Add", [START, PAST], _POOL + "last")
    rows = add("Where", [seen, add("Add", [START, columns], _POOL + "row"), last], _POOL + "rows")
    rows = add("Reshape", [rows, [0, 1, -1]], _POOL + "rows-of-heads")
    last = add("Reshape", [last, [0, 1, 1]], _POOL + "last-of-heads")
    for heads in {heads for heads, _ in signature.cache_shapes}:
        for found, name in zip((rows, last), _indices(heads), strict=True):
            first = add("Mul", [found, heads], f"{name}/first")
            add("Add", [first, np.arange(heads)[:, None]], name)
    return nodes


def _indices(heads: int) -> tuple[str, str]:
    """Return the rows that are read [batch, heads, total] and written [batch, heads, 1]."""
    return f"{_POOL}read/{heads}", f"{_POOL}write/{heads}"


def _through_pool(
    past: str, size: tuple[int, int], source: str, present: str, added: dict[str, onnx.TensorProto]
) -> list[onnx.NodeProto]:
    """Return the nodes that write new keys or values, of one token a request, and read those of all tokens."""
    shape = numpy_helper.from_array(np.array([-1, *size]), f"{_POOL}shape/{size[0]}x{size[1]}")
    added[shape.name] = shape
    new, before, after = (f"{_POOL}{kind}/{past}" for kind in ("new", "before", "after"))
    read, write = _indices(size[0])
    return [
        helper.make_node("Reshape", [source, shape.name], [new], name=new),
        helper.make_node("ScatterND", [before, write, new], [after], name=after),
        helper.make_node("Gather", [after, read], [present], name=f"{_POOL}{present}", axis=0),
    ]


def _computed_shape(
    node: onnx.NodeProto, sizes: Sequence[Size | None], added: dict[str, onnx.TensorProto]
) -> list[onnx.NodeProto]:
    """Return nodes that compute the shape of a value of each request without it; none if it is not known how."""
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes) or known[:1] != [Size(0, 0, 1)] or any(size.past not in {0, 1} for size in known):
        return []
    name = f"{_POOL}shape-of/{node.output[0]}"
    nodes, parts = [], []
    ends = slice(int_attribute(node, "start", 0), int_attribute(node, "end", len(known)))
    for at, size in [*enumerate(known)][ends]:
        if at and not size.past:
            parts.append(_constant(added, [size(1, 0)]))
            continue
        parts.append(f"{name}/{at}")
        if at:
            own = helper.make_node("Add", [_MOST, _constant(added, [size(1, 0)])], parts[-1:], name=parts[-1])
            nodes.append(own)
        else:
            nodes.append(helper.make_node("Shape", [START], [f"{name}/start"], name=f"{name}/start"))
            inputs = [f"{name}/start", _constant(added, [0])]
            nodes.append(helper.make_node("Gather", inputs, parts[-1:], name=parts[-1]))
    return [*nodes, helper.make_node("Concat", parts, [node.output[0]], name=name, axis=0)] if parts else []


def _constant(added: dict[str, onnx.TensorProto], value: int | list[int] | Array) -> str:
    """Return the name of a constant of int64."""
    array = np.array(value, np.int64)
    name = f"{_POOL}constant/{array.shape}/{array.ravel().tolist()}"
    added[name] = numpy_helper.from_array(array, name)
    return name


def _shape_of_past(
    node: onnx.NodeProto, size: tuple[int, int], shapes: dict[str, tuple[int, int]]
) -> list[onnx.NodeProto]:
    """Return nodes in place of ``Shape``, for an input that does not exist any more."""
    name = f"{_POOL}past-shape/{size[0]}x{size[1]}"
    shapes[name] = size
    like = f"{name}/{node.output[0]}"
    value = numpy_helper.from_array(np.zeros(1, np.int8))
    shape = onnx.NodeProto()
    shape.CopyFrom(node)
    shape.input[0] = like
    return [helper.make_node("ConstantOfShape", [name], [like], name=like, value=value), shape]


def _declared_decoder(
    model: onnx.ModelProto,
    nodes: Sequence[onnx.NodeProto],
    added: Mapping[str, onnx.TensorProto],
    signature: DecoderSignature,
    pooled: PooledDecoder,
) -> PooledDecoder:
    """Return a pooled decoder of other nodes, with its inputs and outputs declared."""
    read = {name for node in nodes for name in node.input}
    shapes = {name: size for name, size in pooled.past_shapes.items() if name in read}
    changed = replace_nodes(model, nodes, added)
    graph = changed.graph
    inputs = [_declared(name, TensorProto.INT64, ["batch", 1]) for name in (PAST, START)]
    inputs.append(_declared(IDS, helper.np_dtype_to_tensor_dtype(signature.type_of(IDS)), ["batch", 1]))
    inputs += [_declared(name, TensorProto.INT64, [4]) for name in shapes]
    inputs += [_declared(WANTED, TensorProto.INT64, ["wanted"])] if pooled.prompts else []
    element = helper.np_dtype_to_tensor_dtype(signature.cache_type)
    widths = [width for _, width in signature.cache_shapes]
    inputs += [_declared(name, element, [None, width]) for name, width in zip(pooled.pools, widths, strict=True)]
    logits = next(value.type.tensor_type.elem_type for value in graph.output if value.name == LOGITS)
    outputs = [_declared(LOGITS, logits, [None, 1, signature.vocabulary])]
    outputs += [_declared(name, element, [None, width]) for name, width in zip(pooled.written, widths, strict=False)]
    del graph.input[:], graph.output[:], graph.value_info[:]
    graph.input.extend(inputs)
    graph.output.extend(outputs)
    if pooled.longest:
        changed.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return replace(pooled, model=changed, past_shapes=shapes)


def _declared(name: str, element: int, shape: Sequence[int | str | None]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element, shape)
