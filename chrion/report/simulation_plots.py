"""Pictures of simulation results: latency histograms, rates of a sweep, GPU memory over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from chrion.common.wrong_values import wrong_value
from chrion.report.categories import COLOURS
from chrion.report.figures import label_axes, new_figure, save_figure, shorten_name
from chrion.serving.simulator.find import GROWS, Condition, Limit, Searched
from chrion.serving.simulator.histograms import Counts, bin_edges
from chrion.serving.simulator.results import SHARES, PatternResult, Series, ServerResult
from chrion.serving.simulator.sweep import SweepPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Families of models with a histogram of their own: as many as fit beside each other.
_PANELS = 3
#: Columns of the grid, which one to four panels divide.
_GRID = 12
#: Bins of a histogram between its ends: as many as are distinct at its width.
_BARS = 60
#: Maximum points of a line of violations over time: with more, single requests would show.
_POINTS = 64
#: A logarithmic axis whose ends have a smaller ratio also has labels at 2 and 5; with a greater one they would
#: overlap.
_SHORT_RATIO = 2000.0
#: Servers whose memory has a line of its own; of others, the range shows.
_SERVERS = 32
_LINES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_FILLS = ("full", "none", "top", "bottom", "left", "right")


def plot_results(results: Sequence[PatternResult], path: Path) -> None:
    """Draw execution times by family (Figure 11), all response times, memory, and the load over time.

    Patterns are named with the cost of an hour if servers have a price. The memory is that of every server, with their
    mean and range. The load is the rate of arrivals, the waiting requests, the violations, and the servers that are on
    and available; all but the first have a panel if there are any, or if servers come and go.

    Raises:
        OptionError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(12, 9.0)
    families = _busiest_families(results)
    grid = figure.add_gridspec(3, _GRID)
    span = _GRID // len(families)
    for i, family in enumerate(families):
        axes = figure.add_subplot(grid[0, i * span : (i + 1) * span])
        _draw_histograms(axes, [(r.pattern, r.executions[family]) for r in results])
        label_axes(axes, f"{family}: execution time", "ms", "share of requests" if i == 0 else "")
    axes = figure.add_subplot(grid[1, : _GRID // 2])
    _draw_histograms(axes, [(_with_cost(r), r.responses) for r in results], log=True)
    label_axes(axes, "all models: response time", "ms, logarithmic", "share of requests")
    memory = figure.add_subplot(grid[1, _GRID // 2 :])
    _draw_memory(memory, results)
    drawn = [_draw_arrivals, *(draw for draw, any_of in _SERIES if any(any_of(result) for result in results))]
    span = _GRID // len(drawn)
    for i, draw in enumerate(drawn):
        draw(figure.add_subplot(grid[2, i * span : (i + 1) * span]), results)
    handles, labels = axes.get_legend_handles_labels()
    budgets, names = memory.get_legend_handles_labels()
    _add_legend(figure, [*handles, *budgets[:1]], [*labels, *names[:1]])
    save_figure(figure, path)


def plot_histograms(panels: Mapping[str, Sequence[tuple[str, Counts]]], path: Path) -> None:
    """Draw histograms of execution time side by side.

    Args:
        panels: By title of the panel, the names and the counts of its histograms.
        path: The picture's file.

    Raises:
        OptionError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(3.8 * len(panels), 3.4)
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for i, (axes, (title, named)) in enumerate(zip(row, panels.items(), strict=True)):
        _draw_histograms(axes, [(shorten_name(name), counts) for name, counts in named])
        label_axes(axes, title, "execution time, ms", "share of requests" if i == 0 else "")
    _add_legend(figure, *row[0].get_legend_handles_labels())
    save_figure(figure, path)


def plot_search(quantity: Searched, condition: Condition, limits: Sequence[Limit], path: Path) -> None:
    """Draw the figure of a condition with its confidence intervals over the values that a search tried.

    Values at which queues grow are left out, since their figures depend on the number of requests.

    Raises:
        OptionError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    unit = 100 if condition.metric in SHARES else 1
    for i, limit in enumerate(limits):
        probes = [probe for probe in limit.curve if probe.met != GROWS and math.isfinite(probe.figure.mean)]
        x, y = [probe.amount for probe in probes], [unit * probe.figure.mean for probe in probes]
        axes.plot(x, y, label=shorten_name(limit.pattern), **line_style(i, i))
        low, high = [unit * max(0.0, p.figure.low) for p in probes], [unit * p.figure.high for p in probes]
        axes.fill_between(x, low, high, color=COLOURS[i % len(COLOURS)], alpha=0.2, linewidth=0)
    axes.axhline(unit * condition.limit, color="black", linewidth=1.0, linestyle=(0, (1, 2)), label="limit")
    axes.set_ylim(0, 4 * unit * condition.limit or None)
    label_axes(axes, condition.metric, quantity.unit, "%" if unit == 100 else "ms")
    _add_legend(figure, *axes.get_legend_handles_labels())
    save_figure(figure, path)


def plot_sweep(points: Sequence[SweepPoint], path: Path) -> None:
    """Draw violations and swapping against the first swept key, and the cost of an hour if servers have a price.

    A band is the confidence interval of violations.

    A line has the colour and the marker of its pattern. Its dashes and the fill of its markers are those of its values
    of the other swept keys, or of its pattern if there is only one key. A swept number of copies is drawn as the number
    of models.

    Raises:
        OptionError: matplotlib is not installed, the file cannot be written, or a value of the first key is no number.
    """
    key, *others = points[0].values
    check_axis(key, [point.values[key] for point in points])
    is_copies = key.rsplit(".", 1)[-1] == "copies"
    lines: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for point in points:
        x = point.models if is_copies else point.values[key]
        setting = ", ".join(f"{other} = {point.values[other]}" for other in others)
        for result in point.results:
            rate, interval = result.total.violation_rate, result.intervals.get("violations")
            width = interval.half_width if interval and math.isfinite(interval.half_width) else 0.0
            ends = 100 * max(0.0, rate - width), 100 * (rate + width)
            row = (100 * rate, 100 * result.total.swapping_rate, result.cost_per_hour, *ends)
            lines.setdefault((result.pattern, setting), []).append((x, *row))
    patterns = list(dict.fromkeys(pattern for pattern, _ in lines))
    settings = list(dict.fromkeys(setting for _, setting in lines))
    entries = len(patterns) + (len(settings) if others else 0)
    panels = [("SLO violations", "% of requests"), ("swapping", "loads in % of requests")]
    if any(result.cost_per_hour for point in points for result in point.results):
        panels.append(("cost of the servers that are on", "per hour"))
    figure = new_figure(3 + 4 * len(panels), max(3.8, 0.8 + 0.21 * entries))
    row_of_axes = figure.subplots(1, len(panels))
    for (pattern, setting), rows in lines.items():
        x, *columns, low, high = zip(*sorted(rows), strict=True)
        at = patterns.index(pattern)
        style = line_style(at, settings.index(setting) if others else at)
        for axes, y in zip(row_of_axes, columns, strict=False):
            axes.plot(x, y, **style)
        row_of_axes[0].fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    for axes, (title, unit) in zip(row_of_axes, panels, strict=True):
        label_axes(axes, title, "models" if is_copies else key, unit)
        axes.set_ylim(bottom=0)
    _add_sweep_legend(figure, patterns, settings if others else [])
    save_figure(figure, path)


def line_style(pattern: int, setting: int) -> dict[str, Any]:
    """Return the style of a line of a sweep; 8 patterns with 24 settings each differ in more than their colour."""
    return {
        "color": COLOURS[pattern % len(COLOURS)],
        "marker": _MARKERS[pattern % len(_MARKERS)],
        "linestyle": _LINES[setting % len(_LINES)],
        "fillstyle": _FILLS[(setting + setting // 12) % len(_FILLS)],  # 12 is a common multiple: pairs would repeat
        "markersize": 5,
    }


def check_axis(key: str, values: Sequence[Any]) -> None:
    """Check, before a long sweep, that its first key can be an axis.

    Raises:
        OptionError: A value is no number.
    """
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            hint = "name a key with numeric values first"
            raise wrong_value(f"--plot: {key}", "numbers on the axis", value, hint=hint)


def _draw_histograms(axes: Axes, named: Sequence[tuple[str, Counts]], *, log: bool = False) -> None:
    """Draw shares of requests in common bins, from the 0.1 % to the 99.9 % quantile of all of them."""
    edges = _common_edges([counts for _, counts in named])
    middles = np.sqrt(bin_edges()[:-1] * bin_edges()[1:])
    for i, (name, counts) in enumerate(named):
        shares, _ = np.histogram(np.clip(middles, edges[0], edges[-1]), edges, weights=counts / max(1, counts.sum()))
        colour, line = COLOURS[i % len(COLOURS)], _LINES[i % len(_LINES)]
        axes.stairs(shares, edges, color=colour, fill=True, alpha=0.5 / len(named))
        axes.stairs(shares, edges, label=name, color=colour, linestyle=line, linewidth=1.3)
    if log:
        _set_log_scale(axes, edges[-1] / edges[0])


def _with_cost(result: PatternResult) -> str:
    """Return the name of a pattern, with the cost of its servers if they have a price."""
    name = shorten_name(result.pattern)
    return f"{name}, {result.cost_per_hour:.2f} per hour" if result.cost_per_hour else name


def _set_log_scale(axes: Axes, ratio: float) -> None:
    """Make the x-axis logarithmic, with plain numbers as labels."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter  # noqa: PLC0415 - optional dependency

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if ratio < _SHORT_RATIO else (1.0,)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _busiest_families(results: Sequence[PatternResult]) -> list[str]:
    """Return the families with most executions, in the scenario's order; at least one."""
    executions = results[0].executions
    ranked = sorted(executions, key=lambda family: -int(executions[family].sum()))
    chosen = [family for family in ranked[:_PANELS] if executions[family].any()] or ranked[:1]
    return [family for family in executions if family in chosen]


def _common_edges(histograms: Sequence[Counts]) -> np.ndarray[Any, Any]:
    """Return bin edges in ms for all histograms, a subset of the edges of their own bins, so that no bin is split."""
    total = np.sum(histograms, axis=0)
    edges = bin_edges()
    if not total.any():
        return edges[[0, -1]]
    cumulative = np.cumsum(total) / total.sum()
    first, last = (int(np.searchsorted(cumulative, share)) for share in (0.001, 0.999))
    step = max(1, round((last + 2 - first) / _BARS))
    chosen = np.arange(first - step, last + 2 * step + 1, step)
    return edges[np.unique(np.clip(chosen, 0, len(edges) - 1))]


def _ends_s(series: Series) -> np.ndarray[Any, Any]:
    """Return the ends of the bins of a series in s."""
    return np.arange(1, len(series.waiting) + 1) * series.bin_ms / 1000


def _series_style(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": _LINES[i % len(_LINES)], "linewidth": 1.2}


def _draw_arrivals(axes: Axes, results: Sequence[PatternResult]) -> None:
    """Draw the rate of arrivals once, since all patterns get the same requests."""
    series = results[0].series
    axes.plot(_ends_s(series), series.arrivals_per_s, color="black", linewidth=1.2)
    axes.set_ylim(0, 1.15 * max([*series.arrivals_per_s, 1.0]))
    label_axes(axes, "arrivals", "time, s", "requests per second")


def _draw_waiting(axes: Axes, results: Sequence[PatternResult]) -> None:
    for i, result in enumerate(results):
        axes.plot(_ends_s(result.series), result.series.waiting, **_series_style(i))
    axes.set_ylim(bottom=0)
    label_axes(axes, "waiting requests", "time, s", "requests")


def _draw_violations(axes: Axes, results: Sequence[PatternResult]) -> None:
    for i, result in enumerate(results):
        axes.plot(*_violations(result.series), **_series_style(i))
    axes.set_ylim(bottom=0)
    label_axes(axes, "SLO violations", "time, s", "% of arrivals")


def _draw_servers(axes: Axes, results: Sequence[PatternResult]) -> None:
    for i, result in enumerate(results):
        style = _series_style(i)
        axes.plot(_ends_s(result.series), result.series.servers_available, **style)
        axes.plot(_ends_s(result.series), result.series.servers_on, color=style["color"], alpha=0.4, linewidth=2.5)
    axes.set_ylim(bottom=0)
    label_axes(axes, "servers: on (wide), available", "time, s", "servers")


#: Panels of a series that some patterns have, each with the test whether a result has any of it.
_SERIES: tuple[tuple[Callable[[Axes, Sequence[PatternResult]], None], Callable[[PatternResult], bool]], ...] = (
    (_draw_waiting, lambda result: any(result.series.waiting)),
    (_draw_violations, lambda result: result.total.violation_rate > 0),
    (_draw_servers, lambda result: bool(result.series.servers_on)),
)


def _violations(series: Series) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return times in s and violations in % of arrivals, of bins that are joined so that single requests do not show.

    NaN, without arrivals, leaves a gap.
    """
    arrivals, rates = np.array(series.arrivals_per_s), np.nan_to_num(series.violation_rate)
    starts = np.arange(0, len(rates), -(-len(rates) // _POINTS))
    counts = np.add.reduceat(arrivals, starts)
    late = np.add.reduceat(arrivals * rates, starts)
    shares = np.divide(100 * late, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    return np.append(starts[1:], len(rates)) * series.bin_ms / 1000, shares


def _draw_memory(axes: Axes, results: Sequence[PatternResult]) -> None:
    for i, result in enumerate(results):
        colour, line = COLOURS[i % len(COLOURS)], _LINES[i % len(_LINES)]
        seconds, memory = _memory_over_time(result.servers)
        if len(memory) > 1:
            for own in memory[:_SERVERS]:
                axes.stairs(own, seconds, baseline=None, color=colour, linewidth=0.5, alpha=0.4)
            axes.stairs(memory.max(axis=0), seconds, baseline=memory.min(axis=0), color=colour, fill=True, alpha=0.12)
        axes.stairs(memory.mean(axis=0), seconds, baseline=None, color=colour, linestyle=line)
    budgets_gb = sorted({server.memory_budget_mb / 1000 for server in results[0].servers})
    for budget_gb in budgets_gb:
        axes.axhline(budget_gb, color="black", linewidth=1.0, linestyle=(0, (1, 2)), label="memory budget")
    axes.set_ylim(0, 1.05 * budgets_gb[-1] or None)
    one = len(results[0].servers) == 1
    title = "GPU memory held by models" if one else "GPU memory held by models: each server, mean and range"
    label_axes(axes, title, "time, s", "GB")


def _memory_over_time(servers: Sequence[ServerResult]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the edges of bins in s, and the memory of each server in GB. Shapes: [bins + 1], [servers, bins].

    Servers may have bins of different widths, each a power of two times the least; they get the greatest.
    """
    width_ms = max(server.memory_bin_ms for server in servers)
    bins = max(math.ceil(len(server.memory_mb) * server.memory_bin_ms / width_ms) for server in servers)
    memory = np.zeros((len(servers), max(1, bins)))
    for row, server in zip(memory, servers, strict=True):
        joined = round(width_ms / server.memory_bin_ms)
        starts = np.arange(0, len(server.memory_mb), joined)
        if len(starts):
            sums = np.add.reduceat(np.array(server.memory_mb), starts)
            row[: len(starts)] = sums / np.diff([*starts, len(server.memory_mb)]) / 1000
    return np.arange(memory.shape[1] + 1) * width_ms / 1000, memory


def _add_legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(labels), 6),
        fontsize=9,
        frameon=False,
        handlelength=3.5,
    )


def _add_sweep_legend(figure: Figure, patterns: Sequence[str], settings: Sequence[str]) -> None:
    """Put the colours of the patterns and the styles of the settings beside the axes."""
    from matplotlib.lines import Line2D  # noqa: PLC0415 - an optional dependency

    handles = []
    for at, pattern in enumerate(patterns):
        style = line_style(at, 0 if settings else at)
        handles.append(Line2D([], [], **style, label=shorten_name(pattern)))
    for at, setting in enumerate(settings):
        handles.append(Line2D([], [], **(line_style(0, at) | {"color": "black"}), label=shorten_name(setting, 36)))
    figure.legend(handles=handles, loc="outside right upper", fontsize=9, frameon=False, handlelength=3.5)
