"""The best parallel plan for the case that cores do not slow each other down.

The slowdown of operators while other cores are busy is measured last and suffers most from interference: another
process on one core looks like contention between two cores. If it is measured too large, no parallel plan is predicted
to be faster than one core, however fast it would be. The guard should time one all the same.
"""

from __future__ import annotations

from dataclasses import replace

from chrion.graph.dag import Dag
from chrion.graph.model import Graph
from chrion.graph.recurrent import chunk_choices, unroll
from chrion.profiler.profiles import Profile
from chrion.runtime.selection.guard import SHARE
from chrion.scheduler.plan import Plan
from chrion.scheduler.plan_options import PlanOptions
from chrion.scheduler.planner import alternatives

#: A plan is made only if the cores slow each other down by more than this factor in the profile: below, the guard's 5 %
#: decide in any case.
_SLOWDOWN = 1.05
_REMARK = "predicted as if busy cores did not slow each other down, since their slowdown was measured as too large"


def parallel_plan(graph: Graph, profile: Profile, slo_ms: float | None, alpha: float | None) -> Plan | None:
    """Return a plan on several CPU cores, predicted without contention.

    Args:
        graph: The graph.
        profile: Its profile. If it has an accelerator, or less than two cores, there is no plan.
        slo_ms: As for :func:`chrion.scheduler.planner.partition`.
        alpha: As for :func:`chrion.scheduler.planner.partition`.

    Returns:
        The plan; None if the longest path of the graph leaves no gain, if the profile has no contention, or if the
        planner finds no parallel plan either.
    """
    if profile.accelerator or profile.cores < 2:
        return None
    choices = chunk_choices(graph)
    finest = (unroll(graph, min(choices)) if choices else graph).dag
    costs = profile.costs(finest)
    alone_ms = sum(costs.cpu_ms[0])
    if _longest_path_ms(finest, costs.cpu_ms[0]) > SHARE * alone_ms or sum(costs.cpu_ms[-1]) < _SLOWDOWN * alone_ms:
        return None
    operators = {
        s: replace(cost, cpu_ms=cost.cpu_ms[:1] * profile.cores, native_ms=cost.native_ms[:1] * profile.cores)
        for s, cost in profile.operators.items()
    }
    # The estimators of the profile are made of its operators, so that the copy must have its own.
    best = alternatives(graph, replace(profile, operators=operators, _estimators={}), PlanOptions(slo_ms, alpha))[0]
    return replace(best, remarks=(*best.remarks, _REMARK)) if len(best.segments) > 1 else None


def _longest_path_ms(dag: Dag, times_ms: tuple[float, ...]) -> float:
    reach = [0.0] * len(dag)
    for i in dag.topological_order:
        reach[i] = times_ms[i] + max((reach[before] for before in dag.predecessors[i]), default=0.0)
    return max(reach, default=0.0)
