"""Caches of keys and values that grow in place.

A decoder returns its cache as ``present = Concat(past, new)`` along the axis of tokens, which copies the whole cache in
every iteration. Here the cache of a request is a buffer of [tokens, heads, width], to whose end the caller writes the
keys and values of new tokens. The rewritten decoder reads the filled part of the buffer as an input, and transposes it
to the layout that it computes with, [1, heads, tokens, width].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx
from onnx import helper

from chrion.graph.decoder import DecoderSignature
from chrion.graph.observation import Observation, Size
from chrion.graph.rewrite import STANDARD, int_attribute, ints_attribute, replace_nodes

_SWAP = (0, 2, 1, 3)
_PREFIX = "cache/"


@dataclass(frozen=True)
class AppendedDecoder:
    """A decoder whose caches are inputs that already contain the new tokens."""

    model: onnx.ModelProto
    #: By cache input: the value with the keys or values of the new tokens, of [1, L, heads, width] or
    #: [1, heads, L, width].
    sources: Mapping[str, str]
    #: What is known of the values, with the new inputs.
    seen: Observation


def append_caches(model: onnx.ModelProto, signature: DecoderSignature, seen: Observation) -> AppendedDecoder | None:
    """Return a decoder that reads caches in place of computing them, or None if its caches are computed otherwise.

    ``present = Concat(past, new)`` becomes ``present = Transpose(cache)``. ``Attention`` with past keys and values
    becomes ``Attention`` on the whole cache, for which it must have a mask and no causal attribute of its own.
    """
    producer = {name: node for node in model.graph.node for name in node.output if name}
    changed: dict[str, list[onnx.NodeProto]] = {}  # by the name of a node's first output
    sources: dict[str, str] = {}
    for past, present in zip(signature.past, signature.present, strict=True):
        found = producer.get(present)
        new = _new_tokens(found, past, present, seen) if found is not None else None
        if found is None or new is None:
            return None
        cache = _PREFIX + present
        sources[cache] = _before_transpose(new, producer)
        own = changed.setdefault(found.output[0], [])
        own.append(helper.make_node("Transpose", [cache], [present], perm=_SWAP, name=f"Transpose:{present}"))
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        added = changed.get(node.output[0], [])
        nodes += added
        if not added:
            nodes.append(node)
        elif node.op_type == "Attention":
            nodes.append(_whole_attention(node))
    shapes, types = dict(seen.shapes), dict(seen.types)
    for cache, (heads, width) in zip(sources, signature.cache_shapes, strict=True):
        shapes[cache] = (Size(0, 0, 1), Size(1, 1, 0), Size(0, 0, heads), Size(0, 0, width))
        types[cache] = signature.cache_type
    known = Observation(shapes, types, seen.constants, seen.sizes)
    return AppendedDecoder(replace_nodes(model, nodes, {}), sources, known)


def _new_tokens(node: onnx.NodeProto, past: str, present: str, seen: Observation) -> str | None:
    """Return the value that a node appends to past keys or values, or None if the node does something else."""
    if node.domain not in STANDARD:
        return None
    if node.op_type == "Concat" and len(node.input) == 2 and node.input[0] == past:
        return node.input[1] if int_attribute(node, "axis", 0) in {2, -2} else None
    if node.op_type == "Attention" and present in list(node.output)[1:3]:
        at = list(node.output).index(present)
        inputs = [*node.input, *[""] * 7]
        plain = not int_attribute(node, "is_causal", 0) and inputs[3] and not inputs[6] and len(node.output) == 3
        matching = inputs[3 + at] == past and len(seen.shapes[inputs[at]]) == 4
        return inputs[at] if plain and matching else None
    return None


def _before_transpose(name: str, producer: Mapping[str, onnx.NodeProto]) -> str:
    """Return the value in the layout of the cache, if a transposition of it is given."""
    node = producer.get(name)
    if node is not None and node.op_type == "Transpose" and ints_attribute(node, "perm", ()) == _SWAP:
        return node.input[0]
    return name


def _whole_attention(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return an attention to its present keys and values, which other nodes compute."""
    whole = onnx.NodeProto()
    whole.CopyFrom(node)
    whole.input[:] = [node.input[0], node.output[1], node.output[2], node.input[3]]
    whole.output[:] = [node.output[0]]
    return whole
