"""From a graph and a profile to a plan: choose a policy and alpha, schedule, cut, compare with the plain ways."""

from __future__ import annotations

from collections.abc import Callable

from chrion.errors import OptionError
from chrion.graph.model import Graph
from chrion.graph.segments import cut
from chrion.profiler.costs import Costs
from chrion.profiler.profiles import Profile
from chrion.scheduler.plan import Plan, Prediction
from chrion.scheduler.policies import accelerator_only, cpu_only, policy_named
from chrion.scheduler.search import Candidate, choose
from chrion.scheduler.timeline import Schedule, evaluate
from chrion.units import format_ms, parse_duration_ms

DEFAULT_POLICY = "chrion-paper"


def partition(  # noqa: PLR0913 - the knobs of the command of the same name
    graph: Graph,
    profile: Profile,
    slo: str | float | None = None,
    alpha: float | None = None,
    policy: str = DEFAULT_POLICY,
    *,
    cores: int | None = None,
) -> Plan:
    """Plan a graph on the machine of a profile.

    Args:
        graph: The graph.
        profile: Its operators' costs; signatures it lacks are estimated.
        slo: Latency that must not be exceeded: ``60ms``, ``0.06s``, or a number of milliseconds.
        alpha: What a megabyte of accelerator memory is worth, in ms. Lowered if the SLO would be missed; missing, it
            is the largest that meets the SLO, or 0 without an SLO.
        policy: Name of the scheduler, one of ``chrion.scheduler.POLICIES``.
        cores: Use at most so many of the profile's CPU cores.

    Returns:
        The plan. If nothing meets the SLO it is the fastest found, and its ``meets_slo`` is false.

    Raises:
        OptionError: The SLO, alpha or policy is not one.
        ProfileError: The profile has not so many cores.
        ScheduleError: The policy needs what the profile does not have.
    """
    slo_ms = None if slo is None else parse_duration_ms(slo, "slo")
    if alpha is not None and not 0 <= alpha < float("inf"):
        raise OptionError(f"alpha: {alpha} is not a number of ms per MB, from 0 up")
    schedule = policy_named(policy)
    costs = profile.costs(graph.dag, cores)

    def attempt(alpha: float) -> Candidate:
        return _candidate(graph, costs, schedule(graph.dag, costs, alpha), alpha)

    gpu = _baseline(graph, costs, accelerator_only) if costs.accelerator_ms is not None else None
    cpu = _baseline(graph, costs, cpu_only) if costs.cores else None
    scale = gpu.latency_ms / gpu.memory_mb if gpu and gpu.memory_mb else 1.0
    chosen = choose(attempt, slo_ms, alpha, scale)
    return _plan(graph, profile, policy, slo_ms, chosen, (gpu, cpu), _remarks(chosen, slo_ms, alpha))


def _candidate(graph: Graph, costs: Costs, schedule: Schedule, alpha: float) -> Candidate:
    segments = cut(graph.dag, schedule.order, schedule.lanes)
    return Candidate(alpha, schedule, segments, evaluate(graph.dag, costs, schedule, segments))


def _baseline(graph: Graph, costs: Costs, policy: Callable[..., Schedule]) -> Prediction:
    timeline = _candidate(graph, costs, policy(graph.dag, costs, 0.0), 0.0).timeline
    return Prediction(timeline.latency_ms, timeline.memory_mb)


def _remarks(chosen: Candidate, slo_ms: float | None, alpha: float | None) -> tuple[str, ...]:
    remarks = []
    if alpha is not None and chosen.alpha < alpha and chosen.meets(slo_ms):
        remarks.append(f"alpha was lowered from {alpha:g} to {chosen.alpha:.4g} ms/MB to meet the SLO")
    if slo_ms is not None and not chosen.meets(slo_ms):
        over = chosen.timeline.latency_ms - slo_ms
        remarks.append(f"no plan meets the SLO of {format_ms(slo_ms)}: the fastest misses it by {format_ms(over)}")
    return tuple(remarks)


def _plan(  # noqa: PLR0913, PLR0917 - everything a plan is made of meets here
    graph: Graph,
    profile: Profile,
    policy: str,
    slo_ms: float | None,
    chosen: Candidate,
    baselines: tuple[Prediction | None, Prediction | None],
    remarks: tuple[str, ...],
) -> Plan:
    timeline = chosen.timeline
    return Plan(
        model=graph.name,
        digest=graph.digest,
        shapes=graph.shapes,
        policy=policy,
        alpha=chosen.alpha,
        slo_ms=slo_ms,
        accelerator=profile.accelerator if 0 in chosen.schedule.lanes else None,
        machine=profile.machine,
        estimated=len(profile.missing(graph.dag)),
        schedule=chosen.schedule,
        operators=graph.dag.names,
        segments=chosen.segments,
        segment_ms=tuple((timeline.start_ms[s[0]], timeline.finish_ms[s[-1]]) for s in chosen.segments),
        predicted=Prediction(timeline.latency_ms, timeline.memory_mb),
        busy_ms=timeline.busy_ms,
        accelerator_only=baselines[0],
        cpu_only=baselines[1],
        remarks=remarks,
    )
