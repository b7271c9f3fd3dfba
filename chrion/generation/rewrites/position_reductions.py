"""Decoders whose positions depend on the length of the text.

Models for long texts compare the greatest position with a limit, and rotate all tokens otherwise beyond it. The limit
may be beyond all lengths that are tried, so that the operators have to show it.
"""

from __future__ import annotations

import onnx

from chrion.generation.rewrites.decoder import POSITIONS
from chrion.generation.rewrites.token_axis import REDUCTIONS
from chrion.graph.assemble import node_reads


def reduces_positions(model: onnx.ModelProto) -> bool:
    """Return whether a decoder computes one number from all positions, such as the greatest one.

    Positions are those that it reads, and all numbers that it counts, since it may count its positions itself.
    """
    positions = {POSITIONS}
    neutral = {tensor.name for tensor in model.graph.initializer}
    for node, reads in zip(model.graph.node, node_reads(model), strict=True):
        others = {*reads} - neutral
        if node.op_type == "Range":
            positions.update(node.output)
        elif not others or node.op_type in {"Shape", "Size"}:
            neutral.update(node.output)
        elif others <= positions:
            if node.op_type in REDUCTIONS:
                return True
            positions.update(node.output)
    return False
