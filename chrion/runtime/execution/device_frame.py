"""Device frames: buffers and bindings of one request that uses an accelerator.

Values that segments pass to each other live in buffers that are allocated and bound once for each frame, in the memory
of the segments that use them: a value that is transferred has a buffer in the host's memory and one on the device. On
the device, values share buffers as planned (:mod:`chrion.scheduler.evaluation.frame_buffers`). The inputs and outputs
of a request are bound anew for each request and released after it, as in
:mod:`chrion.runtime.execution.host_frame`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnxruntime as ort

from chrion.devices import Device
from chrion.devices.device import Downloader
from chrion.devices.host import allocate, on_host, to_host, zeros
from chrion.graph.model import Graph, TensorInfo
from chrion.runtime.execution.host_frame import PLACEHOLDER, Array, Frame, bound_outputs
from chrion.runtime.execution.segments import Segment, locate_error
from chrion.runtime.execution.transfers import is_held, name_places
from chrion.scheduler.evaluation.frame_buffers import FrameBuffers


class BufferKey(NamedTuple):
    """Key of a buffer: a value in the memory of the host or of the accelerator."""

    name: str
    on_device: bool


class DeviceFrame(Frame[BufferKey]):
    """Frame of a program that has segments on an accelerator.

    Args:
        graph: The graph.
        segments: Its segments, in the plan's order.
        device: The accelerator.
        planned: The buffers of a frame on it.

    Attributes:
        cuda_graphs: Number of each segment's CUDA graph; None for a segment without one.
        device_bytes: Size of the frame's buffers on the device that hold no constant.
    """

    def __init__(self, graph: Graph, segments: Sequence[Segment], device: Device, planned: FrameBuffers) -> None:
        self._device = device
        #: The planned place of each value on the device, and the buffers that are allocated.
        self._planned = name_places(graph, planned)
        self._sizes = planned.sizes
        self._shared: dict[int, ort.OrtValue] = {}
        self.cuda_graphs: list[int | None] = [None] * len(segments)
        #: Buffers that the frame keeps between requests.
        self._buffers: dict[BufferKey, ort.OrtValue] = {}
        #: Values of the current request, which take precedence over those buffers.
        self._current: dict[BufferKey, ort.OrtValue] = {}
        #: Outputs that the current request leaves in the accelerator's memory.
        self._on_device: Collection[str] = ()
        #: All values that segments read.
        self._read: set[BufferKey] = set()
        #: Inputs that each segment on the accelerator takes from the host's memory: onnxruntime copies them when they
        #: are bound, so they are bound when the segment runs.
        self._deferred: list[list[tuple[str, BufferKey]]] = [[] for _ in segments]
        self._downloads: dict[str, Downloader] = {}
        #: All values that each segment reads or writes.
        self._used: list[list[BufferKey]] = [[] for _ in segments]
        with device.exclusive():
            super().__init__(graph, segments)
        #: Deferred inputs that each request supplies: (binding, name in its session).
        self._supplied = [
            (binding, inner)
            for binding, deferred in zip(self.bindings, self._deferred, strict=True)
            for inner, key in deferred
            if key not in self._buffers
        ]
        self.device_bytes = sum(value.tensor_size_in_bytes() for value in self._shared.values())
        self.bytes = self.device_bytes + sum(
            value.tensor_size_in_bytes()
            for key, value in self._buffers.items()
            if not key.on_device or key.name not in self._planned
        )

    def begin(
        self,
        feeds: Mapping[str, ort.OrtValue | Array],
        targets: Mapping[str, ort.OrtValue],
        *,
        arrays: bool = False,
        on_device: Collection[str] = (),
    ) -> None:
        """Bind the inputs and outputs of a request; see :meth:`chrion.runtime.execution.host_frame.Frame.begin`.

        Args:
            feeds: Values of the graph's inputs.
            targets: The caller's buffers.
            arrays: Ignored.
            on_device: Outputs without a target that stay in the accelerator's memory if they are computed there.
        """
        del arrays
        with self._device.exclusive():
            self._current = {}
            self._on_device = on_device
            for name, value in feeds.items():
                self._add_input(name, value)
            for key, output in self._outputs.items():
                try:
                    self._choose_target(key, targets.get(key.name), sized=output.sized)
                    self._bind(key)
                except Exception as error:
                    raise locate_error(error, f"output {key.name!r} of {output.segment}") from error
            for key in self._readers:
                self._bind(key)

    def prepare(self, segment: int) -> None:
        """Bind the inputs that onnxruntime copies when they are bound; called just before the segment runs."""
        if self._deferred[segment]:
            with self._device.exclusive():
                for inner, key in self._deferred[segment]:
                    self.bindings[segment].bind_ortvalue_input(inner, self._find(key))

    def replayable(self, segment: int) -> bool:
        """Return whether a segment uses only the frame's own device buffers in this request, as its CUDA graph does."""
        return all(key.on_device and key not in self._current for key in self._used[segment])

    def fill_with_zeros(self, segment: int) -> None:
        """Fill a segment's device buffers with zeros, except those of constants.

        Its inputs may share memory with the results of another segment, which could be indices out of range.
        """
        for key in self._used[segment]:
            if key.on_device and self._graph.constant(key.name) is None:
                self._device.upload(zeros(self._graph.values[key.name]), self._buffers[key])

    def copy(self, name: str, *, upload: bool) -> None:
        """Copy a value from host to device (``upload``) or from device to host.

        Do nothing if the caller supplied the value on the device, or if one of the memories has no buffer for it.
        """
        if upload and BufferKey(name, on_device=True) in self._current:
            return
        source, target = (self._find(BufferKey(name, on_device)) for on_device in (not upload, upload))
        if source is None or target is None:
            return
        if upload:
            self._device.upload(source, target)
        else:
            self._download(name).copy(source, target)

    def result(self, name: str, target: ort.OrtValue | None) -> ort.OrtValue:
        """Return an output of the request; see :meth:`chrion.runtime.execution.host_frame.Frame.result`."""
        device, host = BufferKey(name, on_device=True), BufferKey(name, on_device=False)
        if target is None and name in self._on_device and is_held(self._graph, name, self._device):
            target = self._current.get(device) or self._device.allocate(self._graph.values[name])
        if target is not None:
            if not on_host(target) and device not in self._current:
                self._device.upload(self._current[host], target)
            return target
        return self._current[host] if host in self._current else self._outputs[host].allocated()

    def release(self) -> None:
        """Release the values of the request; see :meth:`chrion.runtime.execution.host_frame.Frame.release`.

        The frame's own buffer takes the place of each, if there is one.
        """
        with self._device.exclusive():
            self._current = {}
            self._on_device = ()
            for key, value in tuple(self._bound.items()):
                if value is not self._buffers.get(key):
                    self._bind_own(key)
            for binding, inner in self._supplied:
                binding.bind_ortvalue_input(inner, PLACEHOLDER)
            for output in self._allocated:
                output.release()  # otherwise the next run's result would have to fit into this one as well
            for name in self._requested.intersection(self._downloads):
                self._downloads[name].release()

    def _bind_own(self, key: BufferKey) -> None:
        """Bind the frame's own buffer of an input or output in place of the request's; a small tensor without one."""
        kept = self._buffers.get(key)
        self._attach(key, PLACEHOLDER if kept is None else kept)
        if kept is None:
            del self._bound[key]
        else:
            self._bound[key] = kept

    def _bind_segment(self, index: int, segment: Segment) -> None:
        for inner, name in segment.inputs:
            key = self._key(name, segment)
            self._read.add(key)
            self._used[index].append(key)
            if segment.on_device and not key.on_device:
                self._deferred[index].append((inner, key))
                self._keep(key)
            elif name in self._requested:
                self._readers.setdefault(key, []).append((self.bindings[index], inner))
                self._keep(key)
            else:
                self.bindings[index].bind_ortvalue_input(inner, self._keep(key))
        for name, output in bound_outputs(self._graph, segment, self.bindings[index]):
            key = self._key(name, segment)
            if key.on_device and name not in self._planned:  # nothing reads it, and a session must have an output
                key = BufferKey(name, on_device=False)
                output.release()
                self._unused.append(output)
            elif name in self._requested:
                self._outputs[key] = output
                self._keep(key)
            elif output.sized:
                output.binding.bind_ortvalue_output(output.inner, self._keep(key))
            else:
                self._unused.append(output)
            self._used[index].append(key)

    def _key(self, name: str, segment: Segment) -> BufferKey:
        return BufferKey(name, segment.on_device and is_held(self._graph, name, self._device))

    def _keep(self, key: BufferKey) -> ort.OrtValue | None:
        """Return the frame's buffer of a value; None for an input or output on the host, supplied by each request."""
        if key not in self._buffers and (key.on_device or key.name not in self._requested):
            self._buffers[key] = self._allocate(key)
        return self._buffers.get(key)

    def _allocate(self, key: BufferKey) -> ort.OrtValue:
        info, constant = self._graph.values[key.name], self._graph.constant(key.name)
        if key.on_device:
            return self._allocate_on_device(info) if constant is None else self._device.to_device(info, constant)
        if constant is not None:
            return ort.OrtValue.ortvalue_from_numpy(constant)
        return self._device.host_buffer(info) if is_held(self._graph, key.name, self._device) else allocate(info)

    def _allocate_on_device(self, info: TensorInfo) -> ort.OrtValue:
        """Return the planned buffer of a value or its part of it, which values before or after it may share."""
        buffer, offset = self._planned[info.name]
        if buffer not in self._shared:
            whole = self._device.block(self._sizes[buffer]) if self._device.has_views else info
            self._shared[buffer] = self._device.allocate(whole)
        shared = self._shared[buffer]
        return self._device.view(shared, offset, info) if self._device.has_views else shared

    def _find(self, key: BufferKey) -> ort.OrtValue | None:
        return self._current.get(key) or self._buffers.get(key)

    def _add_input(self, name: str, value: ort.OrtValue | Array) -> None:
        host = BufferKey(name, on_device=False)
        if isinstance(value, np.ndarray):
            self._current[host] = ort.OrtValue.ortvalue_from_numpy(value)
        elif on_host(value):
            self._current[host] = value
        else:
            self._current[BufferKey(name, on_device=True)] = value
            if host in self._read:
                self._current[host] = to_host(value)

    def _choose_target(self, key: BufferKey, target: ort.OrtValue | None, *, sized: bool) -> None:
        """Choose the buffer of an output for this request; none if its size is unknown before the run."""
        if target is None and not sized:
            return
        info = self._graph.values[key.name]
        host = BufferKey(key.name, on_device=False)
        host_target = target if target is not None and on_host(target) else None
        if not key.on_device:
            self._current[host] = host_target or allocate(info)
            return
        if target is not None and host_target is None:
            self._current[key] = target
        elif target is None and key.name in self._on_device:
            self._current[key] = self._device.allocate(info)
        if key not in self._current or host in self._read:
            self._current[host] = host_target or allocate(info)

    def _bind(self, key: BufferKey) -> None:
        """Bind a value of the request wherever it is computed and read, unless it is bound already."""
        value = self._find(key)
        if value is None:
            self._bound.pop(key, None)
            self._outputs[key].release()
            return
        if self._bound.pop(key, None) is not value:
            self._attach(key, value)
        self._bound[key] = value

    def _download(self, name: str) -> Downloader:
        if name not in self._downloads:
            self._downloads[name] = self._device.downloader(self._graph.values[name].type)
        return self._downloads[name]
