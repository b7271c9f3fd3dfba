"""The times of variants on GPUs of different speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chrion.serving.variants import Variant


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
