"""Memory of this process, and the release of freed heap memory to the system, which does nothing without glibc."""

from __future__ import annotations

import contextlib
import ctypes

import psutil

#: Functions of these types run without the GIL, unlike attributes of ``ctypes.pythonapi``: trimming takes milliseconds.
_TRIM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t)
_MALLOPT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int)
#: Parameters of mallopt, and their values in bytes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = (-1, 8 << 20), (-3, 4 << 20)


def trim() -> None:
    """Return freed memory to the operating system.

    glibc keeps the memory that loading, profiling and planning have freed, in fragments between memory in use. For a
    small model the fragments take 5 to 10 MB, about as much as its session.
    """
    with contextlib.suppress(AttributeError):
        _TRIM(("malloc_trim", ctypes.pythonapi))(0)


def return_large_blocks() -> None:
    """Let freed blocks of 4 MB and more return to the operating system at once, for as long as the process runs.

    By default glibc raises this size to 32 MB when a process frees such blocks, and keeps up to 64 MB at the end of
    each thread's heap, which :func:`trim` cannot return: threads that have read large requests hold 25 MB each.
    """
    with contextlib.suppress(AttributeError):
        mallopt = _MALLOPT(("mallopt", ctypes.pythonapi))
        for parameter, size in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            mallopt(parameter, size)


def resident_mb() -> float:
    """Return the resident memory of this process in MB, without memory that can be returned to the system."""
    trim()
    return float(psutil.Process().memory_info().rss / 1e6)
