"""Measure how the simulator's time and memory grow with the number of requests.

    python scripts/scale_simulator.py [--most 10000000]

The clusters have 500 models on 8 servers, 5000 on 64 and 10 000 on 1000 servers of 12 GB, Zipf popularity,
resident-first routing and LRU eviction. Each size runs in a new process, so that its peak memory can be measured.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from chrion.serving.simulator.run import simulate
from chrion.serving.simulator.scenario import ScenarioSource

SIZES = (100_000, 1_000_000, 10_000_000)
#: Models and servers.
CLUSTERS = ((500, 8), (5000, 64), (10_000, 1000))


def content(models_number: int, servers: int, requests: int) -> dict[str, Any]:
    """Return a scenario of models that need six times the memory of 8 servers, eight of 64, and that of 1000."""
    rng = np.random.default_rng(0)
    models = []
    for i in range(models_number):
        latency_ms, memory_mb = float(rng.uniform(20, 80)), float(rng.uniform(500, 2000))
        hybrid = {"gpu_busy_ms": latency_ms / 2, "cpu_busy_ms": latency_ms, "cores": 2}
        variants = {
            "gpu": {"memory_mb": memory_mb, "latency_ms": latency_ms, "jitter_cv": 0.05},
            "hybrid": {"memory_mb": memory_mb / 2, "latency_ms": latency_ms, "jitter_cv": 0.05, **hybrid},
        }
        models.append({"name": f"m{i}", "variants": variants})
    return {
        "servers": [{"count": servers}],
        "policies": {"load_order": "fifo", "prefetch": False},
        "workload": {"rate_per_s": 10.0 * servers, "requests": requests, "zipf_exponent": 1.1},
        "models": models,
    }


def measure(cluster: tuple[int, int], requests: int, pattern: str) -> tuple[float, float, float]:
    """Return the CPU seconds of a run, the peak memory of the process in MB, and the swapping rate."""
    source = ScenarioSource(
        "scale", {**content(*cluster, requests), "patterns": [pattern], "slo": {"of": "gpu"}}, Path()
    )
    scenario = source.build()
    begin = time.process_time()
    (result,) = simulate(scenario)
    seconds = time.process_time() - begin
    unit = 1e6 if sys.platform == "darwin" else 1e3
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, result.total.swapping_rate


def main() -> None:
    """Print one line for each size and pattern."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=SIZES[-1], help="the most requests to simulate")
    most = parser.parse_args().most
    print("| models, servers | pattern | requests | CPU seconds | us per request | peak MB | swapping |")
    print("|---|---|---|---|---|---|---|")
    sizes = [size for size in SIZES if size <= most]
    for cluster, pattern, requests in itertools.product(CLUSTERS, ("gpu", "hybrid"), sizes):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            seconds, peak_mb, swapping = pool.submit(measure, cluster, requests, pattern).result()
        each = seconds / requests * 1e6
        figures = f"{requests} | {seconds:.2f} | {each:.2f} | {peak_mb:.0f} | {swapping:.1%}"
        print(f"| {cluster[0]}, {cluster[1]} | {pattern} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
