"""The number of threads of plain sessions in a process that may not use all cores of the machine.

By default onnxruntime starts a thread for each physical core of the machine, whatever the affinity and the quotas of
the process allow. Threads beyond these share cores and spin; under a quota they use it up, and then the whole process
is suspended for the rest of each period.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import onnxruntime as ort
import psutil

from chrion.machine.cores import physical_cores

#: Names the cores of threads, one for each thread; such options determine the number of threads.
_AFFINITIES = "session.intra_op_thread_affinities"
#: Numbers of sessions that are being created with changed options, by the identity of the options; and their lock.
_changed: dict[int, int] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def limited_threads(
    options: ort.SessionOptions | None, cores: int | None = None
) -> Iterator[ort.SessionOptions | None]:
    """Limit the threads of sessions that are created meanwhile to the cores that the process or the session may use.

    Session options cannot be copied in full, so the given ones are changed for that time. Options that give a number of
    threads, or their cores, are left as they are.

    Args:
        options: The caller's session options, or None.
        cores: The limit of the session; None for all cores that the process may use.

    Yields:
        The options for the session: the given ones, or new ones if there is a limit and none were given.
    """
    count = _limit(cores)
    if count is None or not _is_default(options):
        yield options
    elif options is None:
        own = ort.SessionOptions()
        own.intra_op_num_threads = count
        yield own
    else:
        with _lock:
            _changed[id(options)] = _changed.get(id(options), 0) + 1
            options.intra_op_num_threads = count
        try:
            yield options
        finally:
            with _lock:
                _changed[id(options)] -= 1
                if not _changed[id(options)]:
                    del _changed[id(options)]
                    options.intra_op_num_threads = 0


def given_threads(options: ort.SessionOptions) -> int:
    """Return the number of threads that the caller's options give, whether they are changed at present or not."""
    with _lock:
        return 0 if id(options) in _changed else int(options.intra_op_num_threads)


def thread_count(options: ort.SessionOptions | None, cores: int | None = None) -> int:
    """Return the number of threads of a plain session with the caller's options and limit, or of an open session."""
    return (0 if options is None else given_threads(options)) or _usable(cores)


def _usable(cores: int | None) -> int:
    usable = len(physical_cores())
    return usable if cores is None else min(cores, usable)


def _limit(cores: int | None) -> int | None:
    """Return the number of cores that a session may use, or None if it may use all cores of the machine."""
    usable = _usable(cores)
    return usable if usable < (psutil.cpu_count(logical=False) or 1) else None


def _is_default(options: ort.SessionOptions | None) -> bool:
    """Return whether onnxruntime chooses the number of threads."""
    if not isinstance(options, ort.SessionOptions):
        return options is None  # otherwise InferenceSession raises its error
    try:
        cores = options.get_session_config_entry(_AFFINITIES)
    except RuntimeError:  # there is no such entry
        cores = ""
    return not cores and given_threads(options) == 0
