"""Lanes over time as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from chrion.common.lane_numbers import lane_name
from chrion.common.units import format_ms
from chrion.graph.model import Graph
from chrion.report.categories import BACKGROUND, COPY_COLOUR, OTHER_COLOUR, Categories, mark
from chrion.report.figures import new_figure, plain_text, save_figure, shorten_name
from chrion.report.lane_chart import LaneChart, axis_end_ms, share_scale
from chrion.report.timeline_data import OperatorFacts, layer_categories, operator_ms, prefer_types, type_categories
from chrion.scheduler.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

_COPY, _SEVERAL = -1, -2
#: Shorter bars, as a share of the time axis, are merged with their neighbours into blocks of the second share: a few
#: pixels, and room for a number.
_NARROW_SHARE, _BLOCK_SHARE = 0.006, 0.05
_SLO_COLOUR = "#B00020"


def plot_timelines(plan: Plan, charts: Sequence[LaneChart], path: Path, *, graph: Graph | None = None) -> None:
    """Draw charts of lanes one above the other, with the colours and the legend of the page.

    Args:
        plan: The plan.
        charts: The predicted and, if known, the measured chart.
        path: The picture's file.
        graph: The model's graph; with it, colours can show operator types instead of layers.

    Raises:
        OptionError: matplotlib is not installed, or the file cannot be written.
        PlanError: The plan is not for this graph.
    """
    facts = OperatorFacts.of(plan, graph, None)
    times = operator_ms(plan, facts)
    types = type_categories(facts, times)
    categories = types if types and prefer_types(types, plan, facts, times) else layer_categories(plan, times)
    category_of = [categories.of_segment(segment, times) for segment in plan.segments]
    rows = sum(len(chart.lanes) for chart in charts)
    legend_height = 0.5 + 0.175 * (len(categories.names) + 2)
    figure = new_figure(11, max(0.9 + 0.32 * rows + 0.75 * len(charts), legend_height))
    heights = [max(1, len(chart.lanes)) for chart in charts]
    axes = figure.subplots(len(charts), 1, squeeze=False, height_ratios=heights)[:, 0]
    merged = [_draw_chart(axis, plan, chart, category_of) for axis, chart in zip(axes, charts, strict=True)]
    longest_ms = max((axis.get_xlim()[1] for axis in axes), default=1.0)
    if share_scale(charts):
        for axis in axes:
            axis.set_xlim(0, longest_ms)
    figure.suptitle(plain_text(f"{plan.model}, policy {plan.policy}, on {plan.machine}"), fontsize=10)
    visible_slo_ms = plan.slo_ms if plan.slo_ms is not None and plan.slo_ms <= longest_ms else None
    handles = _legend_handles(categories, charts, visible_slo_ms, merged=any(merged))
    title = "operator type" if categories is types else "layer"
    figure.legend(handles=handles, loc="outside right center", fontsize=7.5, title=title, frameon=False)
    save_figure(figure, path)


@dataclass(slots=True)
class _Bar:
    """Operators of one category on a lane, or adjacent ones of several."""

    category: int
    start_ms: float
    end_ms: float
    operators: int = 1


def _merge_narrow(bars: Sequence[_Bar], axis_ms: float) -> list[_Bar]:
    """Return the bars of a lane with adjacent ones that are too narrow to be told apart as blocks."""
    narrow_ms, block_ms = _NARROW_SHARE * axis_ms, _BLOCK_SHARE * axis_ms
    merged: list[_Bar] = []
    is_block = False
    for bar in bars:
        last = merged[-1] if merged else None
        is_narrow = bar.end_ms - bar.start_ms < narrow_ms
        if last and is_block and is_narrow and bar.start_ms - last.end_ms < narrow_ms / 2:
            last.category = last.category if last.category == bar.category else _SEVERAL
            last.end_ms, last.operators = bar.end_ms, last.operators + bar.operators
            is_block = last.end_ms - last.start_ms < block_ms
        else:
            merged.append(replace(bar))
            is_block = is_narrow
    return merged


def _mark(category: int) -> tuple[str, str]:
    """Return the colour and the hatch of a bar."""
    if category < 0:
        return COPY_COLOUR if category == _COPY else OTHER_COLOUR, ""
    colour, _, hatch = mark(category)
    return colour, hatch


def _draw_lane(axis: Axes, row: int, bars: Sequence[_Bar], axis_ms: float) -> None:
    for category in dict.fromkeys(bar.category for bar in bars):
        colour, hatch = _mark(category)
        ranges = [(bar.start_ms, bar.end_ms - bar.start_ms) for bar in bars if bar.category == category]
        axis.broken_barh(ranges, (-row - 0.4, 0.8), facecolor=colour, hatch=hatch, edgecolor=BACKGROUND, linewidth=0)
    wide = [bar for bar in bars if bar.end_ms - bar.start_ms >= _NARROW_SHARE * axis_ms]
    axis.vlines([bar.start_ms for bar in wide], -row - 0.4, -row + 0.4, color=BACKGROUND, linewidth=0.8)
    for bar in wide:
        if bar.category == _SEVERAL and bar.end_ms - bar.start_ms >= 0.5 * _BLOCK_SHARE * axis_ms:
            middle = (bar.start_ms + bar.end_ms) / 2
            axis.text(middle, -row, str(bar.operators), ha="center", va="center", fontsize=7, color=BACKGROUND)


def _draw_chart(axis: Axes, plan: Plan, chart: LaneChart, category_of: Sequence[int]) -> bool:
    """Draw the lanes of one chart; return whether bars of several categories were merged."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 - an optional dependency

    lanes, merged = chart.lanes, False
    end_ms = axis_end_ms(chart, plan.slo_ms)
    for row, lane in enumerate(lanes):
        spans = sorted((s for s in chart.spans if s.lane == lane), key=lambda span: span.start_ms)
        bars = [_Bar(_COPY if s.segment < 0 else category_of[s.segment], s.start_ms, s.end_ms) for s in spans]
        blocks = _merge_narrow(bars, end_ms)
        _draw_lane(axis, row, blocks, end_ms)
        merged = merged or any(bar.category == _SEVERAL for bar in blocks)
    axis.set_yticks([-row for row in range(len(lanes))], [lane_name(lane) for lane in lanes])
    axis.set_ylim(0.5 - max(1, len(lanes)), 0.5)
    if plan.slo_ms is not None:
        axis.axvline(plan.slo_ms, color=_SLO_COLOUR, linestyle="--")
    axis.set_xlim(0, end_ms)
    axis.set_xlabel("time in ms", fontsize=9)
    axis.xaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10]))
    heading = f"{chart.title}: {format_ms(chart.latency_ms)}, {chart.overlap:.2f} lanes busy on average"
    if plan.slo_ms is not None:
        heading += f", SLO of {format_ms(plan.slo_ms)} {'met' if chart.latency_ms <= plan.slo_ms else 'missed'}"
    axis.set_title(heading, fontsize=9, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    return merged


def _legend_handles(
    categories: Categories, charts: Sequence[LaneChart], slo_ms: float | None, *, merged: bool
) -> list[Patch | Line2D]:
    """Return an entry for each category, and for what else the charts show."""
    from matplotlib.lines import Line2D  # noqa: PLC0415 - an optional dependency
    from matplotlib.patches import Patch  # noqa: PLC0415 - an optional dependency

    handles: list[Patch | Line2D] = []
    for at, name in enumerate(categories.names):
        colour, _, hatch = mark(at)
        label = shorten_name(name)
        handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor=BACKGROUND, linewidth=0, label=label))
    if merged:
        handles.append(Patch(facecolor=OTHER_COLOUR, label="several, with their number"))
    if any(span.segment < 0 for chart in charts for span in chart.spans):
        handles.append(Patch(facecolor=COPY_COLOUR, label="copies"))
    if slo_ms is not None:
        handles.append(Line2D([], [], color=_SLO_COLOUR, linestyle="--", label=f"SLO {format_ms(slo_ms)}"))
    return handles
