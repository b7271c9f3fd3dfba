"""Carrying out a program whose lanes are all on the CPU without the interpreter; see :mod:`chrion.native`.

A request is one call from here: what it brings is copied or bound before, what it takes away after. Programs with an
accelerator's lanes, values whose size only the run knows, and requests with run options are left to
:class:`chrion.runtime.execution.executor.Executor`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.devices.host import allocate, on_host, to_host
from chrion.graph.model import ELEMENT_BYTES, Graph
from chrion.native import NativeBinding, NativeError, NativeFrame, NativeLanes, available
from chrion.native.bindings import RUN, SIGNAL, WAIT
from chrion.runtime.execution.executor import Event
from chrion.runtime.execution.frame import Array, Buffer, small_buffer
from chrion.runtime.execution.program import Copy, Program, Run, Wait
from chrion.runtime.execution.segments import Segment
from chrion.waiting import Gate


def fits(graph: Graph, program: Program) -> bool:
    """Whether a program can run so: the library is there, all is on the CPU, and every size is known."""
    sized = all(info.bytes is not None and info.type in ELEMENT_BYTES for info in graph.values.values())
    return available() and sized and not program.copies


class NativeExecutor:
    """Runs one program, for any number of callers at once.

    Args:
        graph: The graph.
        program: Its program; :func:`fits` has agreed.
        segments: What ``Run`` instructions name; their sessions are :class:`chrion.native.NativeSession`.
        cores: The core of each lane; None where it has none of its own.

    Raises:
        RuntimeError: The system gives no threads.
    """

    def __init__(
        self, graph: Graph, program: Program, segments: Sequence[Segment], cores: Mapping[int, int | None]
    ) -> None:
        self._graph = graph
        self._segments = segments
        self._lanes = NativeLanes(_steps(program), [cores[lane] for lane in program.lanes])
        self._lane_of = {i.segment: lane for lane, steps in program.lanes.items() for i in steps if isinstance(i, Run)}
        self._frames: queue.SimpleQueue[_Frame] = queue.SimpleQueue()
        self._gate = Gate()
        self._closed = False

    def run(
        self,
        feeds: Mapping[str, ort.OrtValue | Array],
        outputs: Sequence[str],
        *,
        targets: Mapping[str, ort.OrtValue] | None = None,
        events: list[Event] | None = None,
        arrays: bool = False,
    ) -> dict[str, Any]:
        """Run the program once; see :meth:`chrion.runtime.execution.executor.Executor.run`.

        Raises:
            RuntimeError: A segment failed, its operators are named; or the lanes are closed.
        """
        token = object()
        try:
            self._gate.enter(token)
            if self._closed:
                raise RuntimeError("this session is closed")
            try:
                frame = self._frames.get_nowait()
            except queue.Empty:
                frame = _Frame(self._graph, self._segments, self._lanes)
            frame.begin(feeds, targets or {}, arrays=arrays)
            times = None if events is None else np.zeros((len(self._segments), 2))
            start = time.perf_counter()
            try:
                self._lanes.run(frame.native, times)
            except NativeError as error:
                raise RuntimeError(f"{self._segments[error.segment]}: Error in execution: {error}") from error
            result = {name: frame.result(name, (targets or {}).get(name), array=arrays) for name in outputs}
        finally:
            self._gate.inside.discard(token)
        self._frames.put(frame)
        if events is not None and times is not None:
            ran = sorted((self._lane_of[at], at, *(times[at] / 1e3 - start * 1e3)) for at in self._lane_of)
            events += [Event(lane, at, float(first), float(last)) for lane, at, first, last in ran]
        return result

    def close(self, until: float | None = None) -> None:
        """Stop the lanes when runs that have begun have ended; wait no longer than until then."""
        self._closed = True
        if self._gate.wait_empty(until):
            self._lanes.close(None if until is None else max(0.0, until - time.monotonic()))


class _Frame:
    """Buffers and bindings of one request in flight; see also :class:`chrion.runtime.execution.frame.Frame`."""

    def __init__(self, graph: Graph, segments: Sequence[Segment], lanes: NativeLanes) -> None:
        self._graph = graph
        #: What segments hand to each other.
        self._buffers: dict[str, ort.OrtValue] = {}
        #: For small arrays of the request.
        self._own: dict[str, Buffer] = {}
        #: Where the request's values are bound: binding, and name in its session.
        self._readers: dict[str, list[tuple[NativeBinding, str]]] = {}
        self._writers: dict[str, tuple[NativeBinding, str]] = {}
        #: What is bound of the request.
        self._present: dict[str, ort.OrtValue] = {}
        requested = {info.name for info in (*graph.inputs, *graph.outputs)}
        sessions = [segment.session for segment in segments]
        bindings = [NativeBinding(session) for session in sessions]
        for segment, binding in zip(segments, bindings, strict=True):
            for inner, name in segment.inputs:
                if name in requested:
                    self._readers.setdefault(name, []).append((binding, inner))
                else:
                    binding.bind(inner, self._buffer(name), output=False)
            for inner, name in segment.outputs:
                if name in requested:
                    self._writers[name] = (binding, inner)
                else:
                    binding.bind(inner, self._buffer(name), output=True)
        for name in (*self._readers, *self._writers):
            own = small_buffer(graph.values[name])
            if own is not None:
                self._own[name] = own
        self.native = NativeFrame(lanes, sessions, bindings)

    def begin(
        self, feeds: Mapping[str, ort.OrtValue | Array], targets: Mapping[str, ort.OrtValue], *, arrays: bool
    ) -> None:
        """Copy or bind what a request brings, and bind where its outputs go."""
        for name, value in feeds.items():
            if isinstance(value, np.ndarray):
                own = self._own.get(name)
                if own is not None:
                    np.copyto(own.array, value)
                self._set(name, own.value if own else ort.OrtValue.ortvalue_from_numpy(value))
            else:
                self._set(name, to_host(value))
        for name in self._writers:
            target, own = targets.get(name), self._own.get(name)
            if target is not None and on_host(target):
                self._set(name, target)
            elif arrays and own is not None:
                self._set(name, own.value)
            else:
                self._set(name, allocate(self._graph.values[name]))

    def result(self, name: str, target: ort.OrtValue | None, *, array: bool) -> Any:
        """An output of the request, as an array of the caller's own or as an OrtValue."""
        value, own = self._present[name], self._own.get(name)
        if array:
            return own.array.copy() if own is not None and value is own.value else value.numpy()
        if target is not None and target is not value:
            target.update_inplace(value.numpy())
            return target
        return value

    def _set(self, name: str, value: ort.OrtValue) -> None:
        """Bind what the request has for a name, unless it is bound already."""
        if self._present.get(name) is value:
            return
        if name in self._writers:
            binding, inner = self._writers[name]
            binding.bind(inner, value, output=True)
        for binding, inner in self._readers.get(name, ()):
            binding.bind(inner, value, output=False)
        self._present[name] = value

    def _buffer(self, name: str) -> ort.OrtValue:
        if name not in self._buffers:
            known = self._graph.constant(name)
            made = allocate(self._graph.values[name]) if known is None else ort.OrtValue.ortvalue_from_numpy(known)
            self._buffers[name] = made
        return self._buffers[name]


def _steps(program: Program) -> list[list[tuple[int, int, int]]]:
    """A program as the library reads it."""
    place = {lane: at for at, lane in enumerate(program.lanes)}
    steps: list[list[tuple[int, int, int]]] = []
    for instructions in program.lanes.values():
        mine: list[tuple[int, int, int]] = []
        for step in instructions:
            if isinstance(step, Wait):
                mine.append((WAIT, place[step.lane], step.count))
            elif isinstance(step, Run):
                mine.append((RUN, step.segment, 0))
            elif not isinstance(step, Copy):
                mine.append((SIGNAL, step.count, 0))
        steps.append(mine)
    return steps
