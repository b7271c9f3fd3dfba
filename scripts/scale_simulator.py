"""Measure how the simulator's time and memory grow with the number of requests.

    python scripts/scale_simulator.py [--most 10000000]

The clusters have 500 models on 8 servers, 5000 on 64 and 10 000 on 1000 servers of 12 GB, Zipf popularity,
resident-first routing and LRU eviction; the rows "many options" have two GPUs a server, host memory before a disk,
failures, autoscaling, keep-alive times, batches, deadlines and two priorities as well. Each size runs in a
new process, so that its peak memory can be measured. Building is from the scenario's content to an engine without
requests.
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

from chrion.serving.simulator.engine import ClusterEngine
from chrion.serving.simulator.results import collect
from chrion.serving.simulator.scenario import ScenarioSource

SIZES = (100_000, 1_000_000, 10_000_000)
#: Models and servers.
CLUSTERS = ((500, 8), (5000, 64), (10_000, 1000))
#: Patterns, and whether many options are used.
ROWS = (("gpu", False), ("hybrid", False), ("hybrid", True))


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


def with_options(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the scenario with many options, at half as many servers of two GPUs."""
    count = plain["servers"][0]["count"] // 2
    server = {"count": count, "gpus": 2, "host_memory_gb": 48.0, "disk_gb_per_s": 3.0, "mtbf_h": 1.0, "mttr_s": 60.0}
    models = [{**model, "max_batch": 4} for model in plain["models"]]
    return {
        **plain,
        "servers": [server],
        "models": models,
        "variants": {name: {"batch_cost": 0.3} for name in ("gpu", "hybrid")},
        "policies": {"admission": "deadline", "keep_alive_s": 600.0},
        "autoscaling": {"min_servers": count * 3 // 4, "target": 2.0},
        "classes": [{"name": "first", "priority": 1}, {"name": "second"}],
    }


def measure(cluster: tuple[int, int], requests: int, pattern: str, *, options: bool) -> tuple[float, ...]:
    """Return the CPU seconds to build and to run, the peak memory of the process in MB, and the swapping rate."""
    plain = {**content(*cluster, requests), "patterns": [pattern], "slo": {"of": "gpu", "factor": 20.0}}
    source = ScenarioSource("scale", with_options(plain) if options else plain, Path())
    begin = time.process_time()
    scenario = source.build()
    engine = ClusterEngine(scenario.engine_config(pattern))
    built = time.process_time()
    engine.run(scenario.workload.chunks())
    result = collect(scenario, pattern, engine)
    seconds = time.process_time() - built
    unit = 1e6 if sys.platform == "darwin" else 1e3
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return built - begin, seconds, peak_mb, result.total.swapping_rate


def main() -> None:
    """Print one line for each size and pattern."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=SIZES[-1], help="the most requests to simulate")
    most = parser.parse_args().most
    columns = ("models, servers", "pattern", "requests", "seconds to build", "CPU seconds", "us per request", "peak MB")
    print(f"| {' | '.join(columns)} | swapping |\n|{'---|' * 8}")
    sizes = [size for size in SIZES if size <= most]
    for cluster, (pattern, options), requests in itertools.product(CLUSTERS, ROWS, sizes):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            run = pool.submit(measure, cluster, requests, pattern, options=options)
            build, seconds, peak_mb, swapping = run.result()
        each = seconds / requests * 1e6
        figures = f"{requests} | {build:.2f} | {seconds:.2f} | {each:.2f} | {peak_mb:.0f} | {swapping:.1%}"
        name = pattern + ", many options" * options
        print(f"| {cluster[0]}, {cluster[1]} | {name} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
