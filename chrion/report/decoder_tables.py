"""Tables and a picture of simulated decoders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from chrion.common.units import format_count
from chrion.report.figure_table import FigureTable, key
from chrion.report.figures import label_axes, new_figure, plain_text, save_figure
from chrion.report.simulation_plots import line_style
from chrion.report.simulation_tables import WIDE, figure_text, ms_text
from chrion.serving.simulator.confidence import Interval
from chrion.serving.simulator.decoder_results import VIOLATIONS, DecoderPoint, DecoderSummary
from chrion.serving.simulator.decoder_scenario import DecoderScenario

#: The cells of tables by column.
_COLUMNS: Mapping[str, Callable[[DecoderSummary], str]] = {
    "requests/s": lambda summary: f"{summary.requests_per_s:.2f}",
    "tokens/s": lambda summary: f"{summary.tokens_per_s:.1f}",
    "ms/token p50": lambda summary: ms_text(summary.normalised_p50_ms),
    "ms/token p99": lambda summary: ms_text(summary.normalised_p99_ms),
    "first ms p50": lambda summary: ms_text(summary.first_token_p50_ms),
    "first ms p99": lambda summary: ms_text(summary.first_token_p99_ms),
    "between ms p50": lambda summary: ms_text(summary.between_tokens_p50_ms),
    "between ms p99": lambda summary: ms_text(summary.between_tokens_p99_ms),
    "batch": lambda summary: f"{summary.mean_batch:.2f}",
    "slots": lambda summary: f"{summary.mean_reserved:.0f}",
    "most": lambda summary: f"{summary.most_reserved}",
    "goodput/s": lambda summary: "-" if np.isnan(summary.goodput_per_s) else f"{summary.goodput_per_s:.2f}",
    "preempted": lambda summary: f"{summary.preemptions}",
}
#: Columns that a table has if any of their cells differs from these.
_SOMETIMES = {"goodput/s": "-", "preempted": "0"}
#: What columns mean, of which a table has some.
_MEANINGS = {
    "ms/token p50": "ms/token: latency by generated tokens",
    "first ms p50": "first: time to the first token",
    "between ms p50": "between: mean time between two tokens",
    "batch": "batch: mean requests of an iteration",
    "slots": "slots, most: mean and largest number reserved",
    "goodput/s": "goodput/s: requests that met both objectives",
    "preempted": "preempted: times that requests lost their blocks",
}
#: The keys of the rate of arrival.
_RATES = ("rate_per_s", "rate_scale")


def datasheet_lines(scenarios: Iterable[DecoderScenario]) -> list[str]:
    """Return a line that names the hardware whose figures are estimated, or none."""
    parts = dict.fromkeys(part for scenario in scenarios for part in scenario.estimated_hardware)
    return [f"{', '.join(parts)}: estimated from datasheets"] if parts else []


def decoder_table(scenario: DecoderScenario, summaries: Sequence[DecoderSummary]) -> FigureTable:
    """Return a table with a row for each policy, whose title defines its columns."""
    number = summaries[0].served + summaries[0].refused
    requests, slots = format_count(number, "request"), format_count(scenario.slots, "slot")
    title = f"{scenario.name}: {requests}, {slots} for keys and values"
    if refused := summaries[0].refused:  # the same with every policy
        title += f", {refused} refused because they need more"
    title += "".join(f"; {line}" for line in datasheet_lines([scenario]))
    if scenario.replicas.count > 1:
        title += f"; {scenario.replicas.count} replicas"
    columns = _columns(summaries)
    table = FigureTable(f"{title}\n{_legend(columns)}", [key("policy"), *columns])
    for summary in summaries:
        table.add_row(summary.policy, *(_COLUMNS[name](summary) for name in columns))
    return table


def decoder_sweep_table(points: Sequence[DecoderPoint]) -> FigureTable:
    """Return a table with a row for each point and policy."""
    columns = _columns([summary for point in points for summary in point.summaries])
    keys = [key(name, is_text=False) for name in points[0].values]
    table = FigureTable(_legend(columns), [*keys, key("policy"), *columns])
    for point in points:
        for summary in point.summaries:
            cells = (_COLUMNS[name](summary) for name in columns)
            table.add_row(*map(str, point.values.values()), summary.policy, *cells)
    return table


def decoder_replications_table(sample: str, by_policy: Mapping[str, Mapping[str, Interval]]) -> FigureTable:
    """Return a table with the mean of each figure and its 95 % confidence interval, given the sample in words."""
    title = f"{sample}, and half the width of their 95 % confidence intervals; {WIDE}"
    table = FigureTable(title, [key("figure"), *by_policy])
    for name in next(iter(by_policy.values())):
        entries = [intervals[name] for intervals in by_policy.values()]
        if not all(np.isnan(entry.mean) for entry in entries):
            unit = "" if name == VIOLATIONS or name.endswith("_per_s") else " ms"
            table.add_row(f"{name}{unit}", *(figure_text(name, e.mean, e.half_width) for e in entries))
    return table


def plot_decoder_sweep(points: Sequence[DecoderPoint], path: Path) -> None:
    """Draw median normalised latency against throughput, one line for each policy and value of other keys (Figure 10).

    Raises:
        OptionError: matplotlib is not installed, or the file cannot be written.
    """
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for point in sorted(points, key=_rate):
        setting = _setting(point.values)
        for summary in point.summaries:
            row = (summary.requests_per_s, summary.normalised_p50_ms)
            lines.setdefault((summary.policy, setting), []).append(row)
    figure = new_figure(9, max(4.4, 0.6 + 0.22 * len(lines)))
    axes = figure.subplots()
    policies = list(dict.fromkeys(policy for policy, _ in lines))
    settings = list(dict.fromkeys(setting for _, setting in lines))
    for (policy, setting), rows in lines.items():
        x, y = np.array(rows).T
        style = line_style(policies.index(policy), settings.index(setting))
        axes.plot(x, y, **style, label=plain_text(f"{policy} {setting}".strip()))
    axes.set_yscale("log")
    title, unit = "latency against throughput", "median latency per generated token, ms"
    label_axes(axes, title, "requests per second", unit)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9, handlelength=3.5)
    save_figure(figure, path)


def sweeps_rate(values: Iterable[str]) -> bool:
    """Return whether the keys of a sweep have the rate of arrival, along which lines are drawn."""
    return any(_is_rate(name) for name in values)


def _is_rate(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in _RATES


def _rate(point: DecoderPoint) -> float:
    return next((float(value) for name, value in point.values.items() if _is_rate(name)), 0.0)


def _setting(values: Mapping[str, Any]) -> str:
    """Return the swept values that tell lines apart: all but the rate, which is the position on a line."""
    return ", ".join(f"{name} = {value}" for name, value in values.items() if not _is_rate(name))


def _legend(columns: Sequence[str]) -> str:
    """Return a line that defines the columns."""
    return "; ".join(meaning for name, meaning in _MEANINGS.items() if name in columns)


def _columns(summaries: Sequence[DecoderSummary]) -> list[str]:
    """Return the columns of a table."""
    return [name for name, cell in _COLUMNS.items() if any(cell(own) != _SOMETIMES.get(name) for own in summaries)]
