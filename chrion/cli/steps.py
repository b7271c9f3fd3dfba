"""Steps that several commands share: open a session, time it, and judge its latency."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from chrion.cli.console import note, step
from chrion.cli.exit_codes import OUT_OF_REACH
from chrion.cli.option_groups import ModelOptions
from chrion.common.units import format_count, format_mb, format_ms, format_shape
from chrion.graph import Graph
from chrion.machine.cores import physical_cores
from chrion.profiler.interference import CoreMonitor
from chrion.report.benchmark.latency import TRIAL_S, SessionFactory, Timing, time_candidates
from chrion.runtime import HybridSession
from chrion.scheduler import Plan


def open_session(graph: Graph, arguments: dict[str, Any], model: ModelOptions) -> HybridSession:
    """Open a HybridSession; unless a plan is given, it times plans against plain sessions."""
    if "plan" in arguments:
        return HybridSession(graph, **arguments)
    with step(f"choosing between plans and plain onnxruntime for {graph.name}", animated=False):
        session = HybridSession(graph, **arguments)
    if graph.declared_free and session.plan:
        words = [w for name, shape in graph.shapes.items() for w in ("--shape", f"{name}={format_shape(shape)}")]
        for name in ("precision", "max_error"):
            if arguments.get(name) not in {None, "float32"}:
                words += [f"--{name.replace('_', '-')}", str(arguments[name])]
        tune = shlex.join(["chrion", "tune", str(model.path), *words])
        note(f"for these shapes alone; whether sessions of free dimensions use the plan: {tune}")
    return session


def time_sessions(candidates: Mapping[str, SessionFactory], rounds: int) -> tuple[list[Timing], bool]:
    """Time sessions side by side.

    Returns:
        The timings, and whether other processes used the cores meanwhile.
    """
    monitor = CoreMonitor(physical_cores(), patience_s=rounds * len(candidates) * TRIAL_S)
    text = f"timing {format_count(len(candidates), 'session')} in {format_count(rounds, 'round')}"
    with step(text, animated=False) as update:
        timings = time_candidates(candidates, rounds=rounds, progress=update, monitor=monitor)
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
