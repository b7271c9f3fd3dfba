"""The data of a timeline: operators with their categories and costs, and charts, as plain values for JSON.

Operators and spans are stored as parallel lists, one for each attribute, to keep the data of large plans small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chrion.common.lane_numbers import is_accelerator_lane, is_copy_lane, lane_name
from chrion.graph.dag import Dag
from chrion.graph.model import Graph
from chrion.profiler.costs import Costs
from chrion.profiler.profiles import Profile
from chrion.report.categories import (
    COPY_COLOUR,
    DARK_COPY_COLOUR,
    MAX_CATEGORIES,
    Categories,
    categorise,
    layer_name,
    mark,
)
from chrion.report.lane_chart import LaneChart, axis_end_ms, share_scale
from chrion.scheduler.plan import Plan

SCHEMA = "chrion.timeline/1"
#: If one operator type has a greater share of the time, layers are shown first, because types would show one colour.
_DOMINANT_SHARE = 0.8
#: Digits of times in ms: nanoseconds.
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """Facts about a plan's operators that the plan does not contain; None if their source is missing."""

    #: From the model.
    dag: Dag | None = None
    #: From the profile.
    costs: Costs | None = None

    @classmethod
    def of(cls, plan: Plan, graph: Graph | None, profile: Profile | None) -> OperatorFacts:
        """Collect the facts about a plan's operators.

        Raises:
            PlanError: The plan is not for this graph.
        """
        dag = plan.apply(graph).dag if graph else None
        return cls(dag, profile.costs(dag, widths=plan.schedule.widths) if profile and dag else None)


def operator_ms(plan: Plan, facts: OperatorFacts) -> list[float]:
    """Return the predicted time of each operator on its lane, in ms.

    Without costs, the operators of a segment share its time equally.
    """
    times = [0.0] * len(plan.operators)
    for segment, (start_ms, end_ms) in zip(plan.segments, plan.segment_ms, strict=True):
        for i in segment:
            times[i] = (end_ms - start_ms) / len(segment)
    if facts.costs:
        for i, lane in enumerate(plan.schedule.lanes):
            width, busy = plan.schedule.width(i), _busy_cores(plan, facts.costs)
            cost = facts.costs.core_ms(i, width, busy) if width > 1 else facts.costs.lane_ms(lane, busy)[i]
            times[i] = cost if math.isfinite(cost) else 0.0
    return times


def layer_categories(plan: Plan, times: Sequence[float]) -> Categories:
    """Return the division of a plan's operators by layer."""
    return categorise([layer_name(name) for name in plan.operators], times, by_weight=False)


def type_categories(facts: OperatorFacts, times: Sequence[float]) -> Categories | None:
    """Return the division of a plan's operators by operator type; None without the model."""
    return categorise(facts.dag.op_types, times, by_weight=True) if facts.dag else None


def prefer_types(types: Categories | None, plan: Plan, facts: OperatorFacts, times: Sequence[float]) -> bool:
    """Return whether to show operator types first, not layers: no type would colour nearly everything.

    With costs, bars are divided into their operators. Without costs, a bar has the colour of one type.
    """
    if types is None:
        return False
    shares = list(types.shares)
    if facts.costs is None:
        shares = [0.0] * len(types.names)
        total = sum(times) or 1.0
        for segment in plan.segments:
            shares[types.of_segment(segment, times)] += sum(times[i] for i in segment) / total
    return max(shares, default=1.0) <= _DOMINANT_SHARE


def timeline_data(
    plan: Plan, charts: Sequence[LaneChart], remarks: Sequence[str], facts: OperatorFacts
) -> dict[str, Any]:
    """Return the content of a timeline page as plain values.

    Args:
        plan: The plan.
        charts: The predicted and, if known, the measured chart.
        remarks: Lines of text.
        facts: Facts about the operators.
    """
    times = operator_ms(plan, facts)
    types = type_categories(facts, times)
    schemes = {"type": types, "layer": layer_categories(plan, times)}
    return {
        "schema": SCHEMA,
        "model": plan.model,
        "policy": plan.policy,
        "machine": str(plan.machine),
        "accelerator": plan.accelerator,
        "alpha": plan.alpha,
        "slo_ms": plan.slo_ms,
        "lower_bound_ms": plan.lower_bound_ms,
        "remarks": list(remarks),
        "share_scale": share_scale(charts),
        "colour_by": "type" if prefer_types(types, plan, facts, times) else "layer",
        "schemes": {name: _scheme(categories, plan, times) for name, categories in schemes.items() if categories},
        "operators": _operators(plan, facts, times),
        "copy_mark": [COPY_COLOUR, DARK_COPY_COLOUR, ""],
        "several_mark": list(mark(MAX_CATEGORIES)),
        "segments": [list(segment) for segment in plan.segments],
        "segment_ms": [[_round(start), _round(end)] for start, end in plan.segment_ms],
        "charts": [_chart(chart, plan.slo_ms) for chart in charts],
    }


def _scheme(categories: Categories, plan: Plan, times: Sequence[float]) -> dict[str, Any]:
    return {
        "names": list(categories.names),
        "marks": [list(mark(at)) for at in range(len(categories.names))],
        "shares": [round(share, 6) for share in categories.shares],
        "of_operator": list(categories.of_operator),
        "of_segment": [categories.of_segment(segment, times) for segment in plan.segments],
    }


def _operators(plan: Plan, facts: OperatorFacts, times: Sequence[float]) -> dict[str, Any]:
    dag, costs, lanes = facts.dag, facts.costs, plan.schedule.lanes
    indices = range(len(plan.operators))
    names = [lane_name(lane, plan.schedule.width(i)) for i, lane in enumerate(lanes)]
    columns: dict[str, Any] = {"name": list(plan.operators), "lane": names}
    columns["on_accelerator"] = [int(is_accelerator_lane(lane)) for lane in lanes]
    if dag:
        columns["type"] = list(dag.op_types)
        columns["input_bytes"] = list(dag.input_bytes)
        columns["output_bytes"] = list(dag.output_bytes)
        columns["weight_bytes"] = [dag.weight_total(i) for i in indices]
    if costs:
        columns["predicted_ms"] = [_round(ms) for ms in times]
        columns["cpu_ms"] = [_round(ms) for ms in costs.cpu_ms[_busy_cores(plan, costs) - 1]] if costs.cpu_ms else None
        columns["accelerator_ms"] = [_round(ms) for ms in costs.accelerator_ms] if costs.accelerator_ms else None
    return columns


def _chart(chart: LaneChart, slo_ms: float | None) -> dict[str, Any]:
    row = {lane: at for at, lane in enumerate(chart.lanes)}
    spans = sorted(chart.spans, key=lambda span: (row[span.lane], span.start_ms, span.end_ms))
    return {
        "title": chart.title,
        "latency_ms": _round(chart.latency_ms),
        "axis_end_ms": _round(axis_end_ms(chart, slo_ms)),
        "overlap": round(chart.overlap, 4),
        "lanes": [
            {"name": lane_name(lane), "busy_ms": _round(chart.busy_ms(lane)), "copies": is_copy_lane(lane)}
            for lane in chart.lanes
        ],
        "spans": {
            "lane": [row[span.lane] for span in spans],
            "start_ms": [_round(span.start_ms) for span in spans],
            "end_ms": [_round(span.end_ms) for span in spans],
            "segment": [span.segment for span in spans],
            "copied": {str(at): span.label for at, span in enumerate(spans) if span.segment < 0},
        },
    }


def _busy_cores(plan: Plan, costs: Costs) -> int:
    """Return the number of busy cores at which the costs of CPU lanes are read."""
    return max(1, min(plan.schedule.cores, costs.cores))


def _round(ms: float) -> float | None:
    return round(ms, _DIGITS) if math.isfinite(ms) else None
