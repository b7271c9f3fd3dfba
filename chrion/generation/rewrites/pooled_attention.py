"""Attention to keys and values in a pool as one operator, in place of those that read rows, compare and sum up.

The operator (``native/attention.c``) takes each token as a row of the batch, with the first row and the number of past
tokens of its request. A prompt is as many rows as it has tokens. So one call serves prompts and requests that decode,
of any lengths: selective batching (Yu et al., *Orca*, OSDI 2022, section 3.2) without a call for each request.

What is replaced is found by the flow of values, in attention of plain operators (``plain_attention``). From the product
of queries and keys to that of probabilities and values there may be a factor, a cap by ``Tanh`` (Gemma Team, *Gemma 2*,
2024), a mask, and ``Softmax``. If queries and keys are rotated in the same way (``rotation``), the operator does that,
too. It shows every token the tokens up to its own, so a mask may hide others only. That is computed for the longest
request, since a sliding window is not seen in a short one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from chrion.errors import ModelError
from chrion.generation.rewrites.arrangements import fixed_shape
from chrion.generation.rewrites.observation import Decoder, Observation, Size
from chrion.generation.rewrites.rotation import Rotation, RotationFinder
from chrion.graph.ort_sessions import first_line, open_analysis
from chrion.graph.rewrite import (
    STANDARD,
    RewriteError,
    Rewriter,
    int_attribute,
    needed_nodes,
    producers,
    readers,
    standard_opset,
)

Array = np.ndarray[Any, Any]
#: The operator, its domain, and the widest head that it takes.
OPERATOR, DOMAIN, WIDEST = "PooledAttention", "chrion", 256
#: Operators that keep the order of all elements.
_RESHAPING = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze"})
_ARRANGING = _RESHAPING | {"Expand", "Transpose"}
#: Operators behind which scores are the same.
_KEEPING = _RESHAPING | {"Cast"}
#: The most tokens for which masks are computed, if the model does not say how many positions it has.
_LONGEST = 1 << 17
#: The same if that takes memory for all pairs of tokens.
_LONGEST_OF_PAIRS = 1 << 12


@dataclass(frozen=True)
class PooledRows:
    """The keys or the values of a layer: the value with all rows of each request, the new ones, and the pool."""

    read: str
    new: str
    pool: str
    heads: int
    width: int


@dataclass(frozen=True)
class Mask:
    """What hides tokens: numbers that are added to scores, or a condition that has to be true or false for a token.

    Also a factor, which has to be the same for all tokens.
    """

    name: str
    visible: float | bool


@dataclass
class _Scores:
    """What attention computes from a product of queries and keys."""

    scale: float = 1.0
    cap: float = 0.0
    masks: list[Mask] = field(default_factory=list)
    #: Numbers that the model computes.
    numbers: list[Mask] = field(default_factory=list)


def fuse_attention(
    rewriter: Rewriter, caches: Sequence[PooledRows], seen: Observation, counts: tuple[str, str]
) -> tuple[list[onnx.NodeProto], list[Mask]]:
    """Return the nodes of a decoder whose caches are in a pool, with attention as one operator.

    Args:
        rewriter: Its nodes, in topological order, with arrangements joined, and weights beside those of the decoder.
        caches: The keys and values, layer by layer.
        seen: The sizes and constants of the values.
        counts: The inputs with the number of past tokens and with the first row of each token.

    Returns:
        All nodes, some of which are not needed any more, and all masks.

    Raises:
        RewriteError: The attention of a layer is computed otherwise.
    """
    nodes = rewriter.nodes
    rotations = RotationFinder(nodes, seen, counts[:1], standard_opset(rewriter.model))
    layers = _LayerFinder(nodes, caches, seen, rewriter.added, rotations)
    operators = [layers.operator(*layer, counts) for layer in zip(caches[::2], caches[1::2], strict=True)]
    replaced = producers(operators)
    fused: list[onnx.NodeProto] = []
    for node in nodes:
        own = replaced.get(node.output[0], node)
        fused += [*rotations.take_selections(own.input), own]
    return fused, layers.masks


class _LayerFinder:
    """Finds the attention of layers by the flow of values, from their keys and values on."""

    def __init__(
        self,
        nodes: Sequence[onnx.NodeProto],
        caches: Sequence[PooledRows],
        seen: Observation,
        added: Mapping[str, onnx.TensorProto],
        rotations: RotationFinder,
    ) -> None:
        self._seen, self._added, self._rotations = seen, added, rotations
        self._producer = producers(nodes)
        self._readers = readers(node for node in nodes if node.op_type != "Shape")
        self._caches = {rows.read for rows in caches}
        self.masks: list[Mask] = []

    def operator(self, keys: PooledRows, values: PooledRows, counts: tuple[str, str]) -> onnx.NodeProto:
        """Return the operator of a layer."""
        heads, width, scores = keys.heads, keys.width, _Scores()
        products, sums = self._product(keys.read, scores), self._product(values.read, None)
        self._follow(self._softmax(products.output[0], scores), sums)
        queries, output = self._before_factors(products.input[0], scores), self._after_reshaping(sums.output[0])
        shape = fixed_shape(self._seen.shapes.get(queries, ()))
        elements = int(np.prod(shape[1:])) if shape else 0
        alike = (values.heads, values.width) == (heads, width)
        if output is None or not alike or not elements or elements % (heads * width) or width > WIDEST:
            raise RewriteError(f"the heads of {keys.read!r} and of its queries are not those of the operator")
        self.masks += scores.masks + scores.numbers
        new_keys, new_values = (self._before_reshaping(rows.new) for rows in (keys, values))
        # If queries and keys are not rotated in the same way, the operator does not rotate.
        queries_before, rotation = self._rotations.find(queries, elements // width, width)
        keys_before, other = self._rotations.find(new_keys, heads, width)
        if rotation == other:
            queries, new_keys = queries_before, keys_before
        else:
            rotation = Rotation()
        return helper.make_node(
            OPERATOR,
            [queries, new_keys, new_values, keys.pool, values.pool, *counts, *rotation.tables],
            [output[0]],
            name=f"{OPERATOR}:{output[0]}",
            domain=DOMAIN,
            heads=elements // width,
            shared=heads,
            width=width,
            scale=scores.scale,
            cap=scores.cap,
            shape=output[1],
            rotated=rotation.rotated,
            interleaved=int(rotation.interleaved),
            columns=rotation.columns,
        )

    def _product(self, root: str, scores: _Scores | None) -> onnx.NodeProto:
        """Return the product whose second factor is the keys or the values of a layer, the only use of these."""
        name = root
        while (node := self._only_reader(name)) is not None and (name == root or name not in self._caches):
            if node.op_type == "MatMul" and node.input[1] == name:
                return node
            factor = self._factor(node, name, scores) if scores is not None else None
            if factor is not None and scores is not None:
                scores.scale *= factor
            elif node.op_type not in _ARRANGING or node.input[0] != name:
                break
            name = node.output[0]
        raise self._refusal(name, f"is between {root!r} and a product")

    def _softmax(self, name: str, scores: _Scores) -> str:
        """Follow scores to their probabilities, and return these."""
        while (node := self._only_reader(name)) is not None:
            factor = self._factor(node, name, scores)
            rank = len(self._seen.shapes.get(name, ()))
            if node.op_type == "Softmax" and rank and int_attribute(node, "axis", -1) % rank == rank - 1:
                return node.output[0]
            if factor is not None:
                # A mask shows tokens by adding 0, so that it does not matter which of the two is first.
                scores.scale, scores.cap = (
                    (scores.scale, scores.cap * factor) if scores.cap else (scores.scale * factor, 0.0)
                )
            elif node.op_type == "Tanh" and not scores.cap and not scores.masks:
                scores.cap = 1.0
            elif (mask := _mask(node, name)) is not None:
                scores.masks.append(mask)
            elif node.op_type not in _KEEPING or node.input[0] != name:
                break
            name = node.output[0]
        raise self._refusal(name, "is between scores and their softmax")

    def _follow(self, name: str, end: onnx.NodeProto) -> None:
        """Check that probabilities are the first factor of a product, unchanged."""
        while True:
            alike = self._readers.get(name, [])
            if len(alike) == 2 and (chosen := self._without_nan(name, alike)):
                name = chosen
                continue
            node = self._only_reader(name)
            if node is end and end.input[0] == name:
                return
            if node is None or node.op_type not in _KEEPING or node.input[0] != name:
                raise self._refusal(name, "is between probabilities and values")
            name = node.output[0]

    def _refusal(self, name: str, reason: str) -> RewriteError:
        """Return the refusal of the first node that reads a value."""
        return RewriteError(reason, next(iter(self._readers.get(name, [])), None))

    def _only_reader(self, name: str) -> onnx.NodeProto | None:
        """Return the node that reads a value, if it is one of ONNX's own operators and the only one."""
        readers = self._readers.get(name, [])
        return readers[0] if len(readers) == 1 and _is_standard(readers[0]) else None

    def _without_nan(self, name: str, readers: Sequence[onnx.NodeProto]) -> str:
        """Return probabilities with 0 in place of NaN, which they are where a mask hides all tokens; or nothing."""
        for test, choice in (readers, readers[::-1]):
            if (test.op_type, choice.op_type) == ("IsNaN", "Where") and [*choice.input[::2]] == [test.output[0], name]:
                return str(choice.output[0]) if self._number(choice.input[1]) == 0.0 else ""
        return ""

    def _factor(self, node: onnx.NodeProto, name: str, scores: _Scores) -> float | None:
        """Return the constant by which a node multiplies a value, or None if it does something else.

        A number that the model computes may follow from the length of a request: it is checked like a mask.
        """
        if node.domain not in STANDARD or node.op_type not in {"Div", "Mul"}:
            return None
        other = node.input[1] if node.input[0] == name else node.input[0]
        number = self._number(other)
        if number is None or (node.op_type == "Div" and (node.input[0] != name or not number)):
            return None
        if other in self._producer:
            scores.numbers.append(Mask(other, number))
        return number if node.op_type == "Mul" else 1.0 / number

    def _number(self, name: str) -> float | None:
        own = self._added.get(name)
        value = self._seen.constants.get(name) if own is None else numpy_helper.to_array(own)
        return None if value is None or value.size != 1 else float(value.item())

    def _before_reshaping(self, name: str) -> str:
        """Return the value with the same elements before operators that only change its shape."""
        while (node := self._producer.get(name)) is not None and node.op_type in _RESHAPING and _is_standard(node):
            name = node.input[0]
        return name

    def _before_factors(self, name: str, scores: _Scores) -> str:
        """Return queries before they are reshaped and multiplied by constants, which become part of the scale."""
        while (node := self._producer.get(name := self._before_reshaping(name))) is not None:
            data = [read for read in node.input if self._number(read) is None]
            factor = self._factor(node, data[0], scores) if len(data) == 1 else None
            if factor is None:
                break
            scores.scale *= factor
            name = data[0]
        return name

    def _after_reshaping(self, name: str) -> tuple[str, list[int]] | None:
        """Return the last value with the same elements behind operators that only change its shape, and its shape."""
        best = None
        while True:
            if shape := fixed_shape(self._seen.shapes.get(name, ())):
                best = name, shape
            node = self._only_reader(name)
            if node is None or node.op_type not in _RESHAPING or node.input[0] != name:
                return best
            name = node.output[0]


def _is_standard(node: onnx.NodeProto) -> bool:
    return node.domain in STANDARD


def _mask(node: onnx.NodeProto, name: str) -> Mask | None:
    """Return the mask that a node applies to scores, or None if it does something else."""
    if node.op_type == "Add":
        return Mask(node.input[1] if node.input[0] == name else node.input[0], 0.0)
    if node.op_type == "Where" and name in node.input[1:]:
        return Mask(node.input[0], node.input[1] == name)
    return None


def shows_earlier_tokens(
    model: onnx.ModelProto, masks: Collection[Mask], decoder: Decoder, feed: Callable[[Array], Mapping[str, Array]]
) -> int:
    """Return for how many tokens masks show every token all tokens up to its own.

    Args:
        model: The decoder before attention was replaced, with declared inputs.
        masks: The masks; a condition may also be a number that is added.
        decoder: The decoder before its caches were moved to a pool.
        feed: Returns the inputs of tokens after some past ones [requests, 1], without the caches.

    Raises:
        RewriteError: They hide some, or depend on the caches.
        ModelError: onnxruntime refuses the computation of masks.
    """
    tokens = decoder.signature.context or _LONGEST
    names = list(dict.fromkeys(mask.name for mask in masks))
    if not names:
        return tokens
    rewriter = Rewriter(model)
    rewriter.nodes = needed_nodes(model.graph.node, names)
    if any(_grows_by_pairs(decoder.seen.shapes.get(name, ())) for node in rewriter.nodes for name in node.output):
        tokens = min(tokens, _LONGEST_OF_PAIRS)
    read = {*names}.union(*(node.input for node in rewriter.nodes))
    inputs = [value for value in model.graph.input if value.name in read]
    past = np.array([[tokens - 1], [min(tokens - 1, 4)]])
    given = feed(past)
    if cache := next((value.name for value in inputs if value.name not in given), ""):
        raise RewriteError(f"a mask depends on {cache!r}")
    part = rewriter.finish(inputs, [onnx.ValueInfoProto(name=name) for name in names])
    session = open_analysis(part, decoder.graph.weights_folder, "the masks of attention")
    try:
        results = dict(zip(names, session.run(names, {value.name: given[value.name] for value in inputs}), strict=True))
    except Exception as error:
        raise ModelError(f"the masks of attention: {first_line(error)}") from error
    if hiding := next((mask.name for mask in masks if not _shows(mask, results[mask.name], past[:, 0])), ""):
        raise RewriteError(f"the mask {hiding!r} hides earlier tokens")
    return tokens


def _grows_by_pairs(shape: Sequence[Size | None]) -> bool:
    """Return whether several axes of a value may grow with the past."""
    return sum(size is None or size.past != 0 for size in shape) > 1


def _shows(mask: Mask, value: Array, past: Array) -> bool:
    """Return whether a mask shows the requests all tokens up to their own.

    Of one with fewer axes than [requests, heads, 1, tokens], the first axis is not that of the requests.
    """
    added = isinstance(mask.visible, bool) and value.dtype != np.bool_
    visible = 0.0 if added else mask.visible
    by_request = value.ndim > 3 and value.shape[0] == len(past)
    own = [value[at] if by_request else value for at in range(len(past))]
    fits = not value.ndim or value.shape[-1] in {1, max(past) + 1}
    return fits and all(
        (np.atleast_1d(row)[..., : count + 1] == visible).all() for row, count in zip(own, past, strict=True)
    )
