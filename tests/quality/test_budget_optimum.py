"""Distance of the default policy from the optimum within a memory budget, on graphs small enough to enumerate."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from chrion.graph import Dag
from chrion.profiler import CopyCost, Costs, OperatorMemory
from chrion.scheduler import Schedule, evaluate
from chrion.scheduler.evaluation.solution import VariantSolution
from chrion.scheduler.limits import Limits
from chrion.scheduler.policies.chrion import PortfolioSearch
from chrion.scheduler.search.alpha import best_within
from helpers import smallest_graph

CASES = 40
#: Budgets, as shares of the memory of the fastest schedule.
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def case(seed: int) -> tuple[Dag, Costs]:
    """Return three to five operators with shared weights, for a fast accelerator and two cores."""
    rng = random.Random(seed)
    n = rng.randint(3, 5)
    edges = [(a, b) for b in range(n) for a in range(b) if rng.random() < 0.4]
    dag = Dag.from_edges(n, edges, [rng.randrange(1_000, 2_000_000) for _ in edges])
    weights = tuple((rng.randrange(n),) for _ in range(n))
    dag = replace(dag, weights=weights, weight_bytes=tuple(rng.randrange(1_000_000, 9_000_000) for _ in range(n)))
    cpu = [rng.uniform(0.2, 2.0) for _ in range(n)]
    return dag, Costs(
        accelerator_ms=tuple(ms * rng.choice([0.1, 0.3, 0.6]) for ms in cpu),
        # Independent of the number of busy cores: schedules with stages, which are not enumerated, gain from it.
        cpu_ms=(tuple(cpu),) * 2,
        memory=tuple(OperatorMemory(0.0, rng.uniform(0, 3), rng.uniform(0, 2), 0.0) for _ in range(n)),
        upload=CopyCost(0.01, 1e-7),
        download=CopyCost(0.01, 1e-7),
        handoff_ms=0.01,
        base_memory_mb=rng.choice([0.0, 2.0]),
        streams=1,
    )


def everything(dag: Dag, costs: Costs) -> Iterator[tuple[float, float]]:
    """Yield memory and latency of every order and placement; the cores are alike, and the first one is used first."""
    n = len(dag)
    orders = [
        order
        for order in itertools.permutations(range(n))
        if all(order.index(m) < order.index(i) for i in range(n) for m in dag.predecessors[i])
    ]
    placements = [
        lanes for lanes in itertools.product(range(3), repeat=n) if next((lane for lane in lanes if lane), 1) == 1
    ]
    for order, lanes in itertools.product(orders, placements):
        timeline = evaluate(dag, costs, Schedule(order, lanes, 2), check=False)
        yield timeline.resident_mb, timeline.latency_ms


@pytest.fixture(scope="module")
def ratios() -> list[float]:
    """Return the predicted latency over the optimum, for every case and budget."""
    found = []
    for seed in range(CASES):
        dag, costs = case(seed)
        rows = sorted(set(everything(dag, costs)))
        most_mb = min(rows, key=lambda row: (row[1], row[0]))[0]
        solutions = PortfolioSearch({None: (dag, costs)}).solutions[None]
        pool = [VariantSolution(0.0, solution, None, smallest_graph()) for solution in solutions]
        for share in SHARES:
            budget = share * most_mb
            least = min(ms for mb, ms in rows if mb <= budget)
            chosen = best_within(pool, Limits(None, budget), None)[0]
            assert chosen.fits(budget)
            found.append(chosen.solution.timeline.latency_ms / least)
    return found


def test_the_optimum_is_a_lower_bound(ratios: list[float]) -> None:
    """No plan is faster than the fastest of all orders and placements."""
    assert min(ratios) > 1 - 1e-9


def test_plans_within_a_budget_are_near_the_optimum(
    ratios: list[float], record_testsuite_property: Callable[[str, object], None]
) -> None:
    """Plans are within 2 % of the optimum on average and 30 % at worst, and optimal in nine of ten cases."""
    exact = sum(ratio < 1 + 1e-9 for ratio in ratios) / len(ratios)
    summary = f"mean {statistics.mean(ratios):.4f}, worst {max(ratios):.3f}, exact {exact:.2f}"
    record_testsuite_property("within a budget", summary)
    assert statistics.mean(ratios) <= 1.02, summary
    assert max(ratios) <= 1.3, summary
    assert exact >= 0.9, summary
