"""A lock that Chrion's own threads hold while they import modules, and a process while it forks.

Python does not release the locks of modules in a forked child. If a thread of the parent is importing a module at the
fork, an import of it in the child would wait for that thread, which the child does not have, forever.
"""

from __future__ import annotations

import logging  # noqa: F401 - see below
import os
import threading

importing = threading.RLock()

# A module may log while it is imported. Of two hooks before a fork, that which is registered later runs first: this
# lock is acquired before that of logging.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=importing.acquire, after_in_parent=importing.release, after_in_child=importing.release)
