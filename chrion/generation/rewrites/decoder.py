"""Decoders with a cache of keys and values: their inputs and outputs.

The layout is that of the exports of optimum and transformers: ``input_ids``, and optionally ``attention_mask`` and
``position_ids``, with ``past_key_values.N.{key,value}`` to ``logits`` and ``present.N.{key,value}``. A request has a
batch of one. Its sizes depend on two numbers: the new tokens L and the past tokens P.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chrion.errors import ModelError
from chrion.generation.rewrites.context_length import find_context, table_rows
from chrion.graph.model import Graph, TensorInfo
from chrion.graph.rewrite import int_attribute

Array = np.ndarray[Any, Any]
IDS, MASK, POSITIONS, LOGITS = "input_ids", "attention_mask", "position_ids", "logits"
#: Of a merged decoder: whether it reads the cache (``merged_decoder``).
BRANCH = "use_cache_branch"
#: Of decoders of transformers.js: the number of the last tokens whose logits are computed; 0 for all.
KEPT = "num_logits_to_keep"
#: By the type of the cache, the greatest difference that rounding makes to logits, relative to the largest one;
#: differences of meaning far exceed it.
_ROUNDING = {"float16": 2e-2, "float32": 1e-3}
_INTEGERS = ("tensor(int64)", "tensor(int32)")
#: The inputs beside the cache, and their types.
_TYPES = {IDS: _INTEGERS, MASK: _INTEGERS, POSITIONS: _INTEGERS, KEPT: _INTEGERS, BRANCH: ("tensor(bool)",)}
_PAST, _PRESENT = "past_key_values.", "present."
_CACHE = re.compile(r"past_key_values\.\d+\.(key|value)")
#: What the names of other states contain: those of convolutions and of recurrent layers.
_STATE = re.compile(r"conv|ssm|recurrent|state")


@dataclass(frozen=True, slots=True)
class DecoderSignature:
    """The inputs and outputs of a decoder."""

    #: The inputs beside the cache: ``input_ids``, and if the model has them, ``attention_mask``, ``position_ids``,
    #: ``use_cache_branch`` and ``num_logits_to_keep``.
    inputs: tuple[str, ...]
    #: The inputs of the cache: keys and values, layer by layer.
    past: tuple[str, ...]
    #: The outputs of the cache, parallel to ``past``.
    present: tuple[str, ...]
    #: The shape of a token in each cache: heads and width.
    cache_shapes: tuple[tuple[int, int], ...]
    #: The element type of the cache.
    cache_type: np.dtype[Any]
    vocabulary: int
    #: The most tokens that the model has positions for, by its tables or the configuration beside it; 0 if not stated.
    context: int
    #: The element types of ``inputs`` that are not those of :meth:`feed`.
    types: Mapping[str, np.dtype[Any]] = field(default_factory=dict)
    #: The shape of ``num_logits_to_keep``.
    kept_shape: tuple[int, ...] = ()

    @property
    def slot_bytes(self) -> int:
        """The bytes of the keys and values of one token."""
        return sum(heads * width for heads, width in self.cache_shapes) * self.cache_type.itemsize

    def type_of(self, name: str) -> np.dtype[Any]:
        """Return the element type of an input beside the cache."""
        return self.types.get(name, np.dtype(np.bool_ if name == BRANCH else np.int64))

    def feed(self, ids: Sequence[int] | Array, past: int) -> dict[str, Array]:
        """Return the inputs of a request, without the cache.

        Args:
            ids: The new tokens.
            past: The number of tokens in the cache.
        """
        count = len(ids)
        known = {
            IDS: np.asarray(ids)[None],
            MASK: np.ones((1, past + count), np.int64),
            POSITIONS: np.arange(past, past + count, dtype=np.int64)[None],
            BRANCH: np.array([past > 0]),
            KEPT: np.zeros(self.kept_shape, np.int64),
        }
        return {name: known[name].astype(self.type_of(name), copy=False) for name in self.inputs}


def decoder_signature(graph: Graph) -> DecoderSignature:
    """Return the inputs and outputs of a decoder. Other outputs are ignored.

    Raises:
        ModelError: The model is not a decoder with a cache in the layout of optimum and transformers, or the
            configuration beside it is not JSON.
    """
    inputs, outputs = ({info.name: info for info in infos} for infos in (graph.inputs, graph.outputs))
    _refuse_other_kinds(graph, [*inputs])
    plain = [name for name in inputs if name in _TYPES]
    past = sorted((name for name in inputs if _CACHE.fullmatch(name)), key=_layer)
    present = [_PRESENT + name.removeprefix(_PAST) for name in past]
    _check_names(graph, inputs, outputs, past)
    for name in plain:
        if inputs[name].type not in _TYPES[name]:
            wanted = " or ".join(kind.removeprefix("tensor(").removesuffix(")") for kind in _TYPES[name])
            raise _unexpected(graph, f"expected {wanted} for the input {name!r}, found {inputs[name]}")
    kinds = {inputs[name].type for name in past}
    element = {"tensor(float)": np.float32, "tensor(float16)": np.float16}.get(min(kinds))
    if len(kinds) > 1 or element is None:
        raise _unexpected(graph, f"expected a cache of one type, float or float16, found {sorted(kinds)}")
    vocabulary = (outputs[LOGITS].shape or (None,))[-1]
    if not isinstance(vocabulary, int):
        raise _unexpected(graph, "the width of logits is unknown")
    return DecoderSignature(
        inputs=tuple(plain),
        past=tuple(past),
        present=tuple(present),
        cache_shapes=tuple(
            _cache_shape(graph, inputs[name], outputs[new]) for name, new in zip(past, present, strict=True)
        ),
        cache_type=np.dtype(element),
        vocabulary=vocabulary,
        context=_context(graph),
        types={name: np.dtype(np.int32) for name in plain if inputs[name].type == "tensor(int32)"},
        kept_shape=(1,) * len(inputs[KEPT].shape or ()) if KEPT in inputs else (),
    )


def _context(graph: Graph) -> int:
    """Return the smaller one of the context lengths that a model and the configuration beside it state; 0 if none."""
    stated = find_context(graph.file) if graph.file else 0
    return min((length for length in (table_rows(graph.model.graph, POSITIONS), stated) if length), default=0)


def _unexpected(graph: Graph, difference: str) -> ModelError:
    return ModelError(
        f"{graph.name}: not a decoder with a cache: {difference}",
        hint="expected input_ids and past_key_values.N.{key,value} to logits and present.N.{key,value}; "
        "chrion model llama-decoder writes an example",
    )


def _refuse_other_kinds(graph: Graph, inputs: Sequence[str]) -> None:
    """Raise an error for a part of an encoder-decoder model, and for layers with other states than keys and values."""
    if encoder := next((name for name in inputs if name.startswith("encoder_") or ".encoder." in name), ""):
        message = f"{graph.name}: part of an encoder-decoder model, which reads {encoder!r}"
        raise ModelError(message, hint="text is generated by decoders without an encoder")
    states = (name for name in inputs if name.startswith("past") and _STATE.search(name))
    if state := next(states, ""):
        message = f"{graph.name}: some layers have a state in place of keys and values, the input {state!r}"
        raise ModelError(message, hint="text is generated by decoders in which every layer has keys and values")


def _check_names(
    graph: Graph, inputs: Mapping[str, TensorInfo], outputs: Mapping[str, TensorInfo], past: Sequence[str]
) -> None:
    """Raise an error for names that are missing, and for inputs that the layout does not have."""
    other = [name for name in inputs if name not in _TYPES and name not in past]
    if IDS not in inputs:
        raise _unexpected(graph, f"found no input {IDS!r}" + (f", but {other[0]!r}" if other else ""))
    if other:
        raise _unexpected(graph, f"unexpected input {other[0]!r} ({inputs[other[0]]})")
    expected = [f"{_PAST}{layer}.{part}" for layer in range(len(past) // 2 + 1) for part in ("key", "value")]
    if past != expected[:-2] or not past:
        missing = next(name for name in expected if name not in past)
        raise _unexpected(graph, f"found no input {missing!r}" + (f", but {past[-1]!r}" if past else ""))
    for name in (LOGITS, *(_PRESENT + name.removeprefix(_PAST) for name in past)):
        if name not in outputs:
            raise _unexpected(graph, f"found no output {name!r}, but {', '.join(map(repr, [*outputs][:3]))}")


def _layer(name: str) -> tuple[int, str]:
    """Return the layer and the kind of a cache's name."""
    number, _, kind = name.removeprefix(_PAST).partition(".")
    return int(number), kind


def _cache_shape(graph: Graph, past: TensorInfo, present: TensorInfo) -> tuple[int, int]:
    """Return the heads and their width of a cache, as declared or as its attention operator implies."""
    shapes = [shape for shape in (past.shape, present.shape) if shape is not None and len(shape) == 4]
    for shape in shapes:
        if isinstance(shape[1], int) and isinstance(shape[3], int):
            return shape[1], shape[3]
    for node in graph.model.graph.node:
        if node.op_type == "GroupQueryAttention" and past.name in node.input:
            heads, groups = (int_attribute(node, name, 0) for name in ("num_heads", "kv_num_heads"))
            width = (graph.values[node.input[0]].shape or (None,))[-1]
            packed = not (len(node.input) > 1 and node.input[1])
            if isinstance(width, int) and heads and groups:
                return groups, width // (heads + 2 * groups if packed else heads)
    raise ModelError(
        f"{graph.name}: not a decoder with a cache: expected {past.name} of [batch, heads, past, width] with fixed "
        f"heads and width, found {past}"
    )


def random_cache(signature: DecoderSignature, past: int, seed: int = 0) -> dict[str, Array]:
    """Return a random cache of a number of tokens."""
    draw = np.random.default_rng(seed)
    return {
        name: draw.standard_normal((1, heads, past, width)).astype(signature.cache_type)
        for name, (heads, width) in zip(signature.past, signature.cache_shapes, strict=True)
    }


def equal_but_for_rounding(signature: DecoderSignature, result: Array, expected: Array) -> bool:
    """Return whether two results of a decoder are equal except for rounding; an infinite value has to be the same."""
    finite = np.isfinite(expected)
    if result.shape != expected.shape or not np.array_equal(result[~finite], expected[~finite]):
        return False
    limit = _ROUNDING[signature.cache_type.name] * np.abs(expected[finite]).max(initial=0.0)
    return bool((np.abs(result[finite] - expected[finite]) <= limit).all())  # NaN is a difference
