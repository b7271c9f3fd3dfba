"""Rewriting of operators to Chrion's native ones, which are nodes of the domain ``chrion``."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import onnx
from onnx import helper, numpy_helper

from chrion.graph.native_linear import is_product, native_product
from chrion.graph.native_recurrent import OPERATOR, is_recurrent, native_recurrent
from chrion.graph.rewrite import (
    NATIVE,
    STANDARD,
    Rewriter,
    bodies_of,
    int_attribute,
    ints_attribute,
    readers,
    set_int_attribute,
    standard_opset,
)


def may_be_native(node: onnx.NodeProto, *, bfloat16: bool) -> bool:
    """Return whether there is a native operator for nodes of this type: of matrix products only in bfloat16."""
    return is_recurrent(node) or (bfloat16 and is_product(node))


def has_native_operators(model: onnx.ModelProto) -> bool:
    """Return whether a model needs :func:`chrion.native.register_operators`."""
    return any(opset.domain == NATIVE for opset in model.opset_import)


def with_native_operators(
    model: onnx.ModelProto, names: Container[str] | None = None, *, bfloat16: bool = False, split: int = 1
) -> onnx.ModelProto:
    """Return a model with native operators.

    Args:
        model: A model of ONNX's operators. Bodies of If, Loop and Scan are not rewritten.
        names: The names of the nodes to replace; all of which there may be native ones if None.
        bfloat16: Whether they multiply in bfloat16, for which the processor must have instructions.
        split: The number of threads that each of them is divided among, those of its session.

    Returns:
        A model with the same inputs, outputs and weights, which needs
        :func:`chrion.native.register_operators`; the model itself if it has no such node.

    Raises:
        RewriteError: The native operator does not compute what such a node computes; the error names it.
    """
    wanted = (n for n in model.graph.node if names is None or n.name in names)
    chosen = [node for node in wanted if may_be_native(node, bfloat16=bfloat16)]
    if not chosen:
        return model
    weights, opset = {tensor.name: tensor for tensor in model.graph.initializer}, standard_opset(model)
    replaced = {
        id(node): native_recurrent(node, weights, opset, bfloat16=bfloat16, split=split)
        if is_recurrent(node)
        else native_product(node, weights, opset, split=split)
        for node in chosen
    }
    rewriter = Rewriter(model)
    nodes = [replaced.get(id(node), node) for node in model.graph.node]
    rewriter.nodes = _without_squeezes(nodes, replaced.values(), model)
    rewritten = rewriter.finish()
    if not has_native_operators(rewritten):
        rewritten.opset_import.append(helper.make_opsetid(NATIVE, 1))
    return rewritten


def _without_squeezes(
    nodes: list[onnx.NodeProto], made: Iterable[onnx.NodeProto], model: onnx.ModelProto
) -> list[onnx.NodeProto]:
    """Return nodes without those that remove the axis of directions from Y, if operators just made can return it so."""
    if any(True for node in nodes for _ in bodies_of(node)):  # a body may read any value
        return nodes
    reading, removed = readers(nodes), set[int]()
    results = {result.name for result in model.graph.output}
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in made:
        if node.op_type != OPERATOR or not node.output[0] or node.output[0] in results:
            continue
        squeezes = reading.get(node.output[0], [])
        single = int_attribute(node, "directions", 1) == 1 and not int_attribute(node, "layout", 0)
        if single and len(squeezes) == 1 and _squeezes_directions(squeezes[0], weights):
            set_int_attribute(node, "squeezed", 1)
            node.output[0] = squeezes[0].output[0]
            removed.add(id(squeezes[0]))
    return [node for node in nodes if id(node) not in removed]


def _squeezes_directions(node: onnx.NodeProto, weights: Mapping[str, onnx.TensorProto]) -> bool:
    """Return whether a node removes the second of four axes, and no other one."""
    if node.op_type != "Squeeze" or node.domain not in STANDARD:
        return False
    given = weights.get(node.input[1]) if len(node.input) > 1 else None
    axes = ints_attribute(node, "axes", ()) if given is None else numpy_helper.to_array(given).ravel()
    return [int(axis) % 4 for axis in axes] == [1]
