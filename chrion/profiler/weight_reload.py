"""What it takes to bring weights back into a core's own cache."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import numpy as np

from chrion.cores import run_on_cores
from chrion.devices import CPU_PROVIDER
from chrion.devices.probe import product_session

#: A product whose weights fill half of the cache; so many of them in turn, each with weights of its own.
_PRODUCTS = 12
_ROWS = 16
_ROUNDS = 8


def measure_reload_ms_per_byte(cores: Sequence[int], cache_bytes: int) -> float:
    """How much longer an operator takes, for each byte of its weights, when others have run in between.

    Every core runs products in turn, each twice: the second time its weights are there. All cores at once, since they
    share what is behind their caches.

    Args:
        cores: Logical CPUs.
        cache_bytes: What each one's own cache holds; nothing is measured where that is not known, zero.
    """
    side = math.isqrt(cache_bytes // 8)
    if not side:
        return 0.0
    x = np.ones((_ROWS, side), np.float32)

    def differences_ms() -> list[float]:
        products = [product_session(CPU_PROVIDER, _ROWS, side) for _ in range(_PRODUCTS)]
        found = []
        for _ in range(_ROUNDS):
            for product in products:
                times = [time.perf_counter()]
                for _ in range(2):
                    product.run(None, {"x": x})
                    times.append(time.perf_counter())
                found.append((times[1] - times[0]) - (times[2] - times[1]))
        return [s * 1e3 for s in found[_PRODUCTS:]]

    found = [ms for core in run_on_cores(cores, differences_ms) for ms in core]
    return max(0.0, statistics.median(found)) / (4 * side * side)
