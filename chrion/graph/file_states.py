"""States of files, from which it is known later whether they have changed."""

from __future__ import annotations

import os
from pathlib import Path

#: Device, inode, size in bytes and time of modification in ns.
StatState = tuple[int, int, int, int]
#: Absolute path, size in bytes and time of modification in ns.
FileState = tuple[str, int, int]


def stat_state(status: os.stat_result) -> StatState:
    """Return the state of a file whose path is known."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def file_state(path: str | Path) -> FileState | None:
    """Return the state of a file as decisions store it; None if it cannot be read."""
    try:
        _, _, size, modified_ns = stat_state(os.stat(path))  # noqa: PTH116 - often a string
    except (OSError, ValueError):  # a damaged cache file may hold a null byte
        return None
    return os.path.abspath(path), size, modified_ns  # noqa: PTH100 - links stay as they are
