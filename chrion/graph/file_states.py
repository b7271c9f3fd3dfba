"""States of files, from which it is known later whether they have changed."""

from __future__ import annotations

import os

#: Device, inode, size in bytes and time of modification in ns.
StatState = tuple[int, int, int, int]


def stat_state(status: os.stat_result) -> StatState:
    """Return the state of a file whose path is known."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
