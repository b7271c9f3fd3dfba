"""Carrying out a program: frames, lanes, and what happens when something fails.

Each request has a counter for every lane, which only that lane advances. A lane that fails, or that sees that another
has failed, advances its own to the end and stops; so every wait ends, and no lane is left behind in a request that is
over. The caller's thread carries out the first lane itself, pinned to that lane's core meanwhile, and returns when all
lanes have ended.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnxruntime as ort

from chrion.cores import affinity, pin
from chrion.devices.host import zeros
from chrion.graph.model import Graph
from chrion.lane_numbers import lane_name
from chrion.runtime.execution.accelerator import Accelerator
from chrion.runtime.execution.frame import Array, Frame
from chrion.runtime.execution.lane_threads import LaneThreads
from chrion.runtime.execution.program import Copy, Program, Run, Signal, Wait
from chrion.runtime.execution.segments import Segment, named
from chrion.waiting import Counter, Gate

#: The count of a lane that has ended, well or not.
_ENDED = 1 << 60
#: Turns that a lane without a core of its own spins before it parks: about what parking costs.
_SHORT_TURNS = 3


@dataclass(frozen=True, slots=True)
class Event:
    """One segment's run or one copy, in ms from the start of its request."""

    lane: int
    #: Index of the segment; -1 for a copy.
    segment: int
    start_ms: float
    end_ms: float
    #: The value that was copied; empty for a segment.
    copied: str = ""


class AcceleratorFailure(Exception):  # noqa: N818 - carries the error proper
    """Something failed on the accelerator; ``reason`` is the error, with the operators' names."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(slots=True, eq=False)
class _Request:
    """What the lanes of one request share."""

    frame: Frame
    counters: dict[int, Counter]
    run_options: ort.RunOptions | None
    #: Where to note what ran when, or None.
    events: list[tuple[int, int, float, float, str]] | None
    start: float = 0.0
    failure: BaseException | None = None
    #: Parallel lanes may fail at once: the first one counts.
    lock: threading.Lock = field(default_factory=threading.Lock)
    #: What each lane has begun last.
    doing: dict[int, Run | Copy] = field(default_factory=dict)

    def fail(self, error: BaseException) -> None:
        with self.lock:
            if self.failure is None:
                self.failure = error


@dataclass(frozen=True, slots=True)
class _Part:
    """One lane's share of a request."""

    executor: Executor
    request: _Request
    lane: int

    def __call__(self) -> None:
        self.executor.perform(self.request, self.lane)

    def lose(self) -> None:
        self.executor.lose(self.request, self.lane)


class Executor:
    """Runs one program, for any number of callers at once.

    Args:
        graph: The graph.
        program: Its program.
        segments: What ``Run`` instructions name.
        lanes: Threads of all lanes but the program's first.
        cores: The core of each lane; None where it has none of its own.
        accelerator: Runs the segments that are on it.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - all that a program needs
        self,
        graph: Graph,
        program: Program,
        segments: Sequence[Segment],
        lanes: LaneThreads,
        cores: Mapping[int, int | None],
        accelerator: Accelerator | None = None,
    ) -> None:
        self._graph = graph
        self._program = program
        self._segments = segments
        self._lanes = lanes
        #: A lane without a core of its own spins at the cost of one that works.
        self._patience = {lane: _SHORT_TURNS if core is None else None for lane, core in cores.items()}
        self._accelerator = accelerator
        self._first = next(iter(program.lanes))
        self._core = cores[self._first]
        #: The operator that makes each value.
        self._makers = {
            name: graph.dag.names[i]
            for i, nodes in enumerate(graph.nodes)
            for node in nodes
            for name in graph.model.graph.node[node].output
        }
        self._frames: list[Frame] = []
        self._frames_lock = threading.Lock()
        #: Requests pass it together; a CUDA graph is captured while none runs.
        self._gate = Gate()

    def run(  # noqa: PLR0913 - what a request is made of
        self,
        feeds: Mapping[str, ort.OrtValue | Array],
        outputs: Sequence[str],
        *,
        targets: Mapping[str, ort.OrtValue] | None = None,
        staying: Collection[str] = (),
        run_options: ort.RunOptions | None = None,
        events: list[Event] | None = None,
        arrays: bool = False,
    ) -> dict[str, Any]:
        """Run the program once.

        Args:
            feeds: Values of the graph's inputs; contiguous if they are arrays.
            outputs: Which outputs to return.
            targets: Where to write some of them, in either memory.
            staying: Outputs without a target that are to be in the accelerator's memory.
            run_options: Handed to every segment.
            events: Filled with what ran when.
            arrays: Give outputs as arrays of the caller's own; else as OrtValues.

        Raises:
            Exception: What a segment raised, of the same type, with its operators named.
        """
        frame = self._take_frame()
        raw: list[tuple[int, int, float, float, str]] | None = None if events is None else []
        request = _Request(frame, {lane: Counter() for lane in self._program.lanes}, run_options, raw)
        try:
            self._gate.enter(request)
            self._serve(request, feeds, targets or {}, staying, arrays=arrays)
            result = {o: frame.array(o) if arrays else frame.result(o, (targets or {}).get(o)) for o in outputs}
        finally:
            self._gate.inside.discard(request)
        with self._frames_lock:
            self._frames.append(frame)
        if events is not None and raw is not None:
            first = request.start
            events += [Event(la, s, (t0 - first) * 1e3, (t1 - first) * 1e3, c) for la, s, t0, t1, c in sorted(raw)]
        return result

    def close(self, until: float | None = None) -> None:
        """Stop the lanes when runs that have begun have ended; wait no longer than until then."""
        self._lanes.close(until)
        if until is not None:
            self._gate.wait_empty(until)

    def _serve(
        self,
        request: _Request,
        feeds: Mapping[str, ort.OrtValue | Array],
        targets: Mapping[str, ort.OrtValue],
        staying: Collection[str],
        *,
        arrays: bool,
    ) -> None:
        try:
            request.frame.begin(feeds, targets, staying, arrays=arrays)
        except Exception as error:
            if self._accelerator is None:
                raise
            raise AcceleratorFailure(error) from error
        request.start = time.perf_counter()
        self._perform_all(request)
        if request.failure is not None:
            raise request.failure

    def perform(self, request: _Request, lane: int) -> None:
        """Carry out one lane's instructions; raises nothing but what interrupts it from outside."""
        own = request.counters[lane]
        try:
            for instruction in self._program.lanes[lane]:
                if isinstance(instruction, Wait):
                    request.counters[instruction.lane].wait(instruction.count, self._patience[lane], self._lanes.tend)
                elif isinstance(instruction, Signal):
                    own.advance(instruction.count)
                elif request.failure is not None:
                    return
                else:
                    request.doing[lane] = instruction
                    self._do(request, lane, instruction)
        except BaseException as error:  # noqa: BLE001 - the caller raises it again
            request.fail(error)
        finally:
            own.advance(_ENDED)

    def lose(self, request: _Request, lane: int) -> None:
        """Fail a request of which one lane's thread has died."""
        first = next(step for step in self._program.lanes[lane] if isinstance(step, Run | Copy))
        request.fail(RuntimeError(f"lane {lane_name(lane)} died at {self._where(request.doing.get(lane, first))}"))
        request.counters[lane].advance(_ENDED)

    def _perform_all(self, request: _Request) -> None:
        others = [lane for lane in self._program.lanes if lane != self._first]
        submitted = False
        before = None if self._core is None else affinity()
        try:
            self._lanes.submit({lane: _Part(self, request, lane) for lane in others})
            submitted = True
            if self._core is not None:
                pin(self._core)
            self.perform(request, self._first)
            # Still pinned: a waiting caller elsewhere would take a core from a lane that works.
            self._join(request, others)
        except BaseException as error:
            # An interrupt that arrived outside of a segment. Plain stores, so that another one cannot come between:
            # lanes that have their parts see them, and end.
            request.failure = request.failure or error
            request.counters[self._first].count = _ENDED
            if submitted:  # what lanes write into should not be gone before they are
                self._join(request, others)
            raise
        finally:
            if before is not None:
                try:  # noqa: SIM105 - nothing comes before the restoring call that an interrupt could hit
                    os.sched_setaffinity(0, before)
                except OSError:  # the allowed set has shrunk meanwhile
                    pass

    def _join(self, request: _Request, lanes: Sequence[int]) -> None:
        """Wait until lanes have ended their parts."""
        for lane in lanes:
            request.counters[lane].wait(_ENDED, look=self._lanes.tend)

    def _do(self, request: _Request, lane: int, step: Run | Copy) -> None:
        """Run a segment or copy a value."""
        before = time.perf_counter() if request.events is not None else 0.0
        if isinstance(step, Run):
            self._run_segment(request, lane, step)
        else:
            self._copy(request, step)
        if request.events is not None:
            what = (step.segment, "") if isinstance(step, Run) else (-1, step.value)
            request.events.append((lane, what[0], before, time.perf_counter(), what[1]))

    def _run_segment(self, request: _Request, lane: int, step: Run) -> None:
        segment, frame = self._segments[step.segment], request.frame
        if not segment.on_device or self._accelerator is None:
            try:
                segment.session.run_with_iobinding(frame.bindings[step.segment], request.run_options)
            except Exception as error:
                raise named(error, self._where(step)) from error
            return
        try:
            self._run_there(self._accelerator, frame, step, lane, request.run_options)
        except Exception as error:
            raise AcceleratorFailure(named(error, self._where(step))) from error

    def _run_there(
        self, accelerator: Accelerator, frame: Frame, step: Run, lane: int, run_options: ort.RunOptions | None
    ) -> None:
        graph = frame.graphs[step.segment]
        frame.prepare(step.segment)
        accelerator.run(
            self._segments[step.segment].session,
            frame.bindings[step.segment],
            run_options,
            lane=lane,
            complete=step.complete,
            graph=graph,
            replayed=graph is not None and frame.replayable(step.segment),
        )

    def _copy(self, request: _Request, step: Copy) -> None:
        try:
            request.frame.copy(step.value, upload=step.upload)
        except Exception as error:
            raise AcceleratorFailure(named(error, self._where(step))) from error

    def _where(self, step: Run | Copy) -> str:
        """An instruction in words: the operators that a message is about."""
        if isinstance(step, Run):
            return str(self._segments[step.segment])
        maker = self._makers.get(step.value)
        made = f" of operator {maker!r}" if maker else ""
        return f"copy of {step.value!r}{made} {'to' if step.upload else 'from'} the accelerator"

    def _take_frame(self) -> Frame:
        with self._frames_lock:
            if self._frames:
                return self._frames.pop()
        if self._accelerator is None:
            return Frame(self._graph, self._segments)
        try:
            frame = Frame(self._graph, self._segments, self._accelerator.device)
            if self._accelerator.graphs:
                self._capture(frame, self._accelerator)
        except Exception as error:
            raise AcceleratorFailure(error) from error
        return frame

    def _capture(self, frame: Frame, accelerator: Accelerator) -> None:
        """Capture the frame's CUDA graphs on zeros, while nothing else uses the device."""
        lanes = {i.segment: lane for lane, steps in self._program.lanes.items() for i in steps if isinstance(i, Run)}
        with self._gate.alone():
            frame.begin({info.name: zeros(info) for info in self._graph.inputs}, {})
            frame.blank()
            for at, segment in enumerate(self._segments):
                if segment.graph:
                    frame.graphs[at] = accelerator.new_graph()
                    if frame.replayable(at):
                        self._run_there(accelerator, frame, Run(at), lanes[at], None)
