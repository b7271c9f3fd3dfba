"""Lanes over time as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from chrion.graph.model import Graph
from chrion.lane_numbers import lane_name
from chrion.profiler.profiles import Profile
from chrion.report.categories import COPY_COLOUR, Categories, mark
from chrion.report.figures import new_figure, plain_text, save_figure, shorten_name
from chrion.report.lane_chart import LaneChart, share_scale
from chrion.report.timeline_data import (
    OperatorFacts,
    layer_categories,
    operator_ms,
    prefer_types,
    type_categories,
)
from chrion.scheduler.plan import Plan
from chrion.units import format_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COPY = -1
#: Shorter spans, as a share of the chart's latency, have no line at their start: the lines would hide the bars.
_SEPARATED_SHARE = 0.004
_SLO_COLOUR = "#B00020"


def plot_timelines(
    plan: Plan, charts: Sequence[LaneChart], path: Path, *, graph: Graph | None = None, profile: Profile | None = None
) -> None:
    """Draw charts of lanes one above the other, with the colours and the legend of the page.

    Args:
        plan: The plan.
        charts: The predicted and, if known, the measured chart.
        path: The picture's file.
        graph: The model's graph; with it, colours can show operator types instead of layers.
        profile: The profile that the plan was made with; with it, segments are divided into their operators.

    Raises:
        OptionError: matplotlib is not installed, or the file cannot be written.
        PlanError: The plan is not for this graph.
    """
    facts = OperatorFacts.of(plan, graph, profile)
    times = operator_ms(plan, facts)
    types = type_categories(facts, times)
    categories = types if types and prefer_types(types, plan, facts, times) else layer_categories(plan, times)
    parts = [_parts(segment, times, categories, divide=facts.costs is not None) for segment in plan.segments]
    rows = sum(len(chart.lanes) for chart in charts)
    legend_height = 0.5 + 0.175 * (len(categories.names) + 2)
    figure = new_figure(11, max(0.9 + 0.32 * rows + 0.75 * len(charts), legend_height))
    heights = [max(1, len(chart.lanes)) for chart in charts]
    axes = figure.subplots(len(charts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, chart in zip(axes, charts, strict=True):
        _draw_chart(axis, plan, chart, parts)
    if share_scale(charts):
        longest_ms = max((axis.get_xlim()[1] for axis in axes), default=1.0)
        for axis in axes:
            axis.set_xlim(0, longest_ms)
    figure.suptitle(plain_text(f"{plan.model}, policy {plan.policy}, on {plan.machine}"), fontsize=10)
    _add_legend(figure, plan, charts, categories, "operator type" if categories is types else "layer")
    save_figure(figure, path)


def _parts(
    segment: Sequence[int], times: Sequence[float], categories: Categories, *, divide: bool
) -> list[tuple[int, float, float]]:
    """Return the category, start and end of each part of a segment, as shares of its duration."""
    total = sum(times[i] for i in segment)
    if not divide or not total > 0:
        return [(categories.of_segment(segment, times), 0.0, 1.0)]
    parts: list[tuple[int, float, float]] = []
    done = 0.0
    for i in segment:
        start, done = done, done + times[i] / total
        category = categories.of_operator[i]
        if parts and parts[-1][0] == category:
            parts[-1] = (category, parts[-1][1], done)
        else:
            parts.append((category, start, done))
    return parts


def _draw_chart(axis: Axes, plan: Plan, chart: LaneChart, parts: Sequence[Sequence[tuple[int, float, float]]]) -> None:
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 - an optional dependency

    lanes = chart.lanes
    for row, lane in enumerate(lanes):
        by_category: dict[int, list[tuple[float, float]]] = {}
        for span in (span for span in chart.spans if span.lane == lane):
            length_ms = span.end_ms - span.start_ms
            for category, start, end in [(_COPY, 0.0, 1.0)] if span.segment < 0 else parts[span.segment]:
                bar = (span.start_ms + start * length_ms, (end - start) * length_ms)
                by_category.setdefault(category, []).append(bar)
        for category, bars in by_category.items():
            colour, hatch, ink = (COPY_COLOUR, "", "white") if category == _COPY else mark(category)
            axis.broken_barh(bars, (-row - 0.4, 0.8), facecolor=colour, hatch=hatch, edgecolor=ink, linewidth=0)
        shortest_ms = _SEPARATED_SHARE * chart.latency_ms
        starts = [s.start_ms for s in chart.spans if s.lane == lane and s.end_ms - s.start_ms > shortest_ms]
        axis.vlines(starts, -row - 0.4, -row + 0.4, color="white", linewidth=0.8)
    axis.set_yticks([-row for row in range(len(lanes))], [lane_name(lane) for lane in lanes])
    axis.set_ylim(0.5 - max(1, len(lanes)), 0.5)
    end_ms = chart.latency_ms or 1.0
    if plan.slo_ms is not None:
        axis.axvline(plan.slo_ms, color=_SLO_COLOUR, linestyle="--")
        end_ms = max(end_ms, plan.slo_ms) if plan.slo_ms < 1.5 * end_ms else end_ms
    axis.set_xlim(0, end_ms * 1.02)
    axis.set_xlabel("time in ms", fontsize=9)
    axis.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10]))
    heading = f"{chart.title}: {format_ms(chart.latency_ms)}, {chart.overlap:.2f} lanes busy on average"
    axis.set_title(heading, fontsize=9, loc="left")
    axis.spines[["top", "right"]].set_visible(False)


def _add_legend(figure: Figure, plan: Plan, charts: Sequence[LaneChart], categories: Categories, title: str) -> None:
    """Put one entry for each category beside the axes."""
    from matplotlib.lines import Line2D  # noqa: PLC0415 - an optional dependency
    from matplotlib.patches import Patch  # noqa: PLC0415 - an optional dependency

    handles: list[Patch | Line2D] = []
    for at, name in enumerate(categories.names):
        colour, hatch, ink = mark(at)
        label = shorten_name(name)
        handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor=ink, linewidth=0, label=label))
    if any(span.segment < 0 for chart in charts for span in chart.spans):
        handles.append(Patch(facecolor=COPY_COLOUR, label="copies"))
    if plan.slo_ms is not None:
        handles.append(Line2D([], [], color=_SLO_COLOUR, linestyle="--", label=f"SLO {format_ms(plan.slo_ms)}"))
    figure.legend(handles=handles, loc="outside right center", fontsize=7.5, title=title, frameon=False)
