"""GPU memory as the driver counts it (NVML), including a process's context and libraries.

The figures of onnxruntime's arenas do not include the context. NVML comes with the driver; its Python package is an
extra (``pip install 'chrion[nvml]'``). If either is missing, functions return None or an empty result and do not raise.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from chrion.common.imports import import_late

#: The time between two readings during a run; a reading takes some tenths of a millisecond.
_INTERVAL_S = 0.001


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of the machine."""

    name: str
    #: Total memory, and memory in use by any process.
    memory_mb: float
    used_mb: float


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that NVML lists; empty without NVML."""
    listed = []
    for nvml, handle in _handles():
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        name = nvml.nvmlDeviceGetName(handle)
        text = name.decode() if isinstance(name, bytes) else str(name)
        listed.append(Gpu(text, memory.total / 1e6, memory.used / 1e6))
    return tuple(listed)


def used_mb(pid: int | None = None) -> float | None:
    """Return the GPU memory in use by a process, in MB, summed over all GPUs.

    Use the difference of two readings. If the driver numbers processes differently, as it does in a container, the
    result is the memory of all processes. In a container, a process without GPU memory cannot be distinguished from a
    process that the driver does not list, so its first reading may include the memory of other processes.

    Args:
        pid: The process; this process if None.

    Returns:
        Megabytes, or None without NVML.
    """
    pid = os.getpid() if pid is None else pid
    handles = list(_handles())
    if not handles:
        return None
    own = [mb for nvml, handle in handles if (mb := _process_mb(nvml, handle, pid)) is not None]
    if own:
        return sum(own)
    return 0.0 if _shows_processes() else sum(gpu.used_mb for gpu in gpus())


class MemoryMonitor:
    """The growth of this process's GPU memory since the monitor was created."""

    def __init__(self) -> None:
        self._before = used_mb()
        self._peak = self._before

    def growth_mb(self) -> float | None:
        """Return the present growth in MB, or None without NVML."""
        return self._growth(self._read())

    def peak_mb(self) -> float | None:
        """Return the largest growth of all readings in MB, or None without NVML."""
        self._read()
        return self._growth(self._peak)

    @contextlib.contextmanager
    def sampled(self) -> Iterator[None]:
        """Read continually in a thread during the context, to find the peak of memory that a run holds temporarily."""
        if self._before is None:
            yield
            return
        stop = threading.Event()
        thread = threading.Thread(target=self._sample, args=(stop,), name="chrion-nvml", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _sample(self, stop: threading.Event) -> None:
        while not stop.wait(_INTERVAL_S):
            self._read()

    def _read(self) -> float | None:
        now = used_mb()
        if now is not None and self._peak is not None:
            self._peak = max(self._peak, now)
        return now

    def _growth(self, mb: float | None) -> float | None:
        return None if mb is None or self._before is None else mb - self._before


def _handles() -> Iterator[tuple[Any, Any]]:
    """Yield NVML together with the handle of each GPU."""
    nvml = _library()
    if nvml is None:
        return
    with contextlib.suppress(nvml.NVMLError):
        for at in range(nvml.nvmlDeviceGetCount()):
            yield nvml, nvml.nvmlDeviceGetHandleByIndex(at)


def _process_mb(nvml: Any, handle: Any, pid: int) -> float | None:
    """Return the memory of a process on one GPU, or None if the process or its memory is not listed."""
    with contextlib.suppress(nvml.NVMLError):
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == pid and process.usedGpuMemory is not None:
                return float(process.usedGpuMemory) / 1e6
    return None


def _shows_processes() -> bool:
    """Return whether this process is in the machine's initial PID namespace, whose numbers the driver uses."""
    try:
        # The inode of the initial namespace is a constant of Linux (PROC_PID_INIT_INO).
        return os.stat("/proc/self/ns/pid").st_ino == 0xEFFFFFFC  # noqa: PTH116 - not an ordinary file
    except OSError:
        return True


@lru_cache
def _library() -> Any:
    """Return the initialised NVML module, or None if it is not installed or cannot be initialised."""
    try:
        pynvml = import_late("pynvml")  # an optional dependency
        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - not installed, or no driver
        return None
    return pynvml
