"""Distance of the default policy from the optimum over weight groups, for models that exceed the accelerator's memory.

The models have embeddings (large and cheap), dense layers (small and costly) and experts (used with a probability), and
the budget holds a part of their weights. All placements of their operators are enumerated, on one core and one lane of
the accelerator. The other policies of partial placement are compared on the same cases.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from chrion.graph import Dag
from chrion.graph.dag import depth_first_order
from chrion.profiler import CopyCost, Costs, OperatorMemory
from chrion.scheduler import Schedule, evaluate
from chrion.scheduler.evaluation.solution import VariantSolution
from chrion.scheduler.limits import Limits
from chrion.scheduler.policies.chrion import PortfolioSearch
from chrion.scheduler.policies.orders import bfs_order, hybrid_order
from chrion.scheduler.policies.partial_offload import fill, layer_units
from chrion.scheduler.search.alpha import best_within
from helpers import smallest_graph

CASES = 24
#: Budgets, as shares of the memory of the whole model.
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass
class Builder:
    """Operators with one weight each, or none."""

    edges: list[tuple[int, int]]
    sizes: list[int]
    cpu_ms: list[float]
    accelerator_ms: list[float]
    usage: list[float]

    def add(self, before: list[int], size_mb: float, cpu_ms: float, accelerator_ms: float, usage: float = 1.0) -> int:
        at = len(self.sizes)
        self.edges += [(m, at) for m in before]
        self.sizes.append(int(size_mb * 1e6))
        self.cpu_ms.append(cpu_ms * usage)
        self.accelerator_ms.append(accelerator_ms * usage)
        self.usage.append(usage)
        return at


def case(seed: int) -> tuple[Dag, Costs]:
    """Return embeddings, a dense layer, experts, and a dense layer behind each other."""
    rng = random.Random(seed)
    built = Builder([], [], [], [], [])
    read = [built.add([], rng.uniform(50, 500), 0.02, 0.01) for _ in range(rng.randint(1, 3))]
    x = built.add(read, 0, 0.02, 0.01)
    for _ in range(rng.randint(1, 2)):
        size = rng.uniform(5, 60)
        x = built.add([x], size, size / 10, size / 250)
    if rng.random() < 0.8:
        size, shares = rng.uniform(20, 120), [rng.uniform(0.05, 1) for _ in range(rng.randint(2, 4))]
        experts = [built.add([x], size, size / 10, size / 250, min(1.0, share)) for share in shares]
        x = built.add(experts, 0, 0.02, 0.01)
    size = rng.uniform(5, 60)
    built.add([x], size, size / 10, size / 250)
    n = len(built.sizes)
    dag = Dag.from_edges(n, built.edges, [rng.randrange(1_000, 200_000) for _ in built.edges])
    weighted = [i for i, size in enumerate(built.sizes) if size]
    dag = replace(
        dag,
        weights=tuple((weighted.index(i),) if i in weighted else () for i in range(n)),
        weight_bytes=tuple(built.sizes[i] for i in weighted),
        usage=tuple(built.usage),
    )
    return dag, Costs(
        accelerator_ms=tuple(built.accelerator_ms),
        cpu_ms=(tuple(built.cpu_ms),),
        memory=tuple(OperatorMemory(0.0, dag.output_bytes[i] / 1e6, 0.0, dag.weight_total(i) / 1e6) for i in range(n)),
        upload=CopyCost(0.01, 1e-7),
        download=CopyCost(0.01, 1e-7),
        handoff_ms=0.005,
        streams=1,
    )


def optimum(dag: Dag, costs: Costs) -> list[tuple[float, float]]:
    """Return memory and latency of all placements, each with the best of three orders."""
    orders = {hybrid_order(dag, costs), bfs_order(dag), depth_first_order(dag)}
    rows = []
    for lanes in itertools.product((0, 1), repeat=len(dag)):
        found = [evaluate(dag, costs, Schedule(order, lanes, 1), check=False) for order in sorted(orders)]
        rows.append((min(t.resident_mb for t in found), min(t.latency_ms for t in found)))
    return sorted(set(rows))


@pytest.fixture(scope="module")
def ratios() -> dict[str, list[float]]:
    """Return the predicted latency over the optimum of each policy, for every case and budget."""
    found: dict[str, list[float]] = {"chrion": [], "first-fit": [], "layers": []}
    for seed in range(CASES):
        dag, costs = case(seed)
        rows = optimum(dag, costs)
        pool = [
            VariantSolution(0.0, solution, None, smallest_graph())
            for solution in PortfolioSearch({None: (dag, costs)}).solutions[None]
        ]
        for share in SHARES:
            budget = share * max(mb for mb, _ in rows)
            least = min(ms for mb, ms in rows if mb <= budget)
            chosen = best_within(pool, Limits(None, budget), None)[0]
            assert chosen.fits(budget)
            found["chrion"].append(chosen.solution.timeline.latency_ms / least)
            for name, units in (("first-fit", [[i] for i in range(len(dag))]), ("layers", layer_units(dag))):
                timeline = evaluate(dag, costs, fill(dag, costs, units, budget))
                found[name].append(timeline.latency_ms / least)
    return found


def test_plans_are_within_five_percent_of_the_optimum(
    ratios: dict[str, list[float]], record_testsuite_property: Callable[[str, object], None]
) -> None:
    """Every plan is; the figures of the baselines are recorded as well."""
    for name, values in ratios.items():
        record_testsuite_property(f"offload: {name}", f"mean {statistics.mean(values):.3f}, worst {max(values):.3f}")
    assert max(ratios["chrion"]) <= 1.05, sorted(ratios["chrion"])[-5:]


def test_plans_are_no_slower_than_placements_in_a_fixed_order(ratios: dict[str, list[float]]) -> None:
    """Neither baseline is faster on any case, and on average they are a fifth slower or more."""
    for name in ("first-fit", "layers"):
        assert all(own <= other + 1e-9 for own, other in zip(ratios["chrion"], ratios[name], strict=True))
        assert statistics.mean(ratios[name]) > 1.2
