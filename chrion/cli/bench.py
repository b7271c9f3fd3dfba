"""``chrion bench``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import typer

from chrion.cli.console import show, show_json
from chrion.cli.option_groups import ExecutionOptions, InputOptions
from chrion.cli.options import JsonOption, RoundsOption
from chrion.cli.steps import check_reach, open_session, time_sessions
from chrion.devices.nvml import MemoryMonitor
from chrion.devices.providers import CPU_PROVIDER
from chrion.graph import Graph
from chrion.report.benchmark.latency import (
    Feed,
    RunRequest,
    SessionFactory,
    Timing,
    hybrid_candidate,
    memory_held_mb,
    plain_baselines,
)
from chrion.report.tables import bench_table, bench_verdict, best_baseline, memory_line
from chrion.runtime import HybridSession
from chrion.scheduler import Plan

HYBRID = "chrion"


def bench(
    model: InputOptions, options: ExecutionOptions, rounds: RoundsOption = 5, as_json: JsonOption = False
) -> None:
    """Time a HybridSession, the row chrion, beside plain onnxruntime sessions, which take turns in each round.

    The session chooses between plans and plain onnxruntime, as it does in a program. With --plan, --policy or --streams
    it runs that plan, even if plain onnxruntime is faster. Exit code 3: the measured latency misses the SLO.
    """
    monitor = MemoryMonitor()
    plan = options.load_plan()
    graph, arrays = model.load_with_feed(plan)
    model.run_plain(arrays)
    arguments = options.session_arguments(graph, plan)
    with open_session(graph, arguments, model) as session:
        chosen, explanation, providers = session.plan, session.explain(), session.get_providers()
    hybrid = hybrid_candidate(graph, chosen, arrays) if chosen else _as_chosen(graph, arguments, arrays)
    held_mb = memory_held_mb(hybrid, monitor) if providers[0] != CPU_PROVIDER else 0.0
    candidates = {HYBRID: hybrid, **plain_baselines(str(model.path), arrays)}
    timings, interference = time_sessions(candidates, rounds)
    if as_json:
        measured = {"interference": interference, "measured_mb": held_mb}
        show_json({"model": graph.name, **_summary(timings, chosen), **measured})
    else:
        table = bench_table(timings, HYBRID, chosen.predicted.latency_ms if chosen else None)
        memory = [memory_line(chosen.predicted, held_mb)] if chosen and chosen.accelerator else []
        verdict = bench_verdict(timings, HYBRID, plain=chosen is None, interference=interference)
        show(explanation, table, verdict, *memory)
    median_ms = next(t.median_ms for t in timings if t.name == HYBRID)
    raise typer.Exit(check_reach(median_ms, options.plan_options.limits.slo_ms, chosen))


def _summary(timings: Sequence[Timing], plan: Plan | None) -> dict[str, Any]:
    """Return timings and the plan's predictions as plain data; without a plan predictions are None."""
    best = best_baseline(timings, HYBRID)
    own = next(t for t in timings if t.name == HYBRID)
    predicted = plan.predicted if plan else None
    return {
        "runs_plan": plan is not None,
        "ratio": own.median_ms / best.median_ms,
        "best_plain": best.name,
        "predicted_ms": predicted.latency_ms if predicted else None,
        "predicted_memory_mb": predicted.memory_mb if predicted else None,
        "predicted_resident_mb": predicted.resident_mb if predicted else None,
        "timings": [asdict(t) for t in timings],
    }


def _as_chosen(graph: Graph, arguments: dict[str, Any], arrays: Feed) -> SessionFactory:
    """Return a factory of the session that was chosen before; the choice is in the cache."""

    def open_again() -> tuple[RunRequest, Callable[[], None]]:
        session = HybridSession(graph, **arguments)
        return lambda: session.run(None, arrays), session.close

    return open_again
