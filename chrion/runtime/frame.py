"""Frames: the buffers and bindings of one request in flight.

What segments hand to each other lives in buffers that are allocated and bound once for each frame, in the memory of
the side that uses them: a value that crosses has one on each. What a request brings (its inputs) and takes away (its
outputs) is bound anew each time, so that nothing is copied that need not be, and no later request writes into what an
earlier one was given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import onnxruntime as ort

from chrion.devices import Device
from chrion.devices.device import Download
from chrion.devices.host import allocate, on_host, to_host, zeros
from chrion.graph.model import Graph
from chrion.runtime.crossings import held
from chrion.runtime.segment import Segment, named


class Place(NamedTuple):
    """A value in the memory of one side."""

    name: str
    #: In the accelerator's memory.
    there: bool


class _Writer(NamedTuple):
    """Where an output of the request is made."""

    binding: Any
    #: Name in its session, and position among its outputs.
    inner: str
    slot: int
    segment: Segment
    #: Whether its size is known before the run.
    sized: bool


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
        self._buffers: dict[Place, ort.OrtValue] = {}
        #: What the present request has in place of them.
        self._present: dict[Place, ort.OrtValue] = {}
        self._staying: Collection[str] = ()
        self._requested = {info.name for info in (*graph.inputs, *graph.outputs)}
        #: Where a request's values are bound: (binding, name in its session).
        self._readers: dict[Place, list[tuple[Any, str]]] = {}
        self._writers: dict[Place, _Writer] = {}
        #: Results of sizes not known before that nobody reads: each run makes them anew.
        self._dropped: list[tuple[Any, str]] = []
        #: Where any of them is read.
        self._wanted: set[Place] = set()
        #: Inputs that a segment on the accelerator takes from the host's memory: a session fetches them when they are
        #: bound, so they are bound when the segment runs.
        self._late: list[list[tuple[str, Place]]] = [[] for _ in segments]
        self._downloads: dict[str, Download] = {}
        #: Where each segment reads and writes.
        self._places: list[list[Place]] = [[] for _ in segments]
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
        self, feeds: Mapping[str, ort.OrtValue], targets: Mapping[str, ort.OrtValue], staying: Collection[str] = ()
    ) -> None:
        """Bind a request.

        Args:
            feeds: Values of the graph's inputs, in either memory.
            targets: Where the caller wants some of the outputs written, in either memory.
            staying: Outputs that are to stay in the accelerator's memory if they are made there.
        """
        with self._turn():
            self._bind(feeds, targets, staying)

    def _bind(
        self, feeds: Mapping[str, ort.OrtValue], targets: Mapping[str, ort.OrtValue], staying: Collection[str]
    ) -> None:
        self._present = {}
        self._staying = staying
        for name, value in feeds.items():
            there = not on_host(value)
            self._present[Place(name, there)] = value
            if there and Place(name, there=False) in self._wanted:
                self._present[Place(name, there=False)] = to_host(value)
        for binding, inner in self._dropped:
            binding.bind_output(inner)  # or the run would have to fill what the last one made
        for place, writer in self._writers.items():
            try:
                self._bind_target(place, writer, targets.get(place.name))
            except Exception as error:
                raise named(error, f"output {place.name!r} of {writer.segment}") from error
        for place, readers in self._readers.items():
            value = self._at(place)
            for binding, inner in readers:
                binding.bind_ortvalue_input(inner, value)

    def prepare(self, segment: int) -> None:
        """What has to be bound just before a segment runs."""
        if self._late[segment]:
            with self._turn():
                for inner, place in self._late[segment]:
                    self.bindings[segment].bind_ortvalue_input(inner, self._at(place))

    def replayable(self, segment: int) -> bool:
        """Whether a segment works on the frame's own buffers there in this request, as a CUDA graph of it does."""
        return all(place.there and place not in self._present for place in self._places[segment])

    def blank(self) -> None:
        """Fill the buffers there with zeros, constants apart."""
        for place, value in self._buffers.items():
            if place.there and self._device is not None and self._graph.constant(place.name) is None:
                self._device.upload(zeros(self._graph.values[place.name]), value)

    def copy(self, name: str, *, upload: bool) -> None:
        """Bring a value to the other side, unless this request has it there already, or does not want it there."""
        if self._device is None or (upload and Place(name, there=True) in self._present):
            return
        source, target = (self._find(Place(name, side)) for side in (not upload, upload))
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
        there, here = Place(name, there=True), Place(name, there=False)
        if target is None and name in self._staying and self._device and held(self._graph, name, self._device):
            target = self._present.get(there) or self._device.empty(self._graph.values[name])
        if target is not None:
            if not on_host(target) and there not in self._present:
                self._bring(self._present[here], target)
            return target
        if here in self._present:
            return self._present[here]
        writer = self._writers[here]
        return writer.binding.get_outputs()[writer.slot]  # its size was known to the run alone

    def _bring(self, source: ort.OrtValue, target: ort.OrtValue) -> None:
        if self._device is not None:
            self._device.upload(source, target)
        else:
            target.update_inplace(source.numpy())

    def _turn(self) -> contextlib.AbstractContextManager[Any]:
        """Held while something is bound; see :meth:`chrion.devices.Device.turn`."""
        return contextlib.nullcontext() if self._device is None else self._device.turn()

    def _bind_inputs(self, at: int, segment: Segment) -> None:
        for inner, name in segment.inputs:
            place = self._place(name, segment)
            self._wanted.add(place)
            self._places[at].append(place)
            if segment.on_device and not place.there:
                self._late[at].append((inner, place))
                self._keep(place)
            elif name in self._requested:
                self._readers.setdefault(place, []).append((self.bindings[at], inner))
                self._keep(place)
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
                if place.there:
                    self._keep(place)
            elif self._graph.values[name].bytes is None:  # read by no one
                binding.bind_output(inner)
                self._dropped.append((binding, inner))
            else:
                binding.bind_ortvalue_output(inner, self._keep(place))

    def _place(self, name: str, segment: Segment) -> Place:
        return Place(name, segment.on_device and held(self._graph, name, self._device))

    def _keep(self, place: Place) -> ort.OrtValue | None:
        """The buffer of a value on one side; made if it is to stay, None where each request brings its own."""
        if place not in self._buffers and (place.there or place.name not in self._requested):
            self._buffers[place] = self._make(place)
        return self._buffers.get(place)

    def _make(self, place: Place) -> ort.OrtValue:
        info = self._graph.values[place.name]
        known = self._graph.constant(place.name)
        device = self._device
        if place.there and device is not None:
            return device.empty(info) if known is None else device.value(info, known)
        if known is not None:
            return ort.OrtValue.ortvalue_from_numpy(known)
        return (
            device.host_buffer(info) if device is not None and held(self._graph, place.name, device) else allocate(info)
        )

    def _find(self, place: Place) -> ort.OrtValue | None:
        return self._present.get(place) or self._buffers.get(place)

    def _at(self, place: Place) -> ort.OrtValue:
        return self._present.get(place) or self._buffers[place]

    def _bind_target(self, place: Place, writer: _Writer, target: ort.OrtValue | None) -> None:
        """Decide where an output goes in this request, and bind it."""
        if target is None and not writer.sized:
            writer.binding.bind_output(writer.inner)
            return
        info = self._graph.values[place.name]
        here = Place(place.name, there=False)
        host_target = target if target is not None and on_host(target) else None
        if place.there and self._device is not None:
            stays = place.name in self._staying
            if target is not None and host_target is None:
                self._present[place] = target
            elif target is None and stays:
                self._present[place] = self._device.empty(info)
            if place not in self._present or here in self._wanted:
                self._present[here] = host_target or allocate(info)
        else:
            self._present[here] = host_target or allocate(info)
        writer.binding.bind_ortvalue_output(writer.inner, self._at(place))

    def _download(self, name: str, device: Device) -> Download:
        if name not in self._downloads:
            self._downloads[name] = device.download(self._graph.values[name].type)
        return self._downloads[name]
