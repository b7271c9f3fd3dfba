"""How long planning takes: the paper's LSTM, and random layered graphs of growing size, with 16 CPU cores.

Prints a table. The growth column is the time's ratio to the line above over the ratio of n log n: about 1 or below
means that planning grows no worse than n log n.
"""

from __future__ import annotations

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


def layered(n: int, layers: int = 100, fan_in: int = 3, seed: int = 0) -> tuple[Dag, Costs]:
    """A random layered graph: every operator reads ``fan_in`` of the layer before, and one of any earlier layer."""
    rng = random.Random(seed)  # noqa: S311 - a benchmark's input
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


def plan_s(dag: Dag, costs: Costs) -> float:
    """Seconds for Algorithms 1 and 2 together: median of three."""
    return statistics.median(
        _timed(lambda: select_devices(dag, costs, hybrid_order(dag, costs), 0.1)) for _ in range(3)
    )


def _timed(action: Callable[[], object]) -> float:
    before = time.perf_counter()
    action()
    return time.perf_counter() - before


def main() -> None:
    """Print the table."""
    lstm = load(build("lstm-baseline")).dag
    costs = uniform_costs(lstm, accelerator_ms=0.05, cpu_ms=[0.3 * (1 + 0.1 * j) for j in range(CORES)])
    print(f"paper's LSTM, {len(lstm)} operators, k = {CORES}: {plan_s(lstm, costs):.3f} s")
    print(f"{'operators':>10} {'seconds':>8} {'growth over n log n':>20}")
    before = None
    for n in (1_000, 10_000, 30_000, 100_000):
        seconds = plan_s(*layered(n))
        growth = seconds / before[1] / (n * math.log(n) / (before[0] * math.log(before[0]))) if before else None
        print(f"{n:>10} {seconds:>8.2f} {'' if growth is None else format(growth, '>20.2f')}")
        before = (n, seconds)


if __name__ == "__main__":
    main()
