"""Lanes in C, for programs that are all on the CPU; see ``lanes.c``.

The library is made when Chrion is installed, where that can be done (Linux, a C compiler). Without it lanes are
threads of the interpreter, which takes longer to hand work over, and everything else is the same.
"""

from chrion.native.bindings import NativeBinding, NativeError, NativeFrame, NativeLanes, NativeSession, available

__all__ = ["NativeBinding", "NativeError", "NativeFrame", "NativeLanes", "NativeSession", "available"]
