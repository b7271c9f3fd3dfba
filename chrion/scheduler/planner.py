"""The planner: from a graph and a profile to a plan, by a policy, within an SLO and a memory budget."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from chrion.common.lane_numbers import is_accelerator_lane
from chrion.common.units import format_count, format_mb, format_ms
from chrion.errors import OptionError
from chrion.graph.dag import Dag
from chrion.graph.model import Graph
from chrion.graph.recurrent import longest_sequence
from chrion.profiler.costs import Costs
from chrion.profiler.profiles import Profile
from chrion.scheduler.evaluation.evaluate import Timeline, segment_spans_ms
from chrion.scheduler.evaluation.lower_bound import lower_bound_ms
from chrion.scheduler.evaluation.solution import Problem, VariantSolution
from chrion.scheduler.limits import Limits
from chrion.scheduler.native_kernels import native_kernels, remark_on_precision
from chrion.scheduler.plan import Plan, Prediction
from chrion.scheduler.plan_options import DEFAULT_POLICY, PlanOptions
from chrion.scheduler.policies.policy import PlanningTask, ScheduleFunction, SchedulePolicy
from chrion.scheduler.policies.registry import find_policy
from chrion.scheduler.policies.single_device import accelerator_only, cpu_only
from chrion.scheduler.policies.stages import StageMeter
from chrion.scheduler.priced_memory import MEMORY_NAMES, Memory, priced_memory
from chrion.scheduler.schedule import Schedule
from chrion.scheduler.search.alpha import best_within, choose, raise_to_fit
from chrion.scheduler.search.solution_pool import SolutionPool


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
    memory: Memory | None = None,
) -> Plan:
    """Plan a graph on the machine of a profile: the best of :func:`alternatives`.

    Args:
        graph: The graph.
        profile: The costs of its operators; those of missing signatures are estimated.
        slo: Latency that must not be exceeded: ``60ms``, ``0.06s``, or a number of milliseconds.
        alpha: Price of accelerator memory, in ms per MB. If missing, the plan with the least memory that meets the
            SLO is chosen, or without an SLO the fastest one. Policies other than the default one plan for one alpha
            at a time: they lower it if the SLO would be missed, and choose the largest that meets it if it is missing.
        policy: Name of the scheduler, one of :func:`chrion.scheduler.policy_names`. The default policy also chooses
            the chunk length of recurrent operators.
        cores: Most CPU cores to use; all cores of the profile if missing.
        streams: Most accelerator lanes to use, by policies that use several; four if missing.
        meter: Measures stages for policy ``ios``, for example :class:`chrion.report.benchmark.stage_timer.StageTimer`;
            if missing, their latencies are predicted from the profile.
        gpu_budget: Accelerator memory that must not be exceeded: ``600MB``, ``0.6GB``, or a number of megabytes. It
            limits resident memory with one request in flight (what a device runs out of), not the sum of Equation 4,
            and takes precedence over the SLO.
        memory: The memory that ``alpha`` prices, and of which an SLO alone leaves the least, in the default policy:
            ``resident``, or ``paper`` for the sum of Equation 4. The default is ``resident`` if the profile has
            measured accelerator memory, else ``paper``. Other policies price memory as published.

    Returns:
        The plan. If no plan meets the SLO, it is the fastest found, and its ``meets_slo`` is false. If none fits the
        budget, it is the one that exceeds it least, and its ``meets_budget`` is false.

    Raises:
        ShapeError: An input has a free dimension.
        OptionError: An option is invalid; see :class:`chrion.scheduler.plan_options.PlanOptions`.
        ProfileError: The profile has fewer cores than ``cores``, or no operators.
        ScheduleError: The policy needs a device that the profile does not have.
    """
    options = PlanOptions(slo, alpha, policy, cores, streams, meter, gpu_budget, memory)
    return alternatives(graph, profile, options)[0]


def alternatives(graph: Graph, profile: Profile, options: PlanOptions) -> list[Plan]:
    """Return plans with similar predictions, the best first, to be compared by running them.

    The default policy returns one plan for each of the most promising chunk lengths; every other policy returns one
    plan. Only what the limits and the price ask for is searched.

    Raises:
        OptionError: An argument is of another type.
        ShapeError: As for :func:`partition`.
        ProfileError: As for :func:`partition`.
        ScheduleError: As for :func:`partition`.
    """
    _check_types(graph, profile)
    graph.require_shapes()
    limits, alpha = options.limits, options.alpha
    if limits.budget_mb is not None:
        return Planner(graph, profile, options).alternatives(limits, alpha)
    # Without a price, no other plan than the fastest is preferable; an SLO alone asks for the least memory.
    unpriced = alpha == 0 or (alpha is None and limits.slo_ms is None)
    fastest_only = unpriced or profile.accelerator is None
    planner = Planner(graph, profile, options, fastest_only=fastest_only, slo_ms=limits.slo_ms)
    return planner.alternatives(limits, alpha)


def _check_types(graph: object, profile: object) -> None:
    """Raise an OptionError for arguments that are often given in place of a graph and a profile."""
    if not isinstance(graph, Graph):
        raise OptionError(f"graph: expected a Graph, found {graph!r}", hint="chrion.load(MODEL) returns one")
    if not isinstance(profile, Profile):
        hint = "chrion.profile(graph) measures one, Profile.load(FILE) reads one"
        raise OptionError(f"profile: expected a Profile, found {profile!r}", hint=hint)


class Planner:
    """A planner of one graph for one machine, for several limits and prices of memory.

    A policy of solutions, such as the default one, searches once for each budget; SLOs and prices only select from its
    solutions. So of two such plans of one planner, none is better than the other in both latency and memory.

    Args:
        graph: The graph.
        profile: The costs of its operators.
        options: The policy, what it may use of the machine, and the memory that alpha prices. The limits and the price
            are those of each call.
        alphas: Prices that plans will be asked for, if they are known.
        fastest_only: Only the fastest plan will be asked for, without a budget and prices.
        slo_ms: The only SLO that plans will be asked for, if it is known and there is no budget.

    Raises:
        ProfileError: The profile has fewer cores than the options, or no operators.
    """

    def __init__(  # noqa: PLR0913 - what is known of the calls
        self,
        graph: Graph,
        profile: Profile,
        options: PlanOptions | None = None,
        *,
        alphas: Sequence[float] = (),
        fastest_only: bool = False,
        slo_ms: float | None = None,
    ) -> None:
        self._graph, self._profile, self._options = graph, profile, options or PlanOptions()
        self._policy = find_policy(self._options.policy)
        self._memory, self._alphas = priced_memory(profile, self._options.memory), alphas
        self._fastest_only, self._slo_ms = fastest_only, slo_ms
        #: The operators of the graph and of its variants with their costs, by identity.
        self._costs: dict[int, tuple[Dag, Costs]] = {}
        costs = self._costs_of(graph.dag)
        alone = _predict(graph, costs, accelerator_only) if costs.accelerator_ms is not None else None
        self._gpu = alone[0] if alone else None
        #: The number of operators that the accelerator has no kernel for.
        self._off_accelerator = sum(lane > 0 for lane in alone[1].lanes) if alone else 0
        self._plain = profile.plain.get(graph.digest)
        if self._plain and self._plain.threads > costs.cores:
            self._plain = None
        self._cpu = self._cpu_alone(costs.cores)
        self._pool: SolutionPool | None = None
        #: The budget that the solutions were found for.
        self._pool_budget_mb: float | None = None

    def plan(self, limits: Limits, alpha: float | None = None) -> Plan:
        """Return the best plan; see :func:`partition`."""
        return self.alternatives(limits, alpha)[0]

    def alternatives(self, limits: Limits, alpha: float | None = None) -> list[Plan]:
        """Return plans with similar predictions, the best first; see :func:`alternatives`."""
        policy = self._policy
        if isinstance(policy, SchedulePolicy):
            variants = [self._search_alpha(policy, limits, alpha)]
        else:
            if self._pool is None or limits.budget_mb != self._pool_budget_mb:
                solutions = policy.find_solutions(self._task(alpha, limits.budget_mb))
                self._pool = SolutionPool(solutions, self._memory, self._with_least_memory, self._with_frame)
                self._pool_budget_mb = limits.budget_mb
            variants = self._pool.select(limits, alpha)
            price = alpha if alpha is not None else self._pool.implied_alpha(variants[0])
            variants = [replace(variant, alpha=price) for variant in variants]
        remarks = [*self._remarks_on_alpha(limits, alpha, variants[0]), *self._remarks_on_budget(limits, variants[0])]
        return self._plans(variants, limits, alpha, remarks)

    def on_all_cores(self, limits: Limits, alpha: float | None = None) -> Plan | None:
        """Return the plan that runs the graph as it is on one lane of all cores; None if that was not measured."""
        dag = self._graph.dag
        costs = self._costs_of(dag)
        cores = costs.cores
        if cores not in costs.widths:
            return None
        schedule = Schedule(dag.topological_order, (1,) * len(dag), cores, widths=(cores,) * len(dag))
        solution = Problem(dag, costs).evaluate(schedule, origin=f"one lane of {cores} cores")
        return self._plans([VariantSolution(alpha or 0.0, solution, None, self._graph)], limits, alpha, [])[0]

    def _plans(
        self, variants: Sequence[VariantSolution], limits: Limits, alpha: float | None, remarks: Sequence[str]
    ) -> list[Plan]:
        """Return the plans of solutions, with remarks on all of them."""
        plans = [self._build(variant, limits, [*_remarks(variant, limits, alpha), *remarks]) for variant in variants]
        return [replace(plan, priced=alpha is not None, remarks=plan.remarks + plan.missed) for plan in plans]

    def _build(self, chosen: VariantSolution, limits: Limits, remarks: Sequence[str]) -> Plan:
        """Return the plan of a solution."""
        solution, dag = chosen.solution, chosen.graph.dag
        timeline, profile = solution.timeline, self._profile
        cpu_only, cpu_only_cores = self._cpu
        remarks = [*remarks, *self._remarks_on_plain(timeline.latency_ms)]
        kernels = native_kernels(dag, profile, solution.schedule)
        on_precision = remark_on_precision(dag, profile, frozenset(kernels.native))
        return Plan(
            model=self._graph.name,
            digest=chosen.graph.digest,
            shapes=self._graph.shapes,
            chunk=chosen.variant if isinstance(chosen.variant, int) else None,
            uncut=isinstance(chosen.variant, int) and chosen.variant == longest_sequence(self._graph),
            trees=chosen.variant if isinstance(chosen.variant, str) else "",
            policy=self._policy.name,
            alpha=chosen.alpha,
            memory=self._memory,
            slo_ms=limits.slo_ms,
            budget_mb=limits.budget_mb,
            accelerator=profile.accelerator if any(map(is_accelerator_lane, solution.schedule.lanes)) else None,
            machine=profile.machine,
            estimated=len(profile.missing(dag)),
            schedule=solution.schedule,
            operators=dag.names,
            model_operators=len(self._graph.dag),
            segments=solution.segments,
            segment_ms=segment_spans_ms(timeline, self._costs_of(dag), solution.schedule, solution.segments),
            predicted=_prediction(timeline),
            busy_ms=timeline.busy_ms,
            lower_bound_ms=lower_bound_ms(dag, self._costs_of(dag), solution.schedule),
            accelerator_only=self._gpu,
            off_accelerator=self._off_accelerator,
            cpu_only=cpu_only,
            cpu_only_cores=cpu_only_cores,
            cpu_only_measured=self._plain is not None,
            remarks=(*remarks, *([on_precision] if on_precision else [])),
            origin=solution.origin,
            merged=chosen.merged,
            **asdict(kernels),
        )

    def _cpu_alone(self, cores: int) -> tuple[Prediction | None, int]:
        """Return the latency of the model on the CPU alone, measured if possible, and the number of its cores."""
        if self._plain:
            return Prediction(self._plain.latency_ms, 0.0, 0.0), self._plain.threads
        costs = self._profile.costs(self._graph.dag, cores, self._options.streams, native=False)
        if not cores:
            return None, 0
        prediction, schedule = _predict(self._graph, costs, cpu_only)
        return prediction, schedule.cores

    def _remarks_on_plain(self, latency_ms: float) -> list[str]:
        """Return a remark if a plan of a latency is predicted to be slower than the fastest plain session."""
        percent = round((latency_ms / self._plain.latency_ms - 1) * 100) if self._plain else 0
        if self._plain is None or percent < 1:
            return []
        session = f"plain onnxruntime with {format_count(self._plain.threads, 'thread')}"
        measured = format_ms(self._plain.latency_ms)
        return [f"predicted to be {percent} % slower than {session} ({measured}, measured): use that session instead"]

    def _remarks_on_alpha(self, limits: Limits, alpha: float | None, chosen: VariantSolution) -> list[str]:
        """Return a remark if alpha changes nothing, with the reason."""
        reason = self._why_alpha_is_ineffective(limits, chosen) if alpha and chosen.meets(limits.slo_ms) else ""
        return [f"alpha changes nothing: {reason}"] if reason else []

    def _remarks_on_budget(self, limits: Limits, chosen: VariantSolution) -> list[str]:
        """Return a remark if a plan does without the accelerator because any use of it would exceed the budget."""
        base_mb, budget_mb = self._profile.base_memory_mb, limits.budget_mb
        if self._gpu is None or budget_mb is None or budget_mb >= base_mb or not chosen.fits(budget_mb):
            return []
        reason = f"any use of it takes {format_mb(base_mb)} (runtime and libraries)"
        return [f"the GPU budget of {format_mb(budget_mb)} excludes the accelerator: {reason}"]

    def _why_alpha_is_ineffective(self, limits: Limits, chosen: VariantSolution) -> str:
        """Return why a price of memory chose the same plan as no price; empty if it chose another one."""
        if self._gpu is None:
            return "there is no accelerator"
        if not self._policy.weighs_memory:
            return f"policy {self._policy.name} does not weigh memory"
        if isinstance(self._policy, SchedulePolicy):
            free = self._solver(self._policy, self._costs_of(self._graph.dag))(0.0)
            same = free.solution.schedule == chosen.solution.schedule
            return "this policy makes the same plan for alpha 0" if same else ""
        assert self._pool is not None  # noqa: S101 - the plan was selected from it
        fastest = self._pool.select(limits, 0.0)[0]
        if fastest.memory_mb(self._memory) > chosen.memory_mb(self._memory):
            return ""
        memory, least = MEMORY_NAMES[self._memory], self._pool.effective_alpha(limits, fastest)
        if least is None:
            return f"no plan within the limits has less {memory} than the fastest"
        base_mb = self._profile.base_memory_mb if self._memory == "resident" else 0.0
        fixed = f"; {format_mb(base_mb)} of it is taken by any use of the accelerator" if base_mb else ""
        within = "plans" if limits.slo_ms is None and limits.budget_mb is None else "plans within the limits"
        return f"{within} with less {memory} than the fastest are preferred from {least:.3g} ms/MB on{fixed}"

    def _costs_of(self, dag: Dag) -> Costs:
        """Return the costs of the operators of the graph or of one of its variants."""
        if id(dag) not in self._costs:
            self._costs[id(dag)] = dag, self._profile.costs(dag, self._options.cores, self._options.streams)
        return self._costs[id(dag)][1]

    def _task(self, alpha: float | None, budget_mb: float | None) -> PlanningTask:
        """Return the task of a policy of solutions, of which the first plan has a price of memory."""
        return PlanningTask(
            self._graph,
            self._costs_of,
            self._profile.unmeasured,
            alphas=(*self._alphas, *([alpha] if alpha else [])),
            memory=self._memory,
            meter=self._options.meter,
            budget_mb=math.inf if budget_mb is None else budget_mb,
            fastest_only=self._fastest_only,
            slo_ms=self._slo_ms,
        )

    def _search_alpha(self, policy: SchedulePolicy, limits: Limits, alpha: float | None) -> VariantSolution:
        """Return the solution of a policy of schedules."""
        costs = self._costs_of(self._graph.dag)
        solve = self._solver(policy, costs)
        if not self._gpu:
            return solve(alpha or 0.0)
        scale = self._gpu.latency_ms / self._gpu.memory_mb if self._gpu.memory_mb else 1.0
        chosen = self._with_frame(choose(solve, limits.slo_ms, alpha, scale))
        if limits.budget_mb is None or chosen.fits(limits.budget_mb) or not policy.weighs_memory:
            return chosen
        candidates = [raise_to_fit(lambda alpha: self._with_frame(solve(alpha)), chosen, limits.budget_mb, scale)]
        if costs.cores:
            # An operator without memory of its own stays on the accelerator at any alpha, and with it the base memory.
            candidates.append(self._solver(policy, costs.without_accelerator())(candidates[0].alpha))
        return best_within(candidates, limits, alpha)[0]

    def _solver(self, policy: SchedulePolicy, costs: Costs) -> Callable[[float], VariantSolution]:
        """Return the function from alpha to the solution of a policy of schedules."""
        solve = policy.make_solver(self._graph.dag, costs)
        return lambda alpha: VariantSolution(alpha, solve(alpha), None, self._graph)

    def _with_least_memory(self, variant: VariantSolution) -> VariantSolution:
        """Return a solution with a lower bound on its resident memory."""
        bounded = variant.solution.with_least_memory(variant.graph.dag, self._costs_of(variant.graph.dag))
        return replace(variant, solution=bounded)

    def _with_frame(self, variant: VariantSolution) -> VariantSolution:
        """Return a solution with exact resident memory, by which the planner selects."""
        exact = variant.solution.with_frame(variant.graph.dag, self._costs_of(variant.graph.dag))
        return replace(variant, solution=exact)


def _predict(graph: Graph, costs: Costs, policy: ScheduleFunction) -> tuple[Prediction, Schedule]:
    """Return the prediction of a policy's fastest schedule, and the schedule."""
    solution = Problem(graph.dag, costs).evaluate(policy(graph.dag, costs, 0.0))
    return _prediction(solution.with_frame(graph.dag, costs).timeline), solution.schedule


def _prediction(timeline: Timeline) -> Prediction:
    return Prediction(timeline.latency_ms, timeline.memory_mb, timeline.resident_mb, timeline.frame_mb)


def _remarks(chosen: VariantSolution, limits: Limits, alpha: float | None) -> list[str]:
    """Return remarks on operators on several cores, and on changes to alpha."""
    remarks = []
    if widths := Counter(width for width in chosen.solution.schedule.widths if width > 1):
        counts = ", ".join(f"{count} on {width}" for width, count in sorted(widths.items()))
        remarks.append(f"operators on several cores at once: {counts}")
    if alpha is not None and chosen.alpha < alpha and chosen.meets(limits.slo_ms):
        remarks.append(f"alpha was lowered from {alpha:g} to {chosen.alpha:.4g} ms/MB to meet the SLO")
    return remarks
