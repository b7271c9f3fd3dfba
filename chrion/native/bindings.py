"""Python classes for the objects of ``lanes.c``: sessions, bindings, frames and lanes."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

_PATH = Path(__file__).with_name("liblanes.so")
#: For so long a lane spins before it parks, in us, for another lane as for the next request: between two requests that
#: follow at once, a lane that is done early has nothing to do for half of that.
_PATIENCE_US = 800.0
#: A limit on waiting that is never reached.
_NO_LIMIT_S = 1e8

#: What a step does: wait for a lane's count, run a segment, signal a count.
WAIT, RUN, SIGNAL = range(3)


class NativeError(Exception):
    """Onnxruntime refused something, or a segment failed; ``segment`` is its index."""

    def __init__(self, message: str, segment: int) -> None:
        super().__init__(message)
        self.segment = segment


class _Failure(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int32), ("segment", ctypes.c_int32), ("message", ctypes.c_char * 2048))

    def error(self) -> NativeError:
        return NativeError(self.message.decode(errors="replace"), self.segment)


class _Step(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("a", ctypes.c_int32), ("b", ctypes.c_int32))


class _Part(ctypes.Structure):
    _fields_ = (("steps", ctypes.POINTER(_Step)), ("count", ctypes.c_int32), ("core", ctypes.c_int32))


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(_PATH))
    except OSError:
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
        "start": (pointer, ctypes.c_int, ctypes.POINTER(_Part), ctypes.c_double),
        "stop": (ctypes.c_bool, pointer, ctypes.c_double),
        "frame": (pointer, pointer, ctypes.c_int, ctypes.POINTER(pointer), ctypes.POINTER(pointer)),
        "free_frame": (None, pointer),
        "run": (ctypes.c_bool, pointer, pointer, pointer, failure),
    }
    for name, (result, *arguments) in prototypes.items():
        function = getattr(library, f"chrion_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def available() -> bool:
    """Whether the library is there."""
    return _library() is not None


def _loaded() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise RuntimeError(f"{_PATH.name} is missing: Chrion was installed without a C compiler")
    return library


class _Resource:
    """An object of the library, which is released by reference counting after everything that uses it.

    The garbage collector clears the objects of a reference cycle in any order. A resource is part of no cycle: the
    resources that use it refer to it, and the finaliser of its Python object (see :func:`_finalise`). So a binding is
    always released before its session, and a frame before both.

    Args:
        pointer: Address of the object.
        release: Releases it.
        used: Resources that the object uses.
    """

    def __init__(self, pointer: int, release: Callable[[int], object], *used: _Resource) -> None:
        self.pointer = pointer
        self._release = release
        self._used = used

    def __del__(self, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not exiting():  # at exit, a daemon thread may still run the session
            self._release(self.pointer)


def _finalise(owner: object, resource: _Resource) -> None:
    """Keep a resource at least until its owner is collected."""
    weakref.finalize(owner, _drop, resource).atexit = False


def _drop(resource: _Resource) -> None:
    """Do nothing; the caller's reference ends with the call."""


class NativeSession:
    """An onnxruntime session that lanes in C run.

    Args:
        model: A serialised model.
        options: Its options. The library is registered with them, so they should not be used for another session.

    Raises:
        NativeError: Onnxruntime refuses the model or the options.
    """

    def __init__(self, model: bytes, options: ort.SessionOptions) -> None:
        library, failure = _loaded(), _Failure()
        options.register_custom_ops_library(str(_PATH))
        pointer = library.chrion_open(model, len(model), failure)
        if not pointer:
            raise failure.error()
        self.resource = _Resource(pointer, library.chrion_close)
        _finalise(self, self.resource)

    def io_binding(self) -> NativeBinding:
        """Return a new binding of the session's inputs and outputs."""
        return NativeBinding(self)


class NativeBinding:
    """The tensors bound to a session's inputs and outputs, all in the host's memory."""

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
            NativeError: Onnxruntime refuses the name or the tensor.
        """
        self._bind(name, ortvalue, output=False)

    def bind_ortvalue_output(self, name: str, ortvalue: ort.OrtValue) -> None:
        """Bind an output to a tensor, which the caller keeps alive.

        Raises:
            NativeError: Onnxruntime refuses the name or the tensor.
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


class NativeLanes:
    """Lanes in C for one program, with a thread for each but the first.

    Args:
        steps: What each lane does: (kind, first, second), see ``lanes.c``; lanes are numbered by their index here.
        cores: The logical CPU of each lane; None for a lane without a core of its own.

    Raises:
        RuntimeError: The system provides no more threads.
    """

    def __init__(self, steps: Sequence[Sequence[tuple[int, int, int]]], cores: Sequence[int | None]) -> None:
        self._library, process = _loaded(), os.getpid()
        encoded = [(_Step * len(lane))(*(_Step(*step) for step in lane)) for lane in steps]
        parts = (_Part * len(steps))()
        for part, lane, core in zip(parts, encoded, cores, strict=True):
            part.steps, part.count, part.core = lane, len(lane), -1 if core is None else core
        #: Address of the lanes; None once they are closed.
        self._pointer: int | None = self._library.chrion_start(len(parts), parts, _PATIENCE_US)
        if self._pointer is None:
            raise RuntimeError("the system provides no threads for lanes")
        self._stop_arguments = self._library, self._pointer, encoded, process
        self._finaliser = weakref.finalize(self, _stop, *self._stop_arguments)
        self._finaliser.atexit = False

    def close(self, seconds: float | None = None) -> None:
        """Stop the lanes when the requests that they have begun are finished. May be called repeatedly.

        Args:
            seconds: Wait no longer than this.
        """
        self._pointer = None
        if self._finaliser.detach():
            _stop(*self._stop_arguments, seconds)

    @property
    def pointer(self) -> int:
        """Address of the lanes.

        Raises:
            RuntimeError: The lanes are closed.
        """
        if self._pointer is None:
            raise RuntimeError("the lanes are closed")
        return self._pointer

    def run(self, frame: NativeFrame, times: Any = None) -> None:
        """Serve a request on a frame, which serves no other meanwhile.

        Args:
            frame: A frame of these lanes.
            times: Array of float64, [segments, 2]: filled with when each segment began and ended, in us of the
                monotonic clock.

        Raises:
            RuntimeError: The lanes are closed.
            NativeError: A segment failed.
        """
        lanes = self._pointer
        if lanes is None:
            raise RuntimeError("the lanes are closed")
        if frame.lanes is not self:
            raise ValueError("the frame belongs to other lanes")
        pointer = None if times is None else times.ctypes.data
        if not self._library.chrion_run(lanes, frame.pointer, pointer, frame.failure):
            raise frame.failure.error()


class NativeFrame:
    """State of one request in flight on lanes in C.

    Args:
        lanes: The lanes.
        sessions: The session of each segment.
        bindings: The binding of each segment.

    Attributes:
        failure: Where a request that fails leaves its error.
    """

    def __init__(
        self, lanes: NativeLanes, sessions: Sequence[NativeSession], bindings: Sequence[NativeBinding]
    ) -> None:
        library = _loaded()
        self.lanes = lanes
        self.failure = _Failure()
        used = [[o.resource for o in given] for given in (sessions, bindings)]
        pointers = [(ctypes.c_void_p * len(given))(*(resource.pointer for resource in given)) for given in used]
        self.pointer = library.chrion_frame(lanes.pointer, len(sessions), *pointers)
        if not self.pointer:
            raise MemoryError("no memory for a frame")
        _finalise(self, _Resource(self.pointer, library.chrion_free_frame, *used[0], *used[1]))


def _stop(library: ctypes.CDLL, pointer: int, steps: object, process: int, seconds: float | None = None) -> None:
    """Stop lanes, which read ``steps`` until then."""
    if os.getpid() == process and not library.chrion_stop(pointer, _NO_LIMIT_S if seconds is None else seconds):
        _STEPS_IN_USE.append(steps)  # a lane that has not finished still reads them


_STEPS_IN_USE: list[object] = []
