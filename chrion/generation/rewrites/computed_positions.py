"""Positions that a decoder computes itself, as the numbers from the past tokens to all tokens.

``Range(past, past + new)`` is a value of a request, and so is all that follows from it, such as rotated keys. Here
``position_ids`` becomes an input in its place. Then positions are token-wise, and those of the requests of a batch may
differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from chrion.generation.rewrites.decoder import POSITIONS, DecoderSignature
from chrion.generation.rewrites.folding import fold_sizes
from chrion.generation.rewrites.observation import Observation, Size
from chrion.graph.rewrite import defined_names, replace_nodes

_ONE, _NEW, _PAST, _TOTAL = Size(0, 0, 1), Size(1, 0, 0), Size(0, 1, 0), Size(1, 1, 0)


def read_positions(
    model: onnx.ModelProto, signature: DecoderSignature, seen: Observation
) -> tuple[onnx.ModelProto, DecoderSignature, Observation]:
    """Return a decoder that reads its positions in place of computing them, or the same decoder if it does not.

    Args:
        model: The decoder.
        signature: Its inputs and outputs.
        seen: The sizes of its values.

    Returns:
        The decoder, its inputs and outputs, and the sizes of its values.
    """
    given = POSITIONS in signature.inputs
    taken = not given and POSITIONS in defined_names(model.graph)
    found = {} if taken else _positions(model, seen)
    if not found:
        return model, signature, seen
    shapes, types = {**seen.shapes, POSITIONS: (_ONE, _NEW)}, {**seen.types, POSITIONS: signature.type_of(POSITIONS)}
    added: dict[str, onnx.TensorProto] = {}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        axes = found.get(node.output[0])
        if axes is None:
            nodes.append(node)
            continue
        name = node.output[0]
        arranged = f"{POSITIONS}/{name}"
        added[f"{arranged}/axes"] = numpy_helper.from_array(np.array(axes, np.int64), f"{arranged}/axes")
        nodes.append(helper.make_node("Unsqueeze", [POSITIONS, f"{arranged}/axes"], [arranged], name=arranged))
        kind = helper.np_dtype_to_tensor_dtype(seen.types[name])
        nodes.append(helper.make_node("Cast", [arranged], [name], name=f"{arranged}/cast", to=kind))
        shapes[arranged], types[arranged] = seen.shapes[name], types[POSITIONS]
    rewritten = replace_nodes(model, nodes, added)
    if not given:
        rewritten.graph.input.append(helper.make_tensor_value_info(POSITIONS, TensorProto.INT64, [None, None]))
        signature = replace(signature, inputs=(*signature.inputs, POSITIONS))
    return rewritten, signature, replace(seen, shapes=shapes, types=types)


def _positions(model: onnx.ModelProto, seen: Observation) -> Mapping[str, list[int]]:
    """Return the values of [1, ..., L, ...] that are the positions, and their axes beside those of [1, L]."""
    found = {}
    for node in _readers(model, seen):
        shape = seen.shapes.get(node.output[0], ())
        axes = [at for at, size in enumerate(shape) if at and size == _ONE]
        if node.op_type in {"Reshape", "Unsqueeze"} and shape[:1] == (_ONE,) and len(axes) + 2 == len(shape):
            found[node.output[0]] = axes
    return found


def _readers(model: onnx.ModelProto, seen: Observation) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that read the positions as a list of numbers, which may have been cast."""
    folded = fold_sizes(model, seen)

    def is_size(name: str, size: Size) -> bool:
        return name in folded and seen.sizes.get(name) == (size,)

    lists: set[str] = set()
    for node in model.graph.node:
        if node.op_type == "Range":
            step = seen.constants.get(node.input[2])
            single = step is not None and step.item() == 1
            if single and is_size(node.input[0], _PAST) and is_size(node.input[1], _TOTAL):
                lists.add(node.output[0])
        elif node.input and node.input[0] in lists:
            if node.op_type == "Cast" and seen.types[node.output[0]].kind in "if":
                lists.add(node.output[0])
            else:
                yield node
