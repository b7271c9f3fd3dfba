"""Executor on lane threads, for any program, including those with lanes of an accelerator.

Each request has a counter for every lane, which only that lane advances. A lane that fails, or that sees the failure of
another, advances its own counter to the end and stops; so every wait ends, and all lanes leave a failed request.
The caller's thread carries out the first lane itself, pinned to that lane's core meanwhile, and returns when all lanes
have finished.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import onnxruntime as ort

from chrion.common.lane_numbers import lane_name
from chrion.devices.host import zeros
from chrion.graph.model import Graph
from chrion.machine.core_leases import CoreLease
from chrion.machine.cores import affinity, pin
from chrion.machine.waiting import Counter
from chrion.runtime.execution.accelerator import AcceleratorSessions
from chrion.runtime.execution.device_frame import DeviceFrame
from chrion.runtime.execution.executor import AcceleratorFailure, Event, Executor
from chrion.runtime.execution.host_frame import Array, HostFrame
from chrion.runtime.execution.lane_groups import Cores, LaneGroup, LaneGroups
from chrion.runtime.execution.lane_threads import LaneThreads
from chrion.runtime.execution.program import Copy, Program, RunSegment, Signal, Wait
from chrion.runtime.execution.segments import Segment, locate_error
from chrion.scheduler.evaluation.frame_buffers import NO_BUFFERS, FrameBuffers

#: The count of a lane that has finished its part, successfully or not.
_FINISHED = 1 << 60
#: Number of spins before a lane without a core of its own parks: about the cost of parking.
_FEW_SPINS = 3


@dataclass(slots=True, eq=False)
class _Request:
    """State that the lanes of one request share."""

    frame: HostFrame | DeviceFrame
    group: LaneGroup[LaneThreads]
    counters: dict[int, Counter]
    run_options: ort.RunOptions | None
    #: (lane, segment, start in s, end in s, copied value) of each run and copy; None if the caller wants no events.
    events: list[tuple[int, int, float, float, str]] | None
    start_s: float = 0.0
    #: Whether the caller's lane has to share a core with another lane.
    crowded: bool = False
    failure: BaseException | None = None
    #: Guards ``failure``: parallel lanes may fail at once, and the first failure counts.
    lock: threading.Lock = field(default_factory=threading.Lock)
    #: The instruction that each lane started last.
    current: dict[int, RunSegment | Copy] = field(default_factory=dict)

    def fail(self, error: BaseException) -> None:
        with self.lock:
            if self.failure is None:
                self.failure = error


@dataclass(frozen=True, slots=True)
class _RequestPart:
    """One lane's part of a request."""

    executor: PythonExecutor
    request: _Request
    lane: int

    def __call__(self) -> None:
        self.executor.run_lane(self.request, self.lane)

    def fail(self) -> None:
        self.executor.fail_lane(self.request, self.lane)


class PythonExecutor(Executor[HostFrame | DeviceFrame]):
    """Carries out one program on lane threads.

    Args:
        graph: The graph.
        program: Its program.
        segments: The segments that ``Run`` instructions refer to.
        accelerator: Runs the segments on the accelerator; None if the program has none.
        buffers: The buffers of a frame on the accelerator.
        further: Whether most requests run on other lanes, so that the cores are leased as further ones.
        lease: The cores that threads of the segments' sessions are pinned to; None if there are no such threads.
    """

    def __init__(  # noqa: PLR0913 - the parts of an executor
        self,
        graph: Graph,
        program: Program,
        segments: Sequence[Segment],
        accelerator: AcceleratorSessions | None = None,
        buffers: FrameBuffers = NO_BUFFERS,
        *,
        further: bool = False,
        lease: CoreLease | None = None,
    ) -> None:
        self._graph = graph
        self._program = program
        self._accelerator = accelerator
        self._buffers = buffers
        self._first = first = next(iter(program.lanes))

        def open_lanes(cores: Cores) -> LaneThreads:
            return LaneThreads({lane: cores[lane] for lane in program.lanes if lane != first})

        # The streams of an accelerator exist once, and so do the threads of sessions.
        limit = 1 if accelerator or lease else None
        super().__init__(LaneGroups(program.occupied, open_lanes, limit, further=further, lease=lease), segments)
        #: Name of the operator that computes each value.
        self._producers = {
            name: graph.dag.names[i]
            for i, nodes in enumerate(graph.nodes)
            for node in nodes
            for name in graph.model.graph.node[node].output
        }

    def run_lane(self, request: _Request, lane: int) -> None:
        """Carry out one lane's instructions; errors are stored in the request, and only an interrupt is raised."""
        own = request.counters[lane]
        on_timeout = request.group.lanes.replace_dead
        # A spinning lane without a core of its own slows down the others.
        max_spins = _FEW_SPINS if request.crowded or request.group.cores[lane] is None else None
        try:
            for instruction in self._program.lanes[lane]:
                if isinstance(instruction, Wait):
                    spins = 0 if instruction.park else max_spins
                    request.counters[instruction.lane].wait(instruction.count, spins, on_timeout)
                elif isinstance(instruction, Signal):
                    own.advance(instruction.count)
                elif request.failure is not None:
                    return
                else:
                    request.current[lane] = instruction
                    self._carry_out(request, lane, instruction)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            request.fail(error)
        finally:
            own.advance(_FINISHED)

    def fail_lane(self, request: _Request, lane: int) -> None:
        """Fail a request after the thread of one of its lanes has died."""
        first = next(step for step in self._program.lanes[lane] if isinstance(step, RunSegment | Copy))
        request.fail(RuntimeError(f"lane {lane_name(lane)} died at {self._describe(request.current.get(lane, first))}"))
        request.counters[lane].advance(_FINISHED)

    def _make_frame(self) -> HostFrame | DeviceFrame:
        if self._accelerator is None:
            return HostFrame(self._graph, self._segments)
        try:
            frame = DeviceFrame(self._graph, self._segments, self._accelerator.device, self._buffers)
            if self._accelerator.captures_graphs:
                self._capture(frame, self._accelerator)
        except Exception as error:
            raise AcceleratorFailure(error) from error
        return frame

    def _begin(
        self,
        frame: HostFrame | DeviceFrame,
        feeds: Mapping[str, ort.OrtValue | Array],
        targets: Mapping[str, ort.OrtValue],
        on_device: Collection[str],
        *,
        arrays: bool,
    ) -> None:
        if isinstance(frame, HostFrame):
            frame.begin(feeds, targets, arrays=arrays)
            return
        try:
            frame.begin(feeds, targets, arrays=arrays, on_device=on_device)
        except Exception as error:
            raise AcceleratorFailure(error) from error

    def _perform(
        self, frame: HostFrame | DeviceFrame, run_options: ort.RunOptions | None, events: list[Event] | None
    ) -> None:
        counters = {lane: Counter() for lane in self._program.lanes}
        token = object()
        try:
            group = self._groups.lease(token)
            request = _Request(frame, group, counters, run_options, None if events is None else [], time.perf_counter())
            self._run_lanes(request)
        finally:
            self._groups.release(token)
        if request.failure is not None:
            raise request.failure
        if events is not None and request.events is not None:
            for lane, segment, start_s, end_s, copied in sorted(request.events):
                start_ms, end_ms = ((s - request.start_s) * 1e3 for s in (start_s, end_s))
                events.append(Event(lane, segment, start_ms, end_ms, copied))

    def _run_lanes(self, request: _Request) -> None:
        """Give all lanes their parts, carry out the first lane, and wait for the others."""
        others = [lane for lane in self._program.lanes if lane != self._first]
        threads, core = request.group.lanes, request.group.cores[self._first]
        submitted = False
        before = None if core is None else affinity()
        try:
            threads.submit({lane: _RequestPart(self, request, lane) for lane in others})
            submitted = True
            if core is not None and before is not None:
                self._pin_caller(request, core, before)
            self.run_lane(request, self._first)
            # Still pinned: a caller that waited on another core would take that core from a computing lane.
            self._join(request, others)
        except BaseException as error:
            # The error is an interrupt outside a segment, or the parts could not be submitted. These are plain
            # assignments, so that no second interrupt occurs between them. Lanes that have their parts see them and
            # finish.
            request.failure = request.failure or error
            request.counters[self._first].count = _FINISHED
            if submitted:  # the buffers that lanes write into have to outlive their parts
                self._join(request, others)
            raise
        finally:
            if before is not None:
                try:  # noqa: SIM105 - an interrupt must find no call before the one that restores the affinity
                    os.sched_setaffinity(0, before)
                except OSError:  # the allowed set has shrunk meanwhile
                    pass

    @staticmethod
    def _pin_caller(request: _Request, core: int, allowed: set[int]) -> None:
        """Pin the caller to its lane's core if its own affinity allows that."""
        if core in allowed:
            pin(core)
        cores = {other for other in request.group.cores.values() if other is not None}
        if not allowed.issuperset(cores):
            request.crowded = core not in allowed and allowed.issubset(cores)
            request.group.lanes.check_cores()

    def _join(self, request: _Request, lanes: Sequence[int]) -> None:
        """Wait until lanes have finished their parts."""
        for lane in lanes:
            request.counters[lane].wait(_FINISHED, on_timeout=request.group.lanes.replace_dead)

    def _carry_out(self, request: _Request, lane: int, step: RunSegment | Copy) -> None:
        """Run a segment or copy a value."""
        start_s = time.perf_counter() if request.events is not None else 0.0
        if isinstance(step, RunSegment):
            self._run_segment(request, lane, step)
        elif isinstance(request.frame, DeviceFrame):  # programs of host frames have no copies
            self._copy(request.frame, step)
        if request.events is not None:
            segment, copied = (step.segment, "") if isinstance(step, RunSegment) else (-1, step.value)
            request.events.append((lane, segment, start_s, time.perf_counter(), copied))

    def _run_segment(self, request: _Request, lane: int, step: RunSegment) -> None:
        segment, frame = self._segments[step.segment], request.frame
        if segment.on_device and self._accelerator is not None and isinstance(frame, DeviceFrame):
            try:
                self._run_on_device(self._accelerator, frame, step, lane, request.run_options)
            except Exception as error:
                raise AcceleratorFailure(locate_error(error, self._describe(step))) from error
            return
        try:
            segment.session.run_with_iobinding(frame.bindings[step.segment], request.run_options)
        except Exception as error:
            raise locate_error(error, self._describe(step)) from error

    def _run_on_device(
        self,
        accelerator: AcceleratorSessions,
        frame: DeviceFrame,
        step: RunSegment,
        lane: int,
        run_options: ort.RunOptions | None = None,
    ) -> None:
        cuda_graph = frame.cuda_graphs[step.segment]
        frame.prepare(step.segment)
        accelerator.run(
            self._segments[step.segment].session,
            frame.bindings[step.segment],
            run_options,
            lane=lane,
            complete=step.complete,
            cuda_graph=cuda_graph,
            replayed=cuda_graph is not None and frame.replayable(step.segment),
        )

    def _copy(self, frame: DeviceFrame, step: Copy) -> None:
        try:
            frame.copy(step.value, upload=step.upload)
        except Exception as error:
            raise AcceleratorFailure(locate_error(error, self._describe(step))) from error

    def _describe(self, step: RunSegment | Copy) -> str:
        """Describe an instruction by its operators, for error messages."""
        if isinstance(step, RunSegment):
            return str(self._segments[step.segment])
        producer = self._producers.get(step.value)
        made = f" of operator {producer!r}" if producer else ""
        return f"copy of {step.value!r}{made} {'to' if step.upload else 'from'} the accelerator"

    def _capture(self, frame: DeviceFrame, accelerator: AcceleratorSessions) -> None:
        """Capture the frame's CUDA graphs on zeros, while no request uses the device."""
        lanes = self._program.lane_of_segment
        with self._gate.exclusive():
            frame.begin({info.name: zeros(info) for info in self._graph.inputs}, {})
            for index, segment in enumerate(self._segments):
                if segment.cuda_graph:
                    frame.cuda_graphs[index] = accelerator.new_cuda_graph()
                    if frame.replayable(index):
                        frame.fill_with_zeros(index)
                        self._run_on_device(accelerator, frame, RunSegment(index), lanes[index])
