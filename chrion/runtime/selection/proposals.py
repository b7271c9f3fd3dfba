"""The plans that are compared with plain sessions; only sessions that tune import this module."""

from __future__ import annotations

from collections.abc import Sequence

from chrion.graph.model import Graph
from chrion.profiler.profiles import Profile
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.parallel_plan import parallel_plan
from chrion.scheduler.plan import Plan
from chrion.scheduler.plan_options import PlanOptions
from chrion.scheduler.planner import alternatives
from chrion.scheduler.reuse import find_near_plan, is_near, is_near_optimal


def propose_plans(graph: Graph, profile: Profile, config: SessionConfig, earlier: Sequence[Plan]) -> list[Plan]:
    """Return the plans with the best predictions, the best first.

    Args:
        graph: The graph.
        profile: The costs of its operators.
        config: The session's configuration.
        earlier: Plans for other shapes of the model, of which one is used if it is predicted to be nearly as fast.
    """
    near = find_near_plan(earlier, graph, profile)
    if near and is_near_optimal(near):
        return [near]
    options = PlanOptions(config.slo_ms, config.alpha, gpu_budget=config.budget_mb, memory=config.memory)
    plans = alternatives(graph, profile, options)
    if all(len(plan.segments) == 1 for plan in plans) and (
        parallel := parallel_plan(graph, profile, config.slo_ms, config.alpha)
    ):
        plans.append(parallel)
    return [near] if near and is_near(near, plans[0]) else plans
