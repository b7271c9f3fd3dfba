"""The trade between latency and accelerator memory over alpha: Figure 10 of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from chrion.report.figures import new_figure, save_figure
from chrion.scheduler.plan import Plan
from chrion.units import format_mb, format_ms


def alpha_sweep_table(points: Sequence[tuple[float, Plan]]) -> Table:
    """One row an alpha."""
    table = Table(title=f"{points[0][1].model} on {points[0][1].machine}, policy {points[0][1].policy}")
    for name in ("alpha, ms/MB", "latency", "memory (Eq. 4)", "resident memory", "on accelerator", "on CPU", "cores"):
        table.add_column(name, justify="right")
    for alpha, plan in points:
        found = plan.predicted
        counts = (str(plan.on_accelerator), str(plan.on_cpu), str(plan.schedule.cores))
        memory = (format_mb(found.memory_mb), format_mb(found.resident_mb))
        table.add_row(f"{alpha:g}", format_ms(found.latency_ms), *memory, *counts)
    return table


def alpha_sweep_json(points: Sequence[tuple[float, Plan]]) -> dict[str, Any]:
    """The same as plain data, with the plain ways beside it."""
    first = points[0][1]
    only = first.accelerator_only
    return {
        "model": first.model,
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
    """The curve as a picture: latency left, memory right, the plain ways as dashed lines.

    Raises:
        OptionError: matplotlib is missing.
    """
    first = points[0][1]
    alphas = [alpha for alpha, _ in points]
    figure = new_figure(7, 4)
    latency = figure.add_subplot()
    memory = latency.twinx()
    blue, orange = "tab:blue", "tab:orange"
    (line,) = latency.plot(alphas, [p.predicted.latency_ms for _, p in points], "o-", color=blue)
    (dots,) = memory.plot(alphas, [p.predicted.memory_mb for _, p in points], "s-", color=orange)
    lines, names = [line, dots], ["latency", "memory (Eq. 4)"]
    for name, only, style in (("accelerator only", first.accelerator_only, "--"), ("CPU only", first.cpu_only, ":")):
        if only is not None:
            lines.append(latency.axhline(only.latency_ms, color="tab:red", linestyle=style))
            names.append(f"latency, {name}")
    latency.set_xlabel("alpha, ms/MB")
    latency.set_ylabel("latency, ms", color=blue)
    latency.set_ylim(bottom=0)
    memory.set_ylabel("accelerator memory, MB", color=orange)
    memory.set_ylim(bottom=0)
    latency.set_title(f"{first.model} on {first.machine}", fontsize=10)
    latency.legend(lines, names, fontsize=8, loc="lower right")
    save_figure(figure, path)
