"""What becomes of sessions when their process forks or exits.

A forked child has the memory of every session and none of its threads: a session that has lanes would wait for them
forever. So the child tells each, once, and it refuses to run; that costs a run nothing.

A process that exits kills daemon threads where they next ask for the interpreter lock; inside of onnxruntime that
aborts the process. So what is in flight may end first, for a limited time, and nothing new begins.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from typing import Protocol

#: For so long an exiting process waits for requests in flight, all of them together.
EXIT_LIMIT_S = 5.0


class Resident(Protocol):
    """Something that threads belong to."""

    def after_fork(self) -> None:
        """Called in a forked child, where those threads are gone and locks may be held for good."""

    def at_exit(self, until: float) -> None:
        """Called when the process exits: begin nothing more, and end by ``time.monotonic() == until``."""


_residents: weakref.WeakSet[Resident] = weakref.WeakSet()


def register(resident: Resident) -> None:
    """Have a resident told of forks and of the end, as long as it lives."""
    _residents.add(resident)


def _tell_child() -> None:
    for resident in tuple(_residents):
        resident.after_fork()


@atexit.register
def _tell_end() -> None:
    until = time.monotonic() + EXIT_LIMIT_S
    for resident in tuple(_residents):
        resident.at_exit(until)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tell_child)
