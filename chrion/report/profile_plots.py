"""Pictures of a profile: Figures 2, 3 and 6 of the paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chrion.common.units import format_count, format_ms
from chrion.graph.model import Graph
from chrion.profiler.costs import Costs
from chrion.profiler.profiles import Profile
from chrion.report.categories import COLOURS, OTHER_COLOUR
from chrion.report.figures import label_axes, new_figure, plain_text, save_figure, shorten_name
from chrion.report.simulation_plots import line_style
from chrion.scheduler import Plan, partition

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Operator types that are compared on both devices, and whose slowdown by busy cores is drawn: as many as are
#: readable.
_COMPARED, _DRAWN = 8, 5
#: Rows of bars that are left room for, so that few bars are not thick.
_FEW = 4


@dataclass(frozen=True, slots=True)
class TypeCosts:
    """Costs of the operators of one type."""

    op_type: str
    operators: int
    #: The mean time on one core while 1, 2, ..., k cores are busy.
    cpu_ms: tuple[float, ...]
    #: The mean time on the accelerator; None if it cannot run all of them, or without an accelerator.
    accelerator_ms: float | None

    @property
    def total_ms(self) -> float:
        """The time of all operators one after another on one core."""
        return self.operators * self.cpu_ms[0]


def costs_by_type(graph: Graph, costs: Costs) -> list[TypeCosts]:
    """Return the mean costs of the operators by type, the type with the greatest total time first."""
    members: dict[str, list[int]] = {}
    for i, op_type in enumerate(graph.dag.op_types):
        members.setdefault(op_type, []).append(i)

    def mean(times: Sequence[float], chosen: Sequence[int]) -> float:
        return sum(times[i] for i in chosen) / len(chosen)

    entries = []
    for op_type, chosen in members.items():
        on_accelerator = math.inf if costs.accelerator_ms is None else mean(costs.accelerator_ms, chosen)
        on_cpu = tuple(mean(times, chosen) for times in costs.cpu_ms)
        entries.append(TypeCosts(op_type, len(chosen), on_cpu, on_accelerator if on_accelerator < math.inf else None))
    return sorted(entries, key=lambda entry: (-entry.total_ms, entry.op_type))


def plans_by_cores(
    graph: Graph, profile: Profile, progress: Callable[[int, int, str], None] = lambda *_: None
) -> list[Plan]:
    """Return the plans of the paper's scheduler on at most 1, 2, ... cores and no accelerator.

    Args:
        graph: The graph.
        profile: The costs of its operators.
        progress: Is told the number of cores that were planned for, of how many, and what is planned, in words.
    """
    plans = []
    for cores in range(1, profile.cores + 1):
        progress(cores - 1, profile.cores, format_count(cores, "core"))
        plans.append(partition(graph, profile, policy="cpu", cores=cores))
    return plans


def plot_profile(graph: Graph, profile: Profile, plans: Sequence[Plan], path: Path) -> None:
    """Draw latency by cores (Figure 2), operators on both devices (Figure 3), and their times by busy cores (Figure 6).

    A profile of one core has the second panel only.

    Args:
        graph: The graph.
        profile: The costs of its operators.
        plans: As :func:`plans_by_cores` returns them.
        path: The picture's file.

    Raises:
        OptionError: matplotlib is not installed, or the file cannot be written.
    """
    types = [entry for entry in costs_by_type(graph, profile.costs(graph.dag)) if entry.total_ms > 0]
    several = profile.cores > 1
    figure = new_figure(13 if several else 6, 4.4)
    panels = list(figure.subplots(1, 3 if several else 1, squeeze=False)[0])
    if several:
        _draw_latency(panels[0], plans)
        _draw_busy_cores(panels[2], types[:_DRAWN])
    _draw_operators(panels[1 if several else 0], types[:_COMPARED])
    figure.suptitle(plain_text(f"{graph.name} on {profile.machine}"), fontsize=11)
    save_figure(figure, path)


def _draw_latency(axes: Axes, plans: Sequence[Plan]) -> None:
    cores = range(1, len(plans) + 1)
    axes.plot(cores, [plan.predicted.latency_ms for plan in plans], "o-", color=COLOURS[0], label="CPU cores only")
    only = plans[0].accelerator_only
    if only is not None:
        axes.axhline(only.latency_ms, color=COLOURS[5], linestyle="--", label="accelerator only")
    label_axes(axes, "predicted latency by cores", "CPU cores, at most", "ms")
    axes.set_xticks(cores[:: max(1, len(cores) // 8)])
    axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
    axes.legend(loc="best", fontsize=9, frameon=False)


def _draw_operators(axes: Axes, types: Sequence[TypeCosts]) -> None:
    """Draw the mean time of an operator of each type on one core and on the accelerator."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 - an optional dependency

    on_cpu = {row: entry.cpu_ms[0] for row, entry in enumerate(types)}
    on_accelerator = {row: e.accelerator_ms for row, e in enumerate(types) if e.accelerator_ms is not None}
    height, shift = (0.38, 0.2) if on_accelerator else (0.6, 0.0)
    drawn = [axes.barh([r - shift for r in on_cpu], [*on_cpu.values()], height, color=COLOURS[0], label="one CPU core")]
    if on_accelerator:
        style: dict[str, Any] = {"facecolor": "white", "edgecolor": OTHER_COLOUR, "hatch": "////"}
        rows = [row + shift for row in on_accelerator]
        drawn.append(axes.barh(rows, [*on_accelerator.values()], height, **style, label="accelerator"))
    for bars, times in zip(drawn, (on_cpu, on_accelerator), strict=False):
        axes.bar_label(bars, [format_ms(ms) for ms in times.values()], padding=3, fontsize=8)
    axes.set_yticks(range(len(types)), [plain_text(f"{shorten_name(e.op_type, 20)} ({e.operators})") for e in types])
    axes.set_ylim(max(len(types), _FEW) - 0.5, -0.5)
    axes.set_xlim(0, 1.2 * axes.get_xlim()[1])
    axes.xaxis.set_major_locator(MaxNLocator(5))
    label_axes(axes, "mean time by operator type (number of operators)", "ms", "")
    axes.grid(visible=False)
    axes.legend(loc="lower right", fontsize=9, frameon=False)


def _draw_busy_cores(axes: Axes, types: Sequence[TypeCosts]) -> None:
    """Draw the mean time of an operator by the number of busy cores, relative to that with one busy core."""
    cores = range(1, len(types[0].cpu_ms) + 1) if types else range(0)
    for at, entry in enumerate(types):
        relative = [ms / entry.cpu_ms[0] for ms in entry.cpu_ms]
        label = f"{shorten_name(entry.op_type, 20)}, {format_ms(entry.cpu_ms[0])} alone"
        axes.plot(cores, relative, **line_style(at, at), label=label)
    label_axes(axes, "time of an operator by busy cores", "busy CPU cores", "relative to one busy core")
    axes.set_xticks(list(cores)[:: max(1, len(cores) // 8)])
    axes.set_ylim(0, 1.3 * max([1.0, axes.get_ylim()[1]]))
    axes.legend(loc="best", fontsize=9, frameon=False, handlelength=3.5)
