"""What the GPUs of one server share: CPU cores, the link, and host memory before a disk.

- Cores go to the ready batches at the heads of the GPUs' queues. The batch of the highest priority that entered its
  queue first is considered first; if its slot is free and its cores are not, no other batch that needs cores starts.
- The link carries one load at a time. Each GPU proposes the first of its waiting loads; of the proposals for which
  there is memory, or for which it can be made, the first in the load order is carried out.
- Host memory holds weights that were loaded before. A load of others first reads them from the disk, while it occupies
  the link, and evicts the weights that no GPU of the server uses and that have been idle longest, then those in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from chrion.serving.simulator.ready_queue import ReadyQueue
from chrion.serving.simulator.settings import ServerSpec


class HostedGpu(Protocol):
    """A GPU of a host, as :class:`chrion.serving.simulator.general_server.GeneralServer` is one."""

    index: int
    ready: ReadyQueue
    free_slots: int
    cold: dict[int, Any]

    @property
    def outstanding(self) -> int:
        """Requests on the GPU, waiting or running."""

    def head_needs(self) -> tuple[int, int]:
        """Return the slots and cores of the head of its queue."""

    def start_head(self, now: float) -> None:
        """Start the head of its queue."""

    def first_cold(self) -> tuple[tuple[int, float], int, Any, int]:
        """Return the model to load first: its place in the order, the GPU's index, the GPU, and the model."""

    def start_load(self, now: float, model: int) -> bool:
        """Start a load if the memory has room for it, and return whether it has."""

    def last_use_ms(self, model: int) -> float:
        """Return the time of the last use of a model; infinity while it is used, -1 if it never was."""


Gpu = TypeVar("Gpu", bound=HostedGpu)


class Host(Generic[Gpu]):
    """The shared state of the GPUs of one server.

    Args:
        index: The server's number.
        spec: Its resources.
        weights_mb: Weights by model, which host memory holds.
    """

    def __init__(self, index: int, spec: ServerSpec, weights_mb: Sequence[float]) -> None:
        self.index = index
        self.spec = spec
        self.gpus: list[Gpu] = []
        self.free_cores = spec.cpu_cores
        #: The GPU that is being loaded.
        self.loading: Gpu | None = None
        #: True if requests are sent to this server.
        self.available = True
        #: True if it is powered on; it may be unavailable because it starts, fails or drains.
        self.on = True
        #: The time at which it was switched on, and the time for which it was on before.
        self.on_since_ms = 0.0
        self.on_ms = 0.0
        self.disk_loads = 0
        #: Bytes of the weights in host memory, by model.
        self.held: dict[int, int] = {}
        self._weights_mb = weights_mb
        self._room_bytes = round(spec.host_memory_gb * 1e9)

    @property
    def outstanding(self) -> int:
        """Requests on the server, waiting or running."""
        return sum(gpu.outstanding for gpu in self.gpus)

    def start_ready(self, now: float) -> None:
        """Start batches at the heads of the queues while their slots and cores are free."""
        while gpu := self._next_gpu():
            gpu.start_head(now)

    def _next_gpu(self) -> Gpu | None:
        """Return the GPU whose head can start now and comes first."""
        heads = sorted((gpu.ready.head[:2], gpu.index, gpu) for gpu in self.gpus if gpu.ready)
        awaited = False
        for _, _, gpu in heads:
            slots, cores = gpu.head_needs()
            if slots > gpu.free_slots or (cores and awaited):
                continue
            if cores <= self.free_cores:
                return gpu
            awaited = True
        return None

    def load_next(self, now: float) -> None:
        """Start the next load if the link is free and a load has memory."""
        if self.loading is not None:
            return
        for _, _, gpu, model in sorted(gpu.first_cold() for gpu in self.gpus if gpu.cold):
            if gpu.start_load(now, model):
                return

    def disk_ms(self, model: int, load_mb: float) -> float:
        """Return the time of the disk in a load: zero if the weights are in host memory."""
        if not self._room_bytes or model in self.held:
            return 0.0
        return self.spec.disk_fixed_ms + load_mb / self.spec.disk_gb_per_s

    def fetch(self, model: int) -> None:
        """Put a model that is loaded into host memory, if it fits there; others leave until it does."""
        if not self._room_bytes or model in self.held:
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
        for model in models:
            size = round(self._weights_mb[model] * 1e6)
            if model not in self.held and 0 < size <= free:
                self.held[model] = size
                free -= size

    def _last_use_ms(self, model: int) -> float:
        return max(gpu.last_use_ms(model) for gpu in self.gpus)
