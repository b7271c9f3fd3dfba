"""Measure the time that the paper's algorithms take to plan the paper's LSTM and random layered graphs for 16 cores.

    python scripts/bench_planner.py

Prints a table and writes no file; takes about a minute. The graphs have 1 000 to 100 000 operators. The last column is
the growth of the time from the line above, divided by the growth of n log n: planning grows no faster than n log n
where it is about 1 or below.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable

from chrion.graph import Dag, load
from chrion.profiler import CopyCost, Costs, OperatorMemory, uniform_costs
from chrion.scheduler.policies.device_selection import select_devices
from chrion.scheduler.policies.orders import hybrid_order
from chrion.zoo import build

CORES = 16


def layered_graph(n: int, layers: int = 100, fan_in: int = 3, seed: int = 0) -> tuple[Dag, Costs]:
    """Return a random layered graph and random costs.

    Every operator reads ``fan_in`` operators of the preceding layer and one of any earlier layer.
    """
    rng = random.Random(seed)  # noqa: S311 - input of a benchmark
    width = n // layers
    edges = [
        (rng.randrange((layer - 1) * width, layer * width), layer * width + i)
        for layer in range(1, layers)
        for i in range(width)
        for _ in range(fan_in)
    ]
    edges += [(rng.randrange(layer * width), layer * width + i) for layer in range(1, layers) for i in range(width)]
    dag = Dag.from_edges(n, edges, [rng.randrange(1 << 10, 1 << 16) for _ in edges])
    one_core = [rng.uniform(0.1, 3.0) for _ in range(n)]
    costs = Costs(
        accelerator_ms=tuple(rng.uniform(0.1, 1.0) for _ in range(n)),
        cpu_ms=tuple(tuple(ms * (1 + 0.1 * j) for ms in one_core) for j in range(CORES)),
        memory=tuple(OperatorMemory(outputs_mb=rng.random()) for _ in range(n)),
        upload=CopyCost(0.01, 1e-7),
        download=CopyCost(0.01, 1e-7),
    )
    return dag, costs


def planning_s(dag: Dag, costs: Costs) -> float:
    """Return the time of Algorithms 1 and 2 together in seconds: the median of three runs."""
    return statistics.median(
        _time_s(lambda: select_devices(dag, costs, hybrid_order(dag, costs), 0.1)) for _ in range(3)
    )


def _time_s(action: Callable[[], object]) -> float:
    before = time.perf_counter()
    action()
    return time.perf_counter() - before


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    lstm = load(build("lstm-baseline")).dag
    costs = uniform_costs(lstm, accelerator_ms=0.05, cpu_ms=[0.3 * (1 + 0.1 * j) for j in range(CORES)])
    print(f"paper's LSTM, {len(lstm)} operators, k = {CORES}: {planning_s(lstm, costs):.3f} s")
    print(f"{'operators':>10} {'seconds':>8} {'growth / n log n':>20}")
    before = None
    for n in (1_000, 10_000, 30_000, 100_000):
        seconds = planning_s(*layered_graph(n))
        growth = seconds / before[1] / (n * math.log(n) / (before[0] * math.log(before[0]))) if before else None
        print(f"{n:>10} {seconds:>8.2f} {'' if growth is None else format(growth, '>20.2f')}")
        before = (n, seconds)


if __name__ == "__main__":
    main()
