"""Wide lanes: solutions in which CPU lanes have several cores, everywhere or for some of the operators.

Intra-operator and inter-operator parallelism are one choice here (moldable tasks in the literature; compare Radulescu
and van Gemund, "A low-cost approach towards mixed task and data parallel scheduling", ICPP 2001). It is made in two
steps, after the search among lanes of one core each:

1. **Configurations.** For every width w, the k cores are taken as k / w lanes of w cores, over which the fastest
   solution for k / w cores is spread.
2. **Units.** From the fastest solution so far, units or single operators are moved to other lanes and widths. So a plan
   may use 2 x 1 cores where there are branches, and 1 x 2 where there are none.

A wide solution is kept if it is predicted to be faster by a margin, since it needs more threads and sessions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.profiler.costs import Costs
from chrion.scheduler.evaluation.solution import Problem, Solution
from chrion.scheduler.search.critical_chain import critical_operators
from chrion.scheduler.search.initial_solutions import LARGE, GraphFacts, InitialSolutions

#: A wide solution is kept if it takes at most this share of the latency of the best one without wide lanes. Nothing
#: is tried if no schedule can be that fast.
MARGIN = 0.97
#: Operators evaluated in step 2 (a choice, not measured).
_UNIT_WORK = 60_000
#: The most threads of wide segments' sessions in one plan, beside those of its lanes: each has a stack of its own.
_MOST_THREADS = 256


def widen(
    facts: GraphFacts, costs: Costs, known: Sequence[Solution], smaller: Mapping[int, Sequence[Solution]]
) -> list[Solution]:
    """Return solutions with wide lanes that are faster than all known ones, the fastest at most; none if none is.

    Args:
        facts: The graph.
        costs: The costs on the machine.
        known: Solutions for this machine without wide lanes.
        smaller: Solutions without wide lanes for machines with fewer cores, by their number.
    """
    if not costs.widths or not known or len(facts.dag) > LARGE:
        return []
    best = min(known, key=_latency)
    limit_ms = MARGIN * best.timeline.latency_ms
    if _least_ms(costs) > limit_ms:
        return []
    problem = Problem(facts.dag, costs)
    wide = list(_configurations(problem, smaller))
    moved = _move_units(problem, facts, min([_without_barriers(problem, best), *wide], key=_latency))
    fitting = [solution for solution in (moved, *wide) if _fits(solution)]
    fastest = min(fitting, key=_latency, default=best)
    return [fastest] if fastest.timeline.latency_ms <= limit_ms else []


def widen_offloaded(facts: GraphFacts, costs: Costs, known: Sequence[Solution]) -> list[Solution]:
    """Return placements of weight groups on the accelerator, with all other operators on one lane of several cores.

    They are the fastest solutions for some amounts of accelerator memory, if not of all. Those that are not faster than
    a known solution with as little memory are left out. Every width is tried, so that the solutions for more cores
    include those for fewer.
    """
    if costs.accelerator_ms is None or len(facts.dag) > LARGE:
        return []
    problem = Problem(facts.dag, costs)
    offloaded = []
    for width in costs.widths:
        machine = _machine_of_width(costs, width).limited_to(1, 1)
        for solution in InitialSolutions(facts, machine).offloaded():
            wide = _spread_lanes(problem, solution, width)
            if _fits(wide) and not any(_is_as_good(s, wide) for s in known):
                offloaded.append(wide)
    return offloaded


def _is_as_good(known: Solution, wide: Solution) -> bool:
    """Return whether a known solution takes no more time than a wide one, and no more memory by any count."""
    own, other = known.timeline, wide.timeline
    as_small = own.resident_mb <= other.resident_mb and own.memory_mb <= other.memory_mb
    return as_small and own.latency_ms <= other.latency_ms


def _fits(solution: Solution) -> bool:
    """Return whether a plan has few enough wide segments, each of which has a session with threads of its own."""
    return sum(solution.schedule.width(segment[0]) - 1 for segment in solution.segments) <= _MOST_THREADS


def _latency(solution: Solution) -> float:
    return solution.timeline.latency_ms


def _least_ms(costs: Costs) -> float:
    """Return a bound on the latency of any schedule: the work of all operators over all lanes.

    Operators are taken to run where they need the least of a core's, or of the accelerator's, time.
    """
    lanes, total = costs.cores + (costs.streams if costs.accelerator_ms is not None else 0), 0.0
    for i in range(len(costs.memory)):
        work = [costs.cpu_ms[0][i], *(w * row[i] for w, row in zip(costs.widths, costs.wide_ms, strict=True))]
        if costs.accelerator_ms is not None:
            work.append(costs.accelerator_ms[i])
        total += min(work)
    return total / lanes


def _without_barriers(problem: Problem, solution: Solution) -> Solution:
    """Return a solution without stages, since lanes of several cores have no barriers."""
    schedule = solution.schedule
    if not schedule.stages:
        return solution
    return problem.evaluate(replace(schedule, stages=()), solution.tiles, f"{solution.origin}, without barriers")


def _configurations(problem: Problem, smaller: Mapping[int, Sequence[Solution]]) -> Iterator[Solution]:
    """Yield, for each width, the fastest solution for so many times fewer cores, spread over all of them."""
    for width in problem.costs.widths:
        if fewer := smaller.get(problem.costs.cores // width):
            yield _spread_lanes(problem, _without_barriers(problem, min(fewer, key=_latency)), width)


def _machine_of_width(costs: Costs, width: int) -> Costs:
    """Return the costs on a machine whose cores are lanes of several cores."""
    lanes = range(1, costs.cores // width + 1)
    indices = range(len(costs.memory))
    return replace(
        costs,
        cpu_ms=tuple(tuple(costs.core_ms(i, width, width * busy) for i in indices) for busy in lanes),
        widths=(),
        wide_ms=(),
        dispatch_ms=costs.dispatch_ms + costs.wake_ms,
    )


def _spread_lanes(problem: Problem, solution: Solution, width: int) -> Solution:
    """Return a solution for fewer cores with a lane of several cores in place of each."""
    schedule = solution.schedule
    on_device = [is_accelerator_lane(lane) for lane in schedule.lanes]
    spread = replace(
        schedule,
        lanes=tuple(
            lane if device else (lane - 1) * width + 1 for lane, device in zip(schedule.lanes, on_device, strict=True)
        ),
        cores=schedule.cores * width,
        widths=() if all(on_device) else tuple(1 if device else width for device in on_device),
    )
    return problem.evaluate(spread, solution.tiles, f"{solution.origin}, on lanes of {width} cores")


def _move_units(problem: Problem, facts: GraphFacts, solution: Solution) -> Solution:
    """Return the solution with units, or else operators, moved to other lanes and widths where that helps."""
    end = problem.work + _UNIT_WORK
    units = facts.units or tuple((i,) for i in range(len(problem.dag)))
    improved = True
    while improved and problem.work < end:
        before = solution
        critical = critical_operators(problem.dag, problem.costs, solution)
        for unit in units:
            if critical.isdisjoint(unit):
                continue
            for lane, width in _placements(problem.costs, solution.schedule.cores):
                if problem.work >= end:
                    return solution
                solution = _moved(problem, solution, unit, lane, width) or solution
        improved = solution is not before
    return solution


def _placements(costs: Costs, cores: int) -> Iterator[tuple[int, int]]:
    """Yield the lanes and widths to try: single cores, and lanes of each width side by side."""
    for width in (1, *costs.widths):
        yield from ((lane, width) for lane in range(1, cores - width + 2, width))


def _moved(problem: Problem, solution: Solution, unit: Sequence[int], lane: int, width: int) -> Solution | None:
    """Return the solution with a unit moved if that is faster; operators on the accelerator stay."""
    schedule = solution.schedule
    moved = schedule.moved([i for i in unit if not is_accelerator_lane(schedule.lanes[i])], lane, width)
    if moved == schedule:
        return None
    limit = solution.timeline.latency_ms * (1 - 1e-6)
    faster = problem.evaluate_below(limit if limit > 0 else math.inf, moved, solution.tiles, solution.origin)
    return faster if faster and faster.timeline.latency_ms < solution.timeline.latency_ms else None
