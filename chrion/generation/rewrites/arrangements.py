"""Operators that arrange the elements of a request with one new token, joined to one.

To move the axis of the heads before that of the tokens copies every element. With one token all elements are in the
right order already, so a chain of such operators is one ``Reshape``, which copies nothing or once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from chrion.generation.rewrites.observation import Observation, Size
from chrion.graph.rewrite import STANDARD, int_attribute, ints_attribute

_BATCH = Size(0, 0, 1)


def join_arrangements(
    nodes: Sequence[onnx.NodeProto], seen: Observation, added: dict[str, onnx.TensorProto]
) -> list[onnx.NodeProto]:
    """Return the nodes of a decoder for requests of one new token each, with chains of arranging operators joined.

    Nodes whose results are not read any more are kept.

    Args:
        nodes: The nodes, in topological order.
        seen: The sizes of the values, of one request.
        added: Weights beside those of the decoder; new ones are added.
    """
    origin: dict[str, str] = {}  # by value: the one whose elements it has in the same order, with requests as axis 0
    joined = []
    for node in nodes:
        read = node.input[0] if node.input else ""
        source, target = origin.get(read, read), ""
        shape = fixed_shape(seen.shapes.get(node.output[0], ()))
        if shape and _keeps_order(node, seen):
            origin[node.output[0]] = source
            target = f"one-token/{shape}"
            added[target] = numpy_helper.from_array(np.array(shape, np.int64), target)
        elif source != read and _reads_order(node, seen, added):
            target = node.input[1]
        arranged = helper.make_node("Reshape", [source, target], [node.output[0]], name=node.name)
        joined.append(arranged if target else node)
    return joined


def fixed_shape(sizes: Sequence[Size | None]) -> list[int]:
    """Return the shape of a value of several requests with one new token; empty if it depends on the past."""
    if sizes[:1] != (_BATCH,) or any(size is None or size.past for size in sizes):
        return []
    return [0, *(size(1, 0) for size in sizes[1:] if size is not None)]


def _keeps_order(node: onnx.NodeProto, seen: Observation) -> bool:
    """Return whether a node leaves the elements of each request in their order, if it has one new token."""
    if node.domain not in STANDARD or node.op_type not in {"Reshape", "Squeeze", "Transpose", "Unsqueeze"}:
        return False
    sizes = seen.shapes.get(node.input[0], ())
    if sizes[:1] != (_BATCH,):
        return False
    if node.op_type == "Reshape":
        target = seen.constants.get(node.input[1])
        return target is not None and target.size > 0 and int(target[0]) in {0, -1}
    if node.op_type == "Transpose":
        perm = ints_attribute(node, "perm", range(len(sizes))[::-1])
        moved = [at for at in perm if at == 0 or (size := sizes[at]) is None or size.past or size(1, 0) != 1]
        return perm[0] == 0 and moved == sorted(moved)
    axes = seen.constants.get(node.input[1]) if len(node.input) > 1 else None
    return axes is not None and 0 not in axes and bool((axes > -len(sizes)).all())


def _reads_order(node: onnx.NodeProto, seen: Observation, added: Mapping[str, onnx.TensorProto]) -> bool:
    """Return whether a node gives elements another shape, which says nothing of other axes than the first one."""
    if node.domain not in STANDARD or node.op_type != "Reshape" or int_attribute(node, "allowzero", 0):
        return False
    own = added.get(node.input[1])
    target = seen.constants.get(node.input[1]) if own is None else numpy_helper.to_array(own)
    return target is not None and 0 not in target[1:]
