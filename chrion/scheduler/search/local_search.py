"""Local search: move units between lanes, reorder operators and merge segments while the evaluator confirms a gain.

The search is monotone: it takes a step only if the step lowers the latency, within a cap on memory. It also merges
segments if the latency stays the same, since fewer segments need fewer sessions. It moves only what can lower the
latency: operators of the critical chain. The search is bounded by evaluated operators instead of time, and seeded, so
that equal inputs give equal plans.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from chrion.common.lane_numbers import all_lanes, is_accelerator_lane
from chrion.scheduler.evaluation.solution import Problem, Solution
from chrion.scheduler.policies.list_scheduling import Lanes
from chrion.scheduler.schedule import Schedule
from chrion.scheduler.search.beam import beam_search
from chrion.scheduler.search.critical_chain import critical_operators

#: Smaller gains in ms are due to rounding.
_EPSILON = 1e-9
#: Positions in the order by which an operator may be shifted, each way. Without shifts, a plan cost 5 % more.
_MOST_SHIFTED = 4
#: The most operators of graphs in which every operator is moved, not only those of the critical chain, and whose local
#: optima are left; and the operators evaluated for each of them to improve the schedules of beam search, and to iterate
#: (choices, not measured).
_TINY, _TINY_WORK = 16, 400
#: Most operators that change their lane to leave a local optimum.
_MOST_PERTURBED = 3
#: A unit is tried on all lanes if there are at most so many, else on those of its neighbours and the least busy ones:
#: as many trials, however many lanes.
_FEW_LANES = 4


class LocalSearch:
    """Local search for the solutions of one graph.

    Args:
        problem: The graph and its costs.
        groups: Operators of each group.
        units: Operators that stay in one segment; None if the schedule determines the segments.

    Attributes:
        neighbourhoods: Operators that move together, for each pass: groups, then units, or single operators without.
    """

    def __init__(
        self, problem: Problem, groups: tuple[tuple[int, ...], ...], units: tuple[tuple[int, ...], ...] | None
    ) -> None:
        self.problem = problem
        self._merges = units is None
        single = tuple((i,) for i in range(len(problem.dag)))
        finest = units or single
        self.neighbourhoods = [groups, finest] if len(groups) < len(finest) else [finest]

    def improve(self, solution: Solution, *, cap_mb: float = math.inf, budget: int) -> Solution:
        """Improve a solution by moves in every neighbourhood, then by merging segments.

        Args:
            solution: The solution to start from. One with stages is returned as it is.
            cap_mb: Resident accelerator memory that ``solution`` and the result must not exceed.
            budget: Operators to evaluate in each pass.

        Returns:
            A solution that is not worse.
        """
        problem = Problem(self.problem.dag, self.problem.costs, cap_mb)
        solution = replace(solution, cap_mb=cap_mb)
        lanes = solution.schedule.cores + (solution.schedule.streams if problem.costs.accelerator_ms else 0)
        # A single trial takes as much work as the graph has operators.
        if solution.schedule.stages or lanes < 2 or budget <= len(problem.dag):
            return solution
        for units in self.neighbourhoods:
            solution = move_units(problem, solution, units, budget=budget)
        # Units are alike and share one session and its packed weights; merged with a neighbour, they would not.
        return merge_segments(problem, solution, budget=budget) if self._merges else solution

    def leave_local_optimum(self, solution: Solution) -> Solution:
        """Improve a solution of a tiny graph by beam search, and then by iterated local search; see :func:`iterate`."""
        n, costs = len(self.problem.dag), self.problem.costs
        streams = costs.streams if costs.accelerator_ms is not None else 0
        if n > _TINY or streams > 1 or costs.cores + streams < 2:
            return solution
        single = [(i,) for i in range(n)]
        for schedule in beam_search(Lanes(self.problem.dag, costs), solution.timeline.latency_ms):
            start = self.problem.evaluate(schedule, origin="beam search")
            improved = move_units(self.problem, start, single, budget=_TINY_WORK * n)
            solution = min(solution, improved, key=lambda s: (s.timeline.latency_ms, len(s.segments)))
        return solution if solution.schedule.stages else iterate(self.problem, solution, budget=_TINY_WORK * n)


def move_units(problem: Problem, solution: Solution, units: Sequence[Sequence[int]], *, budget: int) -> Solution:
    """Move units between lanes, and single operators in the order, until no move improves the solution.

    Args:
        problem: The graph and its costs.
        solution: The solution to start from.
        units: Operators that move together.
        budget: Operators to evaluate.

    Returns:
        A solution that is not worse.
    """
    search = _Search(problem, solution, problem.work + budget)
    improved = True
    while improved and not search.exhausted:
        before = search.best.cost(0.0)
        promising = search.promising()
        search.move_between_lanes([unit for unit in units if not promising.isdisjoint(unit)])
        if len(units) == len(problem.dag):
            search.shift_in_order(sorted(search.promising()))
        improved = search.best.cost(0.0) < before - _EPSILON
    return search.best


def iterate(problem: Problem, solution: Solution, *, budget: int) -> Solution:
    """Improve a solution by iterated local search (Lourenço, Martin, Stützle, 2003): change it at random, and descend.

    Args:
        problem: The graph and its costs.
        solution: The solution to start from.
        budget: Operators to evaluate.

    Returns:
        A solution that is not worse.
    """
    rng = random.Random(0)  # noqa: S311 - no secret
    end = problem.work + budget
    single = [(i,) for i in range(len(problem.dag))]
    while problem.work < end:
        start = problem.evaluate(_perturbed(problem, solution.schedule, rng), None, solution.origin)
        improved = move_units(problem, start, single, budget=end - problem.work)
        if improved.cost(0.0) < solution.cost(0.0) - _EPSILON:
            solution = improved
    return solution


def _perturbed(problem: Problem, schedule: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule with some operators on other lanes, in a topological order near that of the schedule."""
    dag = problem.dag
    lanes = list(schedule.lanes)
    for i in rng.sample(range(len(dag)), min(len(dag), rng.randint(1, _MOST_PERTURBED))):
        possible = [lane for lane in all_lanes(schedule.cores, schedule.streams) if problem.allowed(i, lane)]
        lanes[i] = rng.choice(possible)
    delay = rng.choice([0.0, 2.0, len(dag)])
    key = {i: at + rng.uniform(0.0, delay) for at, i in enumerate(schedule.order)}
    for i in schedule.order:  # after its predecessors
        key[i] = max([key[i], *(key[m] for m in dag.predecessors[i])])
    position = {i: at for at, i in enumerate(schedule.order)}
    order = sorted(schedule.order, key=lambda i: (key[i], position[i]))
    return replace(schedule, order=tuple(order), lanes=tuple(lanes))


def merge_segments(problem: Problem, solution: Solution, *, budget: int) -> Solution:
    """Merge neighbouring segments of a lane while the predicted latency does not increase."""
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
            if len(trial.segments) < len(best.segments) and trial.cost(0.0) <= best.cost(0.0) + _EPSILON:
                best = trial
            else:
                for i, label in zip(second, kept, strict=True):
                    labels[i] = label
    return best


class _Search:
    """The state of one pass: the best solution so far, and the work that is left."""

    def __init__(self, problem: Problem, solution: Solution, end: int) -> None:
        self.best = solution
        self._problem, self._end = problem, end
        self._rng = random.Random(0)  # noqa: S311 - no secret

    @property
    def exhausted(self) -> bool:
        """True if the budget is spent."""
        return self._problem.work >= self._end

    def promising(self) -> set[int]:
        """Return the operators whose move can lower the latency; in a small graph all, since segments wait as well."""
        n = len(self._problem.dag)
        if n <= _TINY:
            return set(range(n))
        return critical_operators(self._problem.dag, self._problem.costs, self.best)

    def move_between_lanes(self, units: Sequence[Sequence[int]]) -> None:
        """Try every unit on other lanes."""
        order = list(units)
        self._rng.shuffle(order)
        for members in order:
            for lane in list(self._target_lanes(members)):
                if self.exhausted:
                    return
                lanes = list(self.best.schedule.lanes)
                for i in members:
                    lanes[i] = lane
                self._try(replace(self.best.schedule, lanes=tuple(lanes)))

    def shift_in_order(self, operators: list[int]) -> None:
        """Try operators at other positions of the order, between their predecessors and their successors."""
        dag = self._problem.dag
        self._rng.shuffle(operators)
        for i in operators:
            order = list(self.best.schedule.order)
            at = order.index(i)
            before, after = frozenset(dag.predecessors[i]), frozenset(dag.successors[i])
            low = next((p + 1 for p in range(at - 1, max(-1, at - _MOST_SHIFTED - 1), -1) if order[p] in before), 0)
            high = next((p for p in range(at + 1, min(len(order), at + _MOST_SHIFTED + 1)) if order[p] in after), None)
            low = max(low, at - _MOST_SHIFTED)
            high = min(len(order) if high is None else high, at + _MOST_SHIFTED + 1)
            for target in range(low, high):
                if self.exhausted:
                    return
                if target == at:
                    continue
                moved = order[:at] + order[at + 1 :]
                moved.insert(target, i)
                if self._try(replace(self.best.schedule, order=tuple(moved))):
                    break

    def _try(self, schedule: Schedule) -> bool:
        """Evaluate a schedule, and keep it if it is better."""
        limit = self.best.cost(0.0) - _EPSILON
        trial = self._problem.evaluate_below(limit, schedule, self.best.tiles, self.best.origin)
        if trial is None or trial.cost(0.0) >= limit:
            return False
        self.best = trial
        return True

    def _target_lanes(self, members: Sequence[int]) -> Iterator[int]:
        """Yield the lanes to try for a unit."""
        schedule, dag = self.best.schedule, self._problem.dag
        lanes = schedule.lanes
        possible = all_lanes(schedule.cores, schedule.streams)
        if len(possible) > _FEW_LANES:
            near = {lanes[m] for i in members for m in (*dag.predecessors[i], *dag.successors[i])}
            busy = self.best.timeline.busy_ms
            least = sorted(range(1, schedule.cores + 1), key=busy.__getitem__)[:2]
            possible = [lane for lane in possible if lane in near or lane in least or is_accelerator_lane(lane)]
        for lane in possible:
            if any(lanes[i] != lane for i in members) and all(self._problem.allowed(i, lane) for i in members):
                yield lane
