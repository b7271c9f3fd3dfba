"""Solutions of policies for graphs without a model."""

from __future__ import annotations

import functools
from dataclasses import replace

from chrion.graph import Dag, Graph, load
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.solution import Solution
from chrion.scheduler.policies.policy import PlanningTask, SchedulePolicy
from chrion.scheduler.policies.registry import find_policy
from helpers import FLOAT, make_model, node, value


def solve_policy(name: str, dag: Dag, costs: Costs, alpha: float = 0.0) -> Solution:
    """Return the solution of a policy with the least L + alpha * M, without chunks and merged operators."""
    policy = find_policy(name)
    if isinstance(policy, SchedulePolicy):
        return policy.make_solver(dag, costs)(alpha)
    graph = _load_graph()
    graph = replace(graph, dag=dag, nodes=(graph.nodes[0] * 2,) * len(dag))  # operators of two nodes are not merged
    found = policy.find_solutions(PlanningTask(graph, lambda _: costs))
    return min((variant.solution for variant in found), key=lambda solution: solution.cost(alpha))


@functools.cache
def _load_graph() -> Graph:
    return load(make_model([node("Neg", ["x"], ["y"])], [value("x", FLOAT, [1])], [value("y", FLOAT, [1])]))
