"""Decoders with a cache of keys and values: their inputs and outputs, and the sizes of their values.

The layout is that of the exports of optimum and transformers: ``input_ids``, and optionally ``attention_mask`` and
``position_ids``, with ``past_key_values.N.{key,value}`` to ``logits`` and ``present.N.{key,value}``. A request has a
batch of one. Its sizes depend on two numbers: the new tokens L and the past tokens P.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from chrion.errors import ModelError
from chrion.graph.model import Graph, TensorInfo
from chrion.graph.ort_sessions import analysis_options, first_line, open_session, weights_folder_option
from chrion.graph.rewrite import int_attribute

Array = np.ndarray[Any, Any]
IDS, MASK, POSITIONS, LOGITS = "input_ids", "attention_mask", "position_ids", "logits"
_PAST, _PRESENT = "past_key_values.", "present."
#: Pairs of new and past tokens from which sizes are determined, and the elements of a value that is looked at.
_PROBES = ((1, 0), (7, 0), (3, 11), (13, 5), (1, 17), (2, 1))
_SMALL = 4096
#: The most elements of a weight that is looked at.
_LISTED = 64


@dataclass(frozen=True, slots=True)
class DecoderSignature:
    """The inputs and outputs of a decoder."""

    #: The inputs that the model has of ``input_ids``, ``attention_mask`` and ``position_ids``.
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
    #: The most tokens that the model has positions for; 0 if unknown.
    context: int

    @property
    def slot_bytes(self) -> int:
        """The bytes of the keys and values of one token."""
        return sum(heads * width for heads, width in self.cache_shapes) * self.cache_type.itemsize

    def feed(self, ids: Sequence[int] | Array, past: int) -> dict[str, Array]:
        """Return the inputs of a request, without the cache.

        Args:
            ids: The new tokens.
            past: The number of tokens in the cache.
        """
        count = len(ids)
        known = {
            IDS: np.asarray(ids, np.int64)[None],
            MASK: np.ones((1, past + count), np.int64),
            POSITIONS: np.arange(past, past + count, dtype=np.int64)[None],
        }
        return {name: known[name] for name in self.inputs}


def decoder_signature(graph: Graph) -> DecoderSignature:
    """Return the inputs and outputs of a decoder.

    Raises:
        ModelError: The model is not a decoder with a cache in the layout of optimum and transformers.
    """
    where = f"{graph.name}: not a decoder with a cache"
    hint = "expected input_ids and past_key_values.N.{key,value} to logits and present.N.{key,value}"
    inputs, outputs = ({info.name: info for info in infos} for infos in (graph.inputs, graph.outputs))
    plain = [name for name in inputs if not name.startswith(_PAST)]
    past = sorted((name for name in inputs if name.startswith(_PAST)), key=_layer)
    present = [_PRESENT + name.removeprefix(_PAST) for name in past]
    for name in (IDS, LOGITS, *present):
        if name not in inputs and name not in outputs:
            raise ModelError(f"{where}: found no {name!r}", hint=hint)
    expected = [f"{_PAST}{layer}.{part}" for layer in range(max(len(past) // 2, 1)) for part in ("key", "value")]
    if past != expected:
        missing = next((name for name in expected if name not in past), past[-1])
        raise ModelError(f"{where}: expected inputs {expected[0]!r} to {expected[-1]!r}, not {missing!r}", hint=hint)
    for name in plain:
        if name not in {IDS, MASK, POSITIONS} or inputs[name].type != "tensor(int64)":
            raise ModelError(f"{where}: unexpected input {name!r} ({inputs[name]})", hint=hint)
    if extra := [name for name in outputs if name not in {LOGITS, *present}]:
        raise ModelError(f"{where}: unexpected output {extra[0]!r}", hint=hint)
    kinds = {inputs[name].type for name in past}
    element = {"tensor(float)": np.float32, "tensor(float16)": np.float16}.get(min(kinds))
    if len(kinds) > 1 or element is None:
        raise ModelError(f"{where}: expected a cache of one type, float or float16, found {sorted(kinds)}", hint=hint)
    vocabulary = (outputs[LOGITS].shape or (None,))[-1]
    if not isinstance(vocabulary, int):
        raise ModelError(f"{where}: the width of logits is unknown", hint=hint)
    shapes = tuple(_cache_shape(graph, inputs[name], outputs[new]) for name, new in zip(past, present, strict=True))
    return DecoderSignature(
        tuple(plain), tuple(past), tuple(present), shapes, np.dtype(element), vocabulary, _context(graph)
    )


def _context(graph: Graph) -> int:
    """Return the rows of the smallest table that is read by position; 0 if there is none."""
    rows = []
    for node in graph.model.graph.node:
        if node.op_type == "Gather" and node.input[1] == POSITIONS:
            rows.append(node.input[0])
        elif node.op_type == "GroupQueryAttention" and len(node.input) > 7 and node.input[7]:
            rows.append(node.input[7])
    known = [tensor.dims[0] for tensor in graph.model.graph.initializer if tensor.name in rows and tensor.dims]
    return min(known, default=0)


def _layer(name: str) -> tuple[int, str]:
    """Return the layer and the kind of a cache's name."""
    number, _, kind = name.removeprefix(_PAST).partition(".")
    return int(number) if number.isdecimal() else -1, kind


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


@dataclass(frozen=True, slots=True)
class Size:
    """An integer that depends on a request: ``new * L + past * P + fixed``."""

    new: int
    past: int
    fixed: int

    def __call__(self, new: int, past: int) -> int:
        """Return the integer for a number of new and past tokens."""
        return self.new * new + self.past * past + self.fixed

    @property
    def constant(self) -> bool:
        """True if the integer is the same for all requests."""
        return not self.new and not self.past


@dataclass(frozen=True)
class Observation:
    """What runs of a decoder with different numbers of tokens show of its values."""

    #: The sizes of the axes by value; None for a size that is not of the form of :class:`Size`.
    shapes: Mapping[str, tuple[Size | None, ...]]
    types: Mapping[str, np.dtype[Any]]
    #: Values that were equal in all runs.
    constants: Mapping[str, Array]
    #: Lists of integers, and single ones, that are of the form of :class:`Size`.
    sizes: Mapping[str, tuple[Size, ...]]


def observe(graph: Graph, signature: DecoderSignature) -> Observation:
    """Run a decoder with several numbers of new and past tokens, and look at all of its values.

    Raises:
        ModelError: onnxruntime refuses the model or one of the runs.
    """
    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    del model.graph.output[:]
    names = [name for node in model.graph.node for name in node.output if name]
    for name in names:
        model.graph.output.add().name = name
    options = analysis_options(ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    for key, value in weights_folder_option(graph.weights_folder).items():
        options.add_session_config_entry(key, value)
    session = open_session(model, options, graph.name)
    shapes: dict[str, list[tuple[int, ...]]] = {}
    values: dict[str, list[Array]] = {}
    types: dict[str, np.dtype[Any]] = {}
    for new, past in _PROBES:
        feed = signature.feed([0] * new, past) | random_cache(signature, past)
        try:
            found = dict(zip(names, session.run(names, feed), strict=True)) | feed
        except Exception as error:
            message = f"{graph.name}: onnxruntime cannot run {new} new and {past} past tokens: {first_line(error)}"
            raise ModelError(message) from error
        for name, value in found.items():
            if isinstance(value, np.ndarray):
                types[name] = value.dtype
                shapes.setdefault(name, []).append(value.shape)
                values.setdefault(name, []).append(value if value.size <= _SMALL else np.empty(0))
    weights = {t.name: t for t in graph.model.graph.initializer}
    small = {name: graph.constant(name) for name, tensor in weights.items() if math.prod(tensor.dims) <= _LISTED}
    return Observation(
        {name: _fit_shape(seen) for name, seen in shapes.items()}
        | {name: tuple(Size(0, 0, n) for n in tensor.dims) for name, tensor in weights.items()},
        types,
        {name: seen[0] for name, seen in values.items() if _equal(seen)}
        | {name: value for name, value in small.items() if value is not None},
        {name: size for name, seen in values.items() if (size := _fit_values(seen))},
    )


def random_cache(signature: DecoderSignature, past: int, seed: int = 0) -> dict[str, Array]:
    """Return a random cache of a number of tokens."""
    draw = np.random.default_rng(seed)
    return {
        name: draw.standard_normal((1, heads, past, width)).astype(signature.cache_type)
        for name, (heads, width) in zip(signature.past, signature.cache_shapes, strict=True)
    }


def _fit(seen: Sequence[int]) -> Size | None:
    """Return the size that an integer has in all runs, or None."""
    matrix = np.array([(*probe, 1) for probe in _PROBES], np.float64)
    fitted = np.linalg.lstsq(matrix, np.array(seen, np.float64), rcond=None)[0]
    size = Size(*(round(float(x)) for x in fitted))
    return size if all(size(*probe) == n for probe, n in zip(_PROBES, seen, strict=True)) else None


def _fit_shape(seen: Sequence[tuple[int, ...]]) -> tuple[Size | None, ...]:
    if len({len(shape) for shape in seen}) > 1:
        return ()
    return tuple(_fit(axis) for axis in zip(*seen, strict=True))


def _equal(seen: Sequence[Array]) -> bool:
    first = seen[0]
    return first.size > 0 and all(other.shape == first.shape and np.array_equal(first, other) for other in seen[1:])


def _fit_values(seen: Sequence[Array]) -> tuple[Size, ...]:
    first = seen[0]
    if first.dtype.kind != "i" or first.ndim > 1 or not first.size or any(s.shape != first.shape for s in seen):
        return ()
    fitted = [_fit([int(n) for n in element]) for element in zip(*(s.reshape(-1) for s in seen), strict=True)]
    known = tuple(size for size in fitted if size is not None)
    return known if len(known) == len(fitted) else ()
