"""Why an operator is where it is: what the plan would cost with its group on each other lane."""

from __future__ import annotations

from dataclasses import replace

from chrion.errors import OptionError
from chrion.graph.model import Graph
from chrion.lane_numbers import all_lanes, lane_name
from chrion.profiler.profiles import Profile
from chrion.scheduler.evaluation.solution import Problem
from chrion.scheduler.plan import Plan
from chrion.scheduler.search.grouping import group
from chrion.units import format_mb, format_ms


def explain_placement(graph: Graph, profile: Profile, plan: Plan, node: str) -> list[str]:
    """Say why a node's operator is on its lane.

    Args:
        graph: The graph that the plan is for.
        profile: The profile that it was made with.
        plan: The plan.
        node: Name of an operator.

    Returns:
        Lines of text: its lane and times, and what moving its group elsewhere would do to the plan.

    Raises:
        OptionError: There is no operator of that name.
    """
    planned = plan.apply(graph)
    dag = planned.dag
    if node not in dag.names:
        near = next((name for name in dag.names if node in name), dag.names[0] if dag.names else "")
        raise OptionError(f"explain: there is no operator {node!r}", hint=f"there is {near!r}")
    i = dag.names.index(node)
    costs = profile.costs(dag, None)
    schedule = plan.schedule
    groups = group(dag, costs)
    members = groups.members[groups.of[i]]
    lane = schedule.lanes[i]
    labels = [0] * len(dag)
    for at, segment in enumerate(plan.segments):
        for member in segment:
            labels[member] = at
    problem = Problem(dag, costs)
    size = len(plan.segments[labels[i]])
    lines = [
        f"{node} ({dag.op_types[i]}) is on {lane_name(lane)}: segment of {size} operators, group of {len(members)}",
        _times(costs.accelerator_ms[i] if costs.accelerator_ms else None, costs.cpu_ms[schedule.cores - 1][i]),
    ]
    here = plan.predicted
    for other in all_lanes(schedule.cores, schedule.streams):
        if other == lane or not all(problem.allowed(m, other) for m in members):
            continue
        lanes = list(schedule.lanes)
        for member in members:
            lanes[member] = other
        moved = problem.place(replace(schedule, lanes=tuple(lanes)), labels).timeline
        change = moved.latency_ms - here.latency_ms
        lines.append(
            f"with its group on {lane_name(other)}: {format_ms(moved.latency_ms)} ({'+' if change >= 0 else '-'}"
            f"{format_ms(abs(change))}), accelerator {format_mb(moved.resident_mb)}"
        )
    return lines


def _times(accelerator_ms: float | None, cpu_ms: float) -> str:
    accelerator = "" if accelerator_ms is None else f", on the accelerator {format_ms(accelerator_ms)}"
    return f"by itself it takes {format_ms(cpu_ms)} on a core{accelerator}"
