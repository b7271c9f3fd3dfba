"""Plain searches of stages under a budget of evaluations, beside IOS's dynamic programme, and of all stages.

See :mod:`chrion.scheduler.search.stages`. They return the best stages that they have seen. Equal seeds give equal
stages. Simulated annealing and CMA-ES move operators between levels.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random

import numpy as np

from chrion.common.installation import require_extras
from chrion.graph.dag import Dag
from chrion.scheduler.policies.endings import Block, endings
from chrion.scheduler.policies.ios_search import search_stages
from chrion.scheduler.policies.stages import Stage, StageCost
from chrion.scheduler.search.stages import CountedCost, R, S, SpentError, depths, generation_stages, stages_of_levels

#: A beam keeps this many partial sequences of each length, and looks at this many endings of each.
_WIDTH, _ENDINGS, _TRIED = 4, 4_000, 24
#: Temperatures of simulated annealing, first and last, as shares of the first latency.
_HOT, _COLD, _LEAST = 0.1, 0.001, 1e-12
#: Steps of a search without a new stage, after which it ends although evaluations are left.
_IDLE_STEPS = 300
#: Endings that IOS's programme enumerates for each evaluation; see :mod:`chrion.scheduler.policies.ios_search`.
_ENDINGS_PER_EVALUATION = 20

#: Searches the stages of a graph: with the cost of a stage, a budget of evaluations and a seed.
Search = Callable[[Dag, StageCost, int, int], list[Stage]]


def anneal_stages(dag: Dag, stage_ms: StageCost, budget: int, seed: int = 0) -> list[Stage]:
    """Return the best stages that simulated annealing finds."""
    pick = Random(seed)  # noqa: S311 - not a secret
    search = _Best(dag, stage_ms, budget)
    wanted = depths(dag)
    deepest = max(wanted) + 1
    here = first = search.evaluate(wanted)
    for _ in search.steps():
        temperature = max(first * _HOT * (_COLD / _HOT) ** search.share, _LEAST)
        changed = [*wanted]
        at = pick.randrange(len(dag))
        changed[at] = pick.choice((changed[at] - 1, changed[at] + 1, pick.uniform(0, deepest)))
        found = search.evaluate(changed)
        if found <= here or pick.random() < math.exp((here - found) / temperature):
            here, wanted = found, changed
    return search.stages


def evolve_stages(dag: Dag, stage_ms: StageCost, budget: int, seed: int = 0) -> list[Stage]:
    """Return the best stages that CMA-ES finds.

    Raises:
        OptionError: The package cmaes is missing.
    """
    require_extras("CMA-ES", {"evolve": ["cmaes"]})
    from cmaes import CMA  # noqa: PLC0415 - of an extra

    search = _Best(dag, stage_ms, budget)
    wanted = depths(dag)
    search.evaluate(wanted)
    if len(dag) < 2:
        return search.stages  # nothing to evolve: CMA-ES needs two dimensions
    bounds = np.array([[0.0, max(wanted) + 2]] * len(dag))
    optimiser = CMA(np.array(wanted) + 0.5, 1.0, bounds=bounds, seed=seed)
    told: list[tuple[np.ndarray[tuple[int], np.dtype[np.float64]], float]] = []
    for _ in search.steps():
        point = optimiser.ask()
        told.append((point, search.evaluate(point.tolist())))
        if len(told) == optimiser.population_size:
            optimiser.tell(told)
            told = []
            if optimiser.should_stop():
                break
    return search.stages


class _Best:
    """The best of the levels that a search evaluates."""

    def __init__(self, dag: Dag, stage_ms: StageCost, budget: int) -> None:
        self._dag, self._budget = dag, budget
        self._cost = CountedCost(stage_ms, budget)
        self._least = math.inf
        self._spent = False
        self.stages: list[Stage] = []

    @property
    def share(self) -> float:
        """The share of the budget that is spent."""
        return self._cost.evaluations / self._budget

    def steps(self) -> Iterator[int]:
        """Return an iterator that ends when the budget is spent, or when no new stage has come for long."""
        last, idle = self._cost.evaluations, 0

        def goes_on(_: int) -> bool:
            nonlocal last, idle
            idle = idle + 1 if self._cost.evaluations == last else 0
            last = self._cost.evaluations
            return not self._spent and idle < _IDLE_STEPS

        return itertools.takewhile(goes_on, itertools.count())

    def evaluate(self, wanted: Sequence[float]) -> float:
        """Return the latency of levels; infinite if the budget does not suffice."""
        stages = stages_of_levels(self._dag, wanted)
        self.stages = self.stages or stages
        try:
            ms = sum(self._cost(stage.groups) for stage in stages)
        except SpentError:
            self._spent = True
            return math.inf
        if ms < self._least:
            self._least, self.stages = ms, stages
        return ms


def beam_stages(dag: Dag, stage_ms: StageCost, budget: int, seed: int = 0) -> list[Stage]:
    """Return the best stages that a beam search over endings finds, from the last stage to the first.

    Of each length, it keeps the sequences with the least latency for the work that is done. From each it tries some of
    the endings, at random: those of all if they are few. When the budget is spent, the best sequence is completed by
    generations.
    """
    pick = Random(seed)  # noqa: S311 - not a secret
    cost = CountedCost(stage_ms, max(budget, len(dag)))
    block = Block.of(dag, [(i,) for i in dag.topological_order])
    alone = [cost([unit]) for unit in block.units]

    def work_ms(mask: int) -> float:
        return sum(ms for at, ms in enumerate(alone) if mask >> at & 1)

    whole_ms = work_ms(block.whole)
    tried = max(_TRIED, budget // (_WIDTH * len(dag)))

    kept: list[tuple[float, float, int, tuple[Stage, ...]]] = [(0.0, 0.0, block.whole, ())]
    best: tuple[float, tuple[Stage, ...]] = (math.inf, ())
    try:
        while kept:
            longer: dict[int, tuple[float, float, int, tuple[Stage, ...]]] = {}
            for _, so_far, remaining, later in kept:
                found = list(itertools.islice(endings(block, remaining, R, S), _ENDINGS))
                for ending, groups in found if len(found) <= tried else pick.sample(found, tried):
                    stage = Stage(tuple(_members(block, group) for group in groups))
                    ms, rest = so_far + cost(stage.groups), remaining ^ ending
                    expected = ms * whole_ms / max(whole_ms - work_ms(rest), _LEAST)
                    entry = (expected, ms, rest, (stage, *later))
                    if not rest:
                        best = min(best, (ms, entry[3]), key=lambda pair: pair[0])
                    elif rest not in longer or entry[:2] < longer[rest][:2]:
                        longer[rest] = entry
            kept = sorted(longer.values(), key=lambda entry: entry[:3])[:_WIDTH]
    except SpentError:
        if best[0] == math.inf:
            kept = sorted([*kept, *longer.values()], key=lambda entry: (entry[2].bit_count(), *entry[:2]))[:1]
            _, _, remaining, later = kept[0]
            first = _members(block, remaining)
            inside = Dag.from_edges(
                len(first),
                [(first.index(m), at) for at, i in enumerate(first) for m in dag.predecessors[i] if m in first],
            )
            before = stages_of_levels(inside, depths(inside))
            translated = [Stage(tuple(tuple(first[i] for i in group) for group in stage.groups)) for stage in before]
            return [*translated, *later]
    return list(best[1])


def _members(block: Block, mask: int) -> tuple[int, ...]:
    """Return the operators of a mask."""
    return tuple(unit[0] for at, unit in enumerate(block.units) if mask >> at & 1)


def exhaust_stages(dag: Dag, stage_ms: StageCost) -> list[Stage]:
    """Return the best of all stages, for a few operators.

    IOS's programme, ``L[S] = min over endings E of S of L[S - E] + stage_ms(E)``, without its limits r and s, and
    without ending stages at articulation points. There are up to 2^n sets S, and 3^n endings of them.
    """
    block = Block.of(dag, [(i,) for i in dag.topological_order])

    @functools.cache
    def best(remaining: int) -> tuple[float, tuple[Stage, ...]]:
        least: tuple[float, tuple[Stage, ...]] = (math.inf, ()) if remaining else (0.0, ())
        for ending, groups in endings(block, remaining, None, None):
            stage = Stage(tuple(_members(block, group) for group in groups))
            before_ms, before = best(remaining ^ ending)
            if (ms := before_ms + stage_ms(stage.groups)) < least[0]:
                least = ms, (*before, stage)
        return least

    return list(best(block.whole)[1])


def ios_stages(dag: Dag, stage_ms: StageCost, budget: int, seed: int = 0) -> list[Stage]:
    """Return the stages of IOS's dynamic programme, abandoned and begun again in parts as the budget demands."""
    del seed  # it does nothing at random
    return search_stages(dag, stage_ms, r=R, s=S, most_endings=(_ENDINGS_PER_EVALUATION + 1) * budget)


#: The searches by name.
SEARCHES: Mapping[str, Search] = {
    "generations": lambda dag, _cost, _budget, _seed: generation_stages(dag),
    "IOS": ios_stages,
    "beam": beam_stages,
    "annealing": anneal_stages,
    "CMA-ES": evolve_stages,
}
