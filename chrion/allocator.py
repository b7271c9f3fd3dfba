"""Release of freed heap memory to the operating system."""

from __future__ import annotations

import contextlib
import ctypes


def trim() -> None:
    """Return freed memory to the operating system; do nothing if the C library is not glibc.

    glibc keeps the memory that loading, profiling and planning have freed, in fragments between memory in use: 5 to 10
    MB for a small model, which is as much again as its session holds.
    """
    with contextlib.suppress(AttributeError):
        ctypes.pythonapi.malloc_trim(0)
