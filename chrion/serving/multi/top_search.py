"""Search of TOP's plans: launcher settings and combined blocks, by beam search on the virtual clock.

The paper learns both by reinforcement. Its actions are points of a cube, and what they are worth is measured by serving
tasks; so any search can take the place of the agents. ``scripts/bench_top.py`` compares several under equal numbers of
evaluations.

**The objective** is Equation 2 of the paper without its two faults. Its z-scores move while the agents learn, so that
equal plans have different rewards at different times, and the exponential of a sum of them has no scale. Here the
utilisation, the latencies and the variance are compared with those of a fixed plan, which combines nothing:
``a ln(u / u0) - b mean(ln(l / l0)) - c ln((1 + v) / (1 + v0))``. That plan is worth 0. Latencies include the time in
the queue, since the launcher would otherwise lower them by letting tasks wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

import numpy as np

from chrion.graph.blocks import ModuleChain
from chrion.serving.multi.combined import LONGEST_INTERVAL_MS, StageTable, SubBlock, TopPlan, separate, sub_blocks
from chrion.serving.multi.dispatcher import BlockSpan, ModelRules, Replan
from chrion.serving.multi.simulation import Arrival, Served, build_arrivals, simulate
from chrion.serving.multi.top import TopDispatcher
from chrion.serving.multi.virtual_lanes import BlockTimes, PinnedLanes

#: a, b and c of Equation 2: the weights of utilisation, latency and variance.
WEIGHTS = (0.4, 0.4, 0.2)
#: The longest interval of the launcher that is tried, over the time between two arrivals.
LONGEST_SHARE = 1.1
#: n: the times at which the state is sampled.
SAMPLES = 10
#: Tasks of all models in a trial of a plan; evaluations of a search at the opening of a session, and of a later one.
_TASKS, _EVALUATIONS, _LATER = 40, 32, 16
#: What a plan is worth that combines more than H sub-blocks, which is not served.
_SUPERBLOCK = -10.0
#: Plans that a beam keeps, and new ones from each.
_WIDTH, _BRANCHES = 3, 3


@dataclass(frozen=True, slots=True)
class Figures:
    """What Equation 2 of the paper is made of."""

    #: The share of the lanes' time in which they ran pieces, until the last task was over.
    utilisation: float
    #: The mean latency of each model in ms, from arrival to end.
    latency_ms: Mapping[str, float]
    #: The mean variance of the numbers of waiting tasks, over the samples.
    variance: float


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan that has been served on the virtual clock."""

    figures: Figures
    #: Equation 1: for each sample, 1 for each sub-block that a task is in, and the waiting tasks of each model minus
    #: their mean over models.
    state: tuple[tuple[float, ...], ...]
    #: The tasks of each model that wait when the last one arrives.
    waiting: Mapping[str, int]


class TopProblem:
    """The rates and models that a plan is searched for.

    Args:
        rules: The models.
        lanes: The number of lanes.
        chains: Their modules.
        times: The times of their pieces.
        rates: Tasks per second; models of rate 0 are not served.
        table: The stages of combined blocks.
        waiting: Tasks of each model that wait at the beginning.
        most: H, the most sub-blocks of a combined block.
        seed: The seed of arrivals and samples.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what a load consists of
        self,
        rules: Mapping[str, ModelRules],
        lanes: int,
        chains: Mapping[str, ModuleChain],
        times: BlockTimes,
        rates: Mapping[str, float],
        table: StageTable,
        *,
        waiting: Mapping[str, int] | None = None,
        most: int | None = None,
        seed: int = 0,
    ) -> None:
        self.chains, self.most = chains, most or max(2, lanes)
        #: The launcher's intervals that a search tries: up to somewhat more than the time between two arrivals.
        self.periods_ms = {name: min(LONGEST_INTERVAL_MS, 1e3 / rate if rate else 0.0) for name, rate in rates.items()}
        #: The trials so far.
        self.evaluations = 0
        # Tasks that are dropped would have no latency.
        self._rules = {name: replace(own, deadline_ms=None, queue=10**9) for name, own in rules.items()}
        self._lanes, self._times, self._table, self._seed = lanes, times, table, seed
        served = {name: rate for name, rate in rates.items() if rate}
        self._waiting = waiting or {}
        self._arrivals = build_arrivals(served, _TASKS / sum(served.values()), seed=seed)

    def trial(self, plan: TopPlan, waiting: Mapping[str, int] | None = None) -> Trial:
        """Serve the tasks by a plan, after those that wait: the problem's, or others."""
        self.evaluations += 1
        queued = self._waiting if waiting is None else waiting
        first = [Arrival(0.0, name) for name, count in queued.items() for _ in range(count)]
        dispatcher = TopDispatcher(self._rules, self._lanes, self.chains, plan, self._table)
        arrivals = [*first, *self._arrivals]
        served, spans = simulate(dispatcher, arrivals, PinnedLanes(self._lanes, self._times))
        return _summarise(served, spans, arrivals, self.chains, self._lanes, self._seed)

    def score(self, plan: TopPlan) -> float:
        """Return what a plan is worth; 0 for the one that combines nothing."""
        if plan.largest > self.most:
            self.evaluations += 1
            return _SUPERBLOCK - plan.largest
        return objective(self.trial(plan).figures, self.first.figures)

    @cached_property
    def first(self) -> Trial:
        """The trial of the plan that combines nothing."""
        first = self.trial(separate(self.chains))
        self.evaluations -= 1  # every search needs it
        return first


def objective(figures: Figures, reference: Figures, model: str | None = None) -> float:
    """Return the objective of figures, against those of a reference plan; with a model, its latency is what counts."""
    utilisation, latency, variance = WEIGHTS
    names = reference.latency_ms if model is None else [model]
    ratios = [math.log(figures.latency_ms[name] / reference.latency_ms[name]) for name in names]
    return (
        utilisation * math.log(figures.utilisation / reference.utilisation)
        - latency * sum(ratios) / len(ratios)
        - variance * math.log((1 + figures.variance) / (1 + reference.variance))
    )


def _summarise(  # noqa: PLR0913, PLR0917 - what a simulation has
    served: Sequence[Served],
    spans: Sequence[BlockSpan],
    arrivals: Sequence[Arrival],
    chains: Mapping[str, ModuleChain],
    lanes: int,
    seed: int,
) -> Trial:
    end_ms = max(task.end_ms for task in served)
    busy_ms = sum(span.end_ms - span.start_ms for span in spans)
    latencies: dict[str, list[float]] = {}
    for task in served:
        latencies.setdefault(task.model, []).append(task.latency_ms)
    # For every task, when it began each module; a task is in a module until it begins the next one.
    home = {name: {p: at for at, own in enumerate(chain.modules) for p in own} for name, chain in chains.items()}
    began: dict[int, dict[SubBlock, float]] = {}
    for span in spans:
        own = began.setdefault(span.task, {})
        block = span.model, home[span.model][span.block]
        own[block] = min(own.get(block, math.inf), span.start_ms)
    ended = {span.task: span.end_ms for span in spans}  # spans are in the order of their ends
    pick = Random(seed)  # noqa: S311 - not a secret
    samples = sorted(pick.uniform(0, arrivals[-1].time_ms or end_ms) for _ in range(SAMPLES))
    blocks = {block: at for at, block in enumerate(sub_blocks(chains))}
    models = {name: at for at, name in enumerate(chains)}
    occupied = np.zeros((SAMPLES, len(blocks)))
    waiting = np.zeros((SAMPLES, len(models)))
    for number, arrival in enumerate(arrivals):  # tasks are numbered as they arrive
        times = [*sorted(began[number].values()), ended[number]]
        for row, at_ms in enumerate(samples):
            if arrival.time_ms <= at_ms < times[0]:
                waiting[row, models[arrival.model]] += 1
            elif times[0] <= at_ms < times[-1]:
                inside = sum(time_ms <= at_ms for time_ms in times) - 1
                occupied[row, blocks[arrival.model, inside]] = 1
    deviations = waiting - waiting.mean(axis=1, keepdims=True)
    figures = Figures(
        busy_ms / (lanes * end_ms),
        {name: sum(latencies[name]) / len(latencies[name]) for name in chains if name in latencies},
        float(waiting.var(axis=1).mean()),
    )
    last_ms = arrivals[-1].time_ms
    open_ = dict.fromkeys(chains, 0)
    for number, arrival in enumerate(arrivals):
        open_[arrival.model] += min(began[number].values()) > last_ms
    return Trial(figures, tuple(map(tuple, np.concatenate([occupied, deviations], axis=1).tolist())), open_)


def neighbour(plan: TopPlan, problem: TopProblem, pick: Random) -> TopPlan:
    """Return a plan that differs in one interval, or in the combined block of one sub-block."""
    if pick.random() < 0.3:
        name = pick.choice(list(plan.intervals_ms))
        interval_ms = pick.choice((0.0, pick.uniform(0, LONGEST_SHARE) * problem.periods_ms.get(name, 0.0)))
        return replace(plan, intervals_ms={**plan.intervals_ms, name: min(interval_ms, LONGEST_INTERVAL_MS)})
    block = pick.choice(sub_blocks(problem.chains))
    rest = [tuple(b for b in members if b != block) for members in plan.combined]
    rest = [members for members in rest if members]
    targets = [at for at, members in enumerate(rest) if len(members) < problem.most]
    at = pick.choice([-1, *targets, *targets])
    if at < 0:
        return replace(plan, combined=(*rest, (block,)))
    return replace(plan, combined=(*rest[:at], _in_order((*rest[at], block), problem), *rest[at + 1 :]))


def _in_order(members: Sequence[SubBlock], problem: TopProblem) -> tuple[SubBlock, ...]:
    order = {block: at for at, block in enumerate(sub_blocks(problem.chains))}
    return tuple(sorted(members, key=order.__getitem__))


def beam(problem: TopProblem, evaluations: int, seed: int = 0) -> TopPlan:
    """Return the best plan of a beam search whose steps change one interval or one sub-block."""
    pick = Random(seed)  # noqa: S311 - not a secret
    kept = [(0.0, 0, separate(problem.chains))]
    for first in range(1, evaluations + 1, _WIDTH * _BRANCHES):
        numbers = range(first, min(first + _WIDTH * _BRANCHES, evaluations + 1))
        found = [(number, neighbour(kept[number % len(kept)][2], problem, pick)) for number in numbers]
        kept += [(-problem.score(plan), number, plan) for number, plan in found]
        kept = sorted(kept, key=lambda entry: entry[:2])[:_WIDTH]
    return kept[0][2]


def encode(plan: TopPlan, chains: Mapping[str, ModuleChain]) -> list[float]:
    """Return an action that stands for a plan: each combined block has a part of the range."""
    blocks = sub_blocks(chains)
    place = {block: (at + 0.5) / len(blocks) for at, members in enumerate(plan.combined) for block in members}
    return [*(plan.intervals_ms[name] / LONGEST_INTERVAL_MS for name in chains), *(place[block] for block in blocks)]


class TopPlanner:
    """Makes the plans of a session: one for its rates at the beginning, others for what arrives.

    Args:
        rules: The models, with the times of their pieces.
        lanes: The number of lanes.
        chains: The modules of the models.
    """

    def __init__(self, rules: Mapping[str, ModelRules], lanes: int, chains: Mapping[str, ModuleChain]) -> None:
        self._rules, self._lanes, self._chains = rules, lanes, chains
        self._times = {name: (own.block_ms, own.block_ms) for name, own in rules.items()}
        self.table = StageTable(chains, self._times, lanes)
        rates = {name: own.rate or 0.0 for name, own in rules.items()}
        #: The plan for the rates of the session; the one that combines nothing if none are given.
        self.first = self._search(rates, {}, _EVALUATIONS) if all(rates.values()) else separate(chains)

    def replan(self, request: Replan) -> TopPlan:
        """Return a plan for the tasks that wait and the rates at which they have arrived."""
        return self._search(request.rates, request.waiting, _LATER)

    def _search(self, rates: Mapping[str, float], waiting: Mapping[str, int], evaluations: int) -> TopPlan:
        some = {name: min(count, _TASKS) for name, count in waiting.items()}  # a long queue shows no more
        problem = TopProblem(self._rules, self._lanes, self._chains, self._times, rates, self.table, waiting=some)
        return beam(problem, evaluations)  # the best of them by scripts/bench_top.py
