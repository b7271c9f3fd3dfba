"""Measurement of weight reload: the time to read weights that a core's private cache no longer holds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import numpy as np

from chrion.devices import CPU_PROVIDER
from chrion.devices.small_models import product_session
from chrion.machine.cores import run_on_cores

#: The number of matrix products that run in turn, each with its own weights of half the cache size: before its turn
#: comes again, the others have replaced its weights.
_PRODUCTS = 12
#: Rows of a product: few, so that reading its weights takes a large part of its time; and rounds over all products, of
#: which the first one is a warm-up.
_ROWS = 16
_ROUNDS = 8


def measure_reload_ms_per_byte(cores: Sequence[int], cache_bytes: int) -> float:
    """Measure how much longer an operator takes per byte of its weights if they are not in the cache.

    Every core runs several products in turn, each of them twice; the second time, its weights are in the cache. All
    cores run at the same time, since they share the memory behind their private caches.

    Args:
        cores: Logical CPUs.
        cache_bytes: The size of a core's private cache; zero if unknown.

    Returns:
        Milliseconds per byte; zero if the size of the cache is unknown.
    """
    side = math.isqrt(cache_bytes // 8)
    if not side:
        return 0.0
    x = np.ones((_ROWS, side), np.float32)

    def differences_ms() -> list[float]:
        products = [product_session(CPU_PROVIDER, _ROWS, side) for _ in range(_PRODUCTS)]
        differences_s = []
        for _ in range(_ROUNDS):
            for product in products:
                times = [time.perf_counter()]
                for _ in range(2):
                    product.run(None, {"x": x})
                    times.append(time.perf_counter())
                differences_s.append((times[1] - times[0]) - (times[2] - times[1]))
        return [s * 1e3 for s in differences_s[_PRODUCTS:]]

    differences = [ms for core in run_on_cores(cores, differences_ms) for ms in core]
    return max(0.0, statistics.median(differences)) / (4 * side * side)
