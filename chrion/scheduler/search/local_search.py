"""Local search: move units between lanes, reorder operators and merge segments while the evaluator confirms a gain.

The search is monotone: it takes a step only if the step lowers L + alpha * M. It also merges segments if the cost stays
the same, since fewer segments need fewer sessions. The search is bounded by evaluated operators instead of time, and
seeded, so that equal inputs give equal plans. The default budget takes about a second.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

from chrion.lane_numbers import all_lanes
from chrion.scheduler.evaluation.solution import Problem, Solution

#: Operators evaluated by one call of a search.
BUDGET = 400_000
_EPSILON = 1e-9
#: Positions in the order by which an operator may be shifted, each way.
_MOST_SHIFTED = 4
#: Graphs up to this size are also searched operator by operator.
_FINE = 400
#: Graphs up to this size are searched operator by operator even if operators belong to units.
_TINY = 40


class LocalSearch:
    """Local search for the solutions of one graph.

    Args:
        problem: The graph and its costs.
        groups: Operators of each group.
        units: Operators that stay in one segment; None if the schedule determines the segments.
    """

    def __init__(
        self, problem: Problem, groups: tuple[tuple[int, ...], ...], units: tuple[tuple[int, ...], ...] | None
    ) -> None:
        self.problem = problem
        self._groups = groups
        self._units = units

    @property
    def neighbourhoods(self) -> list[tuple[tuple[int, ...], ...]]:
        """Operators that move together, for each pass: groups; in small graphs units and single operators as well."""
        n = len(self.problem.dag)
        if n > _FINE:
            return [self._groups]
        found = [self._groups]
        if self._units:
            found.append(self._units)
        if not self._units or n <= _TINY:
            found.append(tuple((i,) for i in range(n)))
        return found

    def improve(self, solution: Solution, alpha: float, *, cap_mb: float = math.inf, budget: int = BUDGET) -> Solution:
        """Improve a solution in every neighbourhood.

        Args:
            solution: The solution to start from.
            alpha: Price of accelerator memory, in ms per MB.
            cap_mb: Resident accelerator memory that ``solution`` and the result must not exceed.
            budget: Operators to evaluate in each pass.

        Returns:
            A solution that is not worse.
        """
        problem = Problem(self.problem.dag, self.problem.costs, cap_mb)
        solution = replace(solution, cap_mb=cap_mb)
        for units in self.neighbourhoods:
            solution = move_units(problem, solution, units, alpha, budget=budget)
        # Units are alike and share one session and its packed weights; merged with a neighbour, they would not.
        return solution if self._units else merge_segments(problem, solution, alpha, budget=budget)


def move_units(  # noqa: PLR0913 - budget and seed by name
    problem: Problem,
    solution: Solution,
    units: Sequence[Sequence[int]],
    alpha: float,
    *,
    budget: int = BUDGET,
    seed: int = 0,
) -> Solution:
    """Move units between lanes, and single operators in the order, until no move improves the solution.

    Args:
        problem: The graph and its costs.
        solution: The solution to start from.
        units: Operators that move together: groups, or single operators.
        alpha: Price of accelerator memory, in ms per MB.
        budget: Operators to evaluate.
        seed: Seed of the order in which moves are tried.

    Returns:
        A solution that is not worse.
    """
    end = problem.work + budget
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    improved = True
    while improved and problem.work < end:
        before = solution.cost(alpha)
        solution = _move_between_lanes(problem, solution, units, alpha, end, rng)
        if len(units) == len(problem.dag):
            solution = _shift_in_order(problem, solution, alpha, end, rng)
        improved = solution.cost(alpha) < before - _EPSILON
    return solution


def merge_segments(problem: Problem, solution: Solution, alpha: float, *, budget: int = BUDGET) -> Solution:
    """Merge neighbouring segments of a lane while the predicted cost does not increase."""
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
            trial = problem.evaluate(schedule, labels, solution.origin)
            if len(trial.segments) < len(best.segments) and trial.cost(alpha) <= best.cost(alpha) + _EPSILON:
                best = trial
            else:
                for i, label in zip(second, kept, strict=True):
                    labels[i] = label
    return best


def _move_between_lanes(  # noqa: PLR0913, PLR0917 - the search's state
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
            trial = problem.evaluate(replace(best.schedule, lanes=tuple(lanes)), best.tiles, best.origin)
            if trial.cost(alpha) < best.cost(alpha) - _EPSILON:
                best = trial
    return best


def _shift_in_order(problem: Problem, best: Solution, alpha: float, end: int, rng: random.Random) -> Solution:
    """Try every operator at other positions of the order, between its predecessors and its successors."""
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
        for target in range(max(low, at - _MOST_SHIFTED), min(high, at + _MOST_SHIFTED + 1)):
            if target == at or problem.work >= end:
                continue
            moved = order[:at] + order[at + 1 :]
            moved.insert(target, i)
            trial = problem.evaluate(replace(best.schedule, order=tuple(moved)), best.tiles, best.origin)
            if trial.cost(alpha) < best.cost(alpha) - _EPSILON:
                best = trial
                break
    return best
