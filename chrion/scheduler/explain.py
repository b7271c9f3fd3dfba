"""Explanation of a plan: the lane of an operator, and the cost of the plan if its group ran on another lane."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from chrion.common.lane_numbers import all_lanes, lane_name
from chrion.common.units import format_mb, format_ms
from chrion.errors import ModelError, OptionError
from chrion.graph.model import Graph
from chrion.profiler.costs import Costs
from chrion.profiler.profiles import Profile
from chrion.scheduler.evaluation.solution import Problem
from chrion.scheduler.plan import Plan
from chrion.scheduler.schedule import Schedule
from chrion.scheduler.search.grouping import group_operators

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
        Lines of text: the operator's lane and times, and for each other lane the plan's latency and memory with the
        operator's group on that lane. If the name stands for several operators, a list of them by lane.

    Raises:
        OptionError: No operator has that name.
        PlanError: The plan is not for this graph.
    """
    planned = plan.apply(graph)
    operators = find_operators(planned, name)
    if len(operators) == 1:
        return _explain_operator(planned, profile, plan, operators[0])
    return _list_operators(planned, plan, name, operators)


def find_operators(planned: Graph, name: str) -> list[int]:
    """Return the operators that a name stands for.

    The first match of these is used: an operator's name; the name of one of its nodes, or of one that was merged into
    it; a value that it makes; the name of a node, or of a value, that was cut into chunks (``lstm`` for ``lstm/f0``);
    a node or a value of the model's file that onnxruntime's optimisation has fused with others.

    Raises:
        OptionError: No operator has that name; the hint has the most similar names.
    """
    index = _NameIndex(planned)
    operators = index.lookup(name)
    if not operators:
        operators = next((own for value in _fused_values(planned, name) if (own := index.lookup(value))), [])
    if operators:
        return operators
    similar = difflib.get_close_matches(name, index.names, n=3)
    listed = similar or index.names[:3]
    hint = f"{'did you mean' if similar else 'for example'} {', '.join(map(repr, listed))}" if listed else ""
    raise OptionError(f"unknown operator {name!r} in model {planned.name!r}", hint=hint)


class _NameIndex:
    """The names of a graph's operators, nodes and values.

    Attributes:
        names: The names of operators, nodes and values, without those of what was cut into chunks.
    """

    def __init__(self, planned: Graph) -> None:
        # By precedence: operators, nodes and merged operators, values, and what was cut into chunks.
        self._kinds: list[dict[str, set[int]]] = [{}, {}, {}, {}]
        for i, operator in enumerate(planned.dag.names):
            nodes = [planned.model.graph.node[at] for at in planned.nodes[i]]
            self._add(0, i, [operator])
            self._add(1, i, [*(node.name for node in nodes), *operator.split("+")])
            self._add(2, i, [value for node in nodes for value in node.output if value])
        self.names = list(dict.fromkeys(name for kind in self._kinds[:3] for name in kind))
        for kind in self._kinds[:3]:
            for name, operators in kind.items():
                self._add_parents(name, operators)

    def lookup(self, name: str) -> list[int]:
        """Return the operators that a name stands for, in ascending order; none if it is unknown."""
        return next((sorted(kind[name]) for kind in self._kinds if name in kind), [])

    def _add(self, kind: int, i: int, names: Iterable[str]) -> None:
        for name in names:
            self._kinds[kind].setdefault(name, set()).add(i)

    def _add_parents(self, name: str, operators: Iterable[int]) -> None:
        """Add ``a/b`` and ``a`` for ``a/b/c``: chunks are named after what they are cut from."""
        while name := name.rpartition("/")[0]:
            self._kinds[3].setdefault(name, set()).update(operators)


def _fused_values(planned: Graph, name: str) -> Iterator[str]:
    """Yield the outputs of the node that ``name`` identifies in the model's file, and all values computed from them.

    The closest values come first.
    """
    from chrion.graph.reading import read_model  # noqa: PLC0415 - only for names that are unknown otherwise

    try:
        model, _ = planned.source.use(read_model)
    except ModelError:  # the file is gone, or in another format: the name stays unknown
        return
    readers: dict[str, list[str]] = defaultdict(list)
    for node in model.graph.node:
        for value in node.input:
            readers[value] += node.output
    named = (node for node in model.graph.node if name == node.name or name in node.output)
    values = dict.fromkeys(value for node in named for value in node.output if value)
    queue = list(values)
    for value in queue:  # grows while it is walked
        yield value
        new = [after for after in readers[value] if after and after not in values]
        values |= dict.fromkeys(new)
        queue += new


def _list_operators(planned: Graph, plan: Plan, name: str, operators: Sequence[int]) -> list[str]:
    """Return lines that list several operators by lane."""
    by_lane: dict[tuple[int, int], list[str]] = defaultdict(list)
    for i in operators:
        by_lane[plan.schedule.lanes[i], plan.schedule.width(i)].append(planned.dag.names[i])
    lines = [f"{name} is planned as {len(operators)} operators; explain one of them for its alternatives"]
    for lane, names in sorted(by_lane.items()):
        more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
        lines.append(f"{lane_name(*lane)}: {', '.join(names[:_MOST_LISTED])}{more}")
    return lines


def _explain_operator(planned: Graph, profile: Profile, plan: Plan, i: int) -> list[str]:
    """Return the lines that explain one operator."""
    dag, schedule = planned.dag, plan.schedule
    costs = profile.costs(dag, widths=schedule.widths)
    groups = group_operators(dag, costs)
    members = groups.members[groups.of[i]]
    lane = schedule.lanes[i]
    labels = [0] * len(dag)
    for at, segment in enumerate(plan.segments):
        for member in segment:
            labels[member] = at
    sizes = f"in a segment of {len(plan.segments[labels[i]])} and a group of {len(members)} operators"
    lines = [
        f"{dag.names[i]} ({dag.op_types[i]}) is on {lane_name(lane, schedule.width(i))}: {sizes}",
        _times(costs, i, max(schedule.cores, 1)),
    ]
    if plan.machine.hardware:
        lines.append(f"these times are estimated from datasheets: {plan.machine.hardware}")
    problem = Problem(dag, costs)
    for other, width in _alternative_lanes(costs, schedule):
        if (other, width) == (lane, schedule.width(i)) or not all(problem.allowed(m, other) for m in members):
            continue
        solution = problem.evaluate(schedule.moved(members, other, width), labels)
        moved = solution.with_frame(dag, costs).timeline
        change = moved.latency_ms - plan.predicted.latency_ms
        sign = "+" if change >= 0 else "-"
        lines.append(
            f"with its group moved to {lane_name(other, width)}: {format_ms(moved.latency_ms)} ({sign}"
            f"{format_ms(abs(change))}), resident accelerator memory {format_mb(moved.resident_mb)}"
        )
    return lines


def _alternative_lanes(costs: Costs, schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Yield all lanes with a width: one core each, and from the first core on all that the costs have."""
    yield from ((lane, 1) for lane in all_lanes(schedule.cores, schedule.streams))
    yield from ((1, width) for width in costs.widths if width <= schedule.cores)


def _times(costs: Costs, i: int, busy: int) -> str:
    text = f"alone, it takes {format_ms(costs.cpu_ms[busy - 1][i])} on a core"
    for width in costs.widths:
        if width <= busy:
            text += f", {format_ms(costs.core_ms(i, width, busy))} on {width} cores"
    if costs.accelerator_ms:
        text += f", on the accelerator {format_ms(costs.accelerator_ms[i])}"
    return text
