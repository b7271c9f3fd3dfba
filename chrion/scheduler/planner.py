"""From a graph and a profile to a plan: choose chunk, policy and alpha, schedule, cut, compare with the plain ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from chrion.errors import OptionError
from chrion.graph.dag import Dag
from chrion.graph.model import Graph
from chrion.graph.recurrent import chunk_choices, unroll
from chrion.lane_numbers import is_accelerator_lane
from chrion.profiler.costs import Costs
from chrion.profiler.profiles import Profile
from chrion.scheduler.evaluation.evaluate import Timeline, lower_bound_ms
from chrion.scheduler.evaluation.solution import Problem, Solution
from chrion.scheduler.plan import Plan, Prediction
from chrion.scheduler.policies.chrion import Planner
from chrion.scheduler.policies.ios_merging import StageMeter, ios_candidate
from chrion.scheduler.policies.registry import DEFAULT_POLICY, MERGING_POLICY, accelerator_only, cpu_only, policy_named
from chrion.scheduler.schedule import Schedule
from chrion.scheduler.search.alpha import Candidate, Limits, best_within, choose, raise_to_fit
from chrion.scheduler.search.pareto import pareto, refined, spread, trade_offs
from chrion.units import format_mb, format_ms, parse_duration_ms, parse_size_mb

#: Chunks whose beginnings look best are worth refining.
_CHUNKS_REFINED = 3
#: Policies that place operators by what memory is worth; the default one does, too, but searches budgets itself.
_PRICED = frozenset({"chrion-paper", "bfs", "dfs", "heft"})


def partition(  # noqa: PLR0913 - the knobs of the command of the same name
    graph: Graph,
    profile: Profile,
    slo: str | float | None = None,
    alpha: float | None = None,
    policy: str = "chrion-paper",
    *,
    cores: int | None = None,
    streams: int | None = None,
    meter: StageMeter | None = None,
    gpu_budget: str | float | None = None,
) -> Plan:
    """Plan a graph on the machine of a profile: the best of :func:`alternatives`.

    Args:
        graph: The graph.
        profile: Its operators' costs; signatures it lacks are estimated.
        slo: Latency that must not be exceeded: ``60ms``, ``0.06s``, or a number of milliseconds.
        alpha: What a megabyte of accelerator memory is worth, in ms. Lowered if the SLO would be missed; missing, it
            is the largest that meets the SLO, or 0 without an SLO.
        policy: Name of the scheduler, one of ``chrion.scheduler.POLICIES``; the paper's algorithms if missing.
            ``chrion``, which the command and HybridSession use, also chooses into which chunks recurrent operators
            are cut.
        cores: Use at most so many of the profile's CPU cores.
        streams: Use at most so many lanes of the accelerator (four if missing), where a policy uses several.
        meter: Measures stages for IOS, :class:`chrion.benchmark.stage_timer.StageTimer` for example; their latencies
            are predicted from the profile if missing.
        gpu_budget: Accelerator memory that must not be exceeded: ``600MB``, ``0.6GB``, or a number of megabytes. It
            is held against the resident memory (what an arena must hold: that is what a card runs out of), not against
            Equation 4's sum, and goes before the SLO where both cannot be had.

    Returns:
        The plan. If nothing meets the SLO it is the fastest found, and its ``meets_slo`` is false. If nothing fits the
        budget it is what exceeds it least, and its ``meets_budget`` is false.

    Raises:
        OptionError: As for :func:`check_options`.
        ProfileError: The profile has not so many cores.
        ScheduleError: The policy needs what the profile does not have.
    """
    return alternatives(
        graph, profile, slo, alpha, policy, cores=cores, streams=streams, meter=meter, gpu_budget=gpu_budget
    )[0]


def alternatives(  # noqa: PLR0913 - as for partition
    graph: Graph,
    profile: Profile,
    slo: str | float | None = None,
    alpha: float | None = None,
    policy: str = DEFAULT_POLICY,
    *,
    cores: int | None = None,
    streams: int | None = None,
    meter: StageMeter | None = None,
    gpu_budget: str | float | None = None,
) -> list[Plan]:
    """Plans that are predicted to be about as good, the best first, to be compared by running them.

    Arguments and errors are those of :func:`partition`. The default policy offers one plan for each of the chunks that
    look best; the others offer one plan.
    """
    limits = check_options(slo, alpha, policy, gpu_budget, streams=streams, meter=meter)

    def costs_of(dag: Dag) -> Costs:
        return profile.costs(dag, cores, streams)

    costs = costs_of(graph.dag)
    gpu = _baseline(graph, costs, accelerator_only) if costs.accelerator_ms is not None else None
    cpu = _baseline(graph, costs, cpu_only) if costs.cores else None
    chunked = _Chunked.of(graph, costs_of) if policy == DEFAULT_POLICY else None
    attempt = chunked.attempt if chunked else _attempt(graph, policy, costs_of, meter)
    scale = gpu.latency_ms / gpu.memory_mb if gpu and gpu.memory_mb else 1.0
    # Without an accelerator there is no memory to trade.
    chosen = choose(attempt, limits.slo_ms, alpha, scale) if gpu else attempt(alpha or 0.0)
    found = [chosen]
    if chunked:
        refined = chunked.improve(chosen.alpha)
        found = [c for c in refined if c.meets(limits.slo_ms) or not chosen.meets(limits.slo_ms)] or [chosen]
    if gpu and limits.budget_mb is not None:
        if chunked:
            found = chunked.within(found, limits, alpha, scale)
        elif policy in _PRICED and not chosen.fits(limits.budget_mb):
            found = [raise_to_fit(attempt, chosen, limits.budget_mb, scale)]
            if costs.cores:
                # An operator that takes no memory of its own stays on the accelerator at any price, with its context.
                found.append(
                    _attempt(graph, policy, lambda dag: costs_of(dag).without_accelerator(), None)(found[0].alpha)
                )
                found = best_within(found, limits, alpha)[:1]
    draft = _Draft(graph, profile, costs_of, policy, limits, alpha)
    return [draft.plan(candidate, gpu, cpu) for candidate in found]


def check_options(  # noqa: PLR0913 - as for partition
    slo: str | float | None,
    alpha: float | None,
    policy: str,
    gpu_budget: str | float | None = None,
    *,
    streams: int | None = None,
    meter: StageMeter | None = None,
) -> Limits:
    """Refuse what :func:`partition` would refuse, before anything is measured; returns the SLO and the budget.

    Raises:
        OptionError: The SLO, alpha, policy, budget or number of streams is not one, or the policy has no stages to
            measure.
    """
    if alpha is not None and not 0 <= alpha < math.inf:
        raise OptionError(f"alpha: {alpha} is not a number of ms per MB, from 0 up")
    policy_named(policy)
    if streams is not None and streams < 1:
        raise OptionError(f"streams: {streams} asked for, an accelerator has at least one lane")
    if meter is not None and policy != MERGING_POLICY:
        raise OptionError(f"policy {policy}: it has no stages to measure", hint=f"choose policy {MERGING_POLICY}")
    return Limits(
        None if slo is None else parse_duration_ms(slo, "slo"),
        None if gpu_budget is None else parse_size_mb(gpu_budget, "gpu budget"),
    )


def _attempt(
    graph: Graph, policy: str, costs_of: Callable[[Dag], Costs], meter: StageMeter | None
) -> Callable[[float], Candidate]:
    if policy == MERGING_POLICY:
        found = ios_candidate(graph, costs_of, meter)
        return lambda alpha: replace(found, alpha=alpha)
    solve = policy_named(policy)(graph.dag, costs_of(graph.dag))

    def attempt(alpha: float) -> Candidate:
        return Candidate(alpha, solve(alpha), None, graph)

    return attempt


class _Chunked:
    """The default policy over a graph and its unrolled variants.

    Alpha is searched on the beginnings, which are quick to make; only what is chosen in the end is refined.
    """

    def __init__(self, variants: Mapping[int | None, tuple[Graph, Planner]]) -> None:
        self._variants = variants

    @classmethod
    def of(cls, graph: Graph, costs_of: Callable[[Dag], Costs]) -> _Chunked:
        """The graph as it is, and unrolled in every way worth trying."""
        graphs: dict[int | None, Graph] = {None: graph}
        graphs |= {chunk: unroll(graph, chunk) for chunk in chunk_choices(graph)}
        return cls({chunk: (variant, Planner(variant.dag, costs_of(variant.dag))) for chunk, variant in graphs.items()})

    def attempt(self, alpha: float) -> Candidate:
        """The best beginning of all variants."""
        return min(self._begin(alpha), key=lambda c: c.solution.cost(alpha))

    def improve(self, alpha: float) -> list[Candidate]:
        """Refinements of the variants that begin best, the best first."""
        found = []
        for start in sorted(self._begin(alpha), key=lambda c: c.solution.cost(alpha))[:_CHUNKS_REFINED]:
            planner = self._variants[start.chunk][1]
            found.append(replace(start, solution=planner.improve(planner.begin(alpha), alpha)))
        return sorted(found, key=lambda c: c.solution.cost(alpha))

    def within(self, found: Sequence[Candidate], limits: Limits, alpha: float | None, scale: float) -> list[Candidate]:
        """Candidates within a memory budget, the best of each chunk, the best of all first.

        Args:
            found: What was found without the budget.
            limits: The SLO and the budget.
            alpha: As asked, or None.
            scale: An alpha at which latency and memory weigh about the same.
        """
        made_with = found[0].alpha
        points = [
            Candidate(made_with, solution, chunk, variant)
            for chunk, (variant, planner) in self._variants.items()
            for solution in trade_offs(planner, scale)
        ]
        chosen = spread(pareto(points, lambda c: c.solution))
        better = [replace(p, solution=refined(self._variants[p.chunk][1], p.solution, len(chosen))) for p in chosen]
        ranked = best_within([*found, *points, *better], limits, alpha)
        best_of_chunk: dict[int | None, Candidate] = {}
        for candidate in ranked:
            best_of_chunk.setdefault(candidate.chunk, candidate)
        best = ranked[0]
        alike = [c for c in best_of_chunk.values() if c.fits(limits.budget_mb) and c.meets(limits.slo_ms)]
        return alike[:_CHUNKS_REFINED] or [best]

    def _begin(self, alpha: float) -> list[Candidate]:
        return [
            Candidate(alpha, planner.begin(alpha)[0], chunk, variant)
            for chunk, (variant, planner) in self._variants.items()
        ]


def _baseline(graph: Graph, costs: Costs, policy: Callable[..., Schedule]) -> Prediction:
    schedule = policy(graph.dag, costs, 0.0)
    return _prediction(Problem(graph.dag, costs).place(schedule).timeline)


def _prediction(timeline: Timeline) -> Prediction:
    return Prediction(timeline.latency_ms, timeline.memory_mb, timeline.resident_mb)


@dataclass(frozen=True)
class _Draft:
    """What a plan is made of beside the solution."""

    graph: Graph
    profile: Profile
    costs_of: Callable[[Dag], Costs]
    policy: str
    limits: Limits
    alpha: float | None

    def plan(self, chosen: Candidate, gpu: Prediction | None, cpu: Prediction | None) -> Plan:
        solution = chosen.solution
        timeline = solution.timeline
        costs = self.costs_of(chosen.graph.dag)
        return Plan(
            model=self.graph.name,
            digest=chosen.graph.digest,
            shapes=self.graph.shapes,
            chunk=chosen.chunk,
            policy=self.policy,
            alpha=chosen.alpha,
            slo_ms=self.limits.slo_ms,
            budget_mb=self.limits.budget_mb,
            accelerator=self.profile.accelerator if any(map(is_accelerator_lane, solution.schedule.lanes)) else None,
            machine=self.profile.machine,
            estimated=len(self.profile.missing(chosen.graph.dag)),
            schedule=solution.schedule,
            operators=chosen.graph.dag.names,
            segments=solution.segments,
            segment_ms=tuple((timeline.start_ms[s[0]], timeline.finish_ms[s[-1]]) for s in solution.segments),
            predicted=_prediction(timeline),
            busy_ms=timeline.busy_ms,
            lower_bound_ms=lower_bound_ms(chosen.graph.dag, costs, solution.schedule),
            accelerator_only=gpu,
            cpu_only=cpu,
            remarks=tuple(self._remarks(chosen, solution)),
            merged=chosen.merged,
        )

    def _remarks(self, chosen: Candidate, solution: Solution) -> list[str]:
        remarks = []
        if solution.origin and self.policy == DEFAULT_POLICY:
            cut = f"recurrent operators cut into chunks of {chosen.chunk} steps; " if chosen.chunk else ""
            remarks.append(f"{cut}began as: {solution.origin}")
        if chosen.merged:
            count = sum(map(len, chosen.merged))
            remarks.append(f"{count} operators are merged into {len(chosen.merged)}")
        slo_ms, budget_mb = self.limits.slo_ms, self.limits.budget_mb
        if self.alpha is not None and chosen.alpha < self.alpha and chosen.meets(slo_ms):
            remarks.append(f"alpha was lowered from {self.alpha:g} to {chosen.alpha:.4g} ms/MB to meet the SLO")
        if slo_ms is not None and not chosen.meets(slo_ms):
            over = format_ms(solution.timeline.latency_ms - slo_ms)
            within = "" if budget_mb is None else f" within the GPU budget of {format_mb(budget_mb)}"
            remarks.append(f"no plan meets the SLO of {format_ms(slo_ms)}{within}: the fastest misses it by {over}")
        if budget_mb is not None and not chosen.fits(budget_mb):
            over = format_mb(solution.timeline.resident_mb - budget_mb)
            remarks.append(
                f"no plan of this policy fits the GPU budget of {format_mb(budget_mb)}: it takes {over} more"
            )
        return remarks
