"""Release of freed heap memory to the operating system."""

from __future__ import annotations

import contextlib
import ctypes

#: Functions of this type run without the GIL, unlike attributes of ``ctypes.pythonapi``: trimming takes milliseconds.
_PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t)


def trim() -> None:
    """Return freed memory to the operating system; do nothing if the C library is not glibc.

    glibc keeps the memory that loading, profiling and planning have freed, in fragments between memory in use. For a
    small model the fragments take 5 to 10 MB, about as much as its session.
    """
    with contextlib.suppress(AttributeError):
        _PROTOTYPE(("malloc_trim", ctypes.pythonapi))(0)
