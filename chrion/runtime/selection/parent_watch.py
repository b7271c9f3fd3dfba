"""A thread of helper processes that ends them when their parent process has ended."""

from __future__ import annotations

import os
import threading
import time

#: Interval at which a process checks that its parent still exists, in seconds.
_CHECK_S = 1.0


def exit_with_parent() -> None:
    """Let this process exit when its parent process has ended."""
    threading.Thread(target=_exit_with, args=(os.getppid(),), daemon=True).start()


def _exit_with(parent: int) -> None:
    """Exit when the parent process has ended: the system then assigns another parent to this process."""
    while os.getppid() == parent:
        time.sleep(_CHECK_S)
    os._exit(1)
