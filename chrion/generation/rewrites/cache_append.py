"""Caches of keys and values that grow in place.

A decoder returns its cache as ``present = Concat(past, new)`` along the axis of tokens, which copies the whole cache in
every iteration. Here the cache of a request is a buffer of [tokens, heads, width], to whose end the caller writes the
keys and values of new tokens. The rewritten decoder reads the filled part of the buffer as an input, and transposes it
to the layout that it computes with, [1, heads, tokens, width].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import helper

from chrion.generation.rewrites.observation import Decoder, Size
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

    present: str
    #: The operator.
    node: onnx.NodeProto
    #: The values that casts before and behind it compute, which serve nothing else, and those that they read.
    casts: Mapping[str, str]
    #: The value that is appended, before its transposition from the layout of the cache if there is one.
    source: str


def append_caches(decoder: Decoder) -> Decoder:
    """Return a decoder that reads caches in place of computing them.

    ``present = Concat(past, new)`` becomes ``present = Transpose(cache)``. Around ``Concat`` there may be casts, if no
    cache has fewer digits than what is appended.

    Raises:
        RewriteError: A cache is computed otherwise.
    """
    signature, kind = decoder.signature, decoder.signature.cache_type
    shapes, types = dict(decoder.seen.shapes), dict(decoder.seen.types)
    element = helper.np_dtype_to_tensor_dtype(kind)
    inputs, appended = [*decoder.model.graph.input], dict[str, str]()
    appendings = _find_appendings(decoder)
    for appending, size in zip(appendings, signature.cache_shapes, strict=True):
        cache = _PREFIX + appending.present
        appended[cache] = appending.source if types[appending.source] == kind else f"{cache}/new"
        shapes[cache], types[cache] = (_ONE, _TOTAL, *(Size(0, 0, length) for length in size)), kind
        shapes[appended[cache]], types[appended[cache]] = shapes[appending.source], kind
        inputs.append(helper.make_tensor_value_info(cache, element, [1, None, *size]))
    places = {appending.node.output[0]: appending for appending in appendings}
    left_out = {name: source for appending in appendings for name, source in appending.casts.items()}
    rewriter = Rewriter(decoder.model)
    for node in decoder.model.graph.node:
        if (place := places.get(node.output[0])) is not None:
            cache = _PREFIX + place.present
            if appended[cache] != place.source:
                rewriter.add("Cast", [place.source], appended[cache], to=element)
            rewriter.add("Transpose", [cache], place.present, perm=_SWAP)
            if node.output[0] != place.present:
                joined = helper.np_dtype_to_tensor_dtype(types[node.output[0]])
                rewriter.add("Cast", [place.present], node.output[0], to=joined)
        elif node.op_type == "Shape" and node.input[0] in left_out:
            rewriter.nodes.append(with_inputs(node, {0: left_out[node.input[0]]}))
        elif node.output[0] not in left_out:
            rewriter.nodes.append(node)
    known = replace(decoder.seen, shapes=shapes, types=types)
    return replace(decoder, model=rewriter.finish(inputs), known=known, appended=appended)


def _find_appendings(decoder: Decoder) -> list[_Appending]:
    """Return how new keys and values are appended to each cache."""
    nodes, types, kind = [*decoder.model.graph.node], decoder.seen.types, decoder.signature.cache_type
    producer, reading = producers(nodes), readers(nodes)

    def before(name: str, operator: str) -> onnx.NodeProto | None:
        node = producer.get(name)
        return node if node is not None and node.op_type == operator else None

    appendings = []
    for past, present in zip(decoder.signature.past, decoder.signature.present, strict=True):
        behind = before(present, "Cast")
        joined = present if behind is None else behind.input[0]
        node = producer.get(joined)
        refusal = RewriteError(f"computes {present!r} by other means than appending to {past!r}", node)
        if node is None or node.op_type != "Concat" or node.domain not in STANDARD:
            raise refusal
        if len(node.input) != 2 or int_attribute(node, "axis", 0) not in {2, -2}:
            raise refusal
        (first, source), casts = node.input, {} if behind is None else {present: joined}
        if first != past:
            cast = before(first, "Cast")
            others = [one for one in reading[first] if one is not node and one.op_type != "Shape"]
            if cast is None or cast.input[0] != past or others:
                raise refusal
            casts[first] = past
        if not (types[joined] == kind or (behind is not None and np.can_cast(types[joined], kind))):
            raise refusal
        transposition = before(source, "Transpose")
        if transposition is not None and ints_attribute(transposition, "perm", ()) == _SWAP:
            source = transposition.input[0]
        appendings.append(_Appending(present, node, casts, source))
    return appendings
