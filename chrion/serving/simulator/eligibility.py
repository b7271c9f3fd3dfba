"""Which servers can serve which models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chrion.serving.simulator.settings import ServerSpec
from chrion.serving.variants import Variant


class Eligibility:
    """The resources of servers, compared with the needs of models.

    Args:
        servers: One entry for each GPU: its memory and slots, and the cores of its server.
    """

    def __init__(self, servers: Sequence[ServerSpec]) -> None:
        self._bytes = np.array([spec.budget_bytes for spec in servers])
        self._cores = np.array([spec.cpu_cores for spec in servers])
        self._slots = np.array([spec.gpu_slots for spec in servers])
        self._known: dict[tuple[int, int, bool], Sequence[int]] = {}
        #: Equal results are one object.
        self._results: dict[tuple[int, ...], Sequence[int]] = {}

    def of(self, levels: Sequence[Variant]) -> Sequence[int]:
        """Return the indices of the servers that can serve a model, in ascending order.

        Args:
            levels: The model's variants, the smallest one last. A server needs memory for the smallest one, and the
                cores and the GPU slot of all of them.
        """
        size, cores = levels[-1].memory_bytes, max(v.cores for v in levels)
        on_gpu = any(v.gpu_busy_ms for v in levels)
        key = size, cores, on_gpu
        if key not in self._known:
            possible = (size <= self._bytes) & (cores <= self._cores) & ((self._slots > 0) | (not on_gpu))
            indices = tuple(np.flatnonzero(possible).tolist())
            every = range(len(possible)) if len(indices) == len(possible) else indices
            self._known[key] = self._results.setdefault(indices, every)
        return self._known[key]


def eligible_by_model(variants: Sequence[Sequence[Variant]], servers: Sequence[ServerSpec]) -> list[Sequence[int]]:
    """Return the eligible servers of each model, given the variants by level and model."""
    eligibility = Eligibility(servers)
    return [eligibility.of(levels) for levels in zip(*variants, strict=True)]
