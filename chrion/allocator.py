"""The C library's allocator: freed memory returned to the system."""

from __future__ import annotations

import contextlib
import ctypes


def trim() -> None:
    """Return freed memory to the system; nothing where the C library is not glibc.

    glibc keeps what loading, profiling and planning have freed, in pieces between what stays: 5 to 10 MB for a small
    model, as much again as its session holds.
    """
    with contextlib.suppress(AttributeError):
        ctypes.pythonapi.malloc_trim(0)
