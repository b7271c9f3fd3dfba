"""The trade-off between latency and accelerator memory over alpha: Figure 10 of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chrion.common.units import format_mb, format_ms
from chrion.report.categories import COLOURS
from chrion.report.figure_table import FigureTable, key
from chrion.report.figures import label_axes, new_figure, plain_text, save_figure
from chrion.scheduler.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ACCELERATOR_LINE: dict[str, Any] = {"color": COLOURS[5], "linestyle": "--"}
_FIGURES = ("latency", "memory (Eq. 4)", "resident memory", "operators on accelerator", "operators on CPU", "cores")


def alpha_sweep_table(points: Sequence[tuple[float, Plan]]) -> FigureTable:
    """Return a table with one row for each range of alphas that lead to the same plan."""
    first = points[0][1]
    table = FigureTable(
        f"{first.model} on {first.machine}, policy {first.policy}", [key("alpha, ms/MB", is_text=False), *_FIGURES]
    )
    for alphas, plan in _plans(points):
        predicted = plan.predicted
        counts = (str(plan.on_accelerator), str(plan.on_cpu), str(plan.schedule.cores))
        memory = (format_mb(predicted.memory_mb), format_mb(predicted.resident_mb))
        span = f"{alphas[0]:g}" if len(alphas) == 1 else f"{alphas[0]:g} to {alphas[-1]:g}"
        table.add_row(span, format_ms(predicted.latency_ms), *memory, *counts)
    return table


def alpha_sweep_hints(points: Sequence[tuple[float, Plan]]) -> list[str]:
    """Return a line on how to see more of the curve if it has a single step."""
    plans = _plans(points)
    if len(plans) != 2 or plans[0][1].accelerator_only is None:
        return []
    below, above = plans[0][0][-1], plans[1][0][0]
    finer = f"--alpha {below:g}:{above:g}:{(above - below) / 10:g}"
    return [
        f"the plan changes between {below:g} and {above:g} ms/MB: {finer}; --slo of partition selects plans between"
    ]


def _plans(points: Sequence[tuple[float, Plan]]) -> list[tuple[list[float], Plan]]:
    """Return each plan with the consecutive alphas that lead to it."""
    ranges: list[tuple[list[float], Plan]] = []
    for alpha, plan in points:
        if ranges and ranges[-1][1].schedule == plan.schedule and ranges[-1][1].digest == plan.digest:
            ranges[-1][0].append(alpha)
        else:
            ranges.append(([alpha], plan))
    return ranges


def alpha_sweep_json(points: Sequence[tuple[float, Plan]]) -> dict[str, Any]:
    """Return the points as plain data for JSON, with the plans on one device."""
    first = points[0][1]
    only = first.accelerator_only
    return {
        "model": first.model,
        "machine": str(first.machine),
        "estimated": first.estimated,
        "policy": first.policy,
        "accelerator_only": None if only is None else {"latency_ms": only.latency_ms, "memory_mb": only.memory_mb},
        "cpu_only": None if first.cpu_only is None else {"latency_ms": first.cpu_only.latency_ms},
        "points": [
            {
                "alpha": alpha,
                "latency_ms": plan.predicted.latency_ms,
                "memory_mb": plan.predicted.memory_mb,
                "resident_mb": plan.predicted.resident_mb,
                "on_accelerator": plan.on_accelerator,
                "cores": plan.schedule.cores,
            }
            for alpha, plan in points
        ],
    }


def plot_alpha_sweep(points: Sequence[tuple[float, Plan]], path: Path) -> None:
    """Draw latency and memory against alpha in two panels, with the plans on one device as horizontal lines.

    Without an accelerator there is no memory to draw. The SLO is a line on the axis of latencies.

    Raises:
        OptionError: matplotlib is not installed, or the file cannot be written.
    """
    first = points[0][1]
    alphas = [alpha for alpha, _ in points]
    only = first.accelerator_only
    has_memory = only is not None or any(p.predicted.memory_mb for _, p in points)
    figure = new_figure(10 if has_memory else 7, 4)
    panels = figure.subplots(1, 1 + has_memory, squeeze=False)[0]
    latency = panels[0]
    latency.plot(alphas, [p.predicted.latency_ms for _, p in points], "o-", color=COLOURS[0], label="plan")
    if only is not None:
        latency.axhline(only.latency_ms, **_ACCELERATOR_LINE, label="accelerator only")
    if first.cpu_only is not None:
        latency.axhline(first.cpu_only.latency_ms, color=COLOURS[3], linestyle="-.", label="CPU only")
    if first.slo_ms is not None:
        latency.axhline(first.slo_ms, color="black", linestyle=(0, (1, 2)), label=f"SLO {format_ms(first.slo_ms)}")
    _label(latency, "latency", "ms")
    if has_memory:
        memory = panels[1]
        memory.plot(alphas, [p.predicted.memory_mb for _, p in points], "o-", color=COLOURS[0])
        resident = [p.predicted.resident_mb for _, p in points]
        memory.plot(alphas, resident, "^:", color=COLOURS[2], label="plan, resident memory")
        if only is not None:
            memory.axhline(only.memory_mb, **_ACCELERATOR_LINE)
        _label(memory, "accelerator memory (Equation 4)", "MB")
    figure.suptitle(plain_text(f"{first.model} on {first.machine}, policy {first.policy}"), fontsize=11)
    figure.legend(loc="outside lower center", ncols=5, fontsize=9, frameon=False, handlelength=3.5)
    save_figure(figure, path)


def _label(axes: Axes, title: str, unit: str) -> None:
    label_axes(axes, title, "alpha, ms/MB", unit)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # a line at the upper limit would look like the frame
