"""Comparisons of schedulers: a table, plain data and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chrion.common.units import format_count, format_mb, format_ms
from chrion.report.benchmark.comparison import PolicyComparison, PolicyResult
from chrion.report.benchmark.latency import Timing
from chrion.report.categories import COLOURS, OTHER_COLOUR
from chrion.report.figure_table import FigureTable, key
from chrion.report.figures import new_figure, plain_text, save_figure
from chrion.report.tables import BUSY_VERDICT, compare_latency, estimated_lines
from chrion.scheduler.plan import Plan
from chrion.scheduler.plan_options import DEFAULT_POLICY

#: Ratios of predicted latencies from here to 1 are printed as equal.
_LEVEL = 0.9995
_FIGURES = ("predicted", "measured", "vs. plain", "memory (Eq. 4)", "resident memory", "lanes", "waits", "planning")


def comparison_table(comparison: PolicyComparison) -> FigureTable:
    """Return a table with one row for each policy and each plain session; ratios are to the fastest plain session."""
    best = comparison.best_plain
    operators = format_count(len(comparison.graph.dag), "operator")
    fused = " after onnxruntime's fusion" if comparison.graph.optimised else ""
    title = f"{comparison.graph.name}: {operators}{fused} on {comparison.profile.machine}"
    estimated = estimated_lines(comparison.estimated, len(comparison.graph.dag), comparison.profile.machine)
    streams = "streams of the accelerator and " if comparison.profile.accelerator else ""
    legend = f"lanes: {streams}CPU cores that a plan uses"
    if any(result.synchronisations for result in comparison.results):
        legend += "; waits: of one lane for another, in a request"
    title = "\n".join([title, *estimated, legend])
    table = FigureTable(title, [key("policy"), *_FIGURES], sparse=True)
    for result in comparison.results:
        table.add_row(result.policy, *_figures(result, best))
    for timing in comparison.plain:
        table.add_row(timing.name, "", *_measured(timing, best), *[""] * 5)
    return table


def comparison_remarks(comparison: PolicyComparison) -> list[str]:
    """Return lines on what plans run, one for each policy without a plan or a measurement, and what a search gains.

    Plans on the same lanes may differ in the graph that they are for: in folded or merged operators, chunks, and native
    operators. If all run the model as it is, there are no lines on that.
    """
    base_mb = comparison.profile.base_memory_mb
    remarks = [f"{result.policy}: {remark}" for result in comparison.results if (remark := _remark(result, base_mb))]
    return [*_operator_lines(comparison), *remarks, *_search_lines(comparison)]


def comparison_verdict(comparison: PolicyComparison) -> str:
    """Return one line that compares the fastest policy, or those that tie, with the fastest plain session.

    Policies whose plans exceed a budget are left out.
    """
    measured = {e.policy: e.timing.median_ms for e in comparison.results if e.timing and e.fits}
    predicted = {e.policy: e.plan.predicted.latency_ms for e in comparison.results if e.plan and e.fits}
    best = comparison.best_plain
    if comparison.interference:
        return BUSY_VERDICT
    if measured and best:
        ratio = compare_latency(min(measured.values()) / best.median_ms)
        session = f"the fastest plain session ({best.name}, {format_ms(best.median_ms)})"
        return f"{_fastest(measured, 'fastest policy')}, {ratio} {session}"
    if predicted:
        return _fastest(predicted, "fastest policy (predicted)")
    return "no plan fits the GPU budget" if any(e.plan for e in comparison.results) else "no policy found a plan"


def comparison_json(comparison: PolicyComparison) -> dict[str, Any]:
    """Return a comparison as plain data for JSON; unknown figures are null."""
    best = comparison.best_plain
    return {
        "model": comparison.graph.name,
        "operators": len(comparison.graph.dag),
        "estimated": comparison.estimated,
        "machine": str(comparison.profile.machine),
        "policies": [_entry_json(entry) for entry in comparison.results],
        "plain": [asdict(timing) for timing in comparison.plain],
        "best_plain": best.name if best else None,
        "interference": comparison.interference,
    }


def plot_comparison(comparison: PolicyComparison, path: Path) -> None:
    """Draw the predicted and the measured latency of each policy as bars, and the fastest plain session as a line.

    Raises:
        OptionError: matplotlib is not installed, or the file cannot be written.
    """
    shown = [e for e in comparison.results if e.plan]
    figure = new_figure(9, 1.2 + 0.45 * max(1, len(shown)))
    axes = figure.add_subplot()
    predicted = [e.plan.predicted.latency_ms for e in shown if e.plan]
    rows = range(len(shown))
    style: dict[str, Any] = {"facecolor": "white", "edgecolor": OTHER_COLOUR, "hatch": "////"}
    axes.barh([row - 0.2 for row in rows], predicted, 0.38, **style, label="predicted")
    measured = [(row + 0.2, e.timing) for row, e in enumerate(shown) if e.timing]
    if measured:
        medians = [t.median_ms for _, t in measured]
        spread = [[t.median_ms - t.low_ms for _, t in measured], [t.high_ms - t.median_ms for _, t in measured]]
        axes.barh(
            [row for row, _ in measured],
            medians,
            0.38,
            xerr=spread,
            color=COLOURS[0],
            error_kw={"ecolor": "black", "capsize": 3},
            label="measured, with quartiles",
        )
    best = comparison.best_plain
    if best:
        axes.axvline(
            best.median_ms, color=COLOURS[5], linestyle="--", label=f"fastest plain session:\n{plain_text(best.name)}"
        )
    axes.set_yticks(rows, [plain_text(e.policy) for e in shown])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("latency, ms")
    axes.set_title(plain_text(f"{comparison.graph.name} on {comparison.profile.machine}"), fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    if shown:
        figure.legend(loc="outside right center", fontsize=9, frameon=False)
    save_figure(figure, path)


def _figures(entry: PolicyResult, best: Timing | None) -> list[str]:
    if entry.plan is None:
        return [""] * 8
    predicted = entry.plan.predicted
    memory = [format_mb(predicted.memory_mb), format_mb(predicted.resident_mb)]
    counts = [str(entry.lanes), str(entry.synchronisations), format_ms(entry.planning_ms)]
    return [format_ms(predicted.latency_ms), *_measured(entry.timing, best), *memory, *counts]


def _fastest(latencies_ms: Mapping[str, float], title: str) -> str:
    """Return the fastest policy and its latency; policies whose latencies are printed alike tie."""
    shown = format_ms(min(latencies_ms.values()))
    tied = [policy for policy, ms in latencies_ms.items() if format_ms(ms) == shown]
    return f"{title}: {', '.join(tied)}{' (tie)' if len(tied) > 1 else ''}, {shown}"


def _operator_lines(comparison: PolicyComparison) -> list[str]:
    """Return a line for the policies of each set of operators, unless all have those of the model."""
    policies: dict[str, list[str]] = {}
    for result in comparison.results:
        if result.plan:
            policies.setdefault(_operators(result.plan), []).append(result.policy)
    unchanged = format_count(len(comparison.graph.dag), "operator")
    return [f"{', '.join(names)}: {text}" for text, names in policies.items()] if set(policies) - {unchanged} else []


def _search_lines(comparison: PolicyComparison) -> list[str]:
    """Return a line on the default policy beside the fastest other one; none if it is slower or one is missing."""
    latencies_ms = {e.policy: e.plan.predicted.latency_ms for e in comparison.results if e.plan and e.fits}
    planning_ms = {e.policy: e.planning_ms for e in comparison.results}
    own_ms = latencies_ms.pop(DEFAULT_POLICY, None)
    if own_ms is None or not latencies_ms:
        return []
    other = min(latencies_ms, key=lambda policy: (latencies_ms[policy], planning_ms[policy]))
    if (ratio := own_ms / latencies_ms[other]) > 1:
        return []
    taken = f"planned in {format_ms(planning_ms[DEFAULT_POLICY])} ({other}: {format_ms(planning_ms[other])})"
    words = f"{(1 - ratio) * 100:.1f} % below" if ratio < _LEVEL else "as fast as"
    return [f"{DEFAULT_POLICY}: predicted {words} {other}, the fastest other policy; {taken}"]


def _operators(plan: Plan) -> str:
    """Return the operators of a plan in words: their number, how they differ from the model's, and native ones."""
    native = [f"{len(plan.native)} native"] if plan.native else []
    return ", ".join([plan.operator_counts, *native])


def _remark(entry: PolicyResult, base_mb: float) -> str:
    if entry.plan is None or entry.fits:
        return entry.reason.removeprefix(f"policy {entry.policy}").removeprefix(":").strip()
    held = f"{format_mb(entry.plan.predicted.resident_mb)} resident"
    held += f", of which the accelerator's context takes {format_mb(base_mb)}" if base_mb else ""
    limit = f"exceeds the GPU budget of {format_mb(entry.plan.budget_mb or 0.0)} with {held}"
    return f"{limit}; {entry.reason}" if entry.reason else limit


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
        "meets_budget": entry.fits if plan else None,
        "reason": entry.reason or None,
    }
