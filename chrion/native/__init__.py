"""Native lanes (in C), for programs that run on the CPU only; see ``lanes.c``.

The library is compiled when Chrion is installed, if possible (on Linux with a C compiler). Without it, lanes are Python
threads, which have a longer handoff latency; nothing else changes.
"""

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
    "available",
]
