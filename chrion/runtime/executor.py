"""Carrying out a program: frames, lanes, and what happens when something fails.

Each request has a counter for every lane, which only that lane advances. A lane that fails, or that sees that another
has failed, advances its own to the end and stops; so every wait ends, and no lane is left behind in a request that is
over. The caller's thread carries out the first lane itself, pinned to that lane's core meanwhile, and returns when all
lanes have ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import onnxruntime as ort

from chrion.cores import pinned
from chrion.graph.model import Graph
from chrion.runtime.frame import Frame
from chrion.runtime.lanes import Lanes
from chrion.runtime.program import Program, Run, Signal
from chrion.runtime.segment import Segment
from chrion.waiting import Counter

#: The count of a lane that has ended, well or not.
_ENDED = 1 << 60


@dataclass(frozen=True, slots=True)
class Event:
    """One segment's run, in ms from the start of its request."""

    lane: int
    segment: int
    start_ms: float
    end_ms: float


@dataclass(slots=True)
class _Request:
    """What the lanes of one request share."""

    frame: Frame
    counters: dict[int, Counter]
    run_options: ort.RunOptions | None
    #: Where to note what ran when, or None.
    events: list[tuple[int, int, float, float]] | None
    failure: BaseException | None = None
    #: Parallel lanes may fail at once: the first one counts.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, error: BaseException) -> None:
        with self.lock:
            if self.failure is None:
                self.failure = error


class Executor:
    """Runs one program, for any number of callers at once.

    Args:
        graph: The graph.
        program: Its program.
        segments: What ``Run`` instructions name.
        lanes: Threads of all lanes but the program's first.
        core: Core of the program's first lane.
    """

    def __init__(
        self, graph: Graph, program: Program, segments: Sequence[Segment], lanes: Lanes, core: int | None
    ) -> None:
        self._graph = graph
        self._program = program
        self._segments = segments
        self._lanes = lanes
        self._core = core
        self._first = next(iter(program.lanes))
        self._frames: list[Frame] = []
        self._frames_lock = threading.Lock()

    def run(
        self,
        feeds: Mapping[str, ort.OrtValue],
        outputs: Sequence[str],
        *,
        targets: Mapping[str, ort.OrtValue] | None = None,
        run_options: ort.RunOptions | None = None,
        events: list[Event] | None = None,
    ) -> dict[str, ort.OrtValue]:
        """Run the program once.

        Args:
            feeds: Values of the graph's inputs.
            outputs: Which outputs to return.
            targets: Where to write some of them.
            run_options: Handed to every segment.
            events: Filled with what ran when.

        Raises:
            Exception: What a segment raised, of the same type, with its operators named.
        """
        frame = self._take_frame()
        values = frame.begin(feeds, targets or {})
        raw: list[tuple[int, int, float, float]] | None = None if events is None else []
        request = _Request(frame, {lane: Counter() for lane in self._program.lanes}, run_options, raw)
        start = time.perf_counter()
        self._perform_all(request)
        if request.failure is not None:
            raise request.failure
        result = {n: values[n] if n in values else frame.result(n) for n in outputs}
        with self._frames_lock:
            self._frames.append(frame)
        if events is not None and raw is not None:
            events += [Event(la, s, (t0 - start) * 1e3, (t1 - start) * 1e3) for la, s, t0, t1 in sorted(raw)]
        return result

    def _perform_all(self, request: _Request) -> None:
        others = [lane for lane in self._program.lanes if lane != self._first]
        self._lanes.submit({lane: partial(self._perform, request, lane) for lane in others})
        try:
            if self._core is None:
                self._perform(request, self._first)
            else:
                with pinned(self._core):
                    self._perform(request, self._first)
                    # Still pinned: a waiting caller elsewhere would take a core from a lane that works.
                    for lane in others:
                        request.counters[lane].wait(_ENDED)
        except BaseException as error:
            # An interrupt that arrived outside of a segment. The lanes must be gone before the frame is.
            request.fail(error)
            request.counters[self._first].advance(_ENDED)
            raise
        finally:
            for lane in others:
                request.counters[lane].wait(_ENDED)

    def _perform(self, request: _Request, lane: int) -> None:
        """Carry out one lane's instructions; never raises but for an interrupt of the caller's own thread."""
        own = request.counters[lane]
        bindings = request.frame.bindings
        try:
            for instruction in self._program.lanes[lane]:
                if isinstance(instruction, Run):
                    if request.failure is not None:
                        return
                    self._run_segment(request, lane, instruction.segment, bindings[instruction.segment])
                elif isinstance(instruction, Signal):
                    own.advance(instruction.count)
                else:
                    request.counters[instruction.lane].wait(instruction.count)
        except BaseException as error:  # noqa: BLE001 - the caller raises it again
            request.fail(error)
        finally:
            own.advance(_ENDED)

    def _run_segment(self, request: _Request, lane: int, index: int, binding: Any) -> None:
        segment = self._segments[index]
        before = time.perf_counter() if request.events is not None else 0.0
        try:
            segment.session.run_with_iobinding(binding, request.run_options)
        except Exception as error:
            raise _named(error, segment) from error
        if request.events is not None:
            request.events.append((lane, index, before, time.perf_counter()))

    def _take_frame(self) -> Frame:
        with self._frames_lock:
            if self._frames:
                return self._frames.pop()
        return Frame(self._graph, self._segments)


def _named(error: Exception, segment: Segment) -> Exception:
    """The same kind of error, saying in which operators it happened."""
    message = f"{segment}: {error}"
    make: Callable[[str], Exception] = type(error)
    try:
        return make(message)
    except Exception:  # noqa: BLE001 - a type that cannot be made from a message
        return RuntimeError(message)
