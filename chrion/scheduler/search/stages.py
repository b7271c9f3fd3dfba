"""Stages under a budget of evaluations, for searches beside IOS's dynamic programme.

An evaluation is a request for the latency of a stage that is not known yet: what would have to be measured on a device.
Searches obey the limits r and s of :mod:`chrion.scheduler.policies.endings`, and start from the generations of the
graph.

Each operator has a *level* that is wanted, and gets the first one from there on that is not before those of its
predecessors and in which its group fits. The stages are the levels in order; any sequence of stages can be expressed
that way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from chrion.graph.dag import Dag
from chrion.scheduler.policies.stages import Stage, StageCost, generations

#: The paper's limits: most operators of a group, and most groups of a stage.
R, S = 3, 8


class SpentError(Exception):
    """The budget of evaluations is spent."""


class CountedCost:
    """The cost of a stage, which counts how many different stages it was asked for.

    Args:
        stage_ms: The cost.
        budget: The most different stages; beyond that it raises an exception.
    """

    def __init__(self, stage_ms: StageCost, budget: float = math.inf) -> None:
        self._stage_ms, self._budget = stage_ms, budget
        self._known: dict[frozenset[tuple[int, ...]], float] = {}

    @property
    def evaluations(self) -> int:
        """The number of different stages so far."""
        return len(self._known)

    def __call__(self, groups: Sequence[Sequence[int]]) -> float:
        """Return the latency of a stage in ms."""
        key = frozenset(map(tuple, groups))
        if key not in self._known:
            if len(self._known) >= self._budget:
                raise SpentError
            self._known[key] = self._stage_ms(groups)
        return self._known[key]


def stages_of_levels(dag: Dag, wanted: Sequence[float], r: int | None = R, s: int | None = S) -> list[Stage]:
    """Return the stages of levels that are wanted for operators; see the text above.

    Args:
        dag: The graph.
        wanted: The level of each operator; only order and equality of their whole parts matter.
        r: Most operators of a group; None for any number.
        s: Most groups of a stage; None for any number.
    """
    level: dict[int, int] = {}
    groups: dict[int, list[set[int]]] = {}
    for i in dag.topological_order:
        before = dag.predecessors[i]
        at = max([math.floor(wanted[i]), *(level[m] for m in before)])
        while True:
            own = groups.setdefault(at, [])
            joined = [group for group in own if not group.isdisjoint(before)]
            size = 1 + sum(map(len, joined))
            if (r is None or size <= r) and (s is None or len(own) - len(joined) < s):
                break
            at += 1
        groups[at] = [group for group in own if group not in joined] + [{i}.union(*joined)]
        level[i] = at
    position = {v: at for at, v in enumerate(dag.topological_order)}
    return [
        Stage(tuple(sorted(tuple(sorted(group, key=position.__getitem__)) for group in groups[at])))
        for at in sorted(groups)
        if groups[at]
    ]


def generation_stages(dag: Dag) -> list[Stage]:
    """Return the generations of the graph within the limits: what searches start from."""
    return stages_of_levels(dag, depths(dag))


def depths(dag: Dag) -> list[float]:
    """Return the generation of each operator."""
    depth = [0.0] * len(dag)
    for at, own in enumerate(generations(dag)):
        for i in own:
            depth[i] = float(at)
    return depth
