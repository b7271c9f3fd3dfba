"""Initial solutions: complete schedules of several kinds, from which local search starts.

They are made for one machine and use all its lanes (for smaller ones, see :mod:`chrion.scheduler.search.machines`):

- **one lane**: every operator on one lane, without any handoff;
- **published policies**, as they stand: the paper's device selection on three orders, HEFT, CPOP, PEFT, lists
  by critical path, streams (Nimble, Opara) and stages (greedy, wavefront); good if operators are long compared with
  handoffs. In a graph of several steps, HEFT and device selection are tried step by
  step as well;
- **pipeline**: the groups (layers) in order, cut into one stretch for each lane such that the greatest load is as
  small as possible, run tile after tile: good for stacks of recurrent layers, whose lanes then work on different
  time steps;
- **weight groups**: for increasing amounts of accelerator memory, the groups that gain most from the accelerator, by a
  knapsack over their weights; good for models that exceed its memory.

Pipelines are tried with every tile length that is a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.graph.dag import Dag, depth_first_order
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.solution import Problem, Solution
from chrion.scheduler.policies.core_counts import selection_counts
from chrion.scheduler.policies.cpop import path_lengths, place_critical_path
from chrion.scheduler.policies.device_selection import DeviceSelector
from chrion.scheduler.policies.heft import place_by_finish
from chrion.scheduler.policies.list_scheduling import Lanes, by_rank, edge_times, upward_ranks
from chrion.scheduler.policies.nimble import nimble_streams
from chrion.scheduler.policies.opara import opara
from chrion.scheduler.policies.orders import bfs_order, hybrid_order, priority_order
from chrion.scheduler.policies.peft import place_by_optimistic_costs
from chrion.scheduler.policies.stages import DeviceLanes, greedy_stages, round_robin, schedule_stages
from chrion.scheduler.policies.streams import schedule_streams
from chrion.scheduler.schedule import Schedule
from chrion.scheduler.search.group_placement import partial_pipelines, pipeline
from chrion.scheduler.search.grouping import Groups, group_operators, tile_order, unit_order
from chrion.scheduler.search.weight_groups import offload_lanes

#: Graphs of more operators have fewer initial solutions, and only one of each machine is improved, so that planning
#: 100 000 operators takes about a minute.
LARGE = 2_000
#: The most placements of weight groups, and the most operators in all of them; on one core, and by HEFT (choices, not
#: measured).
_OFFLOADED, _OFFLOADED_BY_HEFT = (48, 50_000), (24, 10_000)


class GraphFacts:
    """What initial solutions need to know of a graph, the same for every sub-machine of one machine.

    Args:
        dag: The graph.
        costs: The costs on the whole machine.
    """

    def __init__(self, dag: Dag, costs: Costs) -> None:
        self.dag = dag
        self.edges = edge_times(dag, costs)
        self._selector = DeviceSelector(dag, costs, self.edges, counts=selection_counts)
        self.groups: Groups = group_operators(dag, costs)
        #: Operators that stay in one segment wherever they are placed; None if the schedule determines the segments.
        #: The steps of a layer are alike, so segments of one step each share one session and its packed weights.
        self.units = self.groups.units if self.groups.steps > 1 else None
        self._tilings: dict[int, tuple[list[int], list[int]]] = {}
        self._offloaded: dict[tuple[Sequence[float], int, int], list[tuple[int, ...]]] = {}

    def tiling(self, steps: int) -> tuple[list[int], list[int]]:
        """Return the order and the labels of tiles of so many steps; see :func:`tile_order`."""
        if steps not in self._tilings:
            self._tilings[steps] = tile_order(self.dag, self.groups, steps)
        return self._tilings[steps]

    def offload_lanes(self, costs: Costs, most: int, operators: int) -> list[tuple[int, ...]]:
        """Return placements of weight groups; see :func:`offload_lanes`. They do not depend on the number of cores."""
        key = costs.cpu_ms[0], most, operators
        if key not in self._offloaded:
            self._offloaded[key] = list(dict.fromkeys(offload_lanes(self.dag, costs, most, operators)))
        return self._offloaded[key]

    def select_devices(self, costs: Costs, order: tuple[int, ...], alpha: float) -> Schedule:
        """Return the paper's device selection for the costs on the whole machine or a smaller one."""
        return self._selector.select(costs, order, alpha).schedule

    @cached_property
    def nimble_streams(self) -> list[int]:
        """Nimble's stream of each operator."""
        return nimble_streams(self.dag, share=True)

    @cached_property
    def plain_orders(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The breadth-first and the depth-first order."""
        return bfs_order(self.dag), depth_first_order(self.dag)


class InitialSolutions:
    """The initial solutions of one graph on one machine.

    Args:
        facts: The graph.
        costs: The costs on the machine, overheads included.
        by_units_only: If there are units, make no solution that divides or joins them: units need fewer sessions.
    """

    def __init__(self, facts: GraphFacts, costs: Costs, *, by_units_only: bool = False) -> None:
        self.facts = facts
        self._by_units_only = by_units_only and facts.units is not None
        #: The graph and its costs.
        self.problem = Problem(facts.dag, costs)
        self._streams = costs.streams if costs.accelerator_ms is not None else 0

    def make(self, alphas: Sequence[float]) -> Iterator[Solution]:
        """Yield the initial solutions.

        Args:
            alphas: Prices of accelerator memory, in ms per MB, for the policies that weigh memory; 0.0 is the first.
        """
        problem, costs = self.problem, self.problem.costs
        n = len(problem.dag)
        if costs.cores + self._streams == 1:
            yield problem.evaluate(Schedule(self._order, (costs.cores,) * n, costs.cores), origin=self._name)
            return
        alphas = alphas if costs.cores and self._streams == 1 else alphas[:1]
        if self._streams <= 1:
            yield from self._by_device_selection(alphas)
            if n <= LARGE or len(self.facts.groups.members) < n:  # else a group is an operator
                yield from self._grouped()
        yield from self.by_finish(alphas)
        if self._streams == 1 and costs.cores and (n <= LARGE or costs.cores == 1) and not self._by_units_only:
            yield from self.offloaded()
        yield from self.of_other_policies()

    @cached_property
    def _order(self) -> tuple[int, ...]:
        return hybrid_order(self.problem.dag, self.problem.costs)

    @property
    def _name(self) -> str:
        return "accelerator alone" if self._streams else "one core"

    def _by_device_selection(self, alphas: Sequence[float]) -> Iterator[Solution]:
        """Yield the paper's device selection."""
        dag, costs = self.problem.dag, self.problem.costs
        schedules = (self.facts.select_devices(costs, self._order, alpha) for alpha in alphas)
        for schedule in _up_to_cpu(schedules):
            yield from self._as_it_stands_and_by_units(schedule, "greedy")
        if len(dag) <= LARGE and not self._by_units_only:
            for order in self.facts.plain_orders:
                yield self.problem.evaluate(self.facts.select_devices(costs, order, 0.0), origin="greedy")

    def by_finish(self, alphas: Sequence[float]) -> Iterator[Solution]:
        """Yield HEFT, which ranks operators once for all alphas."""
        lanes = self._lanes
        order = by_rank(self.problem.dag, upward_ranks(lanes))
        for schedule in _up_to_cpu(place_by_finish(lanes, order, alpha) for alpha in alphas):
            yield from self._as_it_stands_and_by_units(schedule, "heft")

    def offloaded(self) -> Iterator[Solution]:
        """Yield placements of weight groups for increasing amounts of accelerator memory.

        On several cores, HEFT chooses the lanes of operators, of which only the placed ones may use the accelerator.
        """
        problem = self.problem
        dag, costs = problem.dag, problem.costs
        single = costs.cores == 1
        order = () if single else by_rank(dag, upward_ranks(self._lanes))
        for lanes in self.facts.offload_lanes(costs, *(_OFFLOADED if single else _OFFLOADED_BY_HEFT)):
            if single:
                yield problem.evaluate(Schedule(self._order, lanes, 1), origin="weight groups")
                continue
            pairs = zip(costs.accelerator_ms or (), lanes, strict=True)
            placed = replace(costs, accelerator_ms=tuple(math.inf if lane else ms for ms, lane in pairs))
            yield problem.evaluate(place_by_finish(Lanes(dag, placed, self.facts.edges), order), origin="weight groups")

    def of_other_policies(self) -> Iterator[Solution]:
        """Yield the schedules of published policies that do not weigh memory; none for large graphs or by units."""
        problem = self.problem
        if len(problem.dag) > LARGE or self._by_units_only:
            return
        dag, costs = problem.dag, problem.costs
        lanes = self._lanes
        yield problem.evaluate(place_by_optimistic_costs(lanes), origin="peft")
        if self._streams <= 1:
            lengths = path_lengths(lanes)
            yield problem.evaluate(place_critical_path(lanes, lengths), origin="cpop")
            yield problem.evaluate(place_by_finish(lanes, priority_order(dag, lengths)), origin="critical path")
            order = by_rank(dag, upward_ranks(lanes, transfers=False))
            yield problem.evaluate(place_by_finish(lanes, order, insertion=False), origin="critical path, no gaps used")
        # Streams and stages are made for the lanes of one device; a core runs what the accelerator does not support.
        if self._streams == 1 or (self._streams and costs.cores > 1):
            return
        device = DeviceLanes(dag, costs)
        stages = greedy_stages(dag)
        made = {
            "nimble": schedule_streams(dag, costs, self.facts.nimble_streams, dag.topological_order),
            "opara": opara(dag, costs, 0.0),
            "stages": schedule_stages(dag, device, stages),
            "wavefront": schedule_stages(dag, device, stages, round_robin(len(device.lanes))),
        }
        for origin, schedule in made.items():
            if schedule.cores <= costs.cores:
                yield problem.evaluate(schedule, origin=origin)

    @cached_property
    def _lanes(self) -> Lanes:
        return Lanes(self.problem.dag, self.problem.costs, self.facts.edges)

    def _grouped(self) -> Iterator[Solution]:
        """Yield the initial solutions that place groups as wholes."""
        problem, groups = self.problem, self.facts.groups
        lanes = pipeline(groups, problem.costs)
        if lanes is None:
            return
        lengths = [2**power for power in range(math.ceil(math.log2(max(groups.steps, 1))) + 1)]
        tiled = {steps: solution for steps in lengths for solution in self._tiled(lanes, "pipeline", steps)}
        yield from tiled.values()
        if tiled and self._streams and self.facts.units is not None:
            best = min(tiled, key=lambda steps: tiled[steps].timeline.latency_ms)
            for part in partial_pipelines(groups, problem.costs):
                yield from self._tiled(part, "pipeline, part of it on the accelerator", best)

    def _tiled(self, lanes: Sequence[int], origin: str, steps: int) -> Iterator[Solution]:
        """Yield the solution of a placement of groups and a tile length, if every group is supported on its lane."""
        groups, problem = self.facts.groups, self.problem
        placement = tuple(lanes[g] for g in groups.of)
        if all(problem.allowed(i, lane) for i, lane in enumerate(placement)):
            order, tiles = self.facts.tiling(steps)
            schedule = Schedule(tuple(order), placement, problem.costs.cores)
            yield problem.evaluate(schedule, tiles, f"{origin}, tiles of {steps}")

    @cached_property
    def _unit_labels(self) -> list[int]:
        labels = [0] * len(self.problem.dag)
        for label, unit in enumerate(self.facts.units or ()):
            for i in unit:
                labels[i] = label
        return labels

    def _as_it_stands_and_by_units(self, schedule: Schedule, origin: str) -> Iterator[Solution]:
        """Yield a schedule, and if there are units, the schedule that places each of them with its longest operator."""
        problem, units = self.problem, self.facts.units
        if not self._by_units_only:
            yield problem.evaluate(schedule, origin=origin)
        if units is None:
            return
        lanes = list(schedule.lanes)
        for unit in units:
            lead = max(unit, key=problem.costs.mean_ms)
            for i in unit:
                lanes[i] = schedule.lanes[lead] if problem.allowed(i, schedule.lanes[lead]) else lanes[i]
        order = unit_order(problem.dag, units, schedule.order) or schedule.order
        by_units = Schedule(tuple(order), tuple(lanes), schedule.cores, schedule.streams)
        yield problem.evaluate(by_units, self._unit_labels, f"{origin}, step by step")


def _up_to_cpu(schedules: Iterable[Schedule]) -> Iterator[Schedule]:
    """Yield the different ones of a policy's schedules for ascending prices of memory.

    Once a schedule leaves the accelerator empty, a greedy policy makes the same one for every higher price: at each
    operator, the accelerator is only more expensive.
    """
    before = None
    for schedule in schedules:
        if schedule != before:
            yield schedule
        if not any(map(is_accelerator_lane, schedule.lanes)):
            return
        before = schedule


def preference(alpha: float, solution: Solution) -> tuple[float, int]:
    """Return the sort key of solutions: the least cost first, on a tie the fewest segments."""
    return solution.cost(alpha), len(solution.segments)
