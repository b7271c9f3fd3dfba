"""Exit codes of the command line.

==== =========================================================================
0    The command succeeded.
1    A failure: wrong outputs, a closed or full standard output, a full disk, no onnxruntime, or a bug (a traceback).
2    Bad input: a usage error, or a file or value that cannot be used.
3    The plan, or the measured latency, misses the SLO or the GPU budget, rates are not sustained, or
     a tuned model is not better than the original.
130  Interrupted with Ctrl-C.
==== =========================================================================
"""

from __future__ import annotations

from chrion.errors import ChrionError, SpaceError

FAILED, BAD_INPUT, OUT_OF_REACH, INTERRUPTED = 1, 2, 3, 130


def exit_code(error: ChrionError) -> int:
    """Return the exit code of a command that an error ends."""
    return FAILED if isinstance(error, SpaceError) else BAD_INPUT
