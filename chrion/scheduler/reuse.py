"""Reuse of a plan for other shapes of the same model.

A plan for one set of shapes is a good plan for shapes near it if the costs of its operators grow alike. If they do not,
another placement or other segments are better. The evaluator tells the two cases apart, since it predicts any schedule
on any costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from chrion.common.units import format_shape
from chrion.errors import ModelError, PlanError, ScheduleError
from chrion.graph.model import Graph
from chrion.profiler.profiles import Profile
from chrion.scheduler.evaluation.evaluate import evaluate, segment_spans_ms
from chrion.scheduler.evaluation.lower_bound import lower_bound_ms
from chrion.scheduler.native_kernels import native_kernels
from chrion.scheduler.plan import Plan, Prediction

#: Beginning of the remark that names the shapes that a plan was made for.
_ORIGIN = "reuses the plan for "
#: A plan is reused if its predicted latency is at most this multiple of that of a plan made for the shapes.
_NEAR = 1.05


def adapt_plan(plan: Plan, graph: Graph, profile: Profile) -> Plan | None:
    """Return the schedule and the segments of a plan as a plan for other shapes, with new predictions.

    Args:
        plan: A plan for CPU cores.
        graph: The model with other shapes.
        profile: Costs of its operators; those of missing signatures are estimated.

    Returns:
        None if the shapes change the operators or their order, or if the plan uses more cores than the profile has, an
        accelerator, or rewritten operators.
    """
    if plan.accelerator or plan.trees or plan.merged or plan.schedule.cores > profile.cores:
        return None
    try:
        variant = plan.rewritten(graph)
        if variant.dag.names != plan.operators:
            return None
        costs = replace(profile, accelerator=None).costs(variant.dag)
        timeline = evaluate(variant.dag, costs, plan.schedule, plan.segments)
        adapted = replace(
            plan,
            digest=variant.digest,
            shapes=graph.shapes,
            estimated=len(profile.missing(variant.dag)),
            segment_ms=segment_spans_ms(timeline, costs, plan.schedule, plan.segments),
            predicted=Prediction(timeline.latency_ms, timeline.memory_mb, timeline.resident_mb),
            busy_ms=timeline.busy_ms,
            lower_bound_ms=lower_bound_ms(variant.dag, costs, plan.schedule),
            cpu_only=None,
            **asdict(native_kernels(variant.dag, profile, plan.schedule)),
            remarks=(*_without_origin(plan), _ORIGIN + _describe(plan)),
        )
        adapted.apply(graph)
    except (ModelError, PlanError, ScheduleError):
        return None
    return adapted


def find_near_plan(plans: Sequence[Plan], graph: Graph, profile: Profile) -> Plan | None:
    """Return the plan with the best prediction for a graph, among plans made for other shapes; None if none fits."""
    adapted = (adapt_plan(plan, graph, profile) for plan in plans)
    return min((plan for plan in adapted if plan), key=lambda plan: plan.predicted.latency_ms, default=None)


def is_near_optimal(plan: Plan) -> bool:
    """Return whether no plan for the same shapes can be predicted to be much faster."""
    return plan.predicted.latency_ms <= _NEAR * plan.lower_bound_ms


def is_near(plan: Plan, own: Plan) -> bool:
    """Return whether a reused plan is predicted to be nearly as fast as one that was made for the shapes."""
    return plan.predicted.latency_ms <= _NEAR * own.predicted.latency_ms


def _without_origin(plan: Plan) -> tuple[str, ...]:
    return tuple(remark for remark in plan.remarks if not remark.startswith(_ORIGIN))


def _describe(plan: Plan) -> str:
    return ", ".join(f"{name} {format_shape(shape)}" for name, shape in plan.shapes.items())
