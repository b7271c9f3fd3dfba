"""Hooks that run when the process of a session forks or exits.

A forked child has the memory of every session but none of its threads: a request would wait for its lanes forever. So a
hook marks each session in the child, which then refuses requests. Requests themselves do not check for forks.

When the interpreter exits, a daemon thread is killed as soon as it asks for the GIL; inside onnxruntime that aborts the
process. So requests in flight, also on plain sessions, may finish first, for a limited time, and no new one starts.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

#: Longest time that an exiting process waits for requests in flight, in seconds, for all sessions together.
EXIT_LIMIT_S = 5.0

#: Time between looks at the requests in flight at the exit, in seconds.
_POLL_S = 0.001

#: One entry for each request in flight in this process. Appending and removing are atomic.
in_flight: deque[None] = deque()

T = TypeVar("T")

#: The hooks of each registered object: (after_fork, at_exit).
_hooks: weakref.WeakKeyDictionary[Any, tuple[Callable[[Any], None], Callable[[Any, float], None]]]
_hooks = weakref.WeakKeyDictionary()


def register(owner: T, after_fork: Callable[[T], None], at_exit: Callable[[T, float], None]) -> None:
    """Register the hooks of an object that owns threads; the registry does not keep the object alive.

    Args:
        owner: The object, which is the first argument of its hooks.
        after_fork: Called in a forked child, where those threads do not exist and any lock may be held forever.
        at_exit: Called when the interpreter exits. It has to refuse new work, and to return by the time of
            ``time.monotonic()`` that is its second argument.
    """
    _hooks[owner] = after_fork, at_exit
    _run_at_exit()


def registered() -> Iterator[tuple[Any, tuple[Callable[[Any], None], Callable[[Any, float], None]]]]:
    """Iterate over the objects and their hooks, while other threads may register further ones."""
    for reference in _hooks.keyrefs():  # a list that is made at once, unlike that of items()
        owner = reference()
        if owner is not None:
            yield owner, _hooks[owner]


def _run_fork_hooks() -> None:
    for owner, (after_fork, _) in registered():
        after_fork(owner)
    in_flight.clear()  # after the hooks, which read it: the requests are those of the parent's threads


@functools.cache
def _run_at_exit() -> None:
    """Run the hooks when the interpreter exits, before the finalisers of objects that exist now, such as threads."""
    weakref.finalize(run_exit_hooks, int)  # the first one: all are called after the hooks, and remove weights in use
    atexit.register(run_exit_hooks)


def run_exit_hooks() -> None:
    """Let all registered objects refuse new work, and wait for requests in flight."""
    until = time.monotonic() + EXIT_LIMIT_S
    for owner, (_, at_exit) in registered():
        at_exit(owner, until)
    while in_flight and time.monotonic() < until:
        time.sleep(_POLL_S)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_run_fork_hooks)
