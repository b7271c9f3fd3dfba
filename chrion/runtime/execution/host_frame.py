"""Host frames: buffers and bindings of one request whose segments all run in the host's memory.

Values that segments pass to each other live in buffers that are allocated and bound once for each frame. The inputs and
outputs of a request are bound anew for each request: large values are not copied, and no later request writes into the
outputs of an earlier one. After the request they are released, so that an idle frame keeps none of them alive. Only
small arrays are copied to and from buffers of the frame, since binding them would take longer.

Both kinds of executors use these frames: a segment's session is an ``onnxruntime.InferenceSession`` or a
:class:`chrion.native.NativeSession`, and their bindings have the same methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import onnxruntime as ort

from chrion.devices.host import allocate, on_host, to_host
from chrion.graph.model import Tensors
from chrion.runtime.execution.segments import Segment, locate_error
from chrion.runtime.requests import numeric_dtype

#: Arrays of at most this many bytes are copied. Wrapping an array in an OrtValue and binding it takes 4 us, and copying
#: 72 KiB takes 2 us; after a large model has evicted the interpreter from the caches, 20 to 60 us and 5 to 15 us.
_COPIED_BYTES = 1 << 17
#: Bound in place of a request's values between requests.
PLACEHOLDER = ort.OrtValue.ortvalue_from_numpy(np.zeros(1, np.float32))

Array = np.ndarray[Any, Any]
#: What identifies a value in a frame: its name, or its name and memory.
K = TypeVar("K")


class CopiedBuffer(NamedTuple):
    """A buffer of the frame for a small input or output of the request."""

    value: ort.OrtValue
    #: The same memory.
    array: Array


class BoundOutput(NamedTuple):
    """An output of a segment, and the binding that it belongs to."""

    binding: Any
    #: Name and position among the outputs of the segment's session.
    inner: str
    slot: int
    segment: Segment
    #: Whether the size is known before the run; otherwise onnxruntime allocates the output during the run.
    sized: bool

    def release(self) -> None:
        """Bind no buffer, so that the next run allocates the output."""
        self.binding.bind_output(self.inner)

    def allocated(self) -> ort.OrtValue:
        """Return what the last run allocated."""
        value: ort.OrtValue = self.binding.get_outputs()[self.slot]
        return value


def bound_outputs(graph: Tensors, segment: Segment, binding: Any) -> Iterator[tuple[str, BoundOutput]]:
    """Yield each output of a segment with its name in the graph.

    If the run allocates any of them, all are first bound in the order of the session: ``get_outputs`` returns values in
    the order of first binding.
    """
    sized = [graph.values[name].bytes is not None for _, name in segment.outputs]
    if not all(sized):
        for inner, _ in segment.outputs:
            binding.bind_output(inner)
    for slot, (inner, name) in enumerate(segment.outputs):
        yield name, BoundOutput(binding, inner, slot, segment, sized[slot])


class Frame(ABC, Generic[K]):
    """The buffers and bindings of one request in flight, with any kind of executor.

    Args:
        graph: The graph's values.
        segments: Its segments, in the plan's order.

    Attributes:
        bindings: One binding for each segment, in the plan's order.
        bytes: Size of the frame's own buffers.
    """

    bytes: int

    def __init__(self, graph: Tensors, segments: Sequence[Segment]) -> None:
        self._graph = graph
        self._requested = {info.name for info in (*graph.inputs, *graph.outputs)}
        self.bindings: list[Any] = [segment.session.io_binding() for segment in segments]
        #: Segments that read inputs or outputs of the request: (binding, name in its session).
        self._readers: dict[K, list[tuple[Any, str]]] = {}
        self._outputs: dict[K, BoundOutput] = {}
        #: Unused results that have no buffer, for example since their size is unknown: each run allocates them.
        self._unused: list[BoundOutput] = []
        #: Inputs and outputs of requests as they are bound now.
        self._bound: dict[K, ort.OrtValue] = {}
        for index, segment in enumerate(segments):
            try:
                self._bind_segment(index, segment)
            except Exception as error:
                raise locate_error(error, segment) from error
        #: Outputs that runs allocate.
        self._allocated = [*(o for o in self._outputs.values() if not o.sized), *self._unused]

    @abstractmethod
    def _bind_segment(self, index: int, segment: Segment) -> None:
        """Bind the values of a segment that are not the request's."""

    @abstractmethod
    def begin(
        self, feeds: Mapping[str, ort.OrtValue | Array], targets: Mapping[str, ort.OrtValue], *, arrays: bool
    ) -> None:
        """Bind the inputs and outputs of a request.

        Args:
            feeds: Values of the graph's inputs, in any memory; arrays are contiguous.
            targets: The caller's buffers for some of the outputs, in any memory.
            arrays: Whether the outputs will be read with :meth:`array`.
        """

    @abstractmethod
    def result(self, name: str, target: ort.OrtValue | None) -> ort.OrtValue:
        """Return an output of the request, after all lanes have finished it.

        Args:
            name: Name of the output.
            target: The caller's buffer for it, or None.
        """

    def array(self, name: str) -> Array:
        """Return an output as an array that belongs to the caller."""
        array: Array = self.result(name, None).numpy()
        return array

    @abstractmethod
    def release(self) -> None:
        """Release the values of the request, after its outputs have been read."""

    def _attach(self, key: K, value: ort.OrtValue) -> None:
        """Bind a value wherever it is computed and read."""
        output = self._outputs.get(key)
        if output is not None:
            output.binding.bind_ortvalue_output(output.inner, value)
        for binding, inner in self._readers.get(key, ()):
            binding.bind_ortvalue_input(inner, value)


class HostFrame(Frame[str]):
    """Frame of a program whose segments all run in the host's memory; see :class:`Frame`."""

    def __init__(self, graph: Tensors, segments: Sequence[Segment]) -> None:
        #: Values between segments.
        self._buffers: dict[str, ort.OrtValue] = {}
        #: Values inside of segments.
        self._inner: list[ort.OrtValue] = []
        #: Buffers for small arrays of the request.
        self._copied: dict[str, CopiedBuffer] = {}
        #: The values bound now that belong to the request, not to the frame.
        self._held: set[str] = set()
        super().__init__(graph, segments)
        self.bytes = sum(
            value.tensor_size_in_bytes()
            for value in (*self._buffers.values(), *self._inner, *(copied.value for copied in self._copied.values()))
        )

    def begin(
        self, feeds: Mapping[str, ort.OrtValue | Array], targets: Mapping[str, ort.OrtValue], *, arrays: bool
    ) -> None:
        """Copy or bind the inputs of a request, and bind its outputs; see :meth:`Frame.begin`."""
        for name, value in feeds.items():
            if isinstance(value, np.ndarray):
                copied = self._copied.get(name)
                if copied is None:
                    self._bind(name, ort.OrtValue.ortvalue_from_numpy(value))
                else:
                    np.copyto(copied.array, value)
                    self._bind(name, copied.value)
            else:
                self._bind(name, to_host(value))
        for name, output in self._outputs.items():
            copied = self._copied.get(name)
            if arrays and copied is not None and self._bound.get(name) is copied.value and name not in targets:
                continue  # still bound from the previous request
            try:
                self._bind_output(name, output, targets.get(name), arrays=arrays)
            except Exception as error:
                raise locate_error(error, f"output {name!r} of {output.segment}") from error

    def result(self, name: str, target: ort.OrtValue | None) -> ort.OrtValue:
        """Return an output of the request; see :meth:`Frame.result`."""
        value = self._bound.get(name)
        if value is None:
            value = self._outputs[name].allocated()
        if target is None or target is value:
            return value
        target.update_inplace(value.numpy())
        return target

    def array(self, name: str) -> Array:
        """Return an output as an array that belongs to the caller."""
        copied = self._copied.get(name)
        if copied is not None and self._bound.get(name) is copied.value:
            return copied.array.copy()
        return super().array(name)

    def release(self) -> None:
        """Release the values of the request; see :meth:`Frame.release`.

        A small tensor takes the place of each, since a binding keeps what is bound to it alive. The next request binds
        its own values before a segment runs.
        """
        for name in self._held:
            self._attach(name, PLACEHOLDER)
            del self._bound[name]
        self._held.clear()
        for output in self._allocated:
            output.release()  # otherwise the next run's result would have to fit into this one as well

    def _bind_segment(self, index: int, segment: Segment) -> None:
        binding = self.bindings[index]
        for inner, name in segment.inputs:
            if name in self._requested:
                self._readers.setdefault(name, []).append((binding, inner))
                self._add_copied(name)
            else:
                binding.bind_ortvalue_input(inner, self._buffer(name))
        for info in segment.inner:
            self._inner.append(allocate(info))
            binding.bind_ortvalue_output(info.name, self._inner[-1])
        for name, output in bound_outputs(self._graph, segment, binding):
            if name in self._requested:
                self._outputs[name] = output
                self._add_copied(name)
            elif output.sized:
                binding.bind_ortvalue_output(output.inner, self._buffer(name))
            else:
                self._unused.append(output)

    def _bind_output(self, name: str, output: BoundOutput, target: ort.OrtValue | None, *, arrays: bool) -> None:
        """Bind an output to the caller's buffer, a buffer of the frame or a new one, or let the run allocate it."""
        copied = self._copied.get(name)
        if target is not None and on_host(target):
            self._bind(name, target)
        elif not output.sized:
            output.release()
        elif arrays and copied is not None:
            self._bind(name, copied.value)
        else:
            self._bind(name, allocate(self._graph.values[name]))

    def _bind(self, name: str, value: ort.OrtValue) -> None:
        """Bind a value of the request wherever it is computed and read, unless it is bound already."""
        if self._bound.get(name) is value:
            return
        copied = self._copied.get(name)
        if copied is None or copied.value is not value:
            self._held.add(name)
        self._attach(name, value)
        self._bound[name] = value

    def _buffer(self, name: str) -> ort.OrtValue:
        """Return the buffer of a value between segments; a constant's holds its value."""
        if name not in self._buffers:
            constant = self._graph.constant(name)
            info = self._graph.values[name]
            self._buffers[name] = allocate(info) if constant is None else ort.OrtValue.ortvalue_from_numpy(constant)
        return self._buffers[name]

    def _add_copied(self, name: str) -> None:
        """Allocate a buffer for an input or output of the request if it is small enough to be copied."""
        info = self._graph.values[name]
        small = 0 < (info.bytes or 0) <= _COPIED_BYTES and numeric_dtype(info.type) is not None
        if small and name not in self._copied:
            value = allocate(info)
            self._copied[name] = CopiedBuffer(value, value.numpy())
