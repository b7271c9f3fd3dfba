"""Lanes over time as an HTML page that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Sequence

from chrion.graph.model import Graph
from chrion.lane_numbers import lane_name
from chrion.profiler.profiles import Profile
from chrion.report.lane_chart import LaneChart
from chrion.scheduler.plan import Plan
from chrion.units import format_ms

_LANE_PX = 34
_GAP_PX = 4
_WIDTH = 1000  # in the drawing's own units; the page stretches it


def timeline_html(
    plan: Plan,
    charts: Sequence[LaneChart],
    remarks: Sequence[str] = (),
    *,
    graph: Graph | None = None,
    profile: Profile | None = None,
) -> str:
    """Return a self-contained page: each chart over one common axis of time.

    Args:
        plan: The plan.
        charts: The predicted and, if known, the measured chart.
        remarks: Lines of text below the charts.
        graph: The model's graph; gives the operators' types and sizes.
        profile: The profile that the plan was made with; gives the operators' costs.
    """
    del graph, profile
    title = f"{plan.model} on {plan.machine}, policy {plan.policy}"
    scale_ms = max((s.latency_ms for s in charts), default=0.0) or 1.0
    drawings = "\n".join(_chart(chart, scale_ms) for chart in charts)
    notes = "".join(f"<li>{html.escape(remark)}</li>" for remark in remarks)
    return _PAGE.format(title=html.escape(title), drawings=drawings, notes=notes)


def _chart(chart: LaneChart, scale_ms: float) -> str:
    lanes = chart.lanes
    height = len(lanes) * (_LANE_PX + _GAP_PX)
    colours = {key: at * 137 % 360 for at, key in enumerate(dict.fromkeys(b.key for b in chart.spans))}
    names = "".join(f'<div style="height:{_LANE_PX}px">{lane_name(lane)}</div>' for lane in lanes)
    rectangles = "".join(
        f'<rect x="{span.start_ms / scale_ms * _WIDTH:.3f}" y="{lanes.index(span.lane) * (_LANE_PX + _GAP_PX)}" '
        f'width="{max((span.end_ms - span.start_ms) / scale_ms * _WIDTH, 0.2):.3f}" height="{_LANE_PX}" '
        f'fill="hsl({colours[span.key]} 60% 60%)"><title>{html.escape(span.label)}\n'
        f"{format_ms(span.start_ms)} to {format_ms(span.end_ms)}</title></rect>"
        for span in chart.spans
    )
    facts = f"{format_ms(chart.latency_ms)}, {chart.overlap:.2f} lanes busy on average"
    return (
        f'<h2>{html.escape(chart.title)} <small>{facts}</small></h2><div class="chart">'
        f'<div class="names">{names}</div><div class="scroll"><svg viewBox="0 0 {_WIDTH} {height}" height="{height}" '
        f'preserveAspectRatio="none">{rectangles}</svg>{_axis(scale_ms)}</div></div>'
    )


def _axis(scale_ms: float) -> str:
    ticks = "".join(f'<span style="left:{at * 10}%">{format_ms(scale_ms * at / 10)}</span>' for at in range(10))
    return f'<div class="axis">{ticks}</div>'


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px system-ui, sans-serif; margin: 2em; color: #222; background: #fff }}
h1 {{ font-size: 1.3em }} h2 {{ font-size: 1em; margin: 1.5em 0 .4em }} small {{ font-weight: normal; color: #666 }}
.chart {{ display: flex; gap: 8px }} .names div {{ margin-bottom: 4px; line-height: 34px; color: #444 }}
.scroll {{ overflow-x: auto; flex: 1 }} svg, .axis {{ width: calc(100% * var(--zoom, 1)); display: block }}
svg {{ background: #f4f4f4 }} rect:hover {{ stroke: #000; stroke-width: 1px; vector-effect: non-scaling-stroke }}
.axis {{ position: relative; height: 1.5em; color: #666; font-size: 12px }}
.axis span {{ position: absolute; border-left: 1px solid #bbb; padding-left: 3px }}
ul {{ color: #444; padding-left: 1.2em }}
</style></head><body><h1>{title}</h1>
<label>zoom <input type="range" min="0" max="6" step="0.1" value="0"
 oninput="document.body.style.setProperty('--zoom', 2 ** this.value)"></label>
{drawings}
<ul>{notes}</ul></body></html>
"""
