"""Frames: the buffers and bindings of one request in flight.

What segments hand to each other lives in buffers that are allocated and bound once for each frame, in the memory of
the side that uses them: a value that crosses has one on each. What a request brings (its inputs) and takes away (its
outputs) is bound anew each time, so that nothing is copied that need not be, and no later request writes into what an
earlier one was given. Only small arrays are copied into and out of buffers of the frame: binding them would take
longer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort

from chrion.devices import Device
from chrion.devices.device import Download
from chrion.devices.host import allocate, on_host, to_host, zeros
from chrion.graph.model import Graph, TensorInfo
from chrion.runtime.execution.segments import Segment, named
from chrion.runtime.execution.transfers import held
from chrion.runtime.requests import numeric_dtype

#: Arrays of so many bytes at most are copied. To make a value of an array and to bind it takes 4 us, and 20 to 60 when
#: a large model has driven the interpreter out of the caches; to copy 72 KiB takes 2, and then 5 to 15.
_COPIED_BYTES = 1 << 17

Array = np.ndarray[Any, Any]


class BufferKey(NamedTuple):
    """A value in the memory of one side."""

    name: str
    #: In the accelerator's memory.
    on_device: bool


class _Writer(NamedTuple):
    """Where an output of the request is made."""

    binding: Any
    #: Name in its session, and position among its outputs.
    inner: str
    slot: int
    segment: Segment
    #: Whether its size is known before the run.
    sized: bool


class Buffer(NamedTuple):
    """A small input or output of the request in the frame's own memory."""

    value: ort.OrtValue
    #: The same memory.
    array: Array


def small_buffer(info: TensorInfo) -> Buffer | None:
    """Memory for an input or output of the request whose arrays are to be copied; None if they are to be bound."""
    if 0 < (info.bytes or 0) <= _COPIED_BYTES and numeric_dtype(info.type) is not None:
        value = allocate(info)
        return Buffer(value, value.numpy())
    return None


class Frame:
    """Bindings of all segments of a program.

    Args:
        graph: The graph.
        segments: Its segments, in the plan's order.
        device: The accelerator, if there is one.

    Attributes:
        bindings: One IOBinding a segment, in the plan's order.
    """

    def __init__(self, graph: Graph, segments: Sequence[Segment], device: Device | None = None) -> None:
        self._graph = graph
        self._device = device
        self.bindings = [segment.session.io_binding() for segment in segments]
        #: Buffers that stay from request to request.
        self._buffers: dict[BufferKey, ort.OrtValue] = {}
        #: What the present request has in place of them.
        self._present: dict[BufferKey, ort.OrtValue] = {}
        #: For its small arrays, where all is in the host's memory.
        self._own: dict[str, Buffer] = {}
        #: What is bound of it.
        self._bound: dict[BufferKey, ort.OrtValue] = {}
        self._staying: Collection[str] = ()
        self._requested = {info.name for info in (*graph.inputs, *graph.outputs)}
        #: Where a request's values are bound: (binding, name in its session).
        self._readers: dict[BufferKey, list[tuple[Any, str]]] = {}
        self._writers: dict[BufferKey, _Writer] = {}
        #: Results of sizes not known before that nobody reads: each run makes them anew.
        self._dropped: list[tuple[Any, str]] = []
        #: Where any of them is read.
        self._wanted: set[BufferKey] = set()
        #: Inputs that a segment on the accelerator takes from the host's memory: a session fetches them when they are
        #: bound, so they are bound when the segment runs.
        self._late: list[list[tuple[str, BufferKey]]] = [[] for _ in segments]
        self._downloads: dict[str, Download] = {}
        #: Where each segment reads and writes.
        self._places: list[list[BufferKey]] = [[] for _ in segments]
        #: Numbers of the segments' CUDA graphs; None where a segment has none.
        self.graphs: list[int | None] = [None] * len(segments)
        with self._turn():
            for at, segment in enumerate(segments):
                try:
                    self._bind_inputs(at, segment)
                    self._bind_outputs(at, segment)
                except Exception as error:
                    raise named(error, segment) from error

    def begin(
        self,
        feeds: Mapping[str, ort.OrtValue | Array],
        targets: Mapping[str, ort.OrtValue],
        staying: Collection[str] = (),
        *,
        arrays: bool = False,
    ) -> None:
        """Bind a request.

        Args:
            feeds: Values of the graph's inputs, in either memory; contiguous if they are arrays.
            targets: Where the caller wants some of the outputs written, in either memory.
            staying: Outputs that are to stay in the accelerator's memory if they are made there.
            arrays: Whether :meth:`array` will be asked for the outputs.
        """
        with self._turn():
            self._present = {}
            self._staying = staying
            for name, value in feeds.items():
                self._take(name, value)
            for binding, inner in self._dropped:
                binding.bind_output(inner)  # or the run would have to fill what the last one made
            for place, writer in self._writers.items():
                try:
                    self._choose_target(place, targets.get(place.name), sized=writer.sized, arrays=arrays)
                    self._bind(place)
                except Exception as error:
                    raise named(error, f"output {place.name!r} of {writer.segment}") from error
            for place in self._readers:
                self._bind(place)

    def prepare(self, segment: int) -> None:
        """What has to be bound just before a segment runs."""
        if self._late[segment]:
            with self._turn():
                for inner, place in self._late[segment]:
                    self.bindings[segment].bind_ortvalue_input(inner, self._at(place))

    def replayable(self, segment: int) -> bool:
        """Whether a segment works on the frame's own buffers there in this request, as a CUDA graph of it does."""
        return all(place.on_device and place not in self._present for place in self._places[segment])

    def blank(self) -> None:
        """Fill the buffers there with zeros, constants apart."""
        for place, value in self._buffers.items():
            if place.on_device and self._device is not None and self._graph.constant(place.name) is None:
                self._device.upload(zeros(self._graph.values[place.name]), value)

    def copy(self, name: str, *, upload: bool) -> None:
        """Bring a value to the other side, unless this request has it there already, or does not want it there."""
        if self._device is None or (upload and BufferKey(name, on_device=True) in self._present):
            return
        source, target = (self._find(BufferKey(name, side)) for side in (not upload, upload))
        if source is None or target is None:
            return
        if upload:
            self._device.upload(source, target)
        else:
            self._download(name, self._device).copy(source, target)

    def result(self, name: str, target: ort.OrtValue | None) -> ort.OrtValue:
        """An output of the request, when all lanes have ended.

        Args:
            name: Which one.
            target: Where the caller wants it, or None.
        """
        there, here = BufferKey(name, on_device=True), BufferKey(name, on_device=False)
        if target is None and name in self._staying and self._device and held(self._graph, name, self._device):
            target = self._present.get(there) or self._device.allocate(self._graph.values[name])
        if target is not None:
            if not on_host(target) and there not in self._present:
                self._bring(self._present[here], target)
            return target
        if here in self._present:
            return self._present[here]
        writer = self._writers[here]
        return writer.binding.get_outputs()[writer.slot]  # its size was known to the run alone

    def array(self, name: str) -> Array:
        """An output of the request as an array of the caller's own."""
        own, value = self._own.get(name), self.result(name, None)
        return own.array.copy() if own is not None and value is own.value else value.numpy()

    def _bring(self, source: ort.OrtValue, target: ort.OrtValue) -> None:
        if self._device is not None:
            self._device.upload(source, target)
        else:
            target.update_inplace(source.numpy())

    def _turn(self) -> contextlib.AbstractContextManager[Any]:
        """Held while something is bound; see :meth:`chrion.devices.Device.turn`."""
        return contextlib.nullcontext() if self._device is None else self._device.exclusive()

    def _bind_inputs(self, at: int, segment: Segment) -> None:
        for inner, name in segment.inputs:
            place = self._place(name, segment)
            self._wanted.add(place)
            self._places[at].append(place)
            if segment.on_device and not place.on_device:
                self._late[at].append((inner, place))
                self._keep(place)
            elif name in self._requested:
                self._readers.setdefault(place, []).append((self.bindings[at], inner))
                self._keep(place)
                self._own_buffer(name)
            else:
                self.bindings[at].bind_ortvalue_input(inner, self._keep(place))

    def _bind_outputs(self, at: int, segment: Segment) -> None:
        binding = self.bindings[at]
        for slot, (inner, name) in enumerate(segment.outputs):
            place = self._place(name, segment)
            self._places[at].append(place)
            if name in self._requested:
                sized = self._graph.values[name].bytes is not None
                self._writers[place] = _Writer(binding, inner, slot, segment, sized)
                binding.bind_output(inner)  # keeps its place: results come in the order of first binding
                if place.on_device:
                    self._keep(place)
                self._own_buffer(name)
            elif self._graph.values[name].bytes is None:  # read by no one
                binding.bind_output(inner)
                self._dropped.append((binding, inner))
            else:
                binding.bind_ortvalue_output(inner, self._keep(place))

    def _place(self, name: str, segment: Segment) -> BufferKey:
        return BufferKey(name, segment.on_device and held(self._graph, name, self._device))

    def _keep(self, place: BufferKey) -> ort.OrtValue | None:
        """The buffer of a value on one side; made if it is to stay, None where each request brings its own."""
        if place not in self._buffers and (place.on_device or place.name not in self._requested):
            self._buffers[place] = self._make(place)
        return self._buffers.get(place)

    def _make(self, place: BufferKey) -> ort.OrtValue:
        info = self._graph.values[place.name]
        known = self._graph.constant(place.name)
        device = self._device
        if place.on_device and device is not None:
            return device.allocate(info) if known is None else device.to_device(info, known)
        if known is not None:
            return ort.OrtValue.ortvalue_from_numpy(known)
        return (
            device.host_buffer(info) if device is not None and held(self._graph, place.name, device) else allocate(info)
        )

    def _find(self, place: BufferKey) -> ort.OrtValue | None:
        return self._present.get(place) or self._buffers.get(place)

    def _at(self, place: BufferKey) -> ort.OrtValue:
        return self._present.get(place) or self._buffers[place]

    def _take(self, name: str, value: ort.OrtValue | Array) -> None:
        """What the request brings."""
        if isinstance(value, np.ndarray):
            own = self._own.get(name)
            if own is not None:
                np.copyto(own.array, value)
            self._present[BufferKey(name, on_device=False)] = (
                own.value if own else ort.OrtValue.ortvalue_from_numpy(value)
            )
            return
        there = not on_host(value)
        self._present[BufferKey(name, there)] = value
        if there and BufferKey(name, on_device=False) in self._wanted:
            self._present[BufferKey(name, on_device=False)] = to_host(value)

    def _choose_target(self, place: BufferKey, target: ort.OrtValue | None, *, sized: bool, arrays: bool) -> None:
        """Decide where an output goes in this request: nowhere yet, if only the run will know its size."""
        if target is None and not sized:
            return
        info = self._graph.values[place.name]
        here = BufferKey(place.name, on_device=False)
        host_target = target if target is not None and on_host(target) else None
        if place.on_device and self._device is not None:
            stays = place.name in self._staying
            if target is not None and host_target is None:
                self._present[place] = target
            elif target is None and stays:
                self._present[place] = self._device.allocate(info)
            if place not in self._present or here in self._wanted:
                self._present[here] = host_target or allocate(info)
        elif arrays and target is None and place.name in self._own:
            self._present[here] = self._own[place.name].value
        else:
            self._present[here] = host_target or allocate(info)

    def _bind(self, place: BufferKey) -> None:
        """Bind what the request has in a place, unless it is bound already."""
        value = self._find(place)
        if value is None:
            self._bound.pop(place, None)
            self._writers[place].binding.bind_output(self._writers[place].inner)
            return
        if self._bound.pop(place, None) is not value:
            if place in self._writers:
                self._writers[place].binding.bind_ortvalue_output(self._writers[place].inner, value)
            for binding, inner in self._readers.get(place, ()):
                binding.bind_ortvalue_input(inner, value)
        self._bound[place] = value

    def _own_buffer(self, name: str) -> None:
        """Make a buffer for an input or output of the request, if its arrays are to be copied."""
        if self._device is None and name not in self._own:
            buffer = small_buffer(self._graph.values[name])
            if buffer is not None:
                self._own[name] = buffer

    def _download(self, name: str, device: Device) -> Download:
        if name not in self._downloads:
            self._downloads[name] = device.download(self._graph.values[name].type)
        return self._downloads[name]
