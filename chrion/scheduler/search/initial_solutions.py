"""Initial solutions: complete schedules of several kinds, from which local search starts.

One lane and device selection are tried once, the others for several numbers of CPU cores
(:attr:`InitialSolutions.core_counts`):

- **one lane**: every operator on one lane, without any handoff;
- **HEFT** on operators, and the paper's greedy device selection: good if operators are long compared with handoffs;
- **pipeline**: the groups (layers) in order, cut into one stretch for each lane such that the greatest load is as
  small as possible, run tile after tile: good for stacks of recurrent layers, whose lanes then work on different
  time steps;
- **alternating**: layers assigned to the CPU lanes round robin; a lane runs a layer to its end, one step behind the
  lane before it: good for layers whose weights would otherwise leave the cache;
- **branches**: HEFT on whole groups, run tile after tile: good for independent directions and branches.

Pipelines and branches are tried with every tile length that is a power of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from chrion.graph.dag import Dag
from chrion.profiler.costs import Costs, OperatorMemory
from chrion.scheduler.evaluation.solution import Problem, Solution
from chrion.scheduler.policies.device_selection import select_devices
from chrion.scheduler.policies.heft import schedule_heft
from chrion.scheduler.policies.orders import hybrid_order
from chrion.scheduler.schedule import Schedule
from chrion.scheduler.search.grouping import Groups, assign_round_robin, group_operators, tile_order, unit_order

#: Larger graphs have initial solutions on one lane and by device selection only.
LARGE = 20_000


class InitialSolutions:
    """The initial solutions of one graph and its costs.

    Args:
        dag: The graph.
        costs: The machine's costs, overheads included.
    """

    def __init__(self, dag: Dag, costs: Costs) -> None:
        #: The graph and its costs.
        self.problem = Problem(dag, costs)
        self.groups = group_operators(dag, costs)
        units = self.groups.units
        #: Operators that stay in one segment wherever they are placed; None if the schedule determines the segments.
        #: The steps of a layer are alike, so segments of one step each share one session and its packed weights.
        self.units = units if self.groups.steps > 1 else None
        self._order = hybrid_order(dag, costs)
        self._independent_of_alpha = [*self._single_lanes(), *self._grouped()]

    def __call__(self, alpha: float) -> list[Solution]:
        """Return the initial solutions for an alpha (ms per MB), the one with the least cost first."""
        return sorted([*self._independent_of_alpha, *self._of_policies(alpha)], key=partial(preference, alpha))

    @property
    def core_counts(self) -> list[int]:
        """The numbers of CPU lanes to try beside a single lane: all up to four, some larger ones, and k.

        Empty for a large graph, where each number would take seconds.
        """
        if len(self.problem.dag) > LARGE:
            return []
        k = self.problem.costs.cores
        least = 1 if self.problem.costs.accelerator_ms is not None else 2
        return [j for j in range(least, k + 1) if j <= 4 or j == k or j in {6, 8, 12, 16, 24, 32, 48, 64, 96, 128}]

    def _single_lanes(self) -> Iterator[Solution]:
        problem, order = self.problem, self._order
        n = len(problem.dag)
        if all(problem.allowed(i, 0) for i in range(n)):
            yield problem.evaluate(Schedule(order, (0,) * n, 0), origin="accelerator alone")
        if problem.costs.cores:
            yield problem.evaluate(Schedule(order, (1,) * n, 1), origin="one core")

    def _grouped(self) -> Iterator[Solution]:
        """Yield the initial solutions that place groups as wholes."""
        problem, groups = self.problem, self.groups
        for cores in self.core_counts:
            for origin, lanes in _group_lanes(groups, problem.costs, cores):
                if all(problem.allowed(i, lanes[groups.of[i]]) for i in range(len(problem.dag))):
                    yield from self._tiled(lanes, cores, origin)
            if alternating := self._alternating(cores):
                yield alternating

    def _tiled(self, lanes: Sequence[int], cores: int, origin: str) -> Iterator[Solution]:
        """Yield a placement of groups with every tile length."""
        groups = self.groups
        placement = tuple(lanes[g] for g in groups.of)
        steps = 1
        while True:
            order, tiles = tile_order(self.problem.dag, groups, steps)
            schedule = Schedule(tuple(order), placement, cores)
            yield self.problem.evaluate(schedule, tiles, f"{origin}, tiles of {steps}")
            if steps >= groups.steps:
                return
            steps *= 2

    def _alternating(self, cores: int) -> Solution | None:
        """Return the solution with layers assigned round robin; None if there is only one step or lane."""
        if self.units is None or cores < 2:
            return None
        dag, groups = self.problem.dag, self.groups
        lanes, start = assign_round_robin(groups, cores)
        labels = {i: label for label, unit in enumerate(self.units) for i in unit}
        by_start = sorted(dag.topological_order, key=start.__getitem__)
        order = unit_order(dag, self.units, by_start) or dag.topological_order
        tiles = [labels[i] for i in range(len(dag))]
        schedule = Schedule(tuple(order), tuple(lanes), cores)
        return self.problem.evaluate(schedule, tiles, "alternating, step by step")

    def _of_policies(self, alpha: float) -> Iterator[Solution]:
        """Yield the initial solutions of published policies, which depend on alpha."""
        dag, costs = self.problem.dag, self.problem.costs
        if len(dag) < 2:
            return
        yield self._by_units(select_devices(dag, costs, self._order, alpha).schedule, "greedy")
        for cores in self.core_counts:
            yield self._by_units(schedule_heft(dag, costs, cores, alpha=alpha), "heft")

    def _by_units(self, schedule: Schedule, origin: str) -> Solution:
        """Evaluate a schedule of single operators; if there are units, each is placed with its longest operator."""
        problem = self.problem
        if self.units is None:
            return problem.evaluate(Schedule(schedule.order, schedule.lanes, schedule.cores), origin=origin)
        lanes, labels = list(schedule.lanes), [0] * len(problem.dag)
        for label, unit in enumerate(self.units):
            lead = max(unit, key=problem.costs.mean_ms)
            for i in unit:
                labels[i] = label
                lanes[i] = schedule.lanes[lead] if problem.allowed(i, schedule.lanes[lead]) else lanes[i]
        order = unit_order(problem.dag, self.units, schedule.order) or schedule.order
        return problem.evaluate(Schedule(tuple(order), tuple(lanes), schedule.cores), labels, f"{origin}, step by step")


def preference(alpha: float, solution: Solution) -> tuple[float, int]:
    """Return the sort key of solutions: the least cost first, on a tie the fewest segments."""
    return solution.cost(alpha), len(solution.segments)


def _group_lanes(groups: Groups, costs: Costs, cores: int) -> Iterator[tuple[str, list[int]]]:
    """Yield placements of groups as wholes: a name, and the lane of each group."""
    loads = _group_costs(groups, costs)
    if len(groups.members) < 2:
        return
    lanes = list(range(0 if costs.accelerator_ms is not None else 1, cores + 1))
    if lanes:
        yield "pipeline", _balanced_stretches(loads, lanes, cores)
        if lanes[0] == 0 and cores:
            yield "pipeline, accelerator last", _balanced_stretches(loads, [*lanes[1:], 0], cores)
    yield "branches", list(schedule_heft(groups.dag, loads, cores).lanes)


def _group_costs(groups: Groups, costs: Costs) -> Costs:
    """Return the costs of groups as if each were one operator."""

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


def _balanced_stretches(loads: Costs, lanes: Sequence[int], cores: int) -> list[int]:
    """Cut the groups, in order, into one stretch for each lane such that the greatest load is least.

    Dynamic programme over prefixes: ``best[g]`` is the least greatest load of the first g groups on the lanes so far.
    O(groups^2 * lanes).

    Returns:
        The lane of each group.
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
