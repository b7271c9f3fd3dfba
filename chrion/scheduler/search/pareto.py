"""Pareto frontier of latency and accelerator memory, found before any budget is known.

1. **Alphas.** Initial solutions are made at many alphas, from 0 to values at which memory far outweighs latency.
2. **Descent.** From the fastest of them, one unit after another moves to a CPU lane, each time the one that frees the
   most memory for the latency it costs. A short local search follows each step, and every placement tried is kept.
3. **Refinement.** Points along the whole frontier are improved by local search, each with its own memory as the cap.

None of these stages depends on a budget: a budget only selects among the points that fit. So a larger budget selects
among more points and never predicts a slower plan. (A search under the budget itself would be simpler, but a heuristic
that depends on the budget may do worse with a larger one.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from chrion.lane_numbers import is_accelerator_lane
from chrion.scheduler.evaluation.solution import Problem, Solution
from chrion.scheduler.search.initial_solutions import InitialSolutions
from chrion.scheduler.search.local_search import BUDGET, LocalSearch

#: Alphas to try, as powers of two times the alpha at which latency and memory have the same weight.
_POWERS = range(-6, 13, 2)
#: Number of the fastest initial solutions that descents start from.
_DESCENTS = 3
#: Number of points that are refined.
_REFINED = 24
#: Operators evaluated in all descents together, and in all refinements together.
_WORK = BUDGET // 2

T = TypeVar("T")


def find_frontier(initial: InitialSolutions, search: LocalSearch, scale: float) -> list[Solution]:
    """Return the frontier after stages 1 and 2, from the least accelerator memory to the least latency.

    Args:
        initial: Initial solutions of a graph.
        search: Local search for the same graph.
        scale: An alpha at which latency and memory have about the same weight, in ms per MB.
    """
    problem = initial.problem
    found = [solution for alpha in _alphas(scale) for solution in initial(alpha)]
    fastest = sorted(pareto_points(found, _itself), key=_latency)[:_DESCENTS]
    starts = [
        problem.evaluate(replace(s.schedule, cores=cores), s.tiles, s.origin)
        for s in fastest
        for cores in ([s.schedule.cores] if s.schedule.cores else initial.core_counts)
    ]
    descents = [(start, units) for start in starts for units in search.neighbourhoods]
    for start, units in descents:
        found += _descend(problem, search, start, units, _WORK // len(descents))
    return pareto_points(found, _itself)


def refine_point(search: LocalSearch, point: Solution, points: int) -> Solution:
    """Improve one of ``points`` points (stage 3): return a solution that is no slower and needs no more memory."""
    return search.improve(point, 0.0, cap_mb=point.timeline.resident_mb, budget=_WORK // points)


def sample_frontier(frontier: Sequence[T]) -> Sequence[T]:
    """Return the points to refine: all, or some at even distances along the frontier, both ends included."""
    if len(frontier) <= _REFINED:
        return frontier
    return [frontier[at * (len(frontier) - 1) // (_REFINED - 1)] for at in range(_REFINED)]


def pareto_points(items: Iterable[T], solution: Callable[[T], Solution]) -> list[T]:
    """Return the items on the frontier of latency and resident memory, by increasing memory; the first of equal ones.

    Args:
        items: Items that have a solution.
        solution: Returns the solution of an item.
    """
    rows = [(solution(item).timeline, item) for item in items]
    found: list[T] = []
    least_ms = math.inf
    for timeline, item in sorted(rows, key=lambda row: (row[0].resident_mb, row[0].latency_ms)):
        if timeline.latency_ms < least_ms:
            found.append(item)
            least_ms = timeline.latency_ms
    return found


def _alphas(scale: float) -> list[float]:
    return [0.0, *(scale * 2.0**power for power in _POWERS)]


def _itself(solution: Solution) -> Solution:
    return solution


def _latency(solution: Solution) -> float:
    return solution.timeline.latency_ms


def _descend(
    problem: Problem, search: LocalSearch, start: Solution, units: Sequence[Sequence[int]], work: int
) -> Iterator[Solution]:
    """Yield the solutions between ``start`` and an empty accelerator, and all placements tried in between.

    Half of the work (operators to evaluate) is for the steps, half for the local search after each.
    """
    end = problem.work + work // 2
    current = start
    for _ in units:  # no more steps than units: local search may move one back that needs no memory
        trials = list(_offload_moves(problem, current, units))
        if not trials or problem.work >= end:
            return
        yield from trials
        best = min(trials, key=lambda trial: _latency_per_mb(current, trial))
        current = search.improve(best, 0.0, cap_mb=best.timeline.resident_mb, budget=work // 2 // len(units))
        yield current


def _offload_moves(problem: Problem, current: Solution, units: Sequence[Sequence[int]]) -> Iterator[Solution]:
    """Yield ``current`` with each unit moved off the accelerator, to the least busy CPU lane or a neighbour's lane."""
    lanes = current.schedule.lanes
    busy = current.timeline.busy_ms
    least_busy = min(range(1, current.schedule.cores + 1), key=busy.__getitem__)
    for unit in units:
        leaving = [i for i in unit if is_accelerator_lane(lanes[i])]
        if not leaving:
            continue
        neighbours = (m for i in leaving for m in (*problem.dag.predecessors[i], *problem.dag.successors[i]))
        targets = {least_busy, next((lanes[m] for m in neighbours if not is_accelerator_lane(lanes[m])), least_busy)}
        for target in sorted(targets):
            moved = list(lanes)
            for i in leaving:
                moved[i] = target
            yield problem.evaluate(replace(current.schedule, lanes=tuple(moved)), current.tiles, current.origin)


def _latency_per_mb(current: Solution, trial: Solution) -> tuple[int, float]:
    """Return the sort key of a step: steps that cost no latency first, then by latency for each MB freed."""
    slower = trial.timeline.latency_ms - current.timeline.latency_ms
    freed = current.timeline.resident_mb - trial.timeline.resident_mb
    if slower <= 0:
        return 0, slower
    return (1, slower / freed) if freed > 0 else (2, slower)
