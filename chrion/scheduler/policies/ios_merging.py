"""IOS's second strategy: siblings of a stage become one operator, where that is faster than running them side by side.

What a merged operator costs is taken from the profile like any other operator's: measured, if the profile was made of
:func:`merged_variants` too, else estimated from operators of its type.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from chrion.graph.dag import Dag
from chrion.graph.merge import merge_operators, mergeable_groups
from chrion.graph.model import Graph
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.solution import Problem
from chrion.scheduler.policies.ios import StageCost, ios
from chrion.scheduler.policies.stages import Device, Stage, staged
from chrion.scheduler.search.alpha import Candidate

#: Sets of siblings up to this size are also merged in part.
_PARTED = 3


def merged_variants(graph: Graph) -> list[Graph]:
    """The graph with siblings merged, in as many ways as it takes to see every merge that IOS considers."""
    return [merge_operators(graph, groups) for groups in _rounds(graph)]


#: Makes the stage cost of a graph on a device; what measures stages is on a higher floor.
StageMeter = Callable[[Graph, Device], StageCost]


def ios_candidate(graph: Graph, costs_of: Callable[[Dag], Costs], meter: StageMeter | None = None) -> Candidate:
    """IOS's schedule of a graph, with siblings merged where that is predicted to be faster.

    Args:
        graph: The graph.
        costs_of: Costs of its operators, and of merged ones.
        meter: Measures stages; their latencies are predicted from the costs if missing.

    Returns:
        The same for any alpha: IOS does not look at memory.
    """
    costs = costs_of(graph.dag)
    device = Device(graph.dag, costs)
    stage_ms = _stage_cost(graph, device, meter)
    apart = ios(graph.dag, stage_ms)
    found = _placed(graph, costs, apart)
    merged_ms = _merged_ms(graph, costs_of, meter)
    stages = ios(graph.dag, stage_ms, merged_ms=merged_ms) if merged_ms else apart
    groups = [_members(stage) for stage in stages if stage.merged]
    if not groups:
        return found
    variant = merge_operators(graph, groups)
    merged = _placed(variant, costs_of(variant.dag), _translated(graph.dag, variant.dag, stages))
    faster = merged.solution.timeline.latency_ms < found.solution.timeline.latency_ms
    names = tuple(tuple(graph.dag.names[i] for i in group) for group in groups)
    return replace(merged, merged=names) if faster else found


def _stage_cost(graph: Graph, device: Device, meter: StageMeter | None) -> StageCost:
    return device.stage_ms if meter is None else meter(graph, device)


def _placed(graph: Graph, costs: Costs, stages: Sequence[Stage]) -> Candidate:
    schedule = staged(graph.dag, Device(graph.dag, costs), stages)
    return Candidate(0.0, Problem(graph.dag, costs).place(schedule, origin="ios"), None, graph)


def _rounds(graph: Graph) -> list[list[tuple[int, ...]]]:
    """Merges that IOS considers, as lists of disjoint ones: each set of siblings, and parts of the small sets."""
    choices: list[list[tuple[int, ...]]] = []
    for siblings in mergeable_groups(graph):
        parts = range(2, len(siblings)) if len(siblings) <= _PARTED else ()
        choices.append([siblings, *(part for size in parts for part in itertools.combinations(siblings, size))])
    return [[group for group in taken if group] for taken in itertools.zip_longest(*choices, fillvalue=())]


def _merged_ms(
    graph: Graph, costs_of: Callable[[Dag], Costs], meter: StageMeter | None
) -> dict[tuple[int, ...], float]:
    """The latency of each merge as a stage of its own: the merged operator and the split behind it."""
    found = {}
    for groups in _rounds(graph):
        variant = merge_operators(graph, groups)
        stage_ms = _stage_cost(variant, Device(variant.dag, costs_of(variant.dag)), meter)
        index = {name: i for i, name in enumerate(variant.dag.names)}
        for group in groups:
            found[group] = stage_ms([_merged(graph.dag, index, group)])
    return found


def _merged(dag: Dag, index: dict[str, int], group: Sequence[int]) -> tuple[int, int]:
    """The two operators that a merge leaves, in the merged graph."""
    name = "+".join(dag.names[i] for i in group)
    return index[name], index[f"{name}/split"]


def _members(stage: Stage) -> tuple[int, ...]:
    return tuple(sorted(itertools.chain(*stage.groups)))


def _translated(dag: Dag, merged: Dag, stages: Sequence[Stage]) -> list[Stage]:
    """The same stages for the graph in which some of them have been merged."""
    index = {name: i for i, name in enumerate(merged.names)}
    return [
        Stage((_merged(dag, index, _members(stage)),))
        if stage.merged
        else Stage(tuple(tuple(index[dag.names[i]] for i in group) for group in stage.groups))
        for stage in stages
    ]
