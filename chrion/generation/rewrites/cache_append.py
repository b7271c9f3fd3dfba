"""Caches of keys and values that grow in place.

A decoder returns its cache as ``present = Concat(past, new)`` along the axis of tokens, which copies the whole cache in
every iteration. Here the cache of a request is a buffer of [tokens, heads, width], to whose end the caller writes the
keys and values of new tokens. The rewritten decoder reads the filled part of the buffer as an input, and transposes it
to the layout that it computes with, [1, heads, tokens, width].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

from chrion.generation.rewrites.decoder import DecoderSignature
from chrion.generation.rewrites.observation import Observation, Size
from chrion.graph.rewrite import STANDARD, int_attribute, ints_attribute, replace_nodes

_SWAP = (0, 2, 1, 3)
_PREFIX = "cache/"
#: The attributes that mean the same for an attention to the whole cache.
_ATTENTION_ATTRIBUTES = frozenset(
    {"is_causal", "kv_num_heads", "q_num_heads", "qk_matmul_output_mode", "scale", "softcap", "softmax_precision"}
)


@dataclass(frozen=True)
class AppendedDecoder:
    """A decoder whose caches are inputs that already contain the new tokens."""

    model: onnx.ModelProto
    #: By cache input: the value with the keys or values of the new tokens, of [1, L, heads, width] or
    #: [1, heads, L, width].
    sources: Mapping[str, str]
    #: What is known of the values, with the new inputs.
    seen: Observation


@dataclass(frozen=True)
class _Appending:
    """How a decoder appends new keys or values to a cache."""

    #: The operator, and the casts before and behind it that serve nothing else.
    node: onnx.NodeProto
    casts: tuple[onnx.NodeProto, ...]
    #: The value that is appended.
    new: str
    #: The value with all keys or values that attention reads.
    joined: str


def append_caches(model: onnx.ModelProto, signature: DecoderSignature, seen: Observation) -> AppendedDecoder | None:
    """Return a decoder that reads caches in place of computing them, or None if its caches are computed otherwise.

    ``present = Concat(past, new)`` becomes ``present = Transpose(cache)``. ``Attention`` with past keys and values
    becomes ``Attention`` on the whole cache, for which it must have a mask and no causal attribute of its own. Around
    ``Concat`` there may be casts, if no cache has fewer digits than what is appended.
    """
    lookup = _Lookup(model)
    changed: dict[str, list[onnx.NodeProto]] = {}  # what comes before or in place of a node, by its first output
    sources: dict[str, str] = {}
    shapes, types = dict(seen.shapes), dict(seen.types)
    caches = zip(signature.past, signature.present, signature.cache_shapes, strict=True)
    for past, present, (heads, width) in caches:
        found = _find_appending(past, present, signature.cache_type, lookup, seen)
        if found is None:
            return None
        cache = _PREFIX + present
        shapes[cache] = (Size(0, 0, 1), Size(1, 1, 0), Size(0, 0, heads), Size(0, 0, width))
        types[cache] = signature.cache_type
        sources[cache] = _before_transpose(found.new, lookup.producer)
        own = changed.setdefault(found.node.output[0], [])
        if types[found.new] != signature.cache_type:
            source, sources[cache] = sources[cache], f"{cache}/new"
            own.append(_cast(source, sources[cache], signature.cache_type))
            shapes[sources[cache]], types[sources[cache]] = shapes[source], signature.cache_type
        own.append(helper.make_node("Transpose", [cache], [present], perm=_SWAP, name=f"Transpose:{present}"))
        if found.joined != present:
            own.append(_cast(present, found.joined, types[found.joined]))
        changed |= {cast.output[0]: [] for cast in found.casts}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        added = changed.get(node.output[0])
        nodes += [_sized_by_past(node, changed, lookup)] if added is None else added
        if added and node.op_type == "Attention":
            nodes.append(_whole_attention(node))
    known = Observation(shapes, types, seen.constants, seen.sizes)
    return AppendedDecoder(replace_nodes(model, nodes, {}), sources, known)


def _sized_by_past(node: onnx.NodeProto, changed: Mapping[str, object], lookup: _Lookup) -> onnx.NodeProto:
    """Return a node that reads the shape of past keys or values, in place of that of their cast, if it reads that."""
    cast = lookup.cast_of(node.input[0]) if node.op_type == "Shape" and node.input[0] in changed else None
    if cast is None:
        return node
    sized = onnx.NodeProto()
    sized.CopyFrom(node)
    sized.input[0] = cast.input[0]
    return sized


class _Lookup:
    """The nodes of a model by the values that they compute and read."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.producer = {name: node for node in model.graph.node for name in node.output if name}
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)

    def cast_of(self, name: str) -> onnx.NodeProto | None:
        """Return the node that casts a value to this one."""
        node = self.producer.get(name)
        return node if node is not None and node.op_type == "Cast" else None

    def sized(self, name: str, reader: onnx.NodeProto) -> bool:
        """Return whether a value has no other readers than one node and those that read its shape."""
        return all(node is reader or node.op_type == "Shape" for node in self._readers[name])


def _find_appending(
    past: str, present: str, cache_type: np.dtype[Any], lookup: _Lookup, seen: Observation
) -> _Appending | None:
    """Return how new keys or values are appended to a cache, or None if it is computed otherwise."""
    behind = lookup.cast_of(present)
    joined = present if behind is None else behind.input[0]
    node = lookup.producer.get(joined)
    if node is None or node.domain not in STANDARD:
        return None
    if node.op_type == "Attention" and behind is None:
        new = _new_of_attention(node, past, present, seen)
        return None if new is None else _Appending(node, (), new, present)
    if node.op_type != "Concat" or len(node.input) != 2 or int_attribute(node, "axis", 0) not in {2, -2}:
        return None
    before, new = node.input
    cast = None if before == past else lookup.cast_of(before)
    whole = before == past or (cast is not None and cast.input[0] == past and lookup.sized(before, node))
    kind = seen.types[joined]
    if not whole or not (kind == cache_type or (behind is not None and np.can_cast(kind, cache_type))):
        return None
    return _Appending(node, tuple(one for one in (cast, behind) if one is not None), new, joined)


def _new_of_attention(node: onnx.NodeProto, past: str, present: str, seen: Observation) -> str | None:
    """Return the value that ``Attention`` appends to past keys or values, or None if it does something else."""
    if present not in list(node.output)[1:3] or not {a.name for a in node.attribute} <= _ATTENTION_ATTRIBUTES:
        return None
    at = list(node.output).index(present)
    inputs = [*node.input, *[""] * 7]
    plain = not int_attribute(node, "is_causal", 0) and inputs[3] and not inputs[6] and len(node.output) == 3
    matching = inputs[3 + at] == past and len(seen.shapes[inputs[at]]) == 4
    return inputs[at] if plain and matching else None


def _cast(source: str, result: str, kind: np.dtype[Any]) -> onnx.NodeProto:
    element = helper.np_dtype_to_tensor_dtype(kind)
    return helper.make_node("Cast", [source], [result], name=f"Cast:{result}", to=element)


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
