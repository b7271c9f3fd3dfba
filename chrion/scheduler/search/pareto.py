"""Pareto frontier of latency and accelerator memory, found before any price, SLO or budget is known.

1. **Initial solutions** are made at many prices of memory, from 0 to values at which memory far outweighs latency.
2. **Descent.** From the fastest of them, one unit after another moves to a CPU lane, each time the one that frees the
   most memory for the latency it costs. A short local search follows each step, and every placement tried is kept.
3. **Refinement.** Points along the whole frontier are improved by local search, each with its own memory as the cap.

None of these stages depends on a price or a limit: these only select among the points. So a larger budget or a smaller
price never gives a slower plan. (A search under the budget itself would be simpler, but a heuristic that depends on the
budget may do worse with a larger one.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.scheduler.evaluation.solution import Problem, Solution
from chrion.scheduler.search.local_search import LocalSearch

#: Units that are tried at each step of a descent: those that free most memory for their time; each takes
#: an evaluation.
_TRIED = 8

T = TypeVar("T")


def pareto_points(items: Iterable[T], figures: Callable[[T], tuple[float, float]]) -> list[T]:
    """Return the items that no other item dominates, by increasing memory; the first of equal ones.

    Args:
        items: Items with a memory and a latency.
        figures: Returns the memory and the latency of an item.
    """
    points: list[T] = []
    least_ms = math.inf
    for _, ms, _, item in sorted((*figures(item), at, item) for at, item in enumerate(items)):
        if ms < least_ms:
            points.append(item)
            least_ms = ms
    return points


def resident_figures(solution: Solution) -> tuple[float, float]:
    """Return the resident memory in MB and the latency in ms."""
    return solution.timeline.resident_mb, solution.timeline.latency_ms


def paper_figures(solution: Solution) -> tuple[float, float]:
    """Return the memory of Equation 4 in MB and the latency in ms."""
    return solution.timeline.memory_mb, solution.timeline.latency_ms


def sample_evenly(points: Sequence[T], most: int) -> Sequence[T]:
    """Return all points, or ``most`` of them at even distances, both ends included."""
    if len(points) <= most:
        return points
    return [points[at * (len(points) - 1) // (most - 1)] for at in range(most)]


def descend(search: LocalSearch, start: Solution, units: Sequence[Sequence[int]], work: int) -> Iterator[Solution]:
    """Yield solutions between ``start`` and an empty accelerator.

    Args:
        search: Local search for the graph.
        start: The solution to start from.
        units: Operators that move together.
        work: Operators to evaluate: half of them for the steps, half for a local search after each.
    """
    problem = search.problem
    end = problem.work + work // 2
    current = start
    for _ in units:
        trials = []
        for trial in _offload_moves(problem, current, units):
            trials.append(trial)
            yield trial
            if problem.work >= end:
                return
        if not trials:
            return
        best = min(trials, key=lambda trial: _latency_per_mb(current, trial))
        budget = work // 2 // len(units) // len(search.neighbourhoods)
        current = replace(search.improve(best, cap_mb=best.timeline.resident_mb, budget=budget), cap_mb=math.inf)
        yield current


def _offload_moves(problem: Problem, current: Solution, units: Sequence[Sequence[int]]) -> Iterator[Solution]:
    """Yield ``current`` with a unit moved off the accelerator, to the least busy CPU lane or a neighbour's lane."""
    lanes = current.schedule.lanes
    if not current.schedule.cores:
        return
    busy = current.timeline.busy_ms
    least_busy = min(range(1, current.schedule.cores + 1), key=busy.__getitem__)
    for leaving in _promising(problem, current, units):
        neighbours = (m for i in leaving for m in (*problem.dag.predecessors[i], *problem.dag.successors[i]))
        targets = {least_busy, next((lanes[m] for m in neighbours if not is_accelerator_lane(lanes[m])), least_busy)}
        for target in sorted(targets):
            yield problem.evaluate(current.schedule.moved(leaving, target), current.tiles, current.origin)


def _promising(problem: Problem, current: Solution, units: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the operators on the accelerator of the units that free most memory for the time they take on a core."""
    dag, costs = problem.dag, problem.costs
    lanes, cores = current.schedule.lanes, current.schedule.cores
    device, host = costs.lane_ms(0, cores), costs.lane_ms(1, cores)
    readers = Counter(w for i, lane in enumerate(lanes) if is_accelerator_lane(lane) for w in dag.weights[i])
    rated = []
    for at, unit in enumerate(units):
        leaving = [i for i in unit if is_accelerator_lane(lanes[i])]
        if leaving:
            slower = sum(host[i] - device[i] for i in leaving)
            own = Counter(w for i in leaving for w in dag.weights[i])
            freed = sum(dag.weight_bytes[w] for w, count in own.items() if count == readers[w]) / 1e6
            freed += sum(costs.memory[i].outputs_mb + costs.memory[i].ephemeral_mb for i in leaving)
            rated.append((slower / freed if freed > 0 and slower > 0 else min(slower, 0.0), at, leaving))
    return [leaving for _, _, leaving in sorted(rated)[:_TRIED]]


def _latency_per_mb(current: Solution, trial: Solution) -> tuple[int, float]:
    """Return the sort key of a step: steps that cost no latency first, then by latency for each MB freed."""
    slower = trial.timeline.latency_ms - current.timeline.latency_ms
    freed = current.timeline.resident_mb - trial.timeline.resident_mb
    if slower <= 0:
        return 0, slower
    return (1, slower / freed) if freed > 0 else (2, slower)
