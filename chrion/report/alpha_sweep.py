"""The trade-off between latency and accelerator memory over alpha: Figure 10 of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chrion.report.categories import COLOURS
from chrion.report.figure_table import FigureTable, key
from chrion.report.figures import new_figure, plain_text, save_figure
from chrion.scheduler.plan import Plan
from chrion.units import format_mb, format_ms

_FIGURES = ("latency", "memory (Eq. 4)", "resident memory", "operators on accelerator", "operators on CPU", "cores")


def alpha_sweep_table(points: Sequence[tuple[float, Plan]]) -> FigureTable:
    """Return a table with one row for each alpha."""
    first = points[0][1]
    table = FigureTable(
        f"{first.model} on {first.machine}, policy {first.policy}", [key("alpha, ms/MB", is_text=False), *_FIGURES]
    )
    for alpha, plan in points:
        found = plan.predicted
        counts = (str(plan.on_accelerator), str(plan.on_cpu), str(plan.schedule.cores))
        memory = (format_mb(found.memory_mb), format_mb(found.resident_mb))
        table.add_row(f"{alpha:g}", format_ms(found.latency_ms), *memory, *counts)
    return table


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

    Raises:
        OptionError: matplotlib is not installed, or the file cannot be written.
    """
    first = points[0][1]
    alphas = [alpha for alpha, _ in points]
    figure = new_figure(9, 3.6)
    latency, memory = figure.subplots(1, 2)
    latency.plot(alphas, [p.predicted.latency_ms for _, p in points], "o-", color=COLOURS[0], label="plan")
    memory.plot(alphas, [p.predicted.memory_mb for _, p in points], "o-", color=COLOURS[0])
    memory.plot(
        alphas, [p.predicted.resident_mb for _, p in points], "^:", color=COLOURS[2], label="plan, resident memory"
    )
    if first.accelerator_only is not None:
        style = {"color": COLOURS[5], "linestyle": "--"}
        latency.axhline(first.accelerator_only.latency_ms, **style, label="accelerator only")
        memory.axhline(first.accelerator_only.memory_mb, **style)
    if first.cpu_only is not None:
        latency.axhline(first.cpu_only.latency_ms, color=COLOURS[3], linestyle="-.", label="CPU only")
    for axes, title, unit in ((latency, "latency", "ms"), (memory, "accelerator memory (Equation 4)", "MB")):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("alpha, ms/MB")
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(plain_text(f"{first.model} on {first.machine}, policy {first.policy}"), fontsize=10)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    save_figure(figure, path)
