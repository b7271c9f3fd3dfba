"""What a process leaves behind when it forks: its child has the memory of every session, and none of the threads.

A session that has lanes would wait for them forever there. So the child marks it, once, and it refuses to run; that
costs a run nothing.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """Something that threads belong to."""

    def after_fork(self) -> None:
        """Called in the child, where those threads are gone and locks may be held for good."""


_known: weakref.WeakSet[Forked] = weakref.WeakSet()


def tell_after_fork(thing: Forked) -> None:
    """Have ``thing.after_fork`` called in every child that is forked from now on, as long as it lives."""
    _known.add(thing)


def _tell() -> None:
    for thing in tuple(_known):
        thing.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tell)
