"""Imports on first use in threads that Chrion has started.

Python does not release the locks of modules in a forked child. If a thread of the parent is importing a module at the
fork, an import of it in the child would wait for that thread, which the child does not have, forever. So such a thread
imports by :func:`import_late`, with a lock that a process holds while it forks: what a step of its work needs for the
first time, before that step. Threads of callers import as they like, since they know when they fork.
"""

from __future__ import annotations

import importlib
import logging  # noqa: F401 - see below
import os
import threading
from typing import Any

_lock = threading.RLock()

# A module may log while it is imported. Of two hooks before a fork, that which is registered later runs first: this
# lock is acquired before that of logging.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def import_late(*modules: str) -> Any:
    """Import modules while no other thread forks; return the last one."""
    with _lock:
        return [importlib.import_module(module) for module in modules][-1]
