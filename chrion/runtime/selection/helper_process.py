"""Processes that help a session: this interpreter runs a function of the package, which answers on standard output."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TextIO

#: Interval at which a process checks that its parent still exists, in seconds: it costs one system call.
_CHECK_S = 1.0


def command(program: str) -> list[str]:
    """Return the command line that runs a program in Python; without modules from the working directory."""
    return [sys.executable, "-P", "-c", program]


def environment() -> dict[str, str]:
    """Return the environment in which the process imports the same modules."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}


def open_replies() -> TextIO:
    """Return the stream for answers, as which libraries cannot print; exit when the parent process has ended."""
    threading.Thread(target=_exit_with, args=(os.getppid(),), daemon=True).start()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _exit_with(parent: int) -> None:
    """Exit when the parent process has ended: the system then assigns another parent to this process."""
    while os.getppid() == parent:
        time.sleep(_CHECK_S)
    os._exit(1)
