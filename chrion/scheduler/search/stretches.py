"""Stretches: solutions that follow one schedule in one part of the graph and another schedule in the next.

So a plan may use lanes of one core each where the graph has branches, and one lane of all cores where it has none. A
**cut** divides the operators, in the order of their starts, into those before it and those after it. Which schedule is
best between two cuts does not depend on the rest of the plan, if a schedule is nearly synchronised at the cuts. So a
shortest path over all pairs of cuts gives the best alternation:

    best(s, j) = min over i < j and schedules r other than s of best(r, i) + change + span(s, i, j)

where the span is the time from the first start to the last end of the operators between both cuts in the schedule, and
a change costs a handoff and waking the threads. This takes O(schedules * cuts^2) steps instead of the evaluation of
every alternation. The result is evaluated, since spans do not know of the caches that a schedule leaves to the next.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from chrion.scheduler.evaluation.solution import Problem, Solution
from chrion.scheduler.schedule import Schedule

#: The most cuts: one in each part of the schedule of equal duration.
_CUTS = 64
#: The most times that the result is combined with the solutions again.
_ROUNDS = 4
_IN_STRETCHES = "; in stretches "


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive operators, and the solution that they are placed as in."""

    operators: tuple[int, ...]
    solution: Solution


def combine(problem: Problem, solutions: Sequence[Solution]) -> Solution:
    """Return the fastest of some solutions, or a faster alternation of them.

    Args:
        problem: The graph and its costs.
        solutions: Solutions without stages; those with another number of streams than the fastest one are left out.
    """
    best = min(solutions, key=_latency)
    others = [s for s in solutions if s is not best and s.schedule.streams == best.schedule.streams]
    for _ in range(_ROUNDS if others else 0):
        found = _join(problem, best, find_stretches(problem, [best, *others]))
        if found is None:
            break
        others, best = [best, *others], found
    return best


def find_stretches(problem: Problem, solutions: Sequence[Solution]) -> list[Stretch]:
    """Return the alternation of solutions with the least sum of spans; the first solution gives the order."""
    order = by_start(solutions[0])
    parts = [order[a:b] for a, b in itertools.pairwise([0, *_cuts(order, solutions), len(order)])]
    first = [[min(s.timeline.start_ms[i] for i in part) for part in parts] for s in solutions]
    last = [[max(s.timeline.finish_ms[i] for i in part) for part in parts] for s in solutions]
    change_ms = problem.costs.handoff_ms + problem.costs.wake_ms
    #: By the cut: for each solution, the least time up to the cut if it ends there, and the cut where it begins.
    best: list[list[tuple[float, int]]] = [[]]
    before: list[list[tuple[float, int]]] = [[(0.0, -1)]]  # by the cut: the two best ends, with their solutions
    for j in range(1, len(parts) + 1):
        best.append([_shortest(before, change_ms, s, first[s][:j], last[s][:j]) for s in range(len(solutions))])
        before.append(sorted((time, s) for s, (time, _) in enumerate(best[j]))[:2])
    found: list[Stretch] = []
    j, s = len(parts), before[-1][0][1]
    while j:
        i = best[j][s][1]
        found.append(Stretch(tuple(itertools.chain(*parts[i:j])), solutions[s]))
        j, s = i, next(r for _, r in before[i] if r != s)
    return found[::-1]


def _shortest(
    before: Sequence[Sequence[tuple[float, int]]],
    change_ms: float,
    s: int,
    first: Sequence[float],
    last: Sequence[float],
) -> tuple[float, int]:
    """Return the least time up to a cut if solution ``s`` ends there, and the cut where its stretch begins.

    Args:
        before: By the earlier cut: the least times up to it, each with the solution that ends there.
        change_ms: Time of a change between solutions.
        s: The solution.
        first: The first start of each part before the cut in this solution.
        last: The last end of each part before the cut in this solution.
    """
    best, at = math.inf, 0
    start, end = math.inf, 0.0
    for i in range(len(first) - 1, -1, -1):
        start, end = min(start, first[i]), max(end, last[i])
        reached = min((ms for ms, r in before[i] if r != s), default=math.inf)
        time = reached + end - start + (change_ms if i else 0.0)
        if time < best:
            best, at = time, i
    return best, at


def by_start(solution: Solution) -> tuple[int, ...]:
    """Return the operators in the order of their predicted starts, which is topological."""
    position = {i: at for at, i in enumerate(solution.schedule.order)}
    return tuple(sorted(position, key=lambda i: (solution.timeline.start_ms[i], position[i])))


def without_ones(widths: Sequence[int]) -> tuple[int, ...]:
    """Return the widths of a schedule, which has none if all lanes have one core."""
    return tuple(widths) if max(widths, default=1) > 1 else ()


def _latency(solution: Solution) -> float:
    return solution.timeline.latency_ms


def _cuts(order: Sequence[int], solutions: Sequence[Solution]) -> list[int]:
    """Return positions in the order, one in each part of the first solution: where operators overlap least."""
    n = len(order)
    overlap = [0.0] * n
    for solution in solutions:
        start, finish = solution.timeline.start_ms, solution.timeline.finish_ms
        latest = list(itertools.accumulate((finish[i] for i in order), max))
        earliest = list(itertools.accumulate((start[i] for i in reversed(order)), min))[::-1]
        for at in range(1, n):
            overlap[at] += max(0.0, latest[at - 1] - earliest[at])
    base = solutions[0].timeline
    least: dict[int, int] = {}
    for at in range(1, n):
        part = at if n <= _CUTS else int(_CUTS * base.start_ms[order[at]] / (base.latency_ms or 1.0))
        if part not in least or overlap[at] < overlap[least[part]]:
            least[part] = at
    return sorted(least.values())


def _join(problem: Problem, best: Solution, stretches: Sequence[Stretch]) -> Solution | None:
    """Return the solution made of stretches, or None if it is no faster than the best."""
    if len({id(stretch.solution) for stretch in stretches}) < 2:
        return None
    n = len(problem.dag)
    order: list[int] = []
    lanes, widths, labels = [0] * n, [1] * n, [0] * n
    for at, stretch in enumerate(stretches):
        own = stretch.solution
        position = {i: p for p, i in enumerate(by_start(own))}
        order += sorted(stretch.operators, key=position.__getitem__)
        segment_of = _segment_labels(own)
        for i in stretch.operators:
            lanes[i], widths[i], labels[i] = own.schedule.lanes[i], own.schedule.width(i), at * n + segment_of[i]
    schedule = Schedule(
        order=tuple(order),
        lanes=tuple(lanes),
        cores=max(stretch.solution.schedule.cores for stretch in stretches),
        streams=best.schedule.streams,
        widths=without_ones(widths),
    )
    origins = [o for stretch in stretches for o in stretch.solution.origin.split(_IN_STRETCHES)]
    return problem.evaluate_below(_latency(best), schedule, labels, _IN_STRETCHES.join(dict.fromkeys(origins)))


def _segment_labels(solution: Solution) -> list[int]:
    """Return the index of each operator's segment."""
    labels = [0] * len(solution.schedule.order)
    for at, segment in enumerate(solution.segments):
        for i in segment:
            labels[i] = at
    return labels
