"""Figures of every variant that all servers share, so that a server does not hold a list of all models.

A *kind* identifies a model and one of its variants: ``level * models + model``. Without shrinking there is one level,
and a model's kind is its number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from chrion.serving.manager.queue_estimate import Freed, Resources, Service
from chrion.serving.simulator.metrics import BusyShares
from chrion.serving.simulator.settings import ServerSpec
from chrion.serving.variants import Variant


@dataclass(frozen=True, slots=True, eq=False)
class ServiceTable:
    """What a load and a request of each kind take. Sequences are indexed by kind unless said otherwise."""

    #: By level and model, at least one level; memory does not increase with the level.
    variants: tuple[tuple[Variant, ...], ...]
    #: Data that a load transfers, bytes, and what a request takes, by level and model.
    load_mb: list[list[float]]
    sizes: list[list[int]]
    service: list[list[Service]]

    @property
    def models(self) -> int:
        """The number of models."""
        return len(self.variants[0])

    def load_ms(self, spec: ServerSpec) -> list[list[float]]:
        """Return the time of a load over a server's link by level and model; servers with equal links can share it."""
        return [[v.load_ms(spec.pcie_gb_per_s, spec.load_fixed_ms) for v in row] for row in self.variants]


def busy_shares(tables: Sequence[ServiceTable], classes: Sequence[int]) -> BusyShares:
    """Return the busy shares of all servers.

    Args:
        tables: The table of each class of servers.
        classes: The class of each server.
    """
    flat = [[v for row in table.variants for v in row] for table in tables]
    gpu = np.array([[v.gpu_busy_ms / v.latency_ms for v in row] for row in flat])
    cores = np.array([[sum(v.core_busy_ms) / v.latency_ms for v in row] for row in flat])
    return BusyShares(gpu, cores, np.array(classes, np.int64))


def service_table(variants: Sequence[Sequence[Variant]]) -> ServiceTable:
    """Return the table of variants given by level and model."""
    flat = [v for row in variants for v in row]
    # Copies of a model share their variants.
    known = {id(v): (int(v.gpu_busy_ms > 0), v.cores, v.latency_ms, *releases(v)) for v in flat}
    return ServiceTable(
        variants=tuple(tuple(row) for row in variants),
        load_mb=[[v.load_mb for v in row] for row in variants],
        sizes=[[v.memory_bytes for v in row] for row in variants],
        service=[[known[id(v)] for v in row] for row in variants],
    )


def releases(variant: Variant) -> tuple[tuple[Freed, ...], Resources]:
    """Return the times at which a request releases its GPU slot and its cores.

    Returns:
        The releases before the end, and what is released at the end.
    """
    end_ms = variant.latency_ms * (1 - 1e-9)
    freed: dict[float, list[int]] = {}
    if variant.gpu_busy_ms > 0:
        freed.setdefault(variant.gpu_busy_ms, [0, 0])[0] += 1
    for busy_ms in variant.core_busy_ms:
        freed.setdefault(busy_ms, [0, 0])[1] += 1
    early = tuple((at_ms, (slots, cores)) for at_ms, (slots, cores) in sorted(freed.items()) if at_ms < end_ms)
    late = [pair for at_ms, pair in freed.items() if at_ms >= end_ms]
    return early, (sum(slots for slots, _ in late), sum(cores for _, cores in late))


def scaled(variant: Variant, gpu_speed: float) -> Variant:
    """Return a variant as it runs on a GPU of another speed.

    The GPU busy time is divided by the speed, and the latency changes by as many ms: the GPU's work is taken to be on
    the critical path. The latency is at least the longest busy time of a core.
    """
    if gpu_speed == 1:
        return variant
    gpu_ms = variant.gpu_busy_ms / gpu_speed
    latency_ms = max((variant.latency_ms - variant.gpu_busy_ms + gpu_ms, *variant.core_busy_ms))
    return replace(variant, gpu_busy_ms=gpu_ms, latency_ms=latency_ms)


def scaled_levels(levels: Sequence[Sequence[Variant]], gpu_speed: float) -> list[list[Variant]]:
    """Return all variants by level and model; those that were one object are one object again."""
    known = {id(v): scaled(v, gpu_speed) for row in levels for v in row}
    return [[known[id(v)] for v in row] for row in levels]
