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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from chrion.generation.rewrites.arrangements import join_arrangements
from chrion.generation.rewrites.decoder import IDS, LOGITS, MASK, POSITIONS, DecoderSignature
from chrion.generation.rewrites.joined_products import join_products
from chrion.generation.rewrites.last_logits import choose_rows
from chrion.generation.rewrites.observation import Decoder, Size
from chrion.generation.rewrites.pooled_attention import DOMAIN, PooledRows, fuse_attention, shows_earlier_tokens
from chrion.graph.rewrite import Constant, RewriteError, Rewriter, int_attribute, needed_nodes

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
    #: The most tokens of a request if attention is that operator, otherwise 0.
    longest: int = 0
    #: True if a prompt may be as many rows as it has tokens. Only the logits of the rows in ``WANTED`` are computed.
    prompts: bool = False

    def serves_all(self, tokens: int) -> bool:
        """Return whether a call may have any requests of up to a number of tokens, which is 0 if there is no limit."""
        return self.prompts and 0 < tokens <= self.longest

    def feed(self, signature: DecoderSignature, past: Array) -> dict[str, Array]:
        """Return the inputs beside the caches for tokens of number 0 after some past ones, int64 [requests, 1]."""
        return {IDS: np.zeros(past.shape, signature.type_of(IDS)), PAST: past, START: past * 0}


def pool_caches(decoder: Decoder, *, joined: bool = True, native: bool = False) -> PooledDecoder:
    """Return a decoder that keeps its caches in a pool.

    The caller has to check on examples that the decoder treats the requests of a batch independently.

    Args:
        decoder: A decoder with caches that are inputs.
        joined: Join operators that arrange the elements of a token, if requests are the first axis of all values.
        native: Have attention as one operator, which must be plain attention to all tokens before.

    Raises:
        RewriteError: It cannot hide pads, reads its past otherwise, or has other attention.
        ModelError: onnxruntime refuses the computation of its masks.
    """
    signature, seen = decoder.signature, decoder.seen
    if MASK not in signature.inputs:
        raise RewriteError(f"without {MASK!r}, pads cannot be hidden")
    rewriter = Rewriter(decoder.model)
    _add_rows(signature, rewriter)
    sizes = dict(zip(signature.past, signature.cache_shapes, strict=True))
    pasts = dict(zip(decoder.appended, signature.past, strict=True))
    depending: set[str] = set()  # on keys and values
    for node in decoder.model.graph.node:
        past = next((pasts[name] for name in node.input if name in pasts), None)
        read = [name for name in node.input if name in sizes]
        replaced = node.op_type == "Shape" and (read or (native and not depending.isdisjoint(node.input)))
        if past is not None:  # the transposition of a cache that is an input
            _add_pool(past, sizes[past], decoder.appended[node.input[0]], node.output[0], rewriter)
            depending.add(node.output[0])
        elif replaced and _add_shape(node, seen.shapes[node.input[0]], rewriter):
            continue
        elif read:
            raise RewriteError(f"reads {read[0]!r}", node)
        else:
            rewriter.nodes.append(node)
            depending.update(node.output if not depending.isdisjoint(node.input) else ())
    pools, written = (tuple(f"{_POOL}{kind}/{name}" for name in signature.past) for kind in ("before", "after"))
    if joined:
        rewriter.nodes = join_arrangements(rewriter.nodes, seen, rewriter.added)
    rewriter.nodes = needed_nodes(rewriter.nodes, [LOGITS, *written])
    pooled = _finish(rewriter, signature, PooledDecoder(decoder.model, pools, written))
    return _with_operator(pooled, decoder, rewriter) if native else pooled


def _with_operator(pooled: PooledDecoder, decoder: Decoder, rewriter: Rewriter) -> PooledDecoder:
    """Return a decoder with attention as one operator."""
    signature, seen = decoder.signature, decoder.seen
    if signature.cache_type != np.float32:
        raise RewriteError("the cache is no float")
    caches = [
        PooledRows(present, f"{_POOL}new/{past}", pool, *shape)
        for present, past, pool, shape in zip(
            signature.present, signature.past, pooled.pools, signature.cache_shapes, strict=True
        )
    ]
    fused, masks = fuse_attention(rewriter, caches, seen, (PAST, START))
    longest = shows_earlier_tokens(pooled.model, masks, decoder, lambda past: pooled.feed(signature, past))
    nodes = needed_nodes(fused, [LOGITS])
    shared = {*pooled.pools, _MOST}
    # What follows from the longest past of a batch may differ for a request by itself, maybe beyond what a trial shows.
    for node in nodes:
        if node.domain != DOMAIN and not shared.isdisjoint(node.input):
            raise RewriteError("depends on the past of all requests", node)
    stored = {tensor.name: tensor for tensor in pooled.model.graph.initializer}
    rewriter.nodes = needed_nodes(join_products(nodes, stored, seen), [LOGITS])
    prompts = True
    try:
        rewriter.nodes = choose_rows(rewriter.nodes, WANTED, seen)
    except RewriteError:
        prompts = False
    return _finish(rewriter, signature, replace(pooled, written=(), longest=longest, prompts=prompts))


def _add_rows(signature: DecoderSignature, rewriter: Rewriter) -> None:
    """Add the nodes that compute the mask, the positions and the rows of the pool."""

    def add(kind: str, inputs: Sequence[str | Constant], output: str, **attributes: Any) -> str:
        return rewriter.add(kind, inputs, _POOL + output, **attributes)

    most = rewriter.add("ReduceMax", [PAST], _MOST, keepdims=0)
    columns = add("Range", [0, add("Add", [most, 1], "total"), 1], "columns")
    seen = add("Less", [columns, add("Add", [PAST, 1], "own-total")], "seen")
    for name, source in ((MASK, seen), (POSITIONS, PAST)):
        if name in signature.inputs:
            rewriter.add("Cast", [source], name, to=helper.np_dtype_to_tensor_dtype(signature.type_of(name)))
    last = add("Add", [START, PAST], "last")
    rows = add("Where", [seen, add("Add", [START, columns], "row"), last], "rows")
    rows = add("Reshape", [rows, [0, 1, -1]], "rows-of-heads")
    last = add("Reshape", [last, [0, 1, 1]], "last-of-heads")
    for heads in sorted({heads for heads, _ in signature.cache_shapes}):
        for row, name in zip((rows, last), _indices(heads), strict=True):
            first = rewriter.add("Mul", [row, heads], f"{name}/first")
            rewriter.add("Add", [first, np.arange(heads)[:, None]], name)


def _indices(heads: int) -> tuple[str, str]:
    """Return the rows that are read [batch, heads, total] and written [batch, heads, 1]."""
    return f"{_POOL}read/{heads}", f"{_POOL}write/{heads}"


def _add_pool(past: str, size: tuple[int, int], source: str, present: str, rewriter: Rewriter) -> None:
    """Add the nodes that write new keys or values, of one token a request, and read those of all tokens."""
    new, before, after = (f"{_POOL}{kind}/{past}" for kind in ("new", "before", "after"))
    read, write = _indices(size[0])
    rewriter.add("Reshape", [source, [-1, *size]], new)
    rewriter.add("ScatterND", [before, write, new], after)
    rewriter.add("Gather", [after, read], present, axis=0)


def _add_shape(node: onnx.NodeProto, sizes: Sequence[Size | None], rewriter: Rewriter) -> bool:
    """Add nodes that compute the shape of a value of each request without it; return False if it is not known how."""
    known = [size for size in sizes if size is not None and size.past in {0, 1}]
    ends = slice(int_attribute(node, "start", 0), int_attribute(node, "end", len(known)))
    if len(known) < len(sizes) or known[:1] != [Size(0, 0, 1)] or not known[ends]:
        return False
    name = f"{_POOL}shape-of/{node.output[0]}"
    parts: list[str | Constant] = []
    for at, size in [*enumerate(known)][ends]:
        if not at:
            parts.append(rewriter.add("Gather", [rewriter.add("Shape", [START], f"{name}/start"), [0]], f"{name}/0"))
        elif size.past:
            parts.append(rewriter.add("Add", [_MOST, [size(1, 0)]], f"{name}/{at}"))
        else:
            parts.append([size(1, 0)])
    rewriter.add("Concat", parts, node.output[0], axis=0)
    return True


def _finish(rewriter: Rewriter, signature: DecoderSignature, pooled: PooledDecoder) -> PooledDecoder:
    """Return a pooled decoder with other nodes, and with its inputs and outputs declared."""
    declared, int64 = helper.make_tensor_value_info, TensorProto.INT64
    inputs = [declared(name, int64, ["batch", 1]) for name in (PAST, START)]
    inputs.append(declared(IDS, helper.np_dtype_to_tensor_dtype(signature.type_of(IDS)), ["batch", 1]))
    inputs += [declared(WANTED, int64, ["wanted"])] if pooled.prompts else []
    element = helper.np_dtype_to_tensor_dtype(signature.cache_type)
    widths = [width for _, width in signature.cache_shapes]
    inputs += [declared(name, element, [None, width]) for name, width in zip(pooled.pools, widths, strict=True)]
    outputs = rewriter.model.graph.output
    logits = next(value.type.tensor_type.elem_type for value in outputs if value.name == LOGITS)
    pools = [declared(name, element, [None, width]) for name, width in zip(pooled.written, widths, strict=False)]
    model = rewriter.finish(inputs, [declared(LOGITS, logits, [None, 1, signature.vocabulary]), *pools])
    del model.graph.value_info[:]
    if pooled.longest:
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return replace(pooled, model=model)
