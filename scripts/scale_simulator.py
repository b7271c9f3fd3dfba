"""Measure how the simulator's time and memory grow with the number of requests.

    python scripts/scale_simulator.py [--most 10000000]

The cluster has 500 models on 8 servers of 12 GB, Zipf popularity, resident-first routing and LRU eviction. Each size
runs in a new process, so that its peak memory can be measured.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from chrion.simulator.run import simulate
from chrion.simulator.scenario import ScenarioSource

SIZES = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)


def content(requests: int) -> dict[str, Any]:
    """Return a scenario of 500 models that need six times the memory of the servers."""
    rng = np.random.default_rng(0)
    models = []
    for i in range(500):
        latency_ms, memory_mb = float(rng.uniform(20, 80)), float(rng.uniform(500, 2000))
        hybrid = {"gpu_busy_ms": latency_ms / 2, "cpu_busy_ms": latency_ms, "cores": 2}
        variants = {
            "gpu": {"memory_mb": memory_mb, "latency_ms": latency_ms, "jitter_cv": 0.05},
            "hybrid": {"memory_mb": memory_mb / 2, "latency_ms": latency_ms, "jitter_cv": 0.05, **hybrid},
        }
        models.append({"name": f"m{i}", "variants": variants})
    return {
        "servers": [{"count": 8}],
        "workload": {"rate_per_s": 80.0, "requests": requests, "zipf_exponent": 1.1},
        "models": models,
    }


def measure(requests: int, pattern: str) -> tuple[float, float, float]:
    """Return the seconds of a run, the peak memory of the process in MB, and the swapping rate."""
    source = ScenarioSource("scale", {**content(requests), "patterns": [pattern], "slo": {"of": "gpu"}}, Path())
    scenario = source.build()
    begin = time.perf_counter()
    (result,) = simulate(scenario)
    seconds = time.perf_counter() - begin
    unit = 1e6 if sys.platform == "darwin" else 1e3
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, result.total.swapping_rate


def main() -> None:
    """Print one line for each size and pattern."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=SIZES[-1], help="the most requests to simulate")
    most = parser.parse_args().most
    print("| pattern | requests | seconds | us per request | peak MB | swapping |")
    print("|---|---|---|---|---|---|")
    for pattern in ("gpu", "hybrid"):
        for requests in (size for size in SIZES if size <= most):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                seconds, peak_mb, swapping = pool.submit(measure, requests, pattern).result()
            each = seconds / requests * 1e6
            print(
                f"| {pattern} | {requests} | {seconds:.2f} | {each:.2f} | {peak_mb:.0f} | {swapping:.1%} |", flush=True
            )


if __name__ == "__main__":
    main()
