"""Solutions: schedules with the segments and the timeline that follow from them, as searches compare them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.graph.dag import Dag
from chrion.graph.model import Graph
from chrion.graph.segments import cut
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.evaluate import Timeline, complete, run_times
from chrion.scheduler.evaluation.memory import device_memory, least_mb
from chrion.scheduler.priced_memory import Memory
from chrion.scheduler.schedule import Schedule

#: Steps of the chunks that recurrent operators are cut into, or the form of tree ensembles as tensor operators; None
#: for the graph itself.
Variant = int | str | None

#: About the time to evaluate an operator of a schedule with several accelerator lanes, relative to one with a single
#: lane.
_CONTENTION = 8


@dataclass(frozen=True, slots=True)
class Solution:
    """An evaluated schedule."""

    schedule: Schedule
    #: Label of each operator by which the schedule was cut into segments; None if the cut delays no operator.
    tiles: tuple[int, ...] | None
    segments: tuple[tuple[int, ...], ...]
    timeline: Timeline
    #: The policy or the initial solution that the schedule comes from.
    origin: str = ""
    #: Resident accelerator memory that the solution must not exceed.
    cap_mb: float = math.inf

    def cost(self, alpha: float) -> float:
        """Return L + alpha * M with M as resident memory; infinite above the cap."""
        if self.timeline.resident_mb > self.cap_mb:
            return math.inf
        return self.timeline.latency_ms + alpha * self.timeline.resident_mb

    def with_least_memory(self, dag: Dag, costs: Costs) -> Solution:
        """Return the solution with a lower bound on resident memory in place of the search's estimate."""
        return replace(
            self, timeline=replace(self.timeline, resident_mb=least_mb(dag, costs, self.schedule.lanes), frame_mb=0.0)
        )

    def with_frame(self, dag: Dag, costs: Costs) -> Solution:
        """Return the solution with exact resident memory in place of the search's estimate."""
        resident_mb, frame_mb = device_memory(dag, costs, self.schedule, self.segments)
        return replace(self, timeline=replace(self.timeline, resident_mb=resident_mb, frame_mb=frame_mb))


@dataclass(frozen=True, slots=True)
class VariantSolution:
    """A solution for one variant of a graph, or for the graph with operators merged."""

    #: Price of accelerator memory that the solution was made with, in ms per MB.
    alpha: float
    solution: Solution
    variant: Variant
    #: The graph of the variant.
    graph: Graph
    #: Operators that were merged into one, by name.
    merged: tuple[tuple[str, ...], ...] = ()

    @property
    def wide(self) -> bool:
        """True if any operator runs on several cores."""
        return bool(self.solution.schedule.widths)

    def memory_mb(self, memory: Memory) -> float:
        """Return the accelerator memory by one of its definitions, in MB."""
        timeline = self.solution.timeline
        return timeline.resident_mb if memory == "resident" else timeline.memory_mb

    def meets(self, slo_ms: float | None) -> bool:
        """Return True if the predicted latency is within the SLO, or there is no SLO."""
        return slo_ms is None or self.solution.timeline.latency_ms <= slo_ms

    def fits(self, budget_mb: float | None) -> bool:
        """Return True if the resident accelerator memory is within the budget, or there is no budget."""
        return budget_mb is None or self.solution.timeline.resident_mb <= budget_mb


class Problem:
    """A graph and its costs, with an evaluator that counts its work.

    Args:
        dag: The graph.
        costs: The machine's costs.
        cap_mb: Resident accelerator memory that solutions must not exceed.
    """

    def __init__(self, dag: Dag, costs: Costs, cap_mb: float = math.inf) -> None:
        self.dag = dag
        self.costs = costs
        self.cap_mb = cap_mb
        #: Operators evaluated so far: the unit of search budgets, because time would make results vary between runs.
        self.work = 0

    def evaluate(self, schedule: Schedule, tiles: Sequence[int] | None = None, origin: str = "") -> Solution:
        """Cut a schedule into segments and evaluate it.

        Args:
            schedule: A valid schedule; it is not checked.
            tiles: Label of each operator by which to cut; if missing, the cut delays no operator.
            origin: The policy or the initial solution that the schedule comes from.
        """
        solution = self.evaluate_below(math.inf, schedule, tiles, origin)
        assert solution is not None  # noqa: S101 - there is no limit
        return solution

    def evaluate_below(
        self, limit_ms: float, schedule: Schedule, tiles: Sequence[int] | None = None, origin: str = ""
    ) -> Solution | None:
        """Return the solution of :meth:`evaluate`, or None if its latency is ``limit_ms`` or more.

        Most trials of a search are no faster, so it pays not to compute their memory.
        """
        dag, costs = self.dag, self.costs
        segments = cut(dag, schedule.order, schedule.lanes, tiles, schedule.stages, schedule.widths)
        self.work += len(dag) * (_CONTENTION if schedule.streams > 1 else 1)
        times = run_times(dag, costs, schedule, segments)
        if times.latency_ms >= limit_ms < math.inf:
            return None
        timeline = complete(dag, costs, schedule, times)
        return Solution(schedule, None if tiles is None else tuple(tiles), segments, timeline, origin, self.cap_mb)

    def allowed(self, i: int, lane: int) -> bool:
        """Return True if operator ``i`` can run on a lane."""
        accelerator_ms = self.costs.accelerator_ms
        return not is_accelerator_lane(lane) or (accelerator_ms is not None and accelerator_ms[i] < math.inf)
