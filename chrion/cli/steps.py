"""Steps that several commands share: load a model, profile it, plan it, open a session."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chrion.cli.console import log, note, step
from chrion.cli.exit_codes import OUT_OF_REACH
from chrion.common.units import format_count, format_mb, format_ms, parse_duration_ms, parse_shape
from chrion.devices import usable_provider
from chrion.devices.providers import CPU_PROVIDER
from chrion.errors import OptionError
from chrion.graph import Graph, load
from chrion.hardware import hardware
from chrion.machine.cores import physical_cores
from chrion.profiler import Profile, profile
from chrion.profiler.hardware_profile import estimate_profile, require_processor
from chrion.profiler.interference import CoreMonitor
from chrion.profiler.measure_graph import require_shapes
from chrion.profiler.synthetic_inputs import synthetic_inputs
from chrion.report.benchmark.feeds import read_arrays, read_feed
from chrion.report.benchmark.latency import TRIAL_S, Feed, SessionFactory, Timing, time_candidates
from chrion.runtime import HybridSession
from chrion.scheduler import DEFAULT_POLICY, Plan, partition
from chrion.scheduler.planner import check_options
from chrion.scheduler.policies.ios_merging import merged_variants
from chrion.scheduler.policies.registry import find_policy

INTERFERENCE = "warning: other processes used the cores during the measurement; repeat it when they are idle"


def load_graph(model: Path, shapes: list[str] | None) -> Graph:
    """Load a model with the values of ``--shape``."""
    graph = load(model, dict(parse_shape(text) for text in shapes or ()))
    log.info("%s: %d operators", model, len(graph.dag))
    return graph


def load_graph_and_feed(model: Path, shapes: list[str] | None, feed: Path | None) -> tuple[Graph, Feed]:
    """Load a model with the values of ``--shape`` and ``--input``.

    Free dimensions that ``--shape`` leaves are those of the arrays.

    Returns:
        The graph, and the arrays of ``--input`` or synthetic inputs.
    """
    graph = load_graph(model, shapes)
    if feed is None:
        return graph, synthetic_inputs(graph)
    if graph.free_dimensions:
        arrays = read_arrays(feed)
        found = {info.name: arrays[info.name].shape for info in graph.inputs if info.name in arrays}
        graph = load(model, {**found, **dict(parse_shape(text) for text in shapes or ())})
    return graph, read_feed(feed, graph)


def load_or_measure_profile(
    graph: Graph,
    stored: Path | None,
    cores: int | None,
    accelerator: str | None,
    *,
    policies: Collection[str] = (),
    fresh: bool = False,
    machine: HardwareOptions | None = None,
) -> Profile:
    """Return the profile of ``--profile``, estimate that of ``--hardware``, or measure one on this machine.

    Args:
        graph: The graph.
        stored: Value of ``--profile``.
        cores: Value of ``--cores``.
        accelerator: Value of ``--accelerator``.
        policies: Schedulers that will use it; what they may merge is measured too.
        fresh: Ignore cached measurements.
        machine: Values of ``--hardware`` and ``--corrections``.

    Raises:
        OptionError: Two of the options contradict each other.
        ProfileError: The stored profile is damaged.
        HardwareError: A part of the machine is unknown or damaged.
    """
    merging = any(find_policy(policy).merges for policy in policies)
    if machine is not None and machine.given:
        if stored is not None or accelerator is not None:
            other = "--accelerator" if stored is None else "--profile"
            raise OptionError(f"{other}: not allowed with --hardware, which names the machine and its accelerator")
        with step(f"estimating {graph.name}"):
            require_shapes(graph)
            return machine.estimate(graph, cores, merged_variants(graph) if merging else ())
    if stored is not None:
        if accelerator is not None:
            raise OptionError("--accelerator: not allowed with --profile, which holds an accelerator's costs or none")
        return Profile.load(stored)
    variants = merged_variants(graph) if merging else ()
    with step(f"profiling {graph.name}", animated=False) as update:
        found = profile(graph, cores, accelerator or "auto", progress=update, fresh=fresh, variants=variants)
    if found.interference:
        note("warning: other processes used the cores; costs may be unreliable and are not cached")
    return found


@dataclass(frozen=True, slots=True)
class HardwareOptions:
    """The options of commands that plan for a machine that is known from datasheets."""

    hardware: str | None
    corrections: Path | None

    @property
    def given(self) -> bool:
        """True if one of the options is given."""
        return self.hardware is not None or self.corrections is not None

    def check(self) -> None:
        """Raise an error if the options contradict each other or name unknown parts.

        Raises:
            OptionError: There are corrections without a machine.
            HardwareError: A part is unknown or damaged, or there is no processor.
        """
        if self.hardware is not None:
            require_processor(hardware(self.hardware))
        elif self.corrections is not None:
            raise OptionError(
                "--corrections: not allowed without --hardware", hint="name a machine, --hardware l4+epyc-16"
            )

    def estimate(self, graph: Graph, cores: int | None, variants: Sequence[Graph]) -> Profile:
        """Return the estimated profile of a graph, corrected if measured operators are given."""
        self.check()
        assert self.hardware is not None  # noqa: S101 - checked above
        measured = Profile.load(self.corrections) if self.corrections else None
        return estimate_profile(graph, hardware(self.hardware), cores, variants=variants, corrections=measured)


@dataclass(frozen=True, slots=True)
class ExecutionOptions:
    """The options of ``chrion run`` and ``chrion bench`` that choose how a model is run."""

    plan: Path | None
    slo: str | None
    alpha: float | None
    gpu_budget: str | None
    policy: str | None
    cores: int | None
    accelerator: str | None
    streams: int | None

    @property
    def slo_ms(self) -> float | None:
        """The SLO in ms; None without one."""
        return None if self.slo is None else parse_duration_ms(self.slo, "--slo")

    def check(self) -> None:
        """Raise an error if options contradict each other or have no valid value.

        Raises:
            OptionError: They do; nothing was measured yet.
        """
        check_options(self.slo, self.alpha, self.policy or DEFAULT_POLICY, self.gpu_budget, streams=self.streams)
        others = (self.alpha, self.gpu_budget, self.policy, self.cores, self.accelerator, self.streams)
        if self.plan is not None and others != (None,) * len(others):
            options = "--alpha, --gpu-budget, --policy, --cores, --accelerator or --streams"
            raise OptionError(f"--plan: not allowed with {options}", hint="the plan already decides these")

    def session_arguments(self, graph: Graph) -> dict[str, Any]:
        """Return the arguments of HybridSession, beside the model.

        With ``--plan``, ``--policy`` or ``--streams`` the session runs that plan. Otherwise it chooses between plans
        and plain sessions, as it does for its users.

        Raises:
            PlanError: The plan is damaged, or does not fit the graph.
        """
        if self.plan is not None:
            plan = Plan.load(self.plan)
            plan.apply(graph)  # refuses a plan of another model before anything is measured
            return {"plan": plan, "strict": True}
        policy = self.policy or (DEFAULT_POLICY if self.streams is not None else None)
        if policy is not None:
            return {"plan": self._make_plan(graph, policy), "strict": True}
        provider = usable_provider(self.accelerator or "auto")
        load_or_measure_profile(graph, None, self.cores, provider or "none")  # the session finds it in the cache
        return {
            "slo": self.slo,
            "alpha": self.alpha,
            "cores": self.cores,
            "gpu_budget": self.gpu_budget,
            "providers": [provider, CPU_PROVIDER] if provider else None,
            "tune": "now",
        }

    def _make_plan(self, graph: Graph, policy: str) -> Plan:
        measured = load_or_measure_profile(graph, None, self.cores, self.accelerator, policies=[policy])
        with step(f"planning {graph.name}"):
            return partition(
                graph,
                measured,
                self.slo,
                self.alpha,
                policy,
                cores=self.cores,
                streams=self.streams,
                gpu_budget=self.gpu_budget,
            )


def open_session(graph: Graph, arguments: dict[str, Any]) -> HybridSession:
    """Open a HybridSession; unless a plan is given, it times plans against plain sessions."""
    if "plan" in arguments:
        return HybridSession(graph, **arguments)
    with step(f"choosing between plans and plain onnxruntime for {graph.name}", animated=False):
        return HybridSession(graph, **arguments)


def time_sessions(candidates: Mapping[str, SessionFactory], rounds: int) -> tuple[list[Timing], bool]:
    """Time sessions side by side; say on stderr if other processes used the cores meanwhile.

    Returns:
        The timings, and whether other processes used the cores.
    """
    monitor = CoreMonitor(physical_cores(), patience_s=rounds * len(candidates) * TRIAL_S)
    text = f"timing {format_count(len(candidates), 'session')} in {format_count(rounds, 'round')}"
    with step(text, animated=False) as update:
        timings = time_candidates(candidates, rounds=rounds, progress=update, monitor=monitor)
    if monitor.gave_up:
        note(INTERFERENCE)
    return timings, monitor.gave_up


def check_reach(measured_ms: float, slo_ms: float | None, plan: Plan | None) -> int:
    """Return the exit code of a timed model: it says on stderr if an SLO or a GPU budget is missed.

    Args:
        measured_ms: Median latency.
        slo_ms: The SLO.
        plan: The plan in use, if any.
    """
    code = 0
    if slo_ms is not None and measured_ms > slo_ms:
        note(f"warning: the SLO of {format_ms(slo_ms)} is missed: measured {format_ms(measured_ms)}")
        code = OUT_OF_REACH
    if plan is not None and plan.budget_mb is not None and not plan.meets_budget:
        resident = format_mb(plan.predicted.resident_mb)
        note(f"warning: the GPU budget of {format_mb(plan.budget_mb)} is exceeded: {resident} predicted")
        code = OUT_OF_REACH
    return code
