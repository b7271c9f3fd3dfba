"""The frontier: what latency each amount of accelerator memory buys, found before any budget is known.

1. **Prices.** Beginnings are made at many prices of memory, from nothing to far more than latency is worth.
2. **Descent.** From the fastest ones, unit after unit leaves the accelerator, each time the one that frees most memory
   for the latency it costs; a little local search follows each step, and every placement tried on the way counts.
3. **Refinement.** Points all along the frontier are improved by local search, each with its own memory as the cap.

None of this looks at a budget: a budget only chooses among what fits. So a larger one chooses among more, and never
predicts a slower plan. (Search under the budget itself would be simpler, but a heuristic that sees the budget can do
worse with a larger one.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from chrion.lane_numbers import is_accelerator_lane
from chrion.scheduler.evaluation.solution import Problem, Solution
from chrion.scheduler.policies.chrion import Planner
from chrion.scheduler.search.local_search import BUDGET

#: Prices of memory, as multiples (powers of two) of the one at which latency and memory weigh the same.
_POWERS = range(-6, 13, 2)
#: Fastest beginnings that descents start from.
_DESCENTS = 3
#: Points that are refined.
_REFINED = 24
#: Operators evaluated in all descents together, and in all refinements together.
_WORK = BUDGET // 2


T = TypeVar("T")


def trade_offs(planner: Planner, scale: float) -> list[Solution]:
    """Stages 1 and 2: solutions from the fastest to the one with the least accelerator memory.

    Args:
        planner: The default policy for a graph.
        scale: An alpha at which latency and memory weigh about the same, in ms per MB.

    Returns:
        All solutions met on the way of which none is both faster and smaller than another.
    """
    met = [s for price in _prices(scale) for s in planner.begin(price)]
    fastest = sorted(pareto(met, _itself), key=_latency)[:_DESCENTS]
    starts = [
        planner.problem.place(replace(s.schedule, cores=cores), s.tiles, s.origin)
        for s in fastest
        for cores in ([s.schedule.cores] if s.schedule.cores else planner.core_counts)
    ]
    ways = [(start, units) for start in starts for units in planner.movable]
    for start, units in ways:
        met += _descent(planner, start, units, _WORK // len(ways))
    return pareto(met, _itself)


def refined(planner: Planner, point: Solution, points: int) -> Solution:
    """Stage 3 for one of so many points: no slower, and no more memory."""
    return planner.refined(point, 0.0, cap_mb=point.timeline.resident_mb, budget=_WORK // points)


def spread(frontier: Sequence[T]) -> Sequence[T]:
    """Points worth refining: all, or some at even distances along the frontier, both ends included."""
    if len(frontier) <= _REFINED:
        return frontier
    return [frontier[at * (len(frontier) - 1) // (_REFINED - 1)] for at in range(_REFINED)]


def pareto(things: Iterable[T], solution: Callable[[T], Solution]) -> list[T]:
    """Those whose solution no other beats in both latency and memory, by rising memory; the first of equal ones."""
    rows = [(solution(thing).timeline, thing) for thing in things]
    found: list[T] = []
    least_ms = math.inf
    for timeline, thing in sorted(rows, key=lambda row: (row[0].resident_mb, row[0].latency_ms)):
        if timeline.latency_ms < least_ms:
            found.append(thing)
            least_ms = timeline.latency_ms
    return found


def _prices(scale: float) -> list[float]:
    return [0.0, *(scale * 2.0**power for power in _POWERS)]


def _itself(solution: Solution) -> Solution:
    return solution


def _latency(solution: Solution) -> float:
    return solution.timeline.latency_ms


def _descent(planner: Planner, start: Solution, units: Sequence[Sequence[int]], work: int) -> Iterator[Solution]:
    """Solutions on the way from ``start`` to an empty accelerator, and all that were tried beside them.

    Half of the work (operators to evaluate) is for the steps, half for the local search after each.
    """
    problem = planner.problem
    end = problem.work + work // 2
    here = start
    for _ in units:  # no more steps than units: local search may bring back one that takes no memory
        trials = list(_departures(problem, here, units))
        if not trials or problem.work >= end:
            return
        yield from trials
        step = min(trials, key=lambda trial: _rate(here, trial))
        here = planner.refined(step, 0.0, cap_mb=step.timeline.resident_mb, budget=work // 2 // len(units))
        yield here


def _departures(problem: Problem, here: Solution, units: Sequence[Sequence[int]]) -> Iterator[Solution]:
    """Every unit that stands on the accelerator moved to the CPU lane that is busy least, or to a neighbour's."""
    lanes = here.schedule.lanes
    busy = here.timeline.busy_ms
    idle = min(range(1, here.schedule.cores + 1), key=busy.__getitem__)
    for unit in units:
        leaving = [i for i in unit if is_accelerator_lane(lanes[i])]
        if not leaving:
            continue
        beside = (m for i in leaving for m in (*problem.dag.predecessors[i], *problem.dag.successors[i]))
        targets = {idle, next((lanes[m] for m in beside if not is_accelerator_lane(lanes[m])), idle)}
        for target in sorted(targets):
            moved = list(lanes)
            for i in leaving:
                moved[i] = target
            yield problem.place(replace(here.schedule, lanes=tuple(moved)), here.tiles, here.origin)


def _rate(here: Solution, trial: Solution) -> tuple[int, float]:
    """What a step costs: steps that cost no latency first, then by latency for each MB freed."""
    slower = trial.timeline.latency_ms - here.timeline.latency_ms
    freed = here.timeline.resident_mb - trial.timeline.resident_mb
    if slower <= 0:
        return 0, slower
    return (1, slower / freed) if freed > 0 else (2, slower)
