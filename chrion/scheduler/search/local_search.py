"""Local search: move units between lanes, reorder, and merge segments, as long as the evaluator agrees.

Monotone: a step is taken only if it lowers L + alpha * M (merging also if it leaves it as it is, since fewer segments
are cheaper to hold). Bounded by a budget of evaluated operators instead of time, and seeded, so that equal inputs give
equal plans; the default budget takes about a second.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

from chrion.lane_numbers import all_lanes
from chrion.scheduler.evaluation.solution import Problem, Solution

#: Operators evaluated by one refinement.
BUDGET = 400_000
_EPSILON = 1e-9


def refine(  # noqa: PLR0913 - budget and seed by name
    problem: Problem,
    solution: Solution,
    units: Sequence[Sequence[int]],
    alpha: float,
    *,
    budget: int = BUDGET,
    seed: int = 0,
) -> Solution:
    """Improve a solution.

    Args:
        problem: The graph and its costs.
        solution: Where to start.
        units: Operators that move together: groups, or single operators.
        alpha: ms per MB.
        budget: Operators to evaluate.
        seed: Of the order in which moves are tried.

    Returns:
        A solution that is not worse.
    """
    end = problem.work + budget
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    improved = True
    while improved and problem.work < end:
        before = solution.cost(alpha)
        solution = _move_units(problem, solution, units, alpha, end, rng)
        if len(units) == len(problem.dag):
            solution = _shift_operators(problem, solution, alpha, end, rng)
        improved = solution.cost(alpha) < before - _EPSILON
    return solution


def merge_segments(problem: Problem, solution: Solution, alpha: float, *, budget: int = BUDGET) -> Solution:
    """Join neighbouring segments of a lane while the predicted cost does not grow."""
    end = problem.work + budget
    labels = [0] * len(problem.dag)
    for at, segment in enumerate(solution.segments):
        for i in segment:
            labels[i] = at
    schedule = solution.schedule
    best = solution
    lanes: dict[int, list[tuple[int, ...]]] = {}
    for segment in solution.segments:
        lanes.setdefault(schedule.lanes[segment[0]], []).append(segment)
    for row in lanes.values():
        for first, second in itertools.pairwise(row):
            if problem.work >= end:
                return best
            kept = [labels[i] for i in second]
            for i in second:
                labels[i] = labels[first[0]]
            trial = problem.place(schedule, labels, solution.origin)
            if len(trial.segments) < len(best.segments) and trial.cost(alpha) <= best.cost(alpha) + _EPSILON:
                best = trial
            else:
                for i, label in zip(second, kept, strict=True):
                    labels[i] = label
    return best


def _move_units(  # noqa: PLR0913, PLR0917 - the search's state
    problem: Problem, best: Solution, units: Sequence[Sequence[int]], alpha: float, end: int, rng: random.Random
) -> Solution:
    """Try every unit on every other lane."""
    order = list(range(len(units)))
    rng.shuffle(order)
    for unit in order:
        for lane in all_lanes(best.schedule.cores, best.schedule.streams):
            members = units[unit]
            if problem.work >= end:
                return best
            if all(best.schedule.lanes[i] == lane for i in members) or not all(
                problem.allowed(i, lane) for i in members
            ):
                continue
            lanes = list(best.schedule.lanes)
            for i in members:
                lanes[i] = lane
            trial = problem.place(replace(best.schedule, lanes=tuple(lanes)), best.tiles, best.origin)
            if trial.cost(alpha) < best.cost(alpha) - _EPSILON:
                best = trial
    return best


def _shift_operators(problem: Problem, best: Solution, alpha: float, end: int, rng: random.Random) -> Solution:
    """Try every operator at other places of the order, between its predecessors and its successors."""
    dag = problem.dag
    operators = list(range(len(dag)))
    rng.shuffle(operators)
    for i in operators:
        if problem.work >= end:
            return best
        order = list(best.schedule.order)
        position = {v: at for at, v in enumerate(order)}
        low = max((position[m] for m in dag.predecessors[i]), default=-1) + 1
        high = min((position[s] for s in dag.successors[i]), default=len(order))
        at = position[i]
        for place in range(max(low, at - 4), min(high, at + 5)):
            if place == at or problem.work >= end:
                continue
            moved = order[:at] + order[at + 1 :]
            moved.insert(place, i)
            trial = problem.place(replace(best.schedule, order=tuple(moved)), best.tiles, best.origin)
            if trial.cost(alpha) < best.cost(alpha) - _EPSILON:
                best = trial
                break
    return best
