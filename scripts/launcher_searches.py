"""Searches of TOP's plans besides the beam search of sessions, for ``bench_top.py`` and tests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np

from chrion.common.installation import require_extras
from chrion.errors import OptionError
from chrion.serving.multi.combined import SubBlock, TopPlan, decode, limit, separate, sub_blocks
from chrion.serving.multi.top_search import TopProblem, beam, encode, neighbour

#: Temperatures of simulated annealing, first and last.
_HOT, _COLD = 0.1, 0.002


def anneal(problem: TopProblem, evaluations: int, seed: int = 0) -> TopPlan:
    """Return the best plan that simulated annealing finds, from the plan that combines nothing."""
    pick = Random(seed)  # noqa: S311 - not a secret
    here = best = separate(problem.chains)
    worth = highest = 0.0
    for step in range(evaluations):
        temperature = _HOT * (_COLD / _HOT) ** (step / max(1, evaluations - 1))
        other = neighbour(here, problem, pick)
        found = problem.score(other)
        if found >= worth or pick.random() < math.exp((found - worth) / temperature):
            here, worth = other, found
        if found > highest:
            best, highest = other, found
    return best


def evolve(problem: TopProblem, evaluations: int, seed: int = 0) -> TopPlan:
    """Return the best plan that CMA-ES finds in the cube of actions (see :func:`chrion.serving.multi.combined.decode`).

    Raises:
        OptionError: The package cmaes is missing.
    """
    require_extras("CMA-ES", {"evolve": ["cmaes"]})
    from cmaes import CMA  # noqa: PLC0415 - of an extra

    start = encode(separate(problem.chains), problem.chains)
    optimiser = CMA(np.array(start), 0.1, bounds=np.array([[0.0, 1.0]] * len(start)), seed=seed)
    best, highest = separate(problem.chains), 0.0
    for generation in itertools.count():
        told: list[tuple[np.ndarray[Any, Any], float]] = []
        for _ in range(optimiser.population_size):
            if generation * optimiser.population_size + len(told) >= evaluations:
                return best
            action = optimiser.ask()
            plan = limit(decode(action, problem.chains), problem.most)
            told.append((action, -problem.score(plan)))
            if -told[-1][1] > highest:
                best, highest = plan, -told[-1][1]
        optimiser.tell(told)
    raise AssertionError


def exhaust(problem: TopProblem, steps: int = 3, limit: int = 20_000) -> TopPlan:
    """Return the best of all combinations with intervals on a grid, for a few sub-blocks.

    Args:
        problem: The problem.
        steps: The intervals of each model: 0, and up to the time between two arrivals at equal distances.
        limit: The most plans.

    Raises:
        OptionError: There are more plans.
    """
    names = list(problem.chains)
    grid = [[problem.periods_ms.get(name, 0.0) * at / (steps - 1) for at in range(steps)] for name in names]
    best, highest = separate(problem.chains), -math.inf
    plans = (
        TopPlan(dict(zip(names, intervals, strict=True)), combined)
        for combined in partitions(sub_blocks(problem.chains), problem.most)
        for intervals in itertools.product(*grid)
    )
    for count, plan in enumerate(plans):
        if count >= limit:
            raise OptionError(f"exhaustive search: more than {limit} plans")
        worth = problem.score(plan)
        if worth > highest:
            best, highest = plan, worth
    return best


def partitions(blocks: Sequence[SubBlock], most: int) -> Sequence[tuple[tuple[SubBlock, ...], ...]]:
    """Return all partitions of sub-blocks into combined blocks of at most ``most``."""
    found: list[tuple[tuple[SubBlock, ...], ...]] = [()]
    for block in blocks:
        grown = [(*own, (block,)) for own in found]
        for own in found:
            for at, members in enumerate(own):
                if len(members) < most:
                    grown.append((*own[:at], (*members, block), *own[at + 1 :]))
        found = grown
    return found


#: The searches by name, each with a problem, a number of evaluations and a seed.
SEARCHES: Mapping[str, Callable[[TopProblem, int, int], TopPlan]] = {
    "beam": beam,
    "annealing": anneal,
    "CMA-ES": evolve,
}
