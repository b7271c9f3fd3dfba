"""Comparison of schedulers on one model: the plan of each, its predicted latency and its measured latency.

If a policy finds no plan (the graph is too large for it, it needs an accelerator, ...) or if its plan does not run, the
result holds the reason, and the other policies are compared as usual.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chrion.common.lane_numbers import is_copy_lane
from chrion.errors import ChrionError
from chrion.graph.model import Graph
from chrion.machine.cores import physical_cores
from chrion.profiler.interference import CoreMonitor
from chrion.profiler.machine import is_this_machine
from chrion.profiler.profiles import Profile
from chrion.report.benchmark.accuracy import TOLERANCE, largest_difference
from chrion.report.benchmark.latency import (
    TRIAL_S,
    Feed,
    SessionFactory,
    Timing,
    hybrid_candidate,
    plain_baseline,
    plain_baselines,
    time_candidates,
)
from chrion.runtime.execution.program import build_program
from chrion.scheduler.plan import Plan
from chrion.scheduler.plan_options import PlanOptions
from chrion.scheduler.planner import alternatives

#: Prefix of the names of plain sessions.
PLAIN = "onnxruntime"

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """The plan of one policy and its latency, or the reason why there is none."""

    policy: str
    #: None if the policy found no plan.
    plan: Plan | None
    planning_ms: float
    #: Lanes that the plan uses; an operator on several cores uses one for each.
    lanes: int = 0
    #: Number of waits of one lane for another in each request.
    synchronisations: int = 0
    #: None if the plan was not measured.
    timing: Timing | None = None
    #: Reason why there is no plan or no measurement; empty if there is one.
    reason: str = ""

    @property
    def fits(self) -> bool:
        """True if there is a plan, and it stays within the budget if there is one."""
        return self.plan is not None and self.plan.meets_budget


@dataclass(frozen=True, slots=True)
class PolicyComparison:
    """Results of several policies and of plain onnxruntime on one model."""

    graph: Graph
    profile: Profile
    results: tuple[PolicyResult, ...]
    #: Plain sessions; empty if the profile is of another machine.
    plain: tuple[Timing, ...] = ()
    #: Whether other processes used the cores while plans and sessions were timed.
    interference: bool = False

    @property
    def estimated(self) -> int:
        """Number of operators whose costs are not in the profile."""
        return len(self.profile.missing(self.graph.dag))

    @property
    def planned(self) -> PolicyComparison:
        """The comparison without the policies that found no plan, unless none found one."""
        return replace(self, results=tuple(result for result in self.results if result.plan) or self.results)

    @property
    def best_plain(self) -> Timing | None:
        """The fastest plain session."""
        return min(self.plain, key=lambda t: t.median_ms, default=None)


def plan_policies(
    graph: Graph, profile: Profile, options: Sequence[PlanOptions], progress: Progress | None = None
) -> PolicyComparison:
    """Plan a graph with each policy.

    Args:
        graph: The graph.
        profile: Costs, of this or another machine.
        options: The options of each plan, which name its policy. A plan may exceed the budget if none fits.
        progress: Called before each policy with the number of finished policies, their total, and the policy's name.

    Returns:
        A comparison without timings.
    """
    results = []
    for at, each in enumerate(options):
        if progress:
            progress(at, len(options), each.policy)
        results.append(_plan(graph, profile, each))
    return PolicyComparison(graph, profile, tuple(results))


def time_plans(
    comparison: PolicyComparison,
    feed: Feed,
    *,
    rounds: int = 5,
    trial_s: float = TRIAL_S,
    progress: Progress | None = None,
) -> PolicyComparison:
    """Time all plans and plain sessions side by side, if the profile is of this machine.

    Args:
        comparison: Plans.
        feed: The request.
        rounds: Number of trials of each candidate.
        trial_s: Duration of a trial in seconds.
        progress: Called after each trial; see :func:`chrion.report.benchmark.latency.time_candidates`.

    Returns:
        The comparison with timings. A plan that does not run, or whose outputs differ from those of a plain session,
        has a reason instead.
    """
    if not is_this_machine(comparison.profile.machine):
        return comparison
    plain = _plain_sessions(comparison, feed)
    expected = _run_once(next(iter(plain.values())))
    checked = [_check(comparison.graph, result, feed, expected) for result in comparison.results]
    hybrid = {r.policy: hybrid_candidate(comparison.graph, r.plan, feed) for r in checked if r.plan and not r.reason}
    candidates = {**hybrid, **plain}
    monitor = CoreMonitor(physical_cores(), patience_s=rounds * len(candidates) * trial_s)
    timed = time_candidates(candidates, rounds=rounds, trial_s=trial_s, progress=progress, monitor=monitor)
    timings = {t.name: t for t in timed}
    results = tuple(replace(r, timing=timings.get(r.policy)) for r in checked)
    baselines = tuple(timings[name] for name in plain)
    return replace(comparison, results=results, plain=baselines, interference=monitor.gave_up)


def _plan(graph: Graph, profile: Profile, options: PlanOptions) -> PolicyResult:
    before = time.perf_counter()
    try:
        plan = alternatives(graph, profile, options)[0]
    except ChrionError as error:
        return PolicyResult(options.policy, None, (time.perf_counter() - before) * 1e3, reason=str(error))
    planning_ms = (time.perf_counter() - before) * 1e3
    schedule = plan.schedule
    program = build_program(plan.apply(graph).dag, schedule, plan.segments)
    lanes = sum(not is_copy_lane(lane) for lane in program.occupied)
    return PolicyResult(options.policy, plan, planning_ms, lanes, program.waits)


def _plain_sessions(comparison: PolicyComparison, feed: Feed) -> dict[str, SessionFactory]:
    source, accelerator = comparison.graph.source, comparison.profile.accelerator
    factories = plain_baselines(source, feed, PLAIN)
    if accelerator:
        factories[f"{PLAIN}, {accelerator}"] = plain_baseline(source, feed, None, accelerator)
    return factories


def _run_once(factory: SessionFactory) -> Sequence[Any]:
    """Open a candidate, run one request, close the candidate, and return the outputs."""
    run, close = factory()
    try:
        return run()
    finally:
        close()


def _check(graph: Graph, result: PolicyResult, feed: Feed, expected: Sequence[Any]) -> PolicyResult:
    """Return a result, with a reason if its plan does not run or gives other outputs than expected."""
    if result.plan is None:
        return result
    try:
        difference = largest_difference(_run_once(hybrid_candidate(graph, result.plan, feed)), expected)
    except Exception as error:  # noqa: BLE001 - after any error the other policies are still measured
        return replace(result, reason=" ".join(f"does not run: {error}".split()))
    wrong = f"outputs differ from plain onnxruntime's by {difference:.2g}"
    return result if difference <= TOLERANCE else replace(result, reason=wrong)
