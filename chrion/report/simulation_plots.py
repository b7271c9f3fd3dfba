"""Pictures of results: latency histograms, rates against what was swept, memory over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from chrion.errors import OptionError
from chrion.report.figures import new_figure, save_figure
from chrion.simulator.metrics import Counts, bin_edges
from chrion.simulator.results import PatternResult
from chrion.simulator.sweep import SweepPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Families of models with a histogram of their own.
_PANELS = 3
#: Bins of a histogram between its ends.
_BARS = 60
#: A logarithmic axis shorter than this has labels at 2 and 5 as well.
_SHORT_SPAN = 2000.0
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")


def plot_results(results: Sequence[PatternResult], path: Path) -> None:
    """Draw execution times by family (Figure 11), all response times, and the memory of the first server.

    Raises:
        OptionError: matplotlib is missing, or the file cannot be written.
    """
    figure = new_figure(10, 6.4)
    families = _busiest(results)
    grid = figure.add_gridspec(2, 6)
    span = 6 // len(families)
    for i, family in enumerate(families):
        axes = figure.add_subplot(grid[0, i * span : (i + 1) * span])
        _histograms(axes, [(r.pattern, r.executions[family]) for r in results])
        _label(axes, f"{family}: execution", "ms", "share of requests" if i == 0 else "")
    axes = figure.add_subplot(grid[1, :3])
    _histograms(axes, [(r.pattern, r.responses) for r in results], log=True)
    _label(axes, "all models: response", "ms", "share of requests")
    _memory(figure.add_subplot(grid[1, 3:]), results)
    _legend(figure, axes)
    save_figure(figure, path)


def plot_histograms(panels: Mapping[str, Sequence[tuple[str, Counts]]], path: Path) -> None:
    """Draw histograms side by side: by panel's title, the named counts.

    Raises:
        OptionError: matplotlib is missing, or the file cannot be written.
    """
    figure = new_figure(3.4 * len(panels), 3.2)
    for i, (axes, (title, named)) in enumerate(
        zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True)
    ):
        _histograms(axes, named)
        _label(axes, title, "ms", "share of requests" if i == 0 else "")
    _legend(figure, axes)
    save_figure(figure, path)


def plot_sweep(points: Sequence[SweepPoint], path: Path) -> None:
    """Draw violations and swapping against the first swept key, one line for each pattern and each other value.

    Copies of models stand as the number of models.

    Raises:
        OptionError: matplotlib is missing, the file cannot be written, or the first key's values are no numbers.
    """
    key, *others = points[0].values
    check_axis(key, [point.values[key] for point in points])
    of_models = key.rsplit(".", 1)[-1] == "copies"
    lines: dict[tuple[Any, ...], list[tuple[float, float, float]]] = {}
    for point in points:
        at = point.models if of_models else point.values[key]
        for result in point.results:
            name = (result.pattern, *(f"{other} = {point.values[other]}" for other in others))
            lines.setdefault(name, []).append((at, result.total.violation_rate, result.total.swapping_rate))
    figure = new_figure(9, 3.8)
    left, right = figure.subplots(1, 2)
    for i, (name, rows) in enumerate(lines.items()):
        x, violations, swapping = zip(*sorted(rows), strict=True)
        style = {"color": _COLOURS[i % len(_COLOURS)], "marker": "o", "markersize": 3, "label": ", ".join(name)}
        left.plot(x, np.array(violations) * 100, **style)
        right.plot(x, np.array(swapping) * 100, **style)
    label = "models" if of_models else key
    _label(left, "SLO violations", label, "% of requests")
    _label(right, "swapping", label, "loads in % of requests")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
    _legend(figure, left)
    save_figure(figure, path)


def check_axis(key: str, values: Sequence[Any]) -> None:
    """See before a long sweep that its first key can be an axis.

    Raises:
        OptionError: Its values are no numbers.
    """
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise OptionError(f"--plot: {key} = {value!r} is not a number", hint="name a key of numbers first")


def _histograms(axes: Axes, named: Sequence[tuple[str, Counts]], *, log: bool = False) -> None:
    """Shares of requests over common bins between the 0.1 % and 99.9 % points of them all."""
    edges = _common_edges([counts for _, counts in named])
    middles = np.sqrt(bin_edges()[:-1] * bin_edges()[1:])
    for i, (name, counts) in enumerate(named):
        shares, _ = np.histogram(np.clip(middles, edges[0], edges[-1]), edges, weights=counts / max(1, counts.sum()))
        axes.stairs(shares, edges, label=name, color=_COLOURS[i % len(_COLOURS)], fill=True, alpha=0.25)
        axes.stairs(shares, edges, color=_COLOURS[i % len(_COLOURS)], linewidth=1.3)
    if log:
        _log_scale(axes, edges[-1] / edges[0])


def _log_scale(axes: Axes, span: float) -> None:
    """A logarithmic axis with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter  # noqa: PLC0415 # an extra

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if span < _SHORT_SPAN else (1.0,)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _busiest(results: Sequence[PatternResult]) -> list[str]:
    """The families with most executions, in the scenario's order; at least one."""
    executions = results[0].executions
    ranked = sorted(executions, key=lambda family: -int(executions[family].sum()))
    chosen = [family for family in ranked[:_PANELS] if executions[family].any()] or ranked[:1]
    return [family for family in executions if family in chosen]


def _common_edges(histograms: Sequence[Counts]) -> np.ndarray[Any, Any]:
    """Edges that are some of the histograms' own, so that no bin is split."""
    total = np.sum(histograms, axis=0)
    edges = bin_edges()
    if not total.any():
        return edges[[0, -1]]
    cumulative = np.cumsum(total) / total.sum()
    first, last = (int(np.searchsorted(cumulative, share)) for share in (0.001, 0.999))
    step = max(1, round((last + 2 - first) / _BARS))
    chosen = np.arange(first - step, last + 2 * step + 1, step)
    return edges[np.unique(np.clip(chosen, 0, len(edges) - 1))]


def _memory(axes: Axes, results: Sequence[PatternResult]) -> None:
    for i, result in enumerate(results):
        server = result.servers[0]
        seconds = np.arange(len(server.memory_mb) + 1) * server.memory_bin_ms / 1000
        axes.stairs(np.array(server.memory_mb) / 1000, seconds, baseline=None, color=_COLOURS[i % len(_COLOURS)])
        axes.axhline(server.memory_budget_mb / 1000, color="black", linewidth=0.8, linestyle=":")
    axes.set_ylim(bottom=0)
    _label(axes, "server 0: GPU memory held by models", "s", "GB")


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(3, len(labels)), frameon=False)


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
