"""GPU memory as the driver counts it, by NVML: everything a process holds, its context and libraries included.

What onnxruntime's arenas say leaves the context out. NVML comes with the driver; its Python package is an extra
(``pip install 'chrion[nvml]'``). Where either is missing, nothing is known, which is None here and never an error.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

#: Between two readings of a run; one takes some tenths of a millisecond.
_INTERVAL_S = 0.001


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of the machine."""

    name: str
    #: All its memory, and what of that is taken by whomever.
    memory_mb: float
    used_mb: float


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that NVML sees; empty without it."""
    found = []
    for nvml, handle in _handles():
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        name = nvml.nvmlDeviceGetName(handle)
        text = name.decode() if isinstance(name, bytes) else str(name)
        found.append(Gpu(text, memory.total / 1e6, memory.used / 1e6))
    return tuple(found)


def used_mb(pid: int | None = None) -> float | None:
    """GPU memory held now, over all GPUs.

    Args:
        pid: The process; this one if missing.

    Returns:
        What the process holds. Where the driver does not show processes by the numbers they have here (in a
        container), what all processes together hold: differences of two readings are meant to be taken. None without
        NVML. A process that holds nothing yet cannot be told from one that is not shown, so the first reading of
        a process is zero only if nobody uses the GPU.
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
    """How much more GPU memory this process holds than when the watch was made."""

    def __init__(self) -> None:
        self._before = used_mb()
        self._peak = self._before

    def growth_mb(self) -> float | None:
        """Growth since then; None without NVML."""
        return self._beyond(self._read())

    def peak_mb(self) -> float | None:
        """The most that was seen of it, now and at all readings before; None without NVML."""
        self._read()
        return self._beyond(self._peak)

    @contextlib.contextmanager
    def sampled(self) -> Iterator[None]:
        """Read again and again meanwhile, by a thread: a run may hold for a moment what it gives back."""
        if self._before is None:
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(target=self._sample, args=(ended,), name="chrion-nvml", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _sample(self, ended: threading.Event) -> None:
        while not ended.wait(_INTERVAL_S):
            self._read()

    def _read(self) -> float | None:
        now = used_mb()
        if now is not None and self._peak is not None:
            self._peak = max(self._peak, now)
        return now

    def _beyond(self, mb: float | None) -> float | None:
        return None if mb is None or self._before is None else mb - self._before


def _handles() -> Iterator[tuple[Any, Any]]:
    """NVML and each of its GPUs."""
    nvml = _library()
    if nvml is None:
        return
    with contextlib.suppress(nvml.NVMLError):
        for at in range(nvml.nvmlDeviceGetCount()):
            yield nvml, nvml.nvmlDeviceGetHandleByIndex(at)


def _process_mb(nvml: Any, handle: Any, pid: int) -> float | None:
    """What a process holds on one GPU; None where it is not listed there, or no figure is given."""
    with contextlib.suppress(nvml.NVMLError):
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == pid and process.usedGpuMemory is not None:
                return float(process.usedGpuMemory) / 1e6
    return None


def _shows_processes() -> bool:
    """Whether the driver numbers processes as this process does: it runs in the machine's own process namespace."""
    try:
        # The machine's first namespace has always had this number.
        return os.stat("/proc/self/ns/pid").st_ino == 0xEFFFFFFC  # noqa: PTH116 - not a file one opens
    except OSError:
        return True


@lru_cache
def _library() -> Any:
    """NVML, started; None where it cannot be."""
    try:
        import pynvml  # noqa: PLC0415 - an extra

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - not installed, or no driver: nothing is known then
        return None
    return pynvml
