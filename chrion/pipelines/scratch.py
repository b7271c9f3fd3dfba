"""Large arrays: in memory if they are small, else in a temporary file that ends with the array."""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
from typing import Any, BinaryIO

import numpy as np

from chrion.graph.weights_folder import space_for

Array = np.ndarray[Any, Any]
#: The most bytes of an array in memory.
MOST_IN_MEMORY = 1 << 28


def allocate(shape: tuple[int, ...], dtype: Any, where: str) -> Array:
    """Return an array of zeros. The space of its file is taken at once: a write to a mapped file could not fail.

    Args:
        shape: The shape.
        dtype: The type.
        where: What the array is of, for the message.

    Raises:
        SpaceError: The folder of temporary files lacks the space.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size <= MOST_IN_MEMORY:
        return np.zeros(shape, dtype)
    with space_for(size, where, "tables of rows"), tempfile.TemporaryFile(prefix="chrion-rows-") as file:
        _reserve(file, size)
        return np.memmap(file, dtype, "r+", shape=shape)  # the file lasts as long as it is mapped


def _reserve(file: BinaryIO, size: int) -> None:
    """Take the space of a file.

    Raises:
        OSError: There is none.
    """
    if shutil.disk_usage(tempfile.gettempdir()).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:  # file systems that cannot
                raise
    file.truncate(size)
