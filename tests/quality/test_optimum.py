"""Distance of the default policy from the optimum, on graphs small enough to solve exactly."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest

from chrion.graph import Dag
from chrion.profiler import CopyCost, Costs, OperatorMemory
from chrion.scheduler import evaluate
from chrion.scheduler.policies.exact import solve
from policy_solutions import solve_policy
from property_tests import repetitions

CASES = repetitions(200)


def case(seed: int) -> tuple[Dag, Costs]:
    """Return a random graph of 3 to 12 operators, and costs for an accelerator and two cores."""
    rng = random.Random(seed)
    n = rng.randint(3, 12)
    density = rng.uniform(0.1, 0.5)
    edges = [(a, b) for b in range(n) for a in range(b) if rng.random() < density]
    dag = Dag.from_edges(n, edges, [rng.randrange(1_000, 2_000_000) for _ in edges])
    cpu = [rng.uniform(0.05, 2.0) for _ in range(n)]
    return dag, Costs(
        accelerator_ms=tuple(ms * rng.choice([0.1, 0.3, 1.0, 2.0]) for ms in cpu),
        cpu_ms=tuple(tuple(ms * (1 + 0.1 * j) for ms in cpu) for j in range(2)),
        memory=(OperatorMemory(),) * n,
        upload=CopyCost(0.01, 1e-7 * rng.choice([0.5, 1, 5])),
        download=CopyCost(0.01, 1e-7),
        handoff_ms=rng.choice([0.002, 0.02, 0.1]),
    )


@pytest.fixture(scope="module")
def ratios() -> dict[str, list[float]]:
    """Return the latency of each policy over the optimum."""
    found: dict[str, list[float]] = {name: [] for name in ("chrion", "chrion-paper", "heft", "cpop")}
    for seed in range(CASES):
        dag, costs = case(seed)
        best = min(evaluate(dag, costs, solve(dag, costs, cores).schedule).latency_ms for cores in range(3))
        for name, values in found.items():
            values.append(solve_policy(name, dag, costs).timeline.latency_ms / best)
    return found


def test_the_optimum_is_a_lower_bound(ratios: dict[str, list[float]]) -> None:
    """No policy is faster than the optimum, within the solver's rounding of times."""
    assert min(min(values) for values in ratios.values()) > 1 - 1e-3


def test_the_default_policy_is_near_the_optimum(
    ratios: dict[str, list[float]], record_testsuite_property: Callable[[str, object], None]
) -> None:
    """The policy is within 0.5 % of the optimum on average and 5 % at worst.

    The ratios of the other policies are recorded as well.
    """
    for name, values in ratios.items():
        record_testsuite_property(f"optimum: {name}", f"mean {statistics.mean(values):.4f}, worst {max(values):.3f}")
    assert statistics.mean(ratios["chrion"]) <= 1.005
    assert max(ratios["chrion"]) <= 1.05


def test_the_default_policy_is_no_worse_than_its_initial_solutions(ratios: dict[str, list[float]]) -> None:
    """The initial solutions include those of the paper's policy and of HEFT, and local search only improves them."""
    for name in ("chrion-paper", "heft"):
        assert all(own <= other + 1e-9 for own, other in zip(ratios["chrion"], ratios[name], strict=True))
