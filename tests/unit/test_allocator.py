"""Return of freed memory to the operating system."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from chrion.allocator import trim

#: A program that frees 80 MB in fragments below one that stays in use, so that glibc does not return them itself.
FRAGMENTS = """
import numpy as np, psutil
from chrion.allocator import trim
rss = psutil.Process().memory_info
pieces = [np.ones(250) for _ in range(40_000)]
last = pieces[-1]
del pieces
before = rss().rss
trim()
print((before - rss().rss) / 1e6)
"""


@pytest.mark.skipif(not hasattr(ctypes.pythonapi, "malloc_trim"), reason="the C library is not glibc")
def test_freed_fragments_are_returned() -> None:
    """Most of 80 MB of freed fragments is returned to the system."""
    command = [sys.executable, "-c", FRAGMENTS]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - this interpreter
    assert float(done.stdout) > 40


def test_other_c_libraries_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``malloc_trim`` the call has no effect and does not raise."""
    library = object()
    monkeypatch.setattr("chrion.allocator.ctypes.pythonapi", library)
    trim()
    assert not hasattr(library, "malloc_trim")
