"""Frames: the buffers and bindings of one request in flight.

What segments hand to each other lives in buffers that are allocated and bound once for each frame. What a request
brings (its inputs) and takes away (its outputs) is bound anew each time, so that nothing is copied and no later
request writes into what an earlier one was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from chrion.graph.model import Graph, TensorInfo
from chrion.runtime.segment import Segment

#: numpy has no bfloat16 of its own.
_ONNX_ONLY = {"tensor(bfloat16)": onnx.TensorProto.BFLOAT16}


class Frame:
    """Bindings of all segments of a program.

    Attributes:
        bindings: One IOBinding a segment, in the plan's order.
    """

    def __init__(self, graph: Graph, segments: Sequence[Segment]) -> None:
        self._graph = graph
        self.bindings = [segment.session.io_binding() for segment in segments]
        self._buffers: dict[str, ort.OrtValue] = {}
        requested = {info.name for info in (*graph.inputs, *graph.outputs)}
        #: Where a request's values are bound: (binding, name in its session).
        self._readers: dict[str, list[tuple[Any, str]]] = {}
        self._writers: dict[str, tuple[Any, str, int]] = {}
        #: Results of sizes not known before that nobody reads: each run makes them anew.
        self._dropped: list[tuple[Any, str]] = []
        for segment, binding in zip(segments, self.bindings, strict=True):
            for inner, name in segment.inputs:
                if name in requested:
                    self._readers.setdefault(name, []).append((binding, inner))
                else:
                    binding.bind_ortvalue_input(inner, self._buffer(name))
            for at, (inner, name) in enumerate(segment.outputs):
                if name in requested:
                    self._writers[name] = (binding, inner, at)
                    binding.bind_output(inner)  # keeps its place: results come in the order of first binding
                elif graph.values[name].bytes is None:  # read by no one
                    binding.bind_output(inner)
                    self._dropped.append((binding, inner))
                else:
                    binding.bind_ortvalue_output(inner, self._buffer(name))

    def begin(self, feeds: Mapping[str, ort.OrtValue], targets: Mapping[str, ort.OrtValue]) -> dict[str, ort.OrtValue]:
        """Bind a request.

        Args:
            feeds: Values of the graph's inputs.
            targets: Where the caller wants some of the outputs written.

        Returns:
            Values of those outputs that are known before the run; the others come from :meth:`result`.
        """
        values = dict(feeds)
        for binding, inner in self._dropped:
            binding.bind_output(inner)  # or the run would have to fill what the last one made
        for name, (binding, inner, _) in self._writers.items():
            info = self._graph.values[name]
            value = targets.get(name) or (allocate(info) if info.bytes is not None else None)
            if value is None:
                binding.bind_output(inner)
            else:
                binding.bind_ortvalue_output(inner, value)
                values[name] = value
        for name, readers in self._readers.items():
            for binding, inner in readers:
                binding.bind_ortvalue_input(inner, values[name])
        return values

    def result(self, name: str) -> ort.OrtValue:
        """An output whose size only the run could tell."""
        binding, _, at = self._writers[name]
        return binding.get_outputs()[at]

    def _buffer(self, name: str) -> ort.OrtValue:
        if name not in self._buffers:
            known = self._graph.constant(name)
            made = allocate(self._graph.values[name]) if known is None else ort.OrtValue.ortvalue_from_numpy(known)
            self._buffers[name] = made
        return self._buffers[name]


def allocate(info: TensorInfo) -> ort.OrtValue:
    """Host memory for a tensor of known size.

    It is onnxruntime's own: arrays that ``OrtValue.numpy`` gives keep that alive, but not memory of another array.
    """
    shape = [d for d in info.shape or () if isinstance(d, int)]
    return ort.OrtValue.ortvalue_from_shape_and_type(shape, _ONNX_ONLY.get(info.type) or numpy_dtype(info.type))


def numpy_dtype(kind: str) -> np.dtype[Any]:
    """Numpy's type for onnxruntime's ``tensor(float)``."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    return np.dtype({"float": "float32", "double": "float64", "string": "object"}.get(name, name))
