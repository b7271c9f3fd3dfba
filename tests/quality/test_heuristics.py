"""The default policy beside list schedulers, on random graphs with an accelerator."""

from __future__ import annotations

import itertools
import statistics

import pytest

from chrion.graph import Dag
from chrion.profiler import Costs
from chrion.scheduler.evaluation.solution import Problem
from made_machines import FAMILIES, made_problem
from policy_solutions import solve_policy
from solution_checks import check_solution
from textbook_schedulers import critical_path_list, lookahead_heft

MADE = (lookahead_heft, critical_path_list)


def best_list_ms(dag: Dag, costs: Costs) -> float:
    """Return the least latency of HEFT, CPOP, PEFT, HEFT with lookahead and lists by critical path."""
    problem = Problem(dag, costs)
    found = [solve_policy(name, dag, costs) for name in ("heft", "cpop", "peft")]
    machines = [costs.limited_to(cores, 1) for cores in range(1, costs.cores + 1)]
    found += [problem.evaluate(make(dag, machine)) for make in MADE for machine in machines]
    for solution in found:
        check_solution(dag, costs, solution)
    return min(solution.timeline.latency_ms for solution in found)


@pytest.mark.parametrize("n", [20, 40])
def test_the_default_policy_is_faster_than_list_schedulers(n: int) -> None:
    """On average it takes at most 0.98 of the best list's latency, and never more than 1.03 of it."""
    problems = [
        made_problem(family, n, 2, seed, accelerator=True, weights=bool(seed))
        for family, seed in itertools.product(FAMILIES, (0, 1))
    ]
    ratios = [solve_policy("chrion", *problem).timeline.latency_ms / best_list_ms(*problem) for problem in problems]
    assert statistics.mean(ratios) <= 0.98
    assert max(ratios) <= 1.03
