"""The memory arena that sessions of a process share: those of a server on the CPU, and those of blocks.

Sessions with arenas of their own keep the memory of the largest request that each has had, for as long as they are
open. One arena for all of them has a limit, which also holds for outputs and intermediate values whose shapes no one
knows before a run, and returns what is free when it is swept. Sweeping every second costs no run anything. The
alternatives, for runs of 1 x 64 numbers (CPU time; larger models show no difference): 9 us with an arena for each
session, 8 us with this one, 10 to 11 us if it is shrunk after each run, which also keeps what outputs take, and 8 us
without an arena, which has no limit. A block finds memory in it that is still in the caches: with an arena for each
block, a chain of GoogLeNet takes 1.065 of the time of the whole model, with this one 1.045; SqueezeNet in blocks of
2 ms 1.13 and 1.08.

onnxruntime has one such arena in a process, and a session keeps the one that it was opened with. The arena that was
made last is that of all sessions opened later, until it is closed. Without one, the first such session makes an arena
that has no limit.
"""

from __future__ import annotations

import re
import threading

import numpy as np
import onnxruntime as ort

from chrion.devices import CPU_PROVIDER
from chrion.devices.small_models import smallest_session
from chrion.machine.allocator import trim

_MISSING = re.compile(r"Available memory of \d+ is smaller than requested bytes of (\d+)")
#: The first region of an arena is never returned, so that it has to be small: it holds the values of the model of one
#: number.
_FIRST_BYTES = 1 << 16
_AS_REQUESTED = 1  # onnxruntime's kSameAsRequested; by default, regions double in size


#: The arena of sessions that are opened now, if there is one, and the lock of its replacement.
_current: SharedArena | None = None
_lock = threading.RLock()


class SharedArena:
    """The arena of the sessions that are opened from now on.

    Args:
        limit: Its maximum size in bytes, weights of sessions included; 0 for none.
    """

    def __init__(self, limit: int = 0) -> None:
        global _current  # noqa: PLW0603 - onnxruntime has one such arena in a process
        self.limit = limit
        kinds = ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
        settings = {
            "max_mem": limit,  # 0 for none
            "arena_extend_strategy": _AS_REQUESTED,
            "initial_chunk_size_bytes": _FIRST_BYTES,
        }
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        with _lock:
            ort.create_and_register_allocator(ort.OrtMemoryInfo("Cpu", *kinds), ort.OrtArenaCfg(settings))
            _current = self
            use_shared_arena(options)
            self._session = smallest_session(CPU_PROVIDER, options)
        self.sweep()

    def sweep(self) -> None:
        """Return the memory that no run and no session uses."""
        options = ort.RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        self._session.run(None, {"x": np.zeros(1, np.float32)}, options)
        trim()

    def close(self) -> None:
        """Leave the arena to the sessions that have it: those that are opened from now on get another one."""
        global _current  # noqa: PLW0603 - as above
        with _lock:
            if _current is self:
                _current = None


def use_shared_arena(options: ort.SessionOptions) -> None:
    """Let a session use the arena, for its weights directly, so that they leave no gaps in it."""
    with _lock:
        if _current is None:
            SharedArena()
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")


def sweep_shared_arena() -> None:
    """Return the memory of the arena that no run and no session uses, if there is one."""
    arena = _current
    if arena is not None:
        arena.sweep()


def missing_bytes(error: BaseException) -> int | None:
    """Return the size of the value for which the arena had no memory left; None for another error."""
    match = _MISSING.search(str(error))
    return int(match[1]) if match else None
