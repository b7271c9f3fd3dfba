"""Decoders that treat long texts otherwise: caches that they trim, and positions that depend on the length.

A layer with a sliding window may keep its last tokens only: beyond the window, ``present`` has fewer rows than there
are past and new tokens. Models for long texts compare the greatest position with a limit, and rotate all tokens
otherwise beyond it. Runs with few tokens show neither, but the operators do: those between a past input and its present
output, one of which can drop rows, and those that compute one number from all positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from chrion.generation.rewrites.decoder import POSITIONS, DecoderSignature
from chrion.generation.rewrites.token_axis import ELEMENTWISE, REDUCTIONS
from chrion.graph.assemble import node_reads
from chrion.graph.model import Graph
from chrion.graph.rewrite import describe, int_attribute, nodes_before

#: Operators whose output has as many rows as their inputs: those of one element each, and of all rows at a time.
_KEEPING = ELEMENTWISE | frozenset(
    """
    Attention Concat DecoderMaskedMultiHeadAttention DequantizeLinear Expand Flatten GroupQueryAttention
    MultiHeadAttention QuantizeLinear Reshape RotaryEmbedding ScatterElements ScatterND SparseAttention Squeeze
    TensorScatter Transpose Unsqueeze
    """.split()  # noqa: SIM905 - a line for each otherwise
)
#: Operators whose output is no rows of their input, but their number.
_COUNTING = frozenset({"Shape", "Size"})


def find_trimmed_caches(graph: Graph, signature: DecoderSignature) -> dict[str, str]:
    """Return the caches that may have fewer rows than there are tokens.

    Args:
        graph: A decoder.
        signature: Its inputs and outputs.

    Returns:
        By the name of a present output: the first operator on the way from its past input that may drop rows.
    """
    nodes = list(graph.model.graph.node)
    reads = node_reads(graph.model)
    producer = {
        name: at for at, node in enumerate(nodes) for name in node.output if name and node.op_type not in _COUNTING
    }
    trimmed = {}
    for past, present in zip(signature.past, signature.present, strict=True):
        way = _between(past, present, nodes, reads, producer)
        dropping = next((nodes[at] for at in way if not _keeps_rows(nodes[at], graph)), None)
        if dropping is not None:
            trimmed[present] = describe(dropping)
    return trimmed


def _between(
    first: str, last: str, nodes: Sequence[onnx.NodeProto], reads: Sequence[Sequence[str]], producer: Mapping[str, int]
) -> list[int]:
    """Return the nodes on all ways from one value to another, in topological order, except through sizes."""
    reached, way = {first}, []
    for at in sorted(nodes_before([last], producer, reads)):
        if not reached.isdisjoint(reads[at]):
            reached.update(name for name in nodes[at].output if name)
            way.append(at)
    return way


def _keeps_rows(node: onnx.NodeProto, graph: Graph) -> bool:
    """Return whether a node keeps all rows, because of its type or because it acts on an axis of fixed length."""
    if node.op_type in _KEEPING:
        return True
    shape = graph.values[node.input[0]].shape
    if shape is None:
        return False
    if node.op_type in {"Gather", "Split"}:
        return isinstance(shape[int_attribute(node, "axis", 0)], int)
    axes = graph.constant(node.input[3]) if node.op_type == "Slice" and len(node.input) > 3 else None
    return axes is not None and all(isinstance(shape[int(axis)], int) for axis in axes)


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
