"""The base class of executors, which carry out a program for each request, and the events that they report.

Every request takes a frame of its own, so any number of callers run at once. A few idle frames are kept for later
requests, without the values of the request before; not that of a request that failed, which may be half bound.

Closing. Requests in flight finish first, later ones are refused, and :meth:`Executor.close` waits for those in flight.
There is one exception: called by a signal handler that has interrupted a request of the same thread, it returns at
once, since that request cannot finish before the handler returns. The last request to finish then stops the lanes.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

import onnxruntime as ort

from chrion.machine.waiting import Gate

if TYPE_CHECKING:  # plain sessions need neither frames nor segments
    from chrion.runtime.execution.host_frame import Array, Frame
    from chrion.runtime.execution.lane_groups import LaneGroups
    from chrion.runtime.execution.segments import Segment

CLOSED = "this session is closed"

#: Maximum number of idle frames, and of bytes of their buffers; at least one frame is kept for each group of lanes.
#: Choices that limit memory after a burst of requests, not measured.
_IDLE_FRAMES, _IDLE_BYTES = 16, 32e6

F = TypeVar("F", bound="Frame[Any]")


@dataclass(frozen=True, slots=True)
class Event:
    """Times of one run of a segment or of one copy, in ms from the start of the request."""

    lane: int
    #: Index of the segment; -1 for a copy.
    segment: int
    start_ms: float
    end_ms: float
    #: Name of the copied value; empty for a segment.
    copied: str = ""


class EngineFailure(Exception):  # noqa: N818 - carries the error proper
    """A failure of an engine; another one may serve the request. ``reason`` is the original error."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason

    def raise_reason(self) -> NoReturn:
        """Raise the original error, with its own cause."""
        raise self.reason from (self.reason.__cause__ if self.__cause__ is self.reason else self.__cause__)


class AcceleratorFailure(EngineFailure):
    """A failure on the accelerator, after which the CPU may serve the request; its message names the operators."""


class SegmentFailure(EngineFailure):
    """The failure of a segment of a plan, after which a plain session may serve the request."""


class Executor(ABC, Generic[F]):
    """Carries out one program, for any number of callers at once.

    Args:
        groups: The lanes of the program.
        segments: The segments that its instructions refer to.
    """

    def __init__(self, groups: LaneGroups[Any], segments: Sequence[Segment]) -> None:
        self._groups = groups
        self._segments = segments
        #: Idle frames, the one used last at the end.
        self._frames: deque[F] = deque()
        #: Requests in flight: (thread, a unique object). A CUDA graph is captured while there are none.
        self._gate = Gate()
        self._closed = False

    def run(  # noqa: PLR0913 - the parts of a request
        self,
        feeds: Mapping[str, ort.OrtValue | Array],
        outputs: Sequence[str],
        *,
        targets: Mapping[str, ort.OrtValue] | None = None,
        on_device: Collection[str] = (),
        run_options: ort.RunOptions | None = None,
        events: list[Event] | None = None,
        arrays: bool = False,
    ) -> dict[str, Any]:
        """Run the program once.

        Args:
            feeds: Values of the graph's inputs; arrays are contiguous.
            outputs: Names of the outputs to return.
            targets: The caller's buffers for some outputs, in any memory.
            on_device: Outputs without a target that are returned in the accelerator's memory.
            run_options: Passed to every segment.
            events: A list to which the runs and copies of this request are added; None to record none.
            arrays: Return outputs as arrays that belong to the caller; otherwise as OrtValues.

        Raises:
            RuntimeError: The executor is closed.
            AcceleratorFailure: A frame, a segment or a copy on the accelerator failed.
            Exception: Raised by a segment, of the same type if possible; the message names its operators.
        """
        targets = targets or {}
        frame = self._take_frame()
        # Entering and leaving are one operation each, so that an interrupt cannot leave the token behind.
        token = (threading.get_ident(), object())
        try:
            self._gate.enter(token)
            if self._closed:
                raise RuntimeError(CLOSED)
            self._begin(frame, feeds, targets, on_device, arrays=arrays)
            self._perform(frame, run_options, events)
            if arrays:
                result: dict[str, Any] = {name: frame.array(name) for name in outputs}
            else:
                result = {name: frame.result(name, targets.get(name)) for name in outputs}
        finally:
            self._gate.inside.discard(token)
            if self._closed and not self._gate.inside:
                self._groups.close()
        self._keep(frame)
        return result

    def close(self, until: float | None = None) -> None:
        """Refuse new requests, and stop the lanes when those in flight have finished. May be called repeatedly.

        Args:
            until: Time at which to stop waiting, in seconds of ``time.monotonic``; None waits without limit.
        """
        self._closed = True
        thread = threading.get_ident()
        in_flight = cast("set[tuple[int, object]]", self._gate.inside)
        if any(token[0] == thread for token in tuple(in_flight)):
            return  # from a signal handler that has interrupted a request of this thread
        if self._gate.wait_empty(until):
            self._groups.close(until)

    @property
    def capacity(self) -> int:
        """Number of requests that the lanes can serve at the same time."""
        return self._groups.capacity

    def _take_frame(self) -> F:
        try:
            return self._frames.pop()
        except IndexError:
            return self._make_frame()

    def _keep(self, frame: F) -> None:
        """Release the values of a request that was served, and keep its frame for another one."""
        try:
            frame.release()
        except Exception:  # noqa: BLE001 - the accelerator was lost after the request; the frame is dropped
            return
        frames = self._frames
        frames.append(frame)
        if len(frames) > 1:
            limit = max(self.capacity, min(_IDLE_FRAMES, _IDLE_BYTES // max(1, frame.bytes)))
            while len(frames) > limit:
                with contextlib.suppress(IndexError):  # another thread has taken the last one
                    frames.popleft()

    def _begin(
        self,
        frame: F,
        feeds: Mapping[str, ort.OrtValue | Array],
        targets: Mapping[str, ort.OrtValue],
        on_device: Collection[str],
        *,
        arrays: bool,
    ) -> None:
        """Bind the inputs and outputs of a request; without an accelerator, no output can stay on one."""
        del on_device
        frame.begin(feeds, targets, arrays=arrays)

    @abstractmethod
    def _make_frame(self) -> F:
        """Return a new frame."""

    @abstractmethod
    def _perform(self, frame: F, run_options: ort.RunOptions | None, events: list[Event] | None) -> None:
        """Carry out the program on a frame whose inputs and outputs are bound."""
