"""Schedulers beside each other on one model: what each plans, what that is predicted to take, and what it takes.

A policy that finds no plan (the graph is too large for it, it needs an accelerator, ...) or whose plan does not run is
kept with the reason, so that one failure does not spoil the comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chrion.benchmark.latency import (
    Feed,
    Maker,
    Timing,
    hybrid_candidate,
    largest_difference,
    plain_baseline,
    plain_baselines,
    race,
)
from chrion.errors import ChrionError
from chrion.graph.model import Graph
from chrion.profiler.machine import this_machine
from chrion.profiler.profiles import Profile
from chrion.runtime.execution.program import build_program
from chrion.scheduler.plan import Plan
from chrion.scheduler.planner import partition

#: Outputs that differ from plain onnxruntime's by more than this are wrong.
TOLERANCE = 1e-3
#: Before the names of plain sessions.
PLAIN = "onnxruntime"

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """What one policy came to."""

    policy: str
    #: None if it found none.
    plan: Plan | None
    planning_ms: float
    #: Lanes that the plan uses.
    lanes: int = 0
    #: Waits of one lane for another in a request.
    synchronisations: int = 0
    #: None where it was not measured.
    timing: Timing | None = None
    #: Why there is no plan or no measurement; empty if there is.
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Policies beside each other and beside plain onnxruntime."""

    graph: Graph
    profile: Profile
    entries: tuple[Entry, ...]
    #: Plain sessions; none where the profile is of another machine.
    plain: tuple[Timing, ...] = ()

    @property
    def estimated(self) -> int:
        """Operators whose costs the profile does not hold."""
        return len(self.profile.missing(self.graph.dag))

    @property
    def best_plain(self) -> Timing | None:
        """The fastest plain session."""
        return min(self.plain, key=lambda t: t.median_ms, default=None)


def plan_all(  # noqa: PLR0913 - what may be left out is by name
    graph: Graph,
    profile: Profile,
    policies: Sequence[str],
    *,
    cores: int | None = None,
    streams: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Let each policy plan.

    Args:
        graph: The graph.
        profile: Costs, of whatever machine.
        policies: Names of schedulers.
        cores: Use at most so many of the profile's CPU cores.
        streams: Use at most so many lanes of the accelerator, where a policy uses several.
        progress: Called before each policy with those done, all, and its name.
    """
    entries = []
    for at, policy in enumerate(policies):
        if progress:
            progress(at, len(policies), policy)
        entries.append(_planned(graph, profile, policy, cores, streams))
    return Comparison(graph, profile, tuple(entries))


def measure_all(
    comparison: Comparison,
    feed: Feed,
    *,
    cycles: int = 5,
    turn_s: float = 0.4,
    progress: Progress | None = None,
) -> Comparison:
    """Run every plan and plain sessions in turns, if the profile is of this machine.

    Args:
        comparison: Plans.
        feed: The request.
        cycles: Turns of each.
        turn_s: How long a turn is timed.
        progress: Called after each turn.

    Returns:
        The comparison with timings; of a plan that does not run, or gives other outputs than a plain session, with
        the reason.
    """
    if not measured_here(comparison.profile):
        return comparison
    plain = _plain(comparison, feed)
    expected = _outputs(next(iter(plain.values())))
    checked = [_checked(comparison.graph, entry, feed, expected) for entry in comparison.entries]
    rivals: Mapping[str, Maker] = {
        e.policy: hybrid_candidate(comparison.graph, e.plan, feed) for e in checked if e.plan and not e.reason
    }
    timings = {t.name: t for t in race({**rivals, **plain}, cycles=cycles, turn_s=turn_s, progress=progress)}
    entries = tuple(replace(e, timing=timings.get(e.policy)) for e in checked)
    return replace(comparison, entries=entries, plain=tuple(timings[name] for name in plain))


def measured_here(profile: Profile) -> bool:
    """Whether a profile is of the machine this runs on, so that its plans can be run."""
    return profile.machine.fingerprint == this_machine(profile.machine.accelerator).fingerprint


def _planned(graph: Graph, profile: Profile, policy: str, cores: int | None, streams: int | None) -> Entry:
    before = time.perf_counter()
    try:
        plan = partition(graph, profile, policy=policy, cores=cores, streams=streams)
    except ChrionError as error:
        return Entry(policy, None, (time.perf_counter() - before) * 1e3, reason=str(error))
    planning_ms = (time.perf_counter() - before) * 1e3
    schedule = plan.schedule
    program = build_program(plan.apply(graph).dag, schedule.lanes, plan.segments, schedule.stages)
    return Entry(policy, plan, planning_ms, len(program.lanes), program.waits)


def _plain(comparison: Comparison, feed: Feed) -> dict[str, Maker]:
    source, accelerator = comparison.graph.source, comparison.profile.accelerator
    rivals = plain_baselines(source, feed, PLAIN)
    if accelerator:
        rivals[f"{PLAIN}, {accelerator}"] = plain_baseline(source, feed, None, accelerator)
    return rivals


def _outputs(make: Maker) -> Sequence[Any]:
    """What a rival gives; it is taken down again."""
    run, close = make()
    try:
        return run()
    finally:
        close()


def _checked(graph: Graph, entry: Entry, feed: Feed, expected: Sequence[Any]) -> Entry:
    """The entry; with a reason if its plan does not run or does not give what is expected."""
    if entry.plan is None:
        return entry
    try:
        difference = largest_difference(_outputs(hybrid_candidate(graph, entry.plan, feed)), expected)
    except Exception as error:  # noqa: BLE001 - whatever it is, the others are to be measured
        return replace(entry, reason=" ".join(f"does not run: {error}".split()))
    wrong = f"outputs differ from plain onnxruntime's by {difference:.2g}"
    return entry if difference <= TOLERANCE else replace(entry, reason=wrong)
