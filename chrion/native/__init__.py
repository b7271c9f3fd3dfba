"""Code in C: lanes for programs that run on the CPU only (``lanes.c``), and operators of decoders (``operators.c``).

The libraries are compiled when Chrion is installed, if possible (on Linux with a C compiler). Without them, lanes are
Python threads, which have a longer handoff latency, and decoders consist of onnxruntime's operators, which copy the
caches; results do not change.
"""

from chrion.native.bindings import (
    NativeBinding,
    NativeError,
    NativeFrame,
    NativeLanes,
    NativeProgram,
    NativeRunOptions,
    NativeSession,
    available,
)
from chrion.native.operators import operators_available, register_operators

__all__ = [
    "NativeBinding",
    "NativeError",
    "NativeFrame",
    "NativeLanes",
    "NativeProgram",
    "NativeRunOptions",
    "NativeSession",
    "available",
    "operators_available",
    "register_operators",
]
