"""Decoders that compute the logits of their last token only.

Before the product with the vocabulary, the last row of the hidden states is selected, in some exports as many rows as
the input ``num_logits_to_keep`` says. The parts of a split decoder need no such selection, since the last of them runs
on chosen tokens anyway. So these decoders are rewritten to compute the logits of every token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import helper, numpy_helper

from chrion.generation.rewrites.decoder import KEPT, LOGITS, DecoderSignature
from chrion.generation.rewrites.observation import Observation, Size
from chrion.generation.rewrites.token_axis import NO_END, tokens_axis
from chrion.graph.loader import reassemble
from chrion.graph.model import Graph
from chrion.graph.rewrite import int_attribute, replace_nodes

#: Operators between the product with the vocabulary and the logits.
_ELEMENTWISE = frozenset({"Add", "Cast", "Div", "Identity", "Mul", "Tanh"})
#: Kinds of that product.
_PRODUCTS = frozenset({"MatMul", "MatMulNBits"})
_LAST, _ALL = Size(1, 0, -1), Size(1, 0, 0)


def keep_all_logits(graph: Graph, signature: DecoderSignature) -> tuple[Graph, DecoderSignature]:
    """Return a decoder without an input for the number of logits, and its signature; they are those of all tokens.

    Args:
        graph: A decoder.
        signature: Its inputs and outputs.
    """
    if KEPT not in signature.inputs:
        return graph, signature
    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    (value,) = (value for value in model.graph.input if value.name == KEPT)
    shape = [1] * len(value.type.tensor_type.shape.dim)
    model.graph.input.remove(value)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(shape, signature.type_of(KEPT)), KEPT))
    names = tuple(name for name in signature.inputs if name != KEPT)
    return reassemble(graph, model), replace(signature, inputs=names)


def select_no_token(graph: Graph, seen: Observation) -> Graph | None:
    """Return a decoder without the selection of the last token before its logits, or None if there is none.

    Args:
        graph: A decoder.
        seen: The sizes of its values.
    """
    nodes = list(graph.model.graph.node)
    producer = {name: node for node in nodes for name in node.output if name}
    chosen = _selection(graph, producer, seen)
    if chosen is None:
        return None
    added: dict[str, onnx.TensorProto] = {}
    nodes[nodes.index(chosen)] = _without_selection(chosen, seen, added)
    return reassemble(graph, replace_nodes(graph.model, nodes, added))


def choose_rows(nodes: Sequence[onnx.NodeProto], rows: str, seen: Observation) -> list[onnx.NodeProto] | None:
    """Return nodes that compute the logits of some requests only, or None if no product computes them.

    Args:
        nodes: The nodes of a decoder for requests of one new token each.
        rows: A value with the numbers of the requests.
        seen: The sizes of its values, of one request.
    """
    producer = {name: node for node in nodes for name in node.output}
    name = LOGITS
    while (node := producer.get(name)) is not None and node.op_type in _ELEMENTWISE:
        read = [one for one in node.input if seen.shapes.get(one) == seen.shapes.get(name)]
        if len(read) != 1:
            return None
        (name,) = read
    if node is None or node.op_type not in _PRODUCTS or seen.shapes.get(node.input[0], ())[:1] != (Size(0, 0, 1),):
        return None
    chosen = f"{rows}/{node.input[0]}"
    product = onnx.NodeProto()
    product.CopyFrom(node)
    product.input[0] = chosen
    gather = helper.make_node("Gather", [node.input[0], rows], [chosen], name=chosen, axis=0)
    return [new for one in nodes for new in ((gather, product) if one is node else (one,))]


def _selection(graph: Graph, producer: Mapping[str, onnx.NodeProto], seen: Observation) -> onnx.NodeProto | None:
    """Return the node through which all that the logits depend on passes, if it selects the last token."""
    found: dict[str, onnx.NodeProto] = {}
    visited: set[str] = set()
    waiting = [LOGITS]
    while waiting:
        name = waiting.pop()
        if name in visited:
            continue
        visited.add(name)
        node = producer.get(name)
        if node is not None and _selects_last(node, seen):
            found[node.output[0]] = node
        elif node is not None and name not in seen.constants:
            waiting += [read for read in node.input if read]
        elif name not in graph.weight_names and name not in seen.constants:
            return None
    return next(iter(found.values())) if len(found) == 1 else None


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


def _without_selection(node: onnx.NodeProto, seen: Observation, added: dict[str, onnx.TensorProto]) -> onnx.NodeProto:
    """Return a node that keeps every token, in place of the batch if the selection removes the axis of tokens."""
    if node.op_type == "Slice" or seen.shapes[node.input[1]]:
        return helper.make_node("Identity", [node.input[0]], [node.output[0]], name=node.name)
    rest = [size.fixed for size in seen.shapes[node.output[0]] if size is not None]
    shape = numpy_helper.from_array(np.array([-1, *rest[1:]]), f"{node.name}/every-token")
    added[shape.name] = shape
    return helper.make_node("Reshape", [node.input[0], shape.name], [node.output[0]], name=node.name)
