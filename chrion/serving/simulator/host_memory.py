"""Host memory of a server before a disk or a network store.

It holds weights that were loaded before. A load of others first reads them from the disk. For them, the weights that no
device of the server uses and that have been idle longest leave host memory, then those in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class HostMemory:
    """The weights in the host memory of a server, and its disk.

    Args:
        room_bytes: Its size; 0 if it holds the weights of all models, so that the disk is not read.
        disk_fixed_ms: Fixed time of a load from the disk.
        disk_gb_per_s: Bandwidth of the disk.
        weights_mb: Weights by model.
        last_use_ms: Returns the time of a model's last use on the server's devices; infinity while it is used.
    """

    def __init__(
        self,
        room_bytes: int,
        disk_fixed_ms: float,
        disk_gb_per_s: float,
        weights_mb: Sequence[float],
        last_use_ms: Callable[[int], float],
    ) -> None:
        #: Bytes of the weights in host memory, by model.
        self.held: dict[int, int] = {}
        self.disk_loads = 0
        self.has_disk = room_bytes > 0
        self._room_bytes = room_bytes
        self._disk_fixed_ms, self._disk_gb_per_s = disk_fixed_ms, disk_gb_per_s
        self._weights_mb = weights_mb
        self._last_use_ms = last_use_ms

    def disk_ms(self, model: int, load_mb: float) -> float:
        """Return the time of the disk in a load: zero if the weights are in host memory."""
        if not self.has_disk or model in self.held:
            return 0.0
        return self._disk_fixed_ms + load_mb / self._disk_gb_per_s

    def fetch(self, model: int) -> None:
        """Put a model that is read from the disk into host memory, if it fits there; others leave until it does."""
        if model in self.held:
            return
        self.disk_loads += 1
        size = round(self._weights_mb[model] * 1e6)
        if size > self._room_bytes:
            return
        free = self._room_bytes - sum(self.held.values())
        for other in sorted(self.held, key=self._last_use_ms):
            if free >= size:
                break
            free += self.held.pop(other)
        self.held[model] = size

    def fill(self, models: Sequence[int]) -> None:
        """Put models into host memory before the first request, as far as they fit."""
        free = self._room_bytes - sum(self.held.values())
        for model in models if free else ():
            size = round(self._weights_mb[model] * 1e6)
            if model not in self.held and 0 < size <= free:
                self.held[model] = size
                free -= size
