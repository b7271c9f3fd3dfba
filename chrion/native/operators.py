"""The operators of ``operators.c``: ``Linear``, ``PooledAttention``, ``Recurrent`` and ``SiluAndMul``."""

from __future__ import annotations

import ctypes
import functools

import onnxruntime as ort

from chrion.native.library import load_library, path_of

_NAME = "operators"


@functools.cache
def operators_library() -> ctypes.CDLL | None:
    """Return the library of the operators; None if they were not compiled when Chrion was installed."""
    library = load_library(_NAME, "native operators")
    if library is not None:
        library.chrion_free_calls.argtypes = (ctypes.c_void_p,)
    return library


def operators_available() -> bool:
    """Return whether the operators were compiled when Chrion was installed."""
    return operators_library() is not None


@functools.cache
def bfloat16_available() -> bool:
    """Return whether the operators are available and this processor multiplies bfloat16."""
    library = operators_library()
    return library is not None and bool(library.chrion_has_bfloat16())


def register_operators(options: ort.SessionOptions) -> None:
    """Let a session have the operators, which must be available."""
    options.register_custom_ops_library(str(path_of(_NAME)))
