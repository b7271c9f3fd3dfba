"""Python classes for the objects of ``lanes.c``: sessions, bindings, frames and lanes."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnxruntime as ort

from chrion.native.library import load_library, path_of
from chrion.native.operators import operators_library

_NAME = "lanes"
#: Maximum time in us that a lane spins before it parks, while it waits for another lane of the same request: as long
#: as Python lanes do, see :data:`chrion.machine.waiting.MAX_SPINS`.
_SPIN_US = 800.0
#: The same while it waits for the next request, if the one before followed within this time. It is twice the idle time,
#: between two requests in direct succession, of a lane that finishes early.
IDLE_SPIN_US = 800.0
#: The pressure at which lanes are no longer pinned, since other work uses their cores: two interrupted requests in
#: short succession reach it, one alone does not; see ``lanes.c``.
_PRESSURE_LIMIT = 12
#: A limit on waiting that is never reached.
_NO_LIMIT_S = 1e8

#: The kinds of steps: wait for a lane's count, run a segment, signal a count, wait for a lane's count without spinning.
WAIT, RUN, SIGNAL, PARK = range(4)
#: The results of a request in ``lanes.c``.
_FAILED, _SERVED, _MOVED = range(3)


class NativeError(Exception):
    """An error of onnxruntime.

    Attributes:
        segment: The index of the segment that failed; 0 for an error outside a request.
    """

    def __init__(self, message: str, segment: int) -> None:
        super().__init__(message)
        self.segment = segment


class _Failure(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int32), ("segment", ctypes.c_int32), ("message", ctypes.c_char * 2048))

    def error(self) -> NativeError:
        """Return the failure as an exception."""
        return NativeError(self.message.decode(errors="replace"), self.segment)


class _Step(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("a", ctypes.c_int32), ("b", ctypes.c_int32))


class _Part(ctypes.Structure):
    _fields_ = (("steps", ctypes.POINTER(_Step)), ("count", ctypes.c_int32), ("core", ctypes.c_int32))


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_library(_NAME, "native lanes")
    if library is None:
        return None
    pointer, failure = ctypes.c_void_p, ctypes.POINTER(_Failure)
    prototypes: dict[str, tuple[Any, ...]] = {
        "open": (pointer, ctypes.c_char_p, ctypes.c_size_t, failure),
        "close": (None, pointer),
        "binding": (pointer, pointer, failure),
        "unbind": (None, pointer),
        "bind": (
            ctypes.c_bool,
            pointer,
            ctypes.c_bool,
            ctypes.c_char_p,
            pointer,
            ctypes.c_size_t,
            ctypes.POINTER(ctypes.c_int64),
            ctypes.c_size_t,
            ctypes.c_int,
            failure,
        ),
        "start": (pointer, ctypes.c_int, ctypes.POINTER(_Part), ctypes.c_double, ctypes.c_double, ctypes.c_int),
        "stop": (ctypes.c_bool, pointer, ctypes.c_double),
        "record_session": (ctypes.c_bool, *[pointer] * 4, ctypes.c_size_t, failure, ctypes.POINTER(pointer)),
        "frame": (pointer, ctypes.c_int, ctypes.c_int, *[ctypes.POINTER(pointer)] * 3, pointer),
        "free_frame": (None, pointer),
        "run": (ctypes.c_int, pointer, pointer, pointer, pointer, failure),
        "options": (pointer,),
        "free_options": (None, pointer),
        "terminate": (None, pointer),
    }
    for name, (result, *arguments) in prototypes.items():
        function = getattr(library, f"chrion_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def available() -> bool:
    """Return whether the compiled library exists and can be loaded."""
    return _library() is not None


def _loaded() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise RuntimeError(f"{path_of(_NAME).name} is missing: Chrion was installed without a C compiler")
    return library


class _Resource:
    """An object of the library, which is released by reference counting after all resources that use it.

    The garbage collector clears the objects of a reference cycle in any order, so a resource must not be part of a
    cycle. Only the resources that use it, and the finaliser of its Python object (see :func:`_finalise`), refer to it.
    Therefore a binding is released before its session, and a frame before both.

    Args:
        pointer: The address of the object.
        release: The function that releases the object.
        used: The resources that the object uses.
    """

    #: None while the constructor runs, which an interrupt may end.
    _release: Callable[[int], object] | None = None

    def __init__(self, pointer: int, release: Callable[[int], object], *used: _Resource) -> None:
        self.pointer = pointer
        self._release = release
        self._used = used

    def __del__(self, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._release and not exiting():  # at exit, a daemon thread may still run the session
            self._release(self.pointer)


def _finalise(owner: object, resource: _Resource) -> None:
    """Keep a resource alive until its owner is collected."""
    weakref.finalize(owner, _drop, resource).atexit = False


def _drop(resource: _Resource) -> None:
    """Do nothing; the reference to the resource ends with the call."""


class NativeSession:
    """An onnxruntime session that native lanes run.

    Args:
        model: The serialised model.
        options: The session options. The library is registered with them, so they should not be used again.

    Raises:
        NativeError: onnxruntime refuses the model or the options.
        RuntimeError: The compiled library is not available.
    """

    def __init__(self, model: bytes, options: ort.SessionOptions) -> None:
        library, failure = _loaded(), _Failure()
        options.register_custom_ops_library(str(path_of(_NAME)))
        pointer = library.chrion_open(model, len(model), failure)
        if not pointer:
            raise failure.error()
        self.resource = _Resource(pointer, library.chrion_close)
        _finalise(self, self.resource)

    def io_binding(self) -> NativeBinding:
        """Return a new binding of the session's inputs and outputs."""
        return NativeBinding(self)


class NativeBinding:
    """The tensors that are bound to a session's inputs and outputs, all in host memory."""

    def __init__(self, session: NativeSession) -> None:
        self._library, failure = _loaded(), _Failure()
        pointer = self._library.chrion_binding(session.resource.pointer, failure)
        if not pointer:
            raise failure.error()
        self.resource = _Resource(pointer, self._library.chrion_unbind, session.resource)
        _finalise(self, self.resource)

    def bind_ortvalue_input(self, name: str, ortvalue: ort.OrtValue) -> None:
        """Bind an input to a tensor, which the caller keeps alive.

        Raises:
            NativeError: onnxruntime refuses the name or the tensor.
        """
        self._bind(name, ortvalue, output=False)

    def bind_ortvalue_output(self, name: str, ortvalue: ort.OrtValue) -> None:
        """Bind an output to a tensor, which the caller keeps alive.

        Raises:
            NativeError: onnxruntime refuses the name or the tensor.
        """
        self._bind(name, ortvalue, output=True)

    def _bind(self, name: str, value: ort.OrtValue, *, output: bool) -> None:
        shape, failure = value.shape(), _Failure()
        if not self._library.chrion_bind(
            self.resource.pointer,
            output,
            name.encode(),
            value.data_ptr(),
            value.tensor_size_in_bytes(),
            (ctypes.c_int64 * len(shape))(*shape),
            len(shape),
            value.element_type(),
            failure,
        ):
            raise failure.error()


class NativeCalls:
    """Calls of the native operators of a segment, which compute on its bound tensors what its session would.

    Args:
        session: The session of the segment, all of whose operators are native ones.
        binding: Its tensors, on which the session is run once to record the calls.
        count: The number of its operators.

    Attributes:
        function: The function that carries them out.

    Raises:
        NativeError: onnxruntime refuses the binding.
        ValueError: Some of the operators cannot be called: their inputs may change how they run.
    """

    def __init__(self, session: NativeSession, binding: NativeBinding, count: int) -> None:
        operators, failure = operators_library(), _Failure()
        assert operators is not None  # noqa: S101 - the session has its operators
        begin, end, self.function = (
            ctypes.cast(function, ctypes.c_void_p)
            for function in (operators.chrion_begin_recording, operators.chrion_end_recording, operators.chrion_call)
        )
        calls = ctypes.c_void_p()
        ran = _loaded().chrion_record_session(
            session.resource.pointer, binding.resource.pointer, begin, end, count, failure, calls
        )
        pointer = calls.value
        resource = _Resource(pointer or 0, operators.chrion_free_calls, session.resource, binding.resource)
        if not ran:
            raise failure.error()
        if not pointer:
            raise ValueError("the operators of the segment cannot be called")
        self.resource = resource
        _finalise(self, resource)


class NativeProgram:
    """The steps of each lane, which any number of lanes can carry out.

    Args:
        steps: The steps of each lane, as triples (kind, first argument, second argument) of ``lanes.c``. Steps refer to
            lanes by their indices in this sequence.
    """

    def __init__(self, steps: Sequence[Sequence[tuple[int, int, int]]]) -> None:
        self.steps = [(_Step * len(lane))(*(_Step(*step) for step in lane)) for lane in steps]


class NativeLanes:
    """The native lanes of one program: a thread for each lane except the first, which runs on the caller's thread.

    Args:
        program: The program.
        cores: The logical CPU of each lane; None for a lane that is not pinned.

    Attributes:
        moved: Whether a lane may no longer use its core, as the last request has found.

    Raises:
        RuntimeError: The system cannot create the threads.
    """

    def __init__(self, program: NativeProgram, cores: Sequence[int | None]) -> None:
        self._library, process = _loaded(), os.getpid()
        self._program = program
        self.moved = False
        parts = (_Part * len(program.steps))()
        for part, lane, core in zip(parts, program.steps, cores, strict=True):
            part.steps, part.count, part.core = lane, len(lane), -1 if core is None else core
        #: The address of the lanes; None if they are closed.
        self._pointer: int | None = self._library.chrion_start(
            len(parts), parts, _SPIN_US, IDLE_SPIN_US, _PRESSURE_LIMIT
        )
        if self._pointer is None:
            raise RuntimeError("cannot create the threads of lanes")
        self._stop_arguments = self._library, self._pointer, program.steps, process
        self._finaliser = weakref.finalize(self, _stop, *self._stop_arguments)
        self._finaliser.atexit = False

    def close(self, until: float | None = None) -> None:
        """Stop the lanes after all requests that were submitted; further calls do nothing.

        Args:
            until: The time at which to stop waiting for their threads, in seconds of ``time.monotonic``; no limit if
                None.
        """
        self._pointer = None
        if self._finaliser.detach():
            _stop(*self._stop_arguments, None if until is None else max(0.0, until - time.monotonic()))

    def run(self, frame: NativeFrame, times: Any = None, options: NativeRunOptions | None = None) -> None:
        """Serve a request on a frame, which must not serve another one at the same time.

        Args:
            frame: A frame of the same program.
            times: A float64 array of [segments, 2] that receives the start and the end of each segment, in us of the
                monotonic clock; None to record no times.
            options: Options with which the request can be terminated; None if it cannot.

        Raises:
            RuntimeError: The lanes are closed.
            ValueError: The frame belongs to another program.
            NativeError: A segment failed.
        """
        lanes = self._pointer
        if lanes is None:
            raise RuntimeError("the lanes are closed")
        if frame.program is not self._program:
            raise ValueError("the frame belongs to another program")
        result = self._library.chrion_run(
            lanes,
            frame.pointer,
            None if options is None else options.pointer,
            None if times is None else times.ctypes.data,
            frame.failure,
        )
        if result == _FAILED:
            raise frame.failure.error()
        if result == _MOVED:
            self.moved = True


class NativeFrame:
    """The state of one request on native lanes.

    Args:
        program: The program.
        sessions: The session of each segment.
        bindings: The binding of each segment.
        calls: The calls that take the place of the sessions of some segments.

    Attributes:
        program: The program.
        failure: The error of the last request, if it failed.

    Raises:
        MemoryError: The frame cannot be allocated.
    """

    def __init__(
        self,
        program: NativeProgram,
        sessions: Sequence[NativeSession],
        bindings: Sequence[NativeBinding],
        calls: Mapping[int, NativeCalls] | None = None,
    ) -> None:
        library, calls = _loaded(), calls or {}
        self.program = program
        self.failure = _Failure()
        used = [[o.resource for o in given] for given in (sessions, bindings)]
        pointers = [(ctypes.c_void_p * len(given))(*(resource.pointer for resource in given)) for given in used]
        listed = (ctypes.c_void_p * len(sessions))()
        for segment, recorded in calls.items():
            listed[segment] = recorded.resource.pointer
        function = next((recorded.function for recorded in calls.values()), None)
        self.pointer = library.chrion_frame(len(program.steps), len(sessions), *pointers, listed, function)
        if not self.pointer:
            raise MemoryError("cannot allocate a frame")
        recordings = (recorded.resource for recorded in calls.values())
        _finalise(self, _Resource(self.pointer, library.chrion_free_frame, *used[0], *used[1], *recordings))


class NativeRunOptions:
    """Options with which another thread terminates a request on native lanes.

    Raises:
        MemoryError: They cannot be allocated.
    """

    def __init__(self) -> None:
        self._library = library = _loaded()
        self.pointer = library.chrion_options()
        if not self.pointer:
            raise MemoryError("cannot allocate run options")
        self._resource = _Resource(self.pointer, library.chrion_free_options)

    def terminate(self) -> None:
        """End the request at the next operators of its lanes, or as soon as it begins."""
        self._library.chrion_terminate(self.pointer)


def _stop(library: ctypes.CDLL, pointer: int, steps: object, process: int, seconds: float | None = None) -> None:
    """Stop lanes, whose threads read ``steps`` until then; do nothing in a forked child, which has no such threads."""
    if os.getpid() == process and not library.chrion_stop(pointer, _NO_LIMIT_S if seconds is None else seconds):
        _STEPS_IN_USE.append(steps)  # a lane that has not finished still reads them


#: The steps of lanes that did not stop in time.
_STEPS_IN_USE: list[object] = []
