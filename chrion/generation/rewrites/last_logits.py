"""Decoders that compute the logits of their last token only.

Before the product with the vocabulary, the last row of the hidden states is selected, in some exports as many rows as
the input ``num_logits_to_keep`` says. The parts of a split decoder need no such selection, since the last of them runs
on chosen tokens anyway. So these decoders are rewritten to compute the logits of every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import helper

from chrion.generation.rewrites.decoder import KEPT, LOGITS
from chrion.generation.rewrites.observation import Decoder, Observation, Size
from chrion.generation.rewrites.token_axis import NO_END, tokens_axis
from chrion.graph.rewrite import RewriteError, Rewriter, int_attribute, producers, with_inputs

#: Operators between the product with the vocabulary and the logits.
_ELEMENTWISE = frozenset({"Add", "Cast", "Div", "Identity", "Mul", "Tanh"})
#: Kinds of that product.
_PRODUCTS = frozenset({"MatMul", "MatMulNBits"})
_LAST, _ALL = Size(1, 0, -1), Size(1, 0, 0)


def keep_all_logits(decoder: Decoder) -> Decoder:
    """Return a decoder without an input for the number of logits; they are those of all tokens."""
    signature = decoder.signature
    if KEPT not in signature.inputs:
        return decoder
    rewriter = Rewriter(decoder.model)
    rewriter.nodes += decoder.model.graph.node
    rewriter.weight(KEPT, np.zeros(signature.kept_shape, signature.type_of(KEPT)))
    model = rewriter.finish(value for value in decoder.model.graph.input if value.name != KEPT)
    names = tuple(name for name in signature.inputs if name != KEPT)
    return replace(decoder, model=model, signature=replace(signature, inputs=names))


def select_no_token(decoder: Decoder) -> Decoder:
    """Return a decoder without the selection of the last token before its logits, if it has one."""
    chosen = _selection(decoder)
    if chosen is None:
        return decoder
    rewriter, seen = Rewriter(decoder.model), decoder.seen
    for node in decoder.model.graph.node:
        if node.output[0] != chosen.output[0]:
            rewriter.nodes.append(node)
        elif node.op_type == "Slice" or seen.shapes[node.input[1]]:
            rewriter.add("Identity", node.input[:1], node.output[0])
        else:  # the selection removes the axis of tokens: they take the place of the batch
            rest = [size.fixed for size in seen.shapes[node.output[0]] if size is not None]
            rewriter.add("Reshape", [node.input[0], np.array([-1, *rest[1:]])], node.output[0])
    return replace(decoder, model=rewriter.finish())


def choose_rows(nodes: Sequence[onnx.NodeProto], rows: str, seen: Observation) -> list[onnx.NodeProto]:
    """Return nodes that compute the logits of some requests only.

    Args:
        nodes: The nodes of a decoder for requests of one new token each.
        rows: A value with the numbers of the requests.
        seen: The sizes of its values, of one request.

    Raises:
        RewriteError: The logits are not those of a product.
    """
    producer = producers(nodes)
    name = LOGITS
    while (node := producer.get(name)) is not None and node.op_type in _ELEMENTWISE:
        read = [one for one in node.input if seen.shapes.get(one) == seen.shapes.get(name)]
        if len(read) != 1:
            break
        (name,) = read
    if node is None or node.op_type not in _PRODUCTS or seen.shapes.get(node.input[0], ())[:1] != (Size(0, 0, 1),):
        raise RewriteError("computes the logits, which is no product", node)
    chosen = f"{rows}/{node.input[0]}"
    gather = helper.make_node("Gather", [node.input[0], rows], [chosen], name=chosen, axis=0)
    product = with_inputs(node, {0: chosen})
    return [new for one in nodes for new in ((gather, product) if one is node else (one,))]


def _selection(decoder: Decoder) -> onnx.NodeProto | None:
    """Return the node through which all that the logits depend on passes, if it selects the last token."""
    seen, producer = decoder.seen, producers(decoder.model.graph.node)
    weights = {tensor.name for tensor in decoder.model.graph.initializer}
    selections: dict[str, onnx.NodeProto] = {}
    visited: set[str] = set()
    waiting = [LOGITS]
    while waiting:
        name = waiting.pop()
        if name in visited:
            continue
        visited.add(name)
        node = producer.get(name)
        if node is not None and _selects_last(node, seen):
            selections[node.output[0]] = node
        elif node is not None and name not in seen.constants:
            waiting += [read for read in node.input if read]
        elif name not in weights and name not in seen.constants:
            return None
    return next(iter(selections.values())) if len(selections) == 1 else None


def _selects_last(node: onnx.NodeProto, seen: Observation) -> bool:
    """Return whether a node has the last token of its input and no other."""
    axis = tokens_axis(seen.shapes.get(node.input[0], ())) if node.input else None
    if axis is None or node.op_type not in {"Gather", "Slice"}:
        return False
    rank = len(seen.shapes[node.input[0]])
    if node.op_type == "Gather":
        along = int_attribute(node, "axis", 0) % rank
        last = along == axis and _is(node.input[1], seen, -1, _LAST)
        return last and (bool(seen.shapes[node.input[1]]) or (axis == 1 and rank > 1))
    axes = seen.constants.get(node.input[3]) if len(node.input) > 3 else None
    if axes is None or [int(at) % rank for at in axes] != [axis]:
        return False
    forward = len(node.input) < 5 or _is(node.input[4], seen, 1)
    ends = _is(node.input[2], seen, None, _ALL)
    return forward and ends and _is(node.input[1], seen, -1, _LAST)


def _is(name: str, seen: Observation, number: int | None, size: Size | None = None) -> bool:
    """Return whether a value is a number (None: beyond all tokens), or an integer of a certain size."""
    value = seen.constants.get(name)
    if value is not None and value.size == 1:
        return int(value.item()) >= NO_END if number is None else int(value.item()) == number
    return size is not None and seen.sizes.get(name) == (size,)
