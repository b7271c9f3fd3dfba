"""A schedule being improved: order, lanes and tiles, with the segments and the timeline that follow from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from chrion.graph.dag import Dag
from chrion.graph.segments import cut
from chrion.lane_numbers import is_accelerator_lane
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.evaluate import Timeline, evaluate
from chrion.scheduler.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Solution:
    """An evaluated schedule."""

    schedule: Schedule
    #: Label of each operator by which it was cut; None where it was cut without delaying anything.
    tiles: tuple[int, ...] | None
    segments: tuple[tuple[int, ...], ...]
    timeline: Timeline
    #: Where it comes from: the rule that made it, and what improved it.
    origin: str = ""
    #: Accelerator memory that it must not exceed.
    cap_mb: float = math.inf

    def cost(self, alpha: float) -> float:
        """L + alpha * M with M as an arena holds it; infinite above the cap."""
        if self.timeline.resident_mb > self.cap_mb:
            return math.inf
        return self.timeline.latency_ms + alpha * self.timeline.resident_mb


class Problem:
    """A graph and its costs; makes solutions and counts how much work that was.

    Args:
        dag: The graph.
        costs: The machine's costs.
        cap_mb: Accelerator memory (see :mod:`chrion.scheduler.evaluation.memory`, resident) that solutions must not
            exceed.
    """

    def __init__(self, dag: Dag, costs: Costs, cap_mb: float = math.inf) -> None:
        self.dag = dag
        self.costs = costs
        self.cap_mb = cap_mb
        #: Operators evaluated so far: the measure of work, since time would make results differ from run to run.
        self.work = 0

    def solve(
        self,
        order: Sequence[int],
        lanes: Sequence[int],
        cores: int,
        tiles: Sequence[int] | None = None,
        origin: str = "",
    ) -> Solution:
        """Cut and evaluate. The order must be topological, and every operator able to run on its lane."""
        return self.place(Schedule(tuple(order), tuple(lanes), cores), tiles, origin)

    def place(self, schedule: Schedule, tiles: Sequence[int] | None = None, origin: str = "") -> Solution:
        """Cut and evaluate a schedule, which must be valid."""
        segments = cut(self.dag, schedule.order, schedule.lanes, tiles, schedule.stages)
        self.work += len(self.dag)
        timeline = evaluate(self.dag, self.costs, schedule, segments, check=False)
        return Solution(schedule, None if tiles is None else tuple(tiles), segments, timeline, origin, self.cap_mb)

    def allowed(self, i: int, lane: int) -> bool:
        """Whether an operator can run on a lane."""
        there = self.costs.accelerator_ms
        return not is_accelerator_lane(lane) or (there is not None and there[i] < float("inf"))
