"""Host memory of a server before a disk.

It holds weights that were loaded before. A load of others first reads them from the disk. For them, the weights that no
device of the server uses and that have been idle longest leave host memory, then those in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from math import inf

from chrion.serving.manager.policy_settings import Figures


class HostMemory:
    """The weights in the host memory of a server, and its disk.

    By default, host memory holds the weights of all models: a live server leaves disks to the system.

    Args:
        room_bytes: Its size; 0 if it holds the weights of all models, so that the disk is not read.
        disk_fixed_ms: Fixed time of a load from the disk.
        disk_gb_per_s: Bandwidth of the disk; infinite if the caller adds the time of reading.
        load_mb: Data that a load reads, by level and model; host memory holds that of the first variant.
    """

    def __init__(
        self,
        room_bytes: int = 0,
        disk_fixed_ms: float = 0.0,
        disk_gb_per_s: float = inf,
        load_mb: Sequence[Figures[float]] = (),
    ) -> None:
        #: Bytes of the weights in host memory, by model, in the order in which their uses have ended.
        self.held: dict[int, int] = {}
        self.disk_loads = 0
        self._room_bytes = room_bytes
        self._disk_fixed_ms, self._disk_gb_per_s = disk_fixed_ms, disk_gb_per_s
        self._load_mb = load_mb

    def misses(self, model: int) -> bool:
        """Return whether a load of a model reads the disk."""
        return self._room_bytes > 0 and model not in self.held

    def disk_ms(self, model: int, level: int) -> float:
        """Return the time of the disk in a load of a model's variant: zero if the weights are in host memory."""
        if not self.misses(model):
            return 0.0
        return self._disk_fixed_ms + self._load_mb[level][model] / self._disk_gb_per_s

    def fetch(self, model: int, is_used: Callable[[int], bool]) -> None:
        """Put a model that is read from the disk into host memory, if it fits there; others leave until it does.

        Args:
            model: The model, which is not in host memory.
            is_used: Returns whether a device of the server uses a model.
        """
        self.disk_loads += 1
        size = self._bytes(model)
        if size > self._room_bytes:
            return
        free = self._room_bytes - sum(self.held.values())
        held = [*self.held]
        leaving = chain((one for one in held if not is_used(one)), (one for one in held if one in self.held))
        while free < size:
            free += self.held.pop(next(leaving))
        self.held[model] = size

    def note_use(self, model: int) -> None:
        """Note that the use of a model has ended."""
        if model in self.held:
            self.held[model] = self.held.pop(model)

    def fill(self, models: Sequence[int]) -> None:
        """Put models that no device uses into host memory before the first request, in their order, each if it fits."""
        free = self._room_bytes - sum(self.held.values())
        added = {}
        for model in models if free else ():
            size = self._bytes(model)
            if model not in self.held and 0 < size <= free:
                added[model] = size
                free -= size
        self.held = added | self.held

    def _bytes(self, model: int) -> int:
        return round(self._load_mb[0][model] * 1e6)
