"""The niceness of threads: on Linux, each thread has its own, and those of a lower one get more of the cores' time."""

from __future__ import annotations

import os
import sys
import threading

#: The highest niceness that the system knows.
MAX_NICENESS = 19


def has_thread_niceness() -> bool:
    """Return whether threads of this system have a niceness of their own."""
    return sys.platform == "linux"


def raise_niceness(steps: int) -> None:
    """Raise the niceness of the calling thread, which needs no privilege; it cannot be lowered again without one."""
    if steps and has_thread_niceness():
        thread = threading.get_native_id()
        level = os.getpriority(os.PRIO_PROCESS, thread) + steps
        os.setpriority(os.PRIO_PROCESS, thread, min(MAX_NICENESS, level))
