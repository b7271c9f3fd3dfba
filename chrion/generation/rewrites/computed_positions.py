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
from onnx import TensorProto, helper

from chrion.generation.rewrites.decoder import POSITIONS, DecoderSignature
from chrion.generation.rewrites.observation import Decoder, Observation, Size, fold_sizes
from chrion.graph.rewrite import RewriteError, Rewriter, defined_names

_ONE, _NEW, _PAST, _TOTAL = Size(0, 0, 1), Size(1, 0, 0), Size(0, 1, 0), Size(1, 1, 0)


def read_positions(decoder: Decoder) -> Decoder:
    """Return a decoder that reads its positions in place of computing them, if it computes them.

    Raises:
        RewriteError: Another value has their name.
    """
    seen = decoder.seen
    positions = _positions(decoder.model, seen)
    if not positions:
        return decoder
    signature, inputs = with_positions(decoder)
    shapes, types = {**seen.shapes, POSITIONS: (_ONE, _NEW)}, {**seen.types, POSITIONS: signature.type_of(POSITIONS)}
    rewriter = Rewriter(decoder.model)
    for node in decoder.model.graph.node:
        name = node.output[0]
        if name not in positions:
            rewriter.nodes.append(node)
            continue
        arranged = rewriter.add("Unsqueeze", [POSITIONS, np.array(positions[name], np.int64)], f"{POSITIONS}/{name}")
        rewriter.add("Cast", [arranged], name, to=helper.np_dtype_to_tensor_dtype(seen.types[name]))
        shapes[arranged], types[arranged] = seen.shapes[name], types[POSITIONS]
    known = replace(seen, shapes=shapes, types=types)
    return replace(decoder, model=rewriter.finish(inputs), signature=signature, known=known)


def with_positions(decoder: Decoder) -> tuple[DecoderSignature, list[onnx.ValueInfoProto]]:
    """Return the signature and the inputs of a decoder that gets ``position_ids``.

    Raises:
        RewriteError: Another value has this name.
    """
    signature, inputs = decoder.signature, [*decoder.model.graph.input]
    if POSITIONS not in signature.inputs:
        if POSITIONS in defined_names(decoder.model.graph):
            raise RewriteError(f"a value that is no input has the name {POSITIONS!r}")
        inputs.append(helper.make_tensor_value_info(POSITIONS, TensorProto.INT64, [None, None]))
        signature = replace(signature, inputs=(*signature.inputs, POSITIONS))
    return signature, inputs


def _positions(model: onnx.ModelProto, seen: Observation) -> Mapping[str, list[int]]:
    """Return the values of [1, ..., L, ...] that are the positions, and their axes beside those of [1, L]."""
    positions = {}
    for node in _readers(model, seen):
        shape = seen.shapes.get(node.output[0], ())
        axes = [at for at, size in enumerate(shape) if at and size == _ONE]
        if node.op_type in {"Reshape", "Unsqueeze"} and shape[:1] == (_ONE,) and len(axes) + 2 == len(shape):
            positions[node.output[0]] = axes
    return positions


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
