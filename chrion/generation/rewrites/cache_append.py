"""Caches of keys and values that grow in place.

A decoder returns its cache as ``present = Concat(past, new)`` along the axis of tokens, which copies the whole cache in
every iteration. Here the cache of a request is a buffer of [tokens, heads, width], to whose end the caller writes the
keys and values of new tokens. The rewritten decoder reads the filled part of the buffer as an input, and transposes it
to the layout that it computes with, [1, heads, tokens, width].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import helper

from chrion.generation.rewrites.observation import Decoder, Observation, Size
from chrion.graph.rewrite import (
    STANDARD,
    RewriteError,
    Rewriter,
    int_attribute,
    ints_attribute,
    producers,
    readers,
    with_inputs,
)

_SWAP = (0, 2, 1, 3)
_PREFIX = "cache/"
_ONE, _TOTAL = Size(0, 0, 1), Size(1, 1, 0)


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


def append_caches(decoder: Decoder) -> Decoder:
    """Return a decoder that reads caches in place of computing them.

    ``present = Concat(past, new)`` becomes ``present = Transpose(cache)``. Around ``Concat`` there may be casts, if no
    cache has fewer digits than what is appended.

    Raises:
        RewriteError: A cache is computed otherwise.
    """
    signature, kind = decoder.signature, decoder.signature.cache_type
    lookup = _Lookup(decoder.model)
    shapes, types = dict(decoder.seen.shapes), dict(decoder.seen.types)
    appended: dict[str, str] = {}
    places: dict[str, tuple[str, _Appending]] = {}  # the cache that a node appends to, by its output
    left_out: dict[str, str] = {}  # the values that casts compute, and those that they read
    for past, present, size in zip(signature.past, signature.present, signature.cache_shapes, strict=True):
        appending = _find_appending(past, present, kind, lookup, decoder.seen)
        cache, source = _PREFIX + present, _before_transpose(appending.new, lookup.producer)
        shapes[cache], types[cache] = (_ONE, _TOTAL, *(Size(0, 0, length) for length in size)), kind
        appended[cache] = source if types[appending.new] == kind else f"{cache}/new"
        shapes[appended[cache]], types[appended[cache]] = shapes[source], kind
        places[appending.node.output[0]] = present, appending
        left_out |= {cast.output[0]: cast.input[0] for cast in appending.casts}
    rewriter = Rewriter(decoder.model)
    for node in decoder.model.graph.node:
        if node.output[0] in places:
            present, appending = places[node.output[0]]
            cache = _PREFIX + present
            if types[appending.new] != kind:
                source = _before_transpose(appending.new, lookup.producer)
                rewriter.add("Cast", [source], appended[cache], to=helper.np_dtype_to_tensor_dtype(kind))
            rewriter.add("Transpose", [cache], present, perm=_SWAP)
            if appending.joined != present:
                element = helper.np_dtype_to_tensor_dtype(types[appending.joined])
                rewriter.add("Cast", [present], appending.joined, to=element)
        elif node.op_type == "Shape" and node.input[0] in left_out:
            rewriter.nodes.append(with_inputs(node, {0: left_out[node.input[0]]}))
        elif node.output[0] not in left_out:
            rewriter.nodes.append(node)
    element = helper.np_dtype_to_tensor_dtype(kind)
    caches = [
        helper.make_tensor_value_info(_PREFIX + present, element, [1, None, *size])
        for present, size in zip(signature.present, signature.cache_shapes, strict=True)
    ]
    model = rewriter.finish([*decoder.model.graph.input, *caches])
    return replace(decoder, model=model, known=replace(decoder.seen, shapes=shapes, types=types), appended=appended)


class _Lookup:
    """The nodes of a model by the values that they compute and read."""

    def __init__(self, model: onnx.ModelProto) -> None:
        nodes = [*model.graph.node]
        self.producer, self._readers = producers(nodes), readers(nodes)

    def cast_of(self, name: str) -> onnx.NodeProto | None:
        """Return the node that casts a value to this one."""
        node = self.producer.get(name)
        return node if node is not None and node.op_type == "Cast" else None

    def sized(self, name: str, reader: onnx.NodeProto) -> bool:
        """Return whether a value has no other readers than one node and those that read its shape."""
        return all(node is reader or node.op_type == "Shape" for node in self._readers[name])


def _find_appending(
    past: str, present: str, cache_type: np.dtype[Any], lookup: _Lookup, seen: Observation
) -> _Appending:
    """Return how new keys or values are appended to a cache.

    Raises:
        RewriteError: It is computed otherwise.
    """
    behind = lookup.cast_of(present)
    joined = present if behind is None else behind.input[0]
    node = lookup.producer.get(joined)
    refusal = RewriteError(f"computes {present!r} by other means than appending to {past!r}", node)
    if node is None or node.op_type != "Concat" or node.domain not in STANDARD:
        raise refusal
    if len(node.input) != 2 or int_attribute(node, "axis", 0) not in {2, -2}:
        raise refusal
    before, new = node.input
    cast = None if before == past else lookup.cast_of(before)
    whole = before == past or (cast is not None and cast.input[0] == past and lookup.sized(before, node))
    kind = seen.types[joined]
    if not whole or not (kind == cache_type or (behind is not None and np.can_cast(kind, cache_type))):
        raise refusal
    return _Appending(node, tuple(one for one in (cast, behind) if one is not None), new, joined)


def _before_transpose(name: str, producer: Mapping[str, onnx.NodeProto]) -> str:
    """Return the value in the layout of the cache, if a transposition of it is given."""
    node = producer.get(name)
    if node is not None and node.op_type == "Transpose" and ints_attribute(node, "perm", ()) == _SWAP:
        return node.input[0]
    return name
