"""Schedulers beside each other: a table, plain data, bars."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from chrion.benchmark.comparison import Comparison, PolicyResult
from chrion.benchmark.latency import Timing
from chrion.report.figures import new_figure, save_figure
from chrion.units import format_mb, format_ms


def comparison_table(comparison: Comparison) -> Table:
    """One row a policy, then plain sessions; ratios are to the best of those.

    ``memory`` is the accelerator's by Equation 4, ``resident`` what an arena must hold; *waits* are those of one lane
    for another in a request.
    """
    best = comparison.best_plain
    table = Table(
        title=f"{comparison.graph.name}: {len(comparison.graph.dag)} operators on {comparison.profile.machine}"
    )
    table.add_column("policy", no_wrap=True)
    for name in ("predicted", "measured", "ratio", "memory", "resident", "lanes", "waits", "planning"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("remark")
    for entry in comparison.results:
        table.add_row(entry.policy, *_figures(entry, best), entry.reason)
    for timing in comparison.plain:
        remark = "best plain" if timing is best else ""
        table.add_row(timing.name, "", *_measured(timing, best), *[""] * 5, remark)
    return table


def comparison_verdict(comparison: Comparison) -> str:
    """One line: which policy serves best, and whether it beats a plain session."""
    measured = {e.policy: e.timing.median_ms for e in comparison.results if e.timing}
    predicted = {e.policy: e.plan.predicted.latency_ms for e in comparison.results if e.plan}
    best = comparison.best_plain
    if measured and best:
        policy, ms = min(measured.items(), key=lambda item: item[1])
        ratio = f"{ms / best.median_ms:.2f} of the time of the best plain session ({best.name})"
        return f"fastest: {policy}, {format_ms(ms)}, {ratio}"
    if predicted:
        policy, ms = min(predicted.items(), key=lambda item: item[1])
        return f"predicted to be fastest: {policy}, {format_ms(ms)}"
    return "no policy found a plan"


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The same as plain data; what is not known is null."""
    best = comparison.best_plain
    return {
        "model": comparison.graph.name,
        "operators": len(comparison.graph.dag),
        "estimated": comparison.estimated,
        "machine": str(comparison.profile.machine),
        "policies": [_entry_json(entry) for entry in comparison.results],
        "plain": [asdict(timing) for timing in comparison.plain],
        "best_plain": best.name if best else None,
    }


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Predicted and measured latency of each policy as bars, and the best plain session as a line.

    Raises:
        OptionError: matplotlib is missing.
    """
    shown = [e for e in comparison.results if e.plan]
    figure = new_figure(8, 1.2 + 0.45 * max(1, len(shown)))
    axes = figure.add_subplot()
    predicted = [e.plan.predicted.latency_ms for e in shown if e.plan]
    axes.barh([-at - 0.2 for at in range(len(shown))], predicted, 0.38, color="#bbbbbb", label="predicted")
    measured = [(-at + 0.2, e.timing) for at, e in enumerate(shown) if e.timing]
    if measured:
        medians = [t.median_ms for _, t in measured]
        spread = [[t.median_ms - t.low_ms for _, t in measured], [t.high_ms - t.median_ms for _, t in measured]]
        places = [place for place, _ in measured]
        axes.barh(places, medians, 0.38, xerr=spread, color="#4477aa", label="measured, with quartiles")
    best = comparison.best_plain
    if best:
        axes.axvline(best.median_ms, color="#ee6677", linestyle="--", label=best.name)
    axes.set_yticks([-at for at in range(len(shown))], [e.policy for e in shown])
    axes.set_xlabel("ms")
    axes.set_title(f"{comparison.graph.name} on {comparison.profile.machine}", fontsize=10)
    if shown:
        axes.legend(fontsize=8)
    save_figure(figure, path)


def _figures(entry: PolicyResult, best: Timing | None) -> list[str]:
    if entry.plan is None:
        return [""] * 8
    found = entry.plan.predicted
    memory = [format_mb(found.memory_mb), format_mb(found.resident_mb)]
    counts = [str(entry.lanes), str(entry.synchronisations), format_ms(entry.planning_ms)]
    return [format_ms(found.latency_ms), *_measured(entry.timing, best), *memory, *counts]


def _measured(timing: Timing | None, best: Timing | None) -> list[str]:
    if timing is None:
        return ["", ""]
    ratio = f"{timing.median_ms / best.median_ms:.2f}" if best else ""
    return [format_ms(timing.median_ms), ratio]


def _entry_json(entry: PolicyResult) -> dict[str, Any]:
    plan, timing = entry.plan, entry.timing
    return {
        "policy": entry.policy,
        "predicted_ms": plan.predicted.latency_ms if plan else None,
        "measured_ms": timing.median_ms if timing else None,
        "low_ms": timing.low_ms if timing else None,
        "high_ms": timing.high_ms if timing else None,
        "memory_mb": plan.predicted.memory_mb if plan else None,
        "resident_mb": plan.predicted.resident_mb if plan else None,
        "lanes": entry.lanes if plan else None,
        "segments": len(plan.segments) if plan else None,
        "synchronisations": entry.synchronisations if plan else None,
        "planning_ms": entry.planning_ms,
        "reason": entry.reason or None,
    }
