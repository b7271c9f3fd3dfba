"""Merging of operators, IOS's second strategy: siblings become one operator if that is predicted to be faster.

The cost of a merged operator comes from the profile like any other: measured, if the profile was also made of
:func:`merged_variants`, else estimated from operators of its type.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from chrion.graph.dag import Dag
from chrion.graph.merge import merge_operators, mergeable_groups
from chrion.graph.model import Graph
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.solution import Problem, VariantSolution
from chrion.scheduler.policies.ios_search import search_stages
from chrion.scheduler.policies.policy import PlanningTask
from chrion.scheduler.policies.stages import DeviceLanes, Stage, StageCost, StageMeter, schedule_stages

#: Largest set of siblings of which subsets are merged as well.
_LARGEST_WITH_SUBSETS = 3


def merged_variants(graph: Graph) -> list[Graph]:
    """Return variants of the graph that together contain every merge that IOS considers."""
    return [merge_operators(graph, groups) for groups in _disjoint_merges(graph)]


def ios(task: PlanningTask) -> list[VariantSolution]:
    """Return IOS's only solution for a graph, with siblings merged if that is predicted to be faster.

    There is one solution for every alpha: IOS does not consider memory.
    """
    graph, costs_of, meter = task.graph, task.costs_of, task.meter
    costs = costs_of(graph.dag)
    device = DeviceLanes(graph.dag, costs)
    stage_ms = _stage_cost(graph, device, meter)
    unmerged_stages = search_stages(graph.dag, stage_ms)
    unmerged = _evaluate(graph, costs, unmerged_stages)
    merged_ms = _merged_ms(task)
    stages = search_stages(graph.dag, stage_ms, merged_ms=merged_ms) if merged_ms else unmerged_stages
    groups = [_members(stage) for stage in stages if stage.merged]
    if not groups:
        return [unmerged]
    variant = merge_operators(graph, groups)
    merged = _evaluate(variant, costs_of(variant.dag), _translate(graph.dag, variant.dag, stages))
    faster = merged.solution.timeline.latency_ms < unmerged.solution.timeline.latency_ms
    names = tuple(tuple(graph.dag.names[i] for i in group) for group in groups)
    return [replace(merged, merged=names) if faster else unmerged]


def _stage_cost(graph: Graph, device: DeviceLanes, meter: StageMeter | None) -> StageCost:
    """Return the measured or predicted stage cost."""
    return device.stage_ms if meter is None else meter(graph, device)


def _evaluate(graph: Graph, costs: Costs, stages: Sequence[Stage]) -> VariantSolution:
    """Return the solution of a sequence of stages."""
    schedule = schedule_stages(graph.dag, DeviceLanes(graph.dag, costs), stages)
    return VariantSolution(0.0, Problem(graph.dag, costs).evaluate(schedule, origin="ios"), None, graph)


def _disjoint_merges(graph: Graph) -> list[list[tuple[int, ...]]]:
    """Return the merges that IOS considers, as lists of disjoint ones: sets of siblings, and subsets of small sets."""
    choices: list[list[tuple[int, ...]]] = []
    for siblings in mergeable_groups(graph):
        parts = range(2, len(siblings)) if len(siblings) <= _LARGEST_WITH_SUBSETS else ()
        choices.append([siblings, *(part for size in parts for part in itertools.combinations(siblings, size))])
    return [[group for group in taken if group] for taken in itertools.zip_longest(*choices, fillvalue=())]


def _merged_ms(task: PlanningTask) -> dict[tuple[int, ...], float]:
    """Return the latency in ms of each merge as a stage of its own: the merged operator and the split after it."""
    durations_ms = {}
    for groups in _disjoint_merges(task.graph):
        variant = merge_operators(task.graph, groups)
        stage_ms = _stage_cost(variant, DeviceLanes(variant.dag, task.costs_of(variant.dag)), task.meter)
        index = {name: i for i, name in enumerate(variant.dag.names)}
        for group in groups:
            durations_ms[group] = stage_ms([_replacements(task.graph.dag, index, group)])
    return durations_ms


def _replacements(dag: Dag, index: dict[str, int], group: Sequence[int]) -> tuple[int, int]:
    """Return the two operators that replace merged ones: the merged operator and the split."""
    name = "+".join(dag.names[i] for i in group)
    return index[name], index[f"{name}/split"]


def _members(stage: Stage) -> tuple[int, ...]:
    """Return the operators of a stage in ascending order."""
    return tuple(sorted(itertools.chain(*stage.groups)))


def _translate(dag: Dag, merged: Dag, stages: Sequence[Stage]) -> list[Stage]:
    """Return the same stages for the graph in which some of them have been merged."""
    index = {name: i for i, name in enumerate(merged.names)}
    return [
        Stage((_replacements(dag, index, _members(stage)),))
        if stage.merged
        else Stage(tuple(tuple(index[dag.names[i]] for i in group) for group in stage.groups))
        for stage in stages
    ]
