"""Executor on the native lanes of :mod:`chrion.native`, for programs whose lanes are all CPU cores.

A request is one call into C, which releases the GIL. Its inputs and outputs are copied or bound before the call, and
small outputs are copied after it. Programs with lanes of an accelerator or with values whose size is unknown before the
run, and requests with run options that do more than terminate them, are left to
:class:`chrion.runtime.execution.python_executor.PythonExecutor`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import numpy as np
import onnxruntime as ort

from chrion.graph.model import ELEMENT_BYTES, Graph, Tensors
from chrion.machine.core_leases import CoreLease
from chrion.native import (
    NativeBinding,
    NativeCalls,
    NativeError,
    NativeFrame,
    NativeLanes,
    NativeProgram,
    NativeRunOptions,
    available,
)
from chrion.native.bindings import PARK, RUN, SIGNAL, WAIT
from chrion.runtime.execution.executor import Event, Executor
from chrion.runtime.execution.host_frame import Array, HostFrame
from chrion.runtime.execution.lane_groups import Cores, LaneGroups
from chrion.runtime.execution.program import Program, RunSegment, Signal, Wait
from chrion.runtime.execution.segments import Segment
from chrion.runtime.options.terminable import fits_native_lanes

NOT_COMPILED = "native lanes are not compiled: this requires Linux, and a C compiler when Chrion is installed"


def find_obstacle(graph: Graph, program: Program) -> str:
    """Return the reason why a program cannot run on native lanes; empty if it can."""
    if program.copies:
        return "values are copied between the memories of host and device"
    for info in graph.values.values():
        if info.bytes is None or info.type not in ELEMENT_BYTES:
            return f"the size of value {info.name!r} is not known before the run"
    return "" if available() else NOT_COMPILED


class _NativeHostFrame(HostFrame):
    """A host frame and its counterpart in C."""

    def __init__(self, graph: Tensors, segments: Sequence[Segment], program: NativeProgram) -> None:
        super().__init__(graph, segments)
        calls = {at: made for at, segment in enumerate(segments) if (made := self._record(segment, self.bindings[at]))}
        self.native = NativeFrame(program, [segment.session for segment in segments], self.bindings, calls)

    def _record(self, segment: Segment, binding: NativeBinding) -> NativeCalls | None:
        """Return calls in place of a segment's session, if possible and if what is bound always stays the same."""
        named = {name for _, name in (*segment.inputs, *segment.outputs)}
        if not segment.calls or not named <= self._buffers.keys():
            return None
        with contextlib.suppress(ValueError, NativeError):
            return NativeCalls(segment.session, binding, segment.calls)
        return None


class NativeExecutor(Executor[_NativeHostFrame]):
    """Carries out one program on native lanes.

    Args:
        graph: The values of a graph that its segments read and write.
        program: The graph's program, for which :func:`find_obstacle` returns an empty text.
        segments: The segments that ``Run`` instructions refer to; their sessions are
            :class:`chrion.native.NativeSession`.
        lease: The cores that threads of the segments' sessions are pinned to; None if there are no such threads.

    Raises:
        RuntimeError: The system cannot start another thread.
    """

    def __init__(
        self, graph: Tensors, program: Program, segments: Sequence[Segment], lease: CoreLease | None = None
    ) -> None:
        self._graph = graph
        self._program = encoded = NativeProgram(_encode(program))

        def open_lanes(cores: Cores) -> NativeLanes:
            return NativeLanes(encoded, [cores[lane] for lane in program.lanes])

        super().__init__(LaneGroups(program.occupied, open_lanes, 1 if lease else None, lease=lease), segments)
        self._lane_of = program.lane_of_segment

    def _make_frame(self) -> _NativeHostFrame:
        return _NativeHostFrame(self._graph, self._segments, self._program)

    def _perform(self, frame: _NativeHostFrame, run_options: ort.RunOptions | None, events: list[Event] | None) -> None:
        if not fits_native_lanes(run_options):
            raise ValueError("native lanes take no run options but those that terminate a request")
        options = None if run_options is None else run_options.native()
        if events is None:
            self._run_lanes(frame.native, options)
            return
        times_us = np.zeros((len(self._segments), 2))
        start_ms = time.perf_counter() * 1e3
        self._run_lanes(frame.native, options, times_us)
        for segment, lane in sorted(self._lane_of.items(), key=lambda ran: (ran[1], ran[0])):
            first_ms, last_ms = times_us[segment] / 1e3 - start_ms
            events.append(Event(lane, segment, float(first_ms), float(last_ms)))

    def _run_lanes(self, frame: NativeFrame, options: NativeRunOptions | None, times_us: Array | None = None) -> None:
        token = object()
        try:
            self._groups.lease(token).lanes.run(frame, times_us, options)
        except NativeError as error:
            raise RuntimeError(f"{self._segments[error.segment]}: Error in execution: {error}") from error
        finally:
            self._groups.release(token)


def _encode(program: Program) -> list[list[tuple[int, int, int]]]:
    """Encode a program for the native library: (kind, first operand, second operand) of each step, by lane."""
    index = {lane: at for at, lane in enumerate(program.lanes)}
    lanes: list[list[tuple[int, int, int]]] = []
    for instructions in program.lanes.values():
        steps: list[tuple[int, int, int]] = []
        for step in instructions:
            if isinstance(step, Wait):
                steps.append((PARK if step.park else WAIT, index[step.lane], step.count))
            elif isinstance(step, RunSegment):
                steps.append((RUN, step.segment, 0))
            elif isinstance(step, Signal):
                steps.append((SIGNAL, step.count, 0))
            else:
                raise TypeError(f"native lanes do not carry out {step}")
        lanes.append(steps)
    return lanes
