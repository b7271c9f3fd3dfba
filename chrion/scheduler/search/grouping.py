"""Groups: operators that are placed on one lane together, and the tiles in which they run.

A layer is placed as a whole: the operators that read one weight (for example all steps of a recurrent layer) form a
group, together with the small operators between them. Groups that depend on each other in both directions are joined.
In a group of many steps, consecutive steps form a **tile**. Running tile after tile instead of step after step gives
each lane long segments, and the next lane can start as soon as the first tile is done.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from chrion.common.imports import import_late
from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs

#: Weights of fewer bytes (biases, scales, shapes) do not bind operators together: one page.
_BINDING_BYTES = 4096
#: An operator that takes no longer than this many dispatches and handoffs joins a predecessor's group.
_SMALL = 4.0


@dataclass(frozen=True)
class Groups:
    """A partition of a graph's operators, groups numbered in topological order."""

    #: Group of each operator.
    of: tuple[int, ...]
    #: Operators of each group, in topological order.
    members: tuple[tuple[int, ...], ...]
    #: The step of each operator: the number of operators before it that read the same weight. An operator without a
    #: large weight has the step of its latest predecessor.
    step: tuple[int, ...]

    @property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """The operators of each group and step: a layer's chunk with the small operators around it."""
        by_step: dict[tuple[int, int], list[int]] = {}
        for members in self.members:
            for i in members:
                by_step.setdefault((self.of[i], self.step[i]), []).append(i)
        return tuple(tuple(unit) for unit in by_step.values())

    @property
    def steps(self) -> int:
        """The number of steps of the longest group."""
        return max(self.step, default=-1) + 1


def group_operators(dag: Dag, costs: Costs) -> Groups:
    """Return the groups of a graph's operators."""
    parent = list(range(len(dag)))
    owner: dict[int, int] = {}
    step = [0] * len(dag)
    seen: dict[int, int] = {}
    small = _SMALL * (costs.dispatch_ms + costs.handoff_ms)
    # Not the mean over all lanes: groups must not depend on the number of lanes.
    alone_ms = costs.lane_ms(1 if costs.cores else 0, 1)
    alike = Counter(dag.signatures)
    stepped = max(Counter(_binding_weight(dag, i) for i in range(len(dag)) if dag.weights[i]).values(), default=0) > 1
    for i in dag.topological_order:
        weight = _binding_weight(dag, i)
        before = dag.predecessors[i]
        if weight is not None:
            _join(parent, i, owner.setdefault(weight, i))
            step[i] = seen.get(weight, 0)
            seen[weight] = step[i] + 1
        # In a graph with steps, a small operator that occurs once is not part of a step, so it joins no group.
        elif before and alone_ms[i] <= small and not (stepped and alike[dag.signatures[i]] == 1):
            latest = max(before, key=lambda m: step[m])
            _join(parent, i, latest)
            step[i] = step[latest]
        elif before:
            step[i] = max(step[m] for m in before)
    return _numbered(dag, [_root(parent, i) for i in range(len(dag))], step)


def tile_order(dag: Dag, groups: Groups, steps: int) -> tuple[list[int], list[int]]:
    """Return an order that runs tile after tile, and within a tile group after group.

    Args:
        dag: The graph.
        groups: Its groups.
        steps: Steps of a group that form a tile.

    Returns:
        A topological order, and for each operator a label by which segments are cut: operators of groups with several
        steps are labelled by tile, so that all tiles of a group are alike; every other group has a label of its own.
    """
    tiles = [0] * len(dag)
    for i in dag.topological_order:
        own = groups.step[i] // steps
        tiles[i] = max([own, *(tiles[m] for m in dag.predecessors[i])])
    position = [0] * len(dag)
    for at, i in enumerate(dag.topological_order):
        position[i] = at
    order = sorted(range(len(dag)), key=lambda i: (tiles[i], groups.of[i], position[i]))
    several = [len({groups.step[i] for i in members}) > 1 for members in groups.members]
    labels = [tiles[i] if several[groups.of[i]] else -1 - groups.of[i] for i in range(len(dag))]
    return order, labels


def unit_order(dag: Dag, units: Sequence[Sequence[int]], order: Sequence[int]) -> list[int] | None:
    """Return the topological order closest to ``order`` in which the operators of a unit are consecutive.

    Returns:
        The order; None if units depend on each other in both directions.
    """
    unit_of = {i: at for at, unit in enumerate(units) for i in unit}
    position = {i: at for at, i in enumerate(order)}
    after: list[set[int]] = [set() for _ in units]
    for i in range(len(dag)):
        for m in dag.predecessors[i]:
            if unit_of[m] != unit_of[i]:
                after[unit_of[m]].add(unit_of[i])
    missing = Counter(u for targets in after for u in targets)
    ready = [(min(position[i] for i in unit), at) for at, unit in enumerate(units) if not missing[at]]
    heapq.heapify(ready)
    ordered: list[int] = []
    while ready:
        _, at = heapq.heappop(ready)
        ordered.extend(sorted(units[at], key=position.__getitem__))
        for u in sorted(after[at]):
            missing[u] -= 1
            if not missing[u]:
                heapq.heappush(ready, (min(position[i] for i in units[u]), u))
    return ordered if len(ordered) == len(dag) else None


def _binding_weight(dag: Dag, i: int) -> int | None:
    """Return the largest weight that an operator reads, if it is large enough to bind operators together."""
    largest = max(dag.weights[i], key=lambda w: dag.weight_bytes[w], default=None)
    return largest if largest is not None and dag.weight_bytes[largest] >= _BINDING_BYTES else None


def _numbered(dag: Dag, labels: Sequence[int], step: Sequence[int]) -> Groups:
    """Return groups from a label for each operator: cycles joined, numbered in topological order."""
    position = {i: at for at, i in enumerate(dag.topological_order)}
    # Large graphs have no groups in most cases; links between single operators would take most of the memory.
    of = tuple(position[i] for i in range(len(dag))) if len(set(labels)) == len(dag) else _numbers(dag, labels)
    members: list[list[int]] = [[] for _ in range(max(of, default=-1) + 1)]
    for i in dag.topological_order:
        members[of[i]].append(i)
    return Groups(of, tuple(tuple(m) for m in members), tuple(step))


def _numbers(dag: Dag, labels: Sequence[int]) -> tuple[int, ...]:
    """Return the number of each operator's group, from a label for each: cycles joined, in topological order."""
    nx = import_late("networkx")  # takes a tenth of a second
    links = nx.DiGraph()
    links.add_nodes_from(dict.fromkeys(labels))
    links.add_edges_from((labels[m], labels[i]) for i in range(len(dag)) for m in dag.predecessors[i])
    links.remove_edges_from(list(nx.selfloop_edges(links)))
    merged = nx.condensation(links)
    position = {i: at for at, i in enumerate(dag.topological_order)}
    component: dict[int, int] = merged.graph["mapping"]
    first: dict[int, int] = {}
    for i in dag.topological_order:
        first.setdefault(component[labels[i]], position[i])
    numbers = {c: at for at, c in enumerate(nx.lexicographical_topological_sort(merged, key=first.__getitem__))}
    return tuple(numbers[component[label]] for label in labels)


def _root(parent: list[int], i: int) -> int:
    """Return the representative of a set (union-find with path halving)."""
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i


def _join(parent: list[int], i: int, other: int) -> None:
    """Join the sets of two members."""
    parent[_root(parent, i)] = _root(parent, other)
