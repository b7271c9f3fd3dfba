"""Code in C: lanes for programs that run on the CPU only (``lanes.c``), and operators (``operators.c``).

The operators are those of decoders and recurrent ones. The libraries are compiled when Chrion is installed, if possible
(on Linux with a C compiler). Without them, lanes are Python threads, which have a longer handoff latency, and models
consist of onnxruntime's operators, of which those of decoders copy the caches; results differ only by rounding.
"""

from chrion.native.bindings import (
    NativeBinding,
    NativeCalls,
    NativeError,
    NativeFrame,
    NativeLanes,
    NativeProgram,
    NativeRunOptions,
    NativeSession,
    available,
)
from chrion.native.operators import bfloat16_available, operators_available, register_operators

__all__ = [
    "NativeBinding",
    "NativeCalls",
    "NativeError",
    "NativeFrame",
    "NativeLanes",
    "NativeProgram",
    "NativeRunOptions",
    "NativeSession",
    "available",
    "bfloat16_available",
    "operators_available",
    "register_operators",
]
