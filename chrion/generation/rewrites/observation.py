"""Decoders as rewrites take and return them, with the sizes of their values.

The sizes are observed in runs with different numbers of new and past tokens. Values that depend on these numbers only
are known without a run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from chrion.errors import ModelError
from chrion.generation.rewrites.decoder import DecoderSignature, random_cache
from chrion.graph.assemble import node_reads
from chrion.graph.model import ELEMENT_BYTES, Graph, TensorInfo, element_code
from chrion.graph.ort_sessions import first_line, open_analysis
from chrion.graph.rewrite import has_bodies

Array = np.ndarray[Any, Any]
#: Pairs of new and past tokens from which sizes are determined, and the elements of a value that is looked at.
_PROBES = ((1, 0), (7, 0), (3, 11), (13, 5), (1, 17), (2, 1))
_SMALL = 4096
#: The most elements of a weight that is looked at.
_LISTED = 64
#: Operators that may compute a value from sizes alone.
_SIZE_OPERATORS = frozenset(
    """
    Add Cast Concat ConstantOfShape Constant Div Equal Expand Gather Identity Mul Neg Pow Reshape Shape Size  Slice
    Sqrt Squeeze Sub Transpose Unsqueeze Where
    """.split()  # noqa: SIM905 - a line for each otherwise
)
#: Operators whose results differ from run to run.
_RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
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
    """Properties of the values of a decoder that runs with different numbers of tokens show."""

    #: The sizes of the axes by value; None for a size that is not of the form of :class:`Size`.
    shapes: Mapping[str, tuple[Size | None, ...]]
    types: Mapping[str, np.dtype[Any]]
    #: Values that were equal in all runs.
    constants: Mapping[str, Array]
    #: Lists of integers, and single ones, that are of the form of :class:`Size`.
    sizes: Mapping[str, tuple[Size, ...]]


@dataclass(frozen=True)
class Decoder:
    """A decoder before or after a rewrite."""

    #: The model as it was loaded; its weights file is removed with it.
    graph: Graph = field(repr=False)
    signature: DecoderSignature
    #: The model as it is now.
    model: onnx.ModelProto = field(repr=False)
    #: The properties of its values, where a rewrite knows them.
    known: Observation | None = None
    #: By cache input: the value with the new tokens that the caller appends to the cache before it is read. Empty if
    #: the decoder has past and present keys and values.
    appended: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def seen(self) -> Observation:
        """The properties of its values.

        Raises:
            ModelError: onnxruntime refuses the model, or cannot run it.
        """
        return self.known or _observe(self)


def _observe(decoder: Decoder) -> Observation:
    """Run a decoder with several numbers of new and past tokens, and look at all of its values.

    Of large values that follow from weights only, such as dequantised ones, the inferred shapes count: as outputs they
    would all be in memory at the same time.

    Raises:
        ModelError: onnxruntime refuses the model or one of the runs.
    """
    model = onnx.ModelProto()
    model.CopyFrom(decoder.model)
    del model.graph.output[:]
    graph, inferred = decoder.graph, _large_constants(decoder)
    names = [name for node in model.graph.node for name in node.output if name and name not in inferred]
    for name in names:
        model.graph.output.add().name = name
    session = open_analysis(model, graph.weights_folder, graph.name, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    shapes: dict[str, list[tuple[int, ...]]] = {}
    values: dict[str, list[Array]] = {}
    types = {info.name: helper.tensor_dtype_to_np_dtype(element_code(info.type)) for info in inferred.values()}
    for new, past in _PROBES:
        feed = decoder.signature.feed([0] * new, past) | random_cache(decoder.signature, past)
        try:
            results = dict(zip(names, session.run(names, feed), strict=True)) | feed
        except Exception as error:
            message = f"{graph.name}: onnxruntime cannot run {new} new and {past} past tokens: {first_line(error)}"
            raise ModelError(message) from error
        for name, value in results.items():
            if isinstance(value, np.ndarray):
                types[name] = value.dtype
                shapes.setdefault(name, []).append(value.shape)
                values.setdefault(name, []).append(value if value.size <= _SMALL else np.empty(0))
    weights, folder = {t.name: t for t in decoder.model.graph.initializer}, str(graph.weights_folder)
    small = [name for name, tensor in weights.items() if math.prod(tensor.dims) <= _LISTED]
    return Observation(
        {name: _fit_shape(seen) for name, seen in shapes.items()}
        | {name: tuple(Size(0, 0, n) for n in tensor.dims) for name, tensor in weights.items()}
        | {
            name: tuple(Size(0, 0, n) for n in info.shape or () if isinstance(n, int))
            for name, info in inferred.items()
        },
        types,
        {name: seen[0] for name, seen in values.items() if _equal(seen)}
        | {name: numpy_helper.to_array(weights[name], folder) for name in small},
        {name: size for name, seen in values.items() if (size := _fit_values(seen))},
    )


def _large_constants(decoder: Decoder) -> dict[str, TensorInfo]:
    """Return the values that follow from weights only and have a known type and a shape of many elements."""
    constant, large = {tensor.name for tensor in decoder.model.graph.initializer}, {}
    for node, read in zip(decoder.model.graph.node, node_reads(decoder.model), strict=True):
        if constant.issuperset(read):
            constant.update(node.output)
            for name in decoder.graph.values.keys() & {*node.output}:
                info = decoder.graph.values[name]
                if (size := info.bytes) is not None and size // ELEMENT_BYTES[info.type] > _SMALL:
                    large[name] = info
    return large


@functools.lru_cache(maxsize=4096)
def _fit(seen: tuple[int, ...]) -> Size | None:
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
    fitted = [_fit(tuple(int(n) for n in element)) for element in zip(*(s.reshape(-1) for s in seen), strict=True)]
    known = tuple(size for size in fitted if size is not None)
    return known if len(known) == len(fitted) else ()


def fold_sizes(model: onnx.ModelProto, seen: Observation) -> frozenset[str]:
    """Return the values that depend on sizes only and are known for all sizes.

    From sizes, few operators are followed: the minimum of a size and a constant, for example, may be another one for
    more tokens than were observed. From constants, such as the width of a head, every operator computes a constant; of
    these, integers count, as indices.
    """
    folded: set[str] = set()
    weights = {tensor.name for tensor in model.graph.initializer}
    integers = {name for name, value in seen.constants.items() if value.dtype.kind in "iub"}
    sized, constant = {*weights}, {*weights}
    for node in model.graph.node:
        inputs = [name for name in node.input if name]
        counted = node.op_type in {"Shape", "Size"} or all(name in sized for name in inputs)
        if node.op_type in _SIZE_OPERATORS and counted:
            sized.update(node.output)
            folded.update(name for name in node.output if name in seen.constants or name in seen.sizes)
        elif all(name in constant for name in inputs) and node.op_type not in _RANDOM and not has_bodies([node]):
            sized.update(integers.intersection(node.output))
            folded.update(integers.intersection(node.output))
        constant.update(integers.intersection(node.output) & folded)
    return frozenset(folded)
