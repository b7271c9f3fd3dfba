"""Explanation of a plan: the lane of an operator, and the plan's cost with its group on each other lane."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from chrion.errors import OptionError
from chrion.graph.model import Graph
from chrion.lane_numbers import all_lanes, lane_name
from chrion.profiler.profiles import Profile
from chrion.scheduler.evaluation.solution import Problem
from chrion.scheduler.plan import Plan
from chrion.scheduler.search.grouping import group_operators
from chrion.units import format_mb, format_ms

#: Most names that a list of operators shows.
_MOST_LISTED = 8


def explain_placement(graph: Graph, profile: Profile, plan: Plan, name: str) -> list[str]:
    """Explain the placement of an operator.

    Args:
        graph: The graph that the plan is for.
        profile: The profile that the plan was made with.
        plan: The plan.
        name: Name of an operator, of a node that is part of one, or of a value that one makes. The name of a node that
            was cut into chunks stands for all of its chunks.

    Returns:
        Lines of text: the operator's lane and times, and the plan's latency and memory with its group on each other
        lane. For several operators, those on each lane.

    Raises:
        OptionError: No operator has that name.
    """
    planned = plan.apply(graph)
    found = find_operators(planned, name)
    if len(found) == 1:
        return _explain_operator(planned, profile, plan, found[0])
    return _list_operators(planned, plan, name, found)


def find_operators(planned: Graph, name: str) -> list[int]:
    """Return the operators that a name stands for.

    The first match of these is used: an operator's name; the name of one of its nodes, or of one that was merged into
    it; a value that it makes; the name of a node, or of a value, that was cut into chunks (``lstm`` for ``lstm/f0``);
    a node or a value of the model's file that onnxruntime's optimisation has fused with others.

    Raises:
        OptionError: No operator has that name; the hint has the most similar names.
    """
    names = [_aliases(planned, i) for i in range(len(planned.dag))]
    found = _lookup(names, name)
    fused = _fused_values(planned, name) if not found else iter(())
    while not found and (value := next(fused, None)):
        found = _lookup(names, value)
    if found:
        return found
    known = list(dict.fromkeys(alias for own in names for aliases in own for alias in aliases))
    near = difflib.get_close_matches(name, known, n=3)
    listed = near or known[:3]
    hint = f"{'did you mean' if near else 'for example'} {', '.join(map(repr, listed))}" if listed else ""
    raise OptionError(f"unknown operator {name!r} in model {planned.name!r}", hint=hint)


_Aliases = tuple[list[str], list[str], list[str]]


def _aliases(planned: Graph, i: int) -> _Aliases:
    """Return the names of an operator: its own, those of its nodes and of merged ones, and those of its values."""
    nodes = [planned.model.graph.node[at] for at in planned.nodes[i]]
    own = planned.dag.names[i]
    return [own], [*(node.name for node in nodes), *own.split("+")], [v for node in nodes for v in node.output if v]


def _lookup(names: Sequence[_Aliases], name: str) -> list[int]:
    """Return the operators with a name, by the first kind of alias that matches; else those that it was cut into."""
    for kind in range(3):
        found = [i for i, aliases in enumerate(names) if name in aliases[kind]]
        if found:
            return found
    parts = f"{name}/"
    return [i for i, own in enumerate(names) if any(a.startswith(parts) for aliases in own for a in aliases)]


def _fused_values(planned: Graph, name: str) -> Iterator[str]:
    """Yield the values of a node in the model's file, and those computed from them, the closest first."""
    import onnx  # noqa: PLC0415 - only for names that are unknown otherwise

    try:
        source = planned.source
        model = (
            onnx.load_model_from_string(source)
            if isinstance(source, bytes)
            else onnx.load(str(source), load_external_data=False)
        )
    except Exception:  # noqa: BLE001 - the file is gone, or in another format: the name stays unknown
        return
    readers: dict[str, list[str]] = defaultdict(list)
    for node in model.graph.node:
        for value in node.input:
            readers[value] += node.output
    values = [v for node in model.graph.node if name == node.name or name in node.output for v in node.output if v]
    for value in values:  # grows while it is walked
        yield value
        values += [v for v in readers[value] if v and v not in values]


def _list_operators(planned: Graph, plan: Plan, name: str, found: Sequence[int]) -> list[str]:
    """Return lines that list several operators by lane."""
    by_lane: dict[int, list[str]] = defaultdict(list)
    for i in found:
        by_lane[plan.schedule.lanes[i]].append(planned.dag.names[i])
    lines = [f"{name} is planned as {len(found)} operators; explain one of them for its alternatives"]
    for lane, names in sorted(by_lane.items()):
        more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
        lines.append(f"{lane_name(lane)}: {', '.join(names[:_MOST_LISTED])}{more}")
    return lines


def _explain_operator(planned: Graph, profile: Profile, plan: Plan, i: int) -> list[str]:
    """Return the lines for one operator."""
    dag, schedule = planned.dag, plan.schedule
    costs = profile.costs(dag, None)
    groups = group_operators(dag, costs)
    members = groups.members[groups.of[i]]
    lane = schedule.lanes[i]
    labels = [0] * len(dag)
    for at, segment in enumerate(plan.segments):
        for member in segment:
            labels[member] = at
    size = len(plan.segments[labels[i]])
    lines = [
        f"{dag.names[i]} ({dag.op_types[i]}) is on {lane_name(lane)}: segment of {size}, group of {len(members)}",
        _times(costs.accelerator_ms[i] if costs.accelerator_ms else None, costs.cpu_ms[max(schedule.cores, 1) - 1][i]),
    ]
    problem = Problem(dag, costs)
    for other in all_lanes(schedule.cores, schedule.streams):
        if other == lane or not all(problem.allowed(m, other) for m in members):
            continue
        lanes = list(schedule.lanes)
        for member in members:
            lanes[member] = other
        moved = problem.evaluate(replace(schedule, lanes=tuple(lanes)), labels).timeline
        change = moved.latency_ms - plan.predicted.latency_ms
        lines.append(
            f"with its group on {lane_name(other)}: {format_ms(moved.latency_ms)} ({'+' if change >= 0 else '-'}"
            f"{format_ms(abs(change))}), accelerator {format_mb(moved.resident_mb)}"
        )
    return lines


def _times(accelerator_ms: float | None, cpu_ms: float) -> str:
    accelerator = "" if accelerator_ms is None else f", on the accelerator {format_ms(accelerator_ms)}"
    return f"alone it takes {format_ms(cpu_ms)} on a core{accelerator}"
