"""The planner: from a graph and a profile to a plan, by a policy, within an SLO and a memory budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from chrion.errors import OptionError
from chrion.graph.dag import Dag
from chrion.graph.model import Graph
from chrion.lane_numbers import is_accelerator_lane
from chrion.profiler.costs import Costs
from chrion.profiler.profiles import Profile
from chrion.scheduler.evaluation.evaluate import Timeline, lower_bound_ms
from chrion.scheduler.evaluation.solution import Problem, VariantSolution
from chrion.scheduler.plan import Plan, Prediction
from chrion.scheduler.policies.chrion import ChunkSearch
from chrion.scheduler.policies.ios_merging import StageMeter, solve_with_merging
from chrion.scheduler.policies.registry import DEFAULT_POLICY, MERGING_POLICY, find_policy
from chrion.scheduler.policies.single_device import accelerator_only, cpu_only
from chrion.scheduler.schedule import Schedule
from chrion.scheduler.search.alpha import Limits, best_within, choose, raise_to_fit
from chrion.units import format_mb, format_ms, parse_duration_ms, parse_size_mb


def partition(  # noqa: PLR0913 - the options of the command of the same name
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
) -> Plan:
    """Plan a graph on the machine of a profile: the best of :func:`alternatives`.

    Args:
        graph: The graph.
        profile: The costs of its operators; those of missing signatures are estimated.
        slo: Latency that must not be exceeded: ``60ms``, ``0.06s``, or a number of milliseconds.
        alpha: Price of accelerator memory, in ms per MB. It is lowered if the SLO would be missed. If missing, it is
            the largest that meets the SLO, or 0 without an SLO.
        policy: Name of the scheduler, one of :func:`chrion.scheduler.policy_names`. The default policy also chooses
            the chunk length of recurrent operators.
        cores: Most CPU cores to use; all cores of the profile if missing.
        streams: Most accelerator lanes to use, by policies that use several; four if missing.
        meter: Measures stages for policy ``ios``, for example :class:`chrion.benchmark.stage_timer.StageTimer`; if
            missing, their latencies are predicted from the profile.
        gpu_budget: Accelerator memory that must not be exceeded: ``600MB``, ``0.6GB``, or a number of megabytes. It
            limits resident memory (what an arena must hold, and so what a device runs out of), not the sum of
            Equation 4, and takes precedence over the SLO.

    Returns:
        The plan. If no plan meets the SLO, it is the fastest found, and its ``meets_slo`` is false. If none fits the
        budget, it is the one that exceeds it least, and its ``meets_budget`` is false.

    Raises:
        OptionError: As for :func:`check_options`.
        ProfileError: The profile has fewer cores than ``cores``, or no operators.
        ScheduleError: The policy needs a device that the profile does not have.
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
    """Return plans with similar predictions, the best first, to be compared by running them.

    Arguments and errors are those of :func:`partition`. The default policy returns one plan for each of the most
    promising chunk lengths; every other policy returns one plan.
    """
    limits = check_options(slo, alpha, policy, gpu_budget, streams=streams, meter=meter)

    def costs_of(dag: Dag) -> Costs:
        return profile.costs(dag, cores, streams)

    costs = costs_of(graph.dag)
    baselines = (
        _predict(graph, costs, accelerator_only) if costs.accelerator_ms is not None else None,
        _predict(graph, costs, cpu_only) if costs.cores else None,
    )
    if policy == DEFAULT_POLICY:
        found = _search_chunks(graph, costs_of, limits, alpha, baselines[0])
    else:
        found = [_search_alpha(graph, policy, costs_of, meter, limits, alpha, baselines[0])]
    builder = _PlanBuilder(graph, profile, costs_of, policy, limits, alpha)
    return [builder.build(variant, *baselines) for variant in found]


def check_options(  # noqa: PLR0913 - as for partition
    slo: str | float | None,
    alpha: float | None,
    policy: str,
    gpu_budget: str | float | None = None,
    *,
    streams: int | None = None,
    meter: StageMeter | None = None,
) -> Limits:
    """Check the options of :func:`partition` before anything is measured; return the SLO and the budget.

    Raises:
        OptionError: The SLO, alpha, policy, budget or number of streams is invalid, or ``meter`` is given for a
            policy that measures no stages.
    """
    if alpha is not None and not 0 <= alpha < math.inf:
        raise OptionError(f"invalid alpha {alpha}: expected a number of ms per MB, 0 or more")
    find_policy(policy)
    if streams is not None and streams < 1:
        raise OptionError(f"invalid number of streams {streams}: expected 1 or more")
    if meter is not None and policy != MERGING_POLICY:
        raise OptionError(f"policy {policy} measures no stages", hint=f"choose --policy {MERGING_POLICY}")
    return Limits(
        None if slo is None else parse_duration_ms(slo, "slo"),
        None if gpu_budget is None else parse_size_mb(gpu_budget, "gpu budget"),
    )


def _search_chunks(
    graph: Graph,
    costs_of: Callable[[Dag], Costs],
    limits: Limits,
    alpha: float | None,
    gpu: Prediction | None,
) -> list[VariantSolution]:
    """Return the solutions of the default policy, the best first."""
    search = ChunkSearch.of(graph, costs_of)
    scale = _scale(gpu)
    # Without an accelerator there is no memory to trade for latency.
    initial = choose(search.initial, limits.slo_ms, alpha, scale) if gpu else search.initial(alpha or 0.0)
    improved = search.improve(initial.alpha)
    found = [v for v in improved if v.meets(limits.slo_ms) or not initial.meets(limits.slo_ms)] or [initial]
    if gpu and limits.budget_mb is not None:
        return search.within(found, limits, alpha, scale)
    return found


def _search_alpha(  # noqa: PLR0913, PLR0917 - the options of partition
    graph: Graph,
    policy: str,
    costs_of: Callable[[Dag], Costs],
    meter: StageMeter | None,
    limits: Limits,
    alpha: float | None,
    gpu: Prediction | None,
) -> VariantSolution:
    """Return the solution of a policy other than the default one."""
    solve = _solver(graph, policy, costs_of, meter)
    if not gpu:
        return solve(alpha or 0.0)
    scale = _scale(gpu)
    chosen = choose(solve, limits.slo_ms, alpha, scale)
    if limits.budget_mb is None or chosen.fits(limits.budget_mb) or not find_policy(policy).weighs_memory:
        return chosen
    found = [raise_to_fit(solve, chosen, limits.budget_mb, scale)]
    if costs_of(graph.dag).cores:
        # An operator without memory of its own stays on the accelerator at any alpha, and with it the base memory.
        on_cpu = _solver(graph, policy, lambda dag: costs_of(dag).without_accelerator(), None)
        found.append(on_cpu(found[0].alpha))
    return best_within(found, limits, alpha)[0]


def _solver(
    graph: Graph, policy: str, costs_of: Callable[[Dag], Costs], meter: StageMeter | None
) -> Callable[[float], VariantSolution]:
    """Return the function from alpha to a policy's solution."""
    if policy == MERGING_POLICY:
        found = solve_with_merging(graph, costs_of, meter)
        return lambda alpha: VariantSolution(alpha, found.solution, found.chunk, found.graph, found.merged)
    solve = find_policy(policy).make_solver(graph.dag, costs_of(graph.dag))
    return lambda alpha: VariantSolution(alpha, solve(alpha), None, graph)


def _scale(gpu: Prediction | None) -> float:
    """Return an alpha at which latency and memory have about the same weight, in ms per MB."""
    return gpu.latency_ms / gpu.memory_mb if gpu and gpu.memory_mb else 1.0


def _predict(graph: Graph, costs: Costs, policy: Callable[[Dag, Costs, float], Schedule]) -> Prediction:
    """Return the prediction of a policy's fastest schedule."""
    return _prediction(Problem(graph.dag, costs).evaluate(policy(graph.dag, costs, 0.0)).timeline)


def _prediction(timeline: Timeline) -> Prediction:
    return Prediction(timeline.latency_ms, timeline.memory_mb, timeline.resident_mb)


@dataclass(frozen=True)
class _PlanBuilder:
    """Builder of plans from solutions; its fields are common to all plans of one call of :func:`alternatives`."""

    graph: Graph
    profile: Profile
    costs_of: Callable[[Dag], Costs]
    policy: str
    limits: Limits
    alpha: float | None

    def build(self, chosen: VariantSolution, gpu: Prediction | None, cpu: Prediction | None) -> Plan:
        """Return the plan of a solution.

        Args:
            chosen: The solution.
            gpu: The prediction for the graph on the accelerator alone; None without an accelerator.
            cpu: The prediction for the graph on the CPU cores alone; None without cores.
        """
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
            remarks=tuple(self._remarks(chosen)),
            merged=chosen.merged,
        )

    def _remarks(self, chosen: VariantSolution) -> list[str]:
        """Return the plan's remarks: the initial solution, changes to the model and to alpha, and missed limits."""
        remarks = []
        timeline = chosen.solution.timeline
        if chosen.chunk:
            remarks.append(f"recurrent operators are cut into chunks of {chosen.chunk} steps")
        if chosen.solution.origin and self.policy == DEFAULT_POLICY:
            remarks.append(f"initial solution: {chosen.solution.origin}")
        if chosen.merged:
            count = sum(map(len, chosen.merged))
            remarks.append(f"{count} operators are merged into {len(chosen.merged)}")
        slo_ms, budget_mb = self.limits.slo_ms, self.limits.budget_mb
        if self.alpha is not None and chosen.alpha < self.alpha and chosen.meets(slo_ms):
            remarks.append(f"alpha was lowered from {self.alpha:g} to {chosen.alpha:.4g} ms/MB to meet the SLO")
        if slo_ms is not None and not chosen.meets(slo_ms):
            excess = format_ms(timeline.latency_ms - slo_ms)
            within = "" if budget_mb is None else f" within the GPU budget of {format_mb(budget_mb)}"
            remarks.append(f"no plan meets the SLO of {format_ms(slo_ms)}{within}: the fastest misses it by {excess}")
        if budget_mb is not None and not chosen.fits(budget_mb):
            excess = format_mb(timeline.resident_mb - budget_mb)
            budget = f"the GPU budget of {format_mb(budget_mb)}"
            remarks.append(f"no plan of this policy fits {budget}: the smallest exceeds it by {excess}")
        return remarks
