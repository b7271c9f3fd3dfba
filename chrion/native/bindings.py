"""What ``lanes.c`` offers, as objects: sessions, bindings, frames and lanes that are let go of by themselves."""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime as ort

_PATH = Path(__file__).with_name("liblanes.so")
#: For so long a lane spins before it parks, in us, for another lane as for the next request: between two requests that
#: follow at once, a lane that is done early has nothing to do for half of that.
_PATIENCE_US = 800.0
#: How long lanes may take to end, if nobody says.
_EVER_S = 1e8

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


class NativeSession:
    """A session that lanes run without the interpreter.

    Args:
        model: A serialised model.
        options: Its options. They get to know the library, so they are best not used for anything else.

    Raises:
        NativeError: Onnxruntime does not make a session of it.
    """

    def __init__(self, model: bytes, options: ort.SessionOptions) -> None:
        library, failure = _loaded(), _Failure()
        options.register_custom_ops_library(str(_PATH))
        self.handle = library.chrion_open(model, len(model), failure)
        if not self.handle:
            raise failure.error()
        weakref.finalize(self, library.chrion_close, self.handle).atexit = False


class NativeBinding:
    """What is bound to a session's inputs and outputs."""

    def __init__(self, session: NativeSession) -> None:
        self._library, failure = _loaded(), _Failure()
        self._session = session  # which has to stay
        self.handle = self._library.chrion_binding(session.handle, failure)
        if not self.handle:
            raise failure.error()
        weakref.finalize(self, self._library.chrion_unbind, self.handle).atexit = False

    def bind(self, name: str, value: ort.OrtValue, *, output: bool) -> None:
        """Bind a tensor in the host's memory, which has to stay.

        Args:
            name: Of the input or output.
            value: The tensor.
            output: Whether it is an output.

        Raises:
            NativeError: Onnxruntime refuses it.
        """
        shape, failure = value.shape(), _Failure()
        if not self._library.chrion_bind(
            self.handle,
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
    """Lanes for one program, with a thread for each but the first.

    Args:
        steps: What each lane does: (kind, first, second), see ``lanes.c``; lanes are named by their place here.
        cores: The logical CPU of each lane; None where it has none of its own.
    """

    def __init__(self, steps: Sequence[Sequence[tuple[int, int, int]]], cores: Sequence[int | None]) -> None:
        self._library, self._process = _loaded(), os.getpid()
        self._steps = [(_Step * len(mine))(*(_Step(*step) for step in mine)) for mine in steps]
        parts = (_Part * len(steps))()
        for part, mine, core in zip(parts, self._steps, cores, strict=True):
            part.steps, part.count, part.core = mine, len(mine), -1 if core is None else core
        self.handle = self._library.chrion_start(len(parts), parts, _PATIENCE_US)
        if not self.handle:
            raise RuntimeError("the system gives no threads for lanes")
        self._stop = weakref.finalize(self, _stop, self._library, self.handle, self._steps, self._process)
        self._stop.atexit = False

    def close(self, seconds: float | None = None) -> None:
        """Stop them, when what they do has ended; wait no longer than that. May be called twice."""
        if self._stop.detach():
            _stop(self._library, self.handle, self._steps, self._process, seconds)

    def run(self, frame: NativeFrame, times: Any = None) -> None:
        """Serve a request on a frame, which serves no other meanwhile.

        Args:
            frame: Of this program.
            times: Array of float64, [segments, 2]: filled with when each began and ended, in us of the monotonic
                clock.

        Raises:
            NativeError: A segment failed.
        """
        failure = frame.failure
        pointer = None if times is None else times.ctypes.data
        if not self._library.chrion_run(self.handle, frame.handle, pointer, failure):
            raise failure.error()


class NativeFrame:
    """What one request works on: a binding for each segment, in their order."""

    def __init__(
        self, lanes: NativeLanes, sessions: Sequence[NativeSession], bindings: Sequence[NativeBinding]
    ) -> None:
        library = _loaded()
        self._kept = (lanes, tuple(sessions), tuple(bindings))
        self.failure = _Failure()
        handles = [(ctypes.c_void_p * len(given))(*(o.handle for o in given)) for given in (sessions, bindings)]
        self.handle = library.chrion_frame(lanes.handle, len(sessions), *handles)
        if not self.handle:
            raise MemoryError("no memory for a frame")
        weakref.finalize(self, library.chrion_free_frame, self.handle).atexit = False


def _stop(library: ctypes.CDLL, handle: int, steps: object, process: int, seconds: float | None = None) -> None:
    """Stop lanes; ``steps`` is what they read until then."""
    if os.getpid() == process and not library.chrion_stop(handle, _EVER_S if seconds is None else seconds):
        _LEFT.append(steps)  # a lane that has not ended reads them still


_LEFT: list[object] = []
