"""The instructions of the processor that native operators use, chosen by tests."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import onnxruntime as ort
import pytest

from chrion.native import register_operators
from chrion.native.library import path_of

#: The number of the best instructions.
_BEST = 4


@contextlib.contextmanager
def using_instructions(level: int) -> Iterator[int]:
    """Let the native operators use some instructions of the processor; skip the test if it does not have them."""
    choose = ctypes.CDLL(str(path_of("operators"))).chrion_choose
    register_operators(ort.SessionOptions())  # chooses the best ones when it is called first
    try:
        if choose(level) != level:
            pytest.skip("the processor does not have these instructions")
        yield level
    finally:
        choose(_BEST)
