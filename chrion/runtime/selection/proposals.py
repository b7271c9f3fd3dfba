"""The plans that are compared with plain sessions; only sessions that tune import this module.

The slowdown of operators while other cores are busy is measured last and suffers most from interference: another
process on one core looks like contention between two cores. If it is measured too large, no parallel plan is predicted
to be faster than one core, however fast it would be. The guard should time one all the same, so the best plan for cores
that do not slow each other down is proposed, too.

Predictions of lanes side by side and of one lane of all cores err in different ways: only the former contain the
slowdown between cores. So if native kernels divide operators among cores, and the plans with the best predictions are
all of narrow lanes, the plan on one lane of all cores takes the place of the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chrion.graph.model import Graph
from chrion.graph.recurrent import chunk_choices, unroll
from chrion.profiler.profiles import Profile
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.guard import SHARE
from chrion.scheduler.evaluation.lower_bound import machine_bound_ms
from chrion.scheduler.plan import Plan
from chrion.scheduler.plan_options import PlanOptions
from chrion.scheduler.planner import Planner, alternatives
from chrion.scheduler.reuse import find_near_plan, is_near, is_near_optimal

#: A plan is made only if the cores slow each other down by more than this factor in the profile: below, the guard's 5 %
#: decide in any case.
_SLOWDOWN = 1.05
#: The plan on one lane of all cores is proposed if it is predicted to take at most so many times as long as the best
#: one (nine in ten predictions err by less than 13 %: docs/results.md), and so many others with it.
_COMPARABLE, _OTHERS = 1.13, 2
_REMARK = "predicted as if busy cores did not slow each other down, since their slowdown was measured as too large"


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
    is_whole = all(len(plan.segments) == 1 for plan in plans)
    if split := split_plan(graph, profile, options, plans):
        plans = [*plans[:_OTHERS], split]
    if is_whole and (parallel := parallel_plan(graph, profile, config.slo_ms, config.alpha)):
        plans.append(parallel)
    return [near] if near and is_near(near, plans[0]) else plans


def split_plan(graph: Graph, profile: Profile, options: PlanOptions, plans: Sequence[Plan]) -> Plan | None:
    """Return the plan in which native kernels divide operators among all cores, on one lane.

    Args:
        graph: The graph.
        profile: Its profile. If it has an accelerator, or no times on several cores, there is no plan.
        options: The options of the plans.
        plans: Those with the best predictions. If one of them has lanes of several cores, there is no plan.

    Returns:
        The plan; None if no kernel is native, or if it is predicted to take far longer than the best one.
    """
    native = any(profile.is_native(signature, profile.cores) for signature in set(graph.dag.signatures))
    if not native or profile.accelerator or any(plan.schedule.widths for plan in plans):
        return None
    split = Planner(graph, profile, options).on_all_cores(options.limits, options.alpha)
    limit_ms = _COMPARABLE * plans[0].predicted.latency_ms
    return split if split and split.predicted.latency_ms <= limit_ms else None


def parallel_plan(graph: Graph, profile: Profile, slo_ms: float | None, alpha: float | None) -> Plan | None:
    """Return a plan on several CPU cores, predicted without contention.

    Args:
        graph: The graph.
        profile: Its profile. If it has an accelerator, or less than two cores, there is no plan.
        slo_ms: As for :func:`chrion.scheduler.planner.partition`.
        alpha: As for :func:`chrion.scheduler.planner.partition`.

    Returns:
        The plan; None if the bound on latencies leaves no gain, if the profile has no contention, or if the
        planner finds no parallel plan either.
    """
    if profile.accelerator or profile.cores < 2:
        return None
    choices = chunk_choices(graph)
    finest = (unroll(graph, min(choices)) if choices else graph).dag
    operators = {
        s: replace(cost, cpu_ms=cost.cpu_ms[:1] * profile.cores, native_ms=cost.native_ms[:1] * profile.cores)
        for s, cost in profile.operators.items()
    }
    # The estimators of the profile are made of its operators, so that the copy must have its own.
    free = replace(profile, operators=operators, _estimators={})
    costs = profile.costs(finest)
    alone_ms = sum(costs.cpu_ms[0])
    if sum(costs.cpu_ms[-1]) < _SLOWDOWN * alone_ms or machine_bound_ms(finest, free.costs(finest)) > SHARE * alone_ms:
        return None
    best = alternatives(graph, free, PlanOptions(slo_ms, alpha))[0]
    return replace(best, remarks=(*best.remarks, _REMARK)) if len(best.segments) > 1 else None
