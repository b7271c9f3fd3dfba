"""The default policy: several ways to begin, judged by the evaluator; the best of them improved by local search.

Ways to begin, for every number of CPU cores:

- **one lane**: everything on one device, which costs no handoff at all;
- **HEFT** on operators, and the paper's greedy selection: good where operators are large against handoffs;
- **pipeline**: groups (layers) in order, cut into one stretch a lane so that the fullest lane has least to do, run tile
  after tile: good for stacks of recurrent layers, whose lanes then work on different times;
- **alternating**: layers dealt out to the CPU lanes in turn; a lane runs a layer to its end, a step behind the lane
  before it: good for layers whose weights do not stay in a cache otherwise;
- **branches**: HEFT on groups as a whole, run tile after tile: good for independent directions and branches.

Each tile length (a power of two) is tried. The paper's skeleton is kept: for every k', choose lanes by finish time plus
alpha times memory, and keep the k' with the least L + alpha * M, with M as an arena holds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs, OperatorMemory
from chrion.scheduler.evaluation.solution import Problem, Solution
from chrion.scheduler.policies.device_selection import select_devices
from chrion.scheduler.policies.heft import heft
from chrion.scheduler.policies.orders import hybrid_order
from chrion.scheduler.schedule import Schedule
from chrion.scheduler.search.grouping import Groups, deal, group, tile_order, unit_order
from chrion.scheduler.search.local_search import BUDGET, merge_segments, refine

#: Solutions that are refined, best first.
_REFINED = 3
#: Graphs up to this size are refined operator by operator, too.
_FINE = 400
#: Graphs above this size are begun in fewer ways.
_LARGE = 20_000
#: Graphs up to this size are refined operator by operator even where operators belong to units.
_TINY = 40


class Planner:
    """The default policy for one graph and its costs.

    Args:
        dag: The graph.
        costs: This machine's costs, overheads included.
    """

    def __init__(self, dag: Dag, costs: Costs) -> None:
        self._problem = Problem(dag, costs)
        self._groups = group(dag, costs)
        self._order = hybrid_order(dag, costs)
        units = self._groups.units
        #: Operators that are cut together wherever they are placed; None leaves the cut to the schedule. All steps of
        #: a layer are alike, so cut step by step they share one session and its packed weights.
        self._units = units if self._groups.steps > 1 else None
        self._fixed = list(self._independent_of_alpha())

    def __call__(self, alpha: float) -> Solution:
        """The best solution found. Equal inputs give equal solutions."""
        return self.improve(self.begin(alpha), alpha)

    def begin(self, alpha: float) -> list[Solution]:
        """Ways to begin, the best first."""
        seeds = [*self._fixed, *self._dependent_on_alpha(alpha)]
        return sorted(seeds, key=partial(_preference, alpha))

    def improve(self, seeds: Sequence[Solution], alpha: float) -> Solution:
        """Refine the best beginnings and keep the best result."""
        count = 1 if len(self._problem.dag) > _LARGE else _REFINED
        improved = [self.refined(seed, alpha) for seed in seeds[:count]]
        return min(improved, key=partial(_preference, alpha))

    def refined(self, seed: Solution, alpha: float, *, cap_mb: float = math.inf, budget: int = BUDGET) -> Solution:
        """One beginning improved by local search, within an accelerator memory that the beginning keeps to."""
        problem = Problem(self._problem.dag, self._problem.costs, cap_mb)
        solution = replace(seed, cap_mb=cap_mb)
        for units in self.movable:
            solution = refine(problem, solution, units, alpha, budget=budget)
        # Tiles are all alike, and share one session and its packed weights; merged with a neighbour they would not.
        return solution if self._units else merge_segments(problem, solution, alpha, budget=budget)

    @property
    def problem(self) -> Problem:
        """The graph and its costs."""
        return self._problem

    @property
    def movable(self) -> list[tuple[tuple[int, ...], ...]]:
        """Operators that local search moves together: groups; in a graph that is not large, smaller units, too."""
        n = len(self._problem.dag)
        singles = tuple((i,) for i in range(n))
        if n > _FINE:
            return [self._groups.members]
        return [
            self._groups.members,
            *([self._units] if self._units else []),
            *([singles] if not self._units or n <= _TINY else []),
        ]

    def _independent_of_alpha(self) -> Iterator[Solution]:
        problem, groups = self._problem, self._groups
        yield from _single_lanes(problem, self._order)
        for cores in self.core_counts:
            for origin, lanes in _group_lanes(groups, problem.costs, cores):
                if all(problem.allowed(i, lanes[groups.of[i]]) for i in range(len(problem.dag))):
                    yield from _tiled(problem, groups, lanes, cores, origin)
            if alternating := self._alternating(cores):
                yield alternating

    def _alternating(self, cores: int) -> Solution | None:
        """Groups of several steps dealt out to CPU lanes in turn; None without several groups and lanes."""
        if self._units is None or cores < 2:
            return None
        dag, groups = self._problem.dag, self._groups
        lanes, start = deal(groups, cores)
        labels = {i: label for label, unit in enumerate(self._units) for i in unit}
        nearest = sorted(dag.topological_order, key=start.__getitem__)
        order = unit_order(dag, self._units, nearest) or list(dag.topological_order)
        tiles = [labels[i] for i in range(len(dag))]
        return self._problem.solve(order, lanes, cores, tiles, "alternating, step by step")

    def _dependent_on_alpha(self, alpha: float) -> Iterator[Solution]:
        dag, costs = self._problem.dag, self._problem.costs
        if len(dag) < 2:
            return
        yield self._placed(select_devices(dag, costs, self._order, alpha).schedule, "greedy")
        for cores in self.core_counts:
            yield self._placed(heft(dag, costs, cores, alpha=alpha), "heft")

    def _placed(self, schedule: Schedule, origin: str) -> Solution:
        """A schedule of single operators; in a graph of many steps, each unit follows its first operator."""
        problem = self._problem
        if self._units is None:
            return problem.solve(schedule.order, schedule.lanes, schedule.cores, origin=origin)
        lanes, labels = list(schedule.lanes), [0] * len(problem.dag)
        for label, unit in enumerate(self._units):
            lead = max(unit, key=problem.costs.mean_ms)
            for i in unit:
                labels[i] = label
                lanes[i] = schedule.lanes[lead] if problem.allowed(i, schedule.lanes[lead]) else lanes[i]
        order = unit_order(problem.dag, self._units, schedule.order) or schedule.order
        return problem.solve(order, lanes, schedule.cores, labels, f"{origin}, step by step")

    @property
    def core_counts(self) -> list[int]:
        """Numbers of CPU lanes to try beside a single lane: all up to four, then about every half doubling, and k.

        None in a large graph, where each number would cost seconds: one lane and the greedy selection have to do.
        """
        if len(self._problem.dag) > _LARGE:
            return []
        k = self._problem.costs.cores
        least = 1 if self._problem.costs.accelerator_ms is not None else 2
        return [j for j in range(least, k + 1) if j <= 4 or j == k or j in {6, 8, 12, 16, 24, 32, 48, 64, 96, 128}]


def _preference(alpha: float, solution: Solution) -> tuple[float, int]:
    return solution.cost(alpha), len(solution.segments)


def _single_lanes(problem: Problem, order: Sequence[int]) -> Iterator[Solution]:
    n = len(problem.dag)
    if all(problem.allowed(i, 0) for i in range(n)):
        yield problem.solve(order, [0] * n, 0, origin="accelerator alone")
    if problem.costs.cores:
        yield problem.solve(order, [1] * n, 1, origin="one core")


def _tiled(problem: Problem, groups: Groups, lanes: Sequence[int], cores: int, origin: str) -> Iterator[Solution]:
    placement = [lanes[g] for g in groups.of]
    steps = 1
    while True:
        order, tiles = tile_order(problem.dag, groups, steps)
        yield problem.solve(order, placement, cores, tiles, f"{origin}, tiles of {steps}")
        if steps >= groups.steps:
            return
        steps *= 2


def _group_lanes(groups: Groups, costs: Costs, cores: int) -> Iterator[tuple[str, list[int]]]:
    """Lanes of the groups, placed as wholes."""
    loads = _group_costs(groups, costs)
    n = len(groups.members)
    if n < 2:
        return
    lanes = list(range(0 if costs.accelerator_ms is not None else 1, cores + 1))
    if lanes:
        yield "pipeline", _stretches(loads, lanes, cores)
        if lanes[0] == 0 and cores:
            yield "pipeline, accelerator last", _stretches(loads, [*lanes[1:], 0], cores)
    yield "branches", list(heft(groups.dag, loads, cores).lanes)


def _group_costs(groups: Groups, costs: Costs) -> Costs:
    """The groups' costs as if each were one operator."""

    def total(times: Sequence[float]) -> tuple[float, ...]:
        return tuple(sum(times[i] for i in members) for members in groups.members)

    weights = [sum(costs.memory[i].own_mb for i in members) for members in groups.members]
    return Costs(
        accelerator_ms=None if costs.accelerator_ms is None else total(costs.accelerator_ms),
        cpu_ms=tuple(total(times) for times in costs.cpu_ms),
        memory=tuple(OperatorMemory(ephemeral_mb=mb) for mb in weights),
        upload=costs.upload,
        download=costs.download,
        handoff_ms=costs.handoff_ms,
        dispatch_ms=costs.dispatch_ms,
    )


def _stretches(loads: Costs, lanes: Sequence[int], cores: int) -> list[int]:
    """Cut the groups, in order, into one stretch a lane so that the fullest lane has least to do.

    Dynamic programme over prefixes: ``best[g]`` is the least fullest load of the first g groups on the lanes so far.
    O(groups^2 * lanes).
    """
    n = len(loads.memory)
    sums = []
    for lane in lanes:
        running = [0.0]
        for ms in loads.lane_ms(lane, cores):
            running.append(running[-1] + ms)
        sums.append(running)
    best = [sums[0][g] for g in range(n + 1)]
    starts: list[list[int]] = [[0] * (n + 1)]
    for running in sums[1:]:
        choice = [min((max(best[s], running[g] - running[s]), s) for s in range(g + 1)) for g in range(n + 1)]
        best = [load for load, _ in choice]
        starts.append([s for _, s in choice])
    placed = [0] * n
    end = n
    for at in reversed(range(len(lanes))):
        start = starts[at][end]
        placed[start:end] = [lanes[at]] * (end - start)
        end = start
    return placed
