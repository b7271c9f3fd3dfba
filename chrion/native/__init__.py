"""Code in C: lanes for programs that run on the CPU only (``lanes.c``), and attention of decoders (``attention.c``).

The libraries are compiled when Chrion is installed, if possible (on Linux with a C compiler). Without them, lanes are
Python threads, which have a longer handoff latency, and attention is made of onnxruntime's operators, which copy the
caches; nothing else changes.
"""

from chrion.native.attention import attention_available, register_attention
from chrion.native.bindings import (
    NativeBinding,
    NativeError,
    NativeFrame,
    NativeLanes,
    NativeProgram,
    NativeSession,
    available,
)

__all__ = [
    "NativeBinding",
    "NativeError",
    "NativeFrame",
    "NativeLanes",
    "NativeProgram",
    "NativeSession",
    "attention_available",
    "available",
    "register_attention",
]
