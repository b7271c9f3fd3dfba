"""Lanes over time: an HTML page that needs nothing else, and a trace for chrome://tracing and Perfetto."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass

from chrion.lane_numbers import display_order, is_copy_lane, lane_name
from chrion.runtime.execution.executor import Event
from chrion.scheduler.plan import Plan
from chrion.units import format_ms

_LANE_PX = 34
_GAP_PX = 4
_WIDTH = 1000  # in the drawing's own units; the page stretches it


@dataclass(frozen=True, slots=True)
class Bar:
    """A segment on a lane."""

    lane: int
    start_ms: float
    end_ms: float
    label: str
    #: Bars of one key have one colour.
    key: str


@dataclass(frozen=True, slots=True)
class Lanes:
    """A set of bars with a heading: what was predicted, or what was measured."""

    title: str
    bars: tuple[Bar, ...]
    #: When all has ended, if that is after the last bar: copies that have no bars.
    ended_ms: float = 0.0

    @property
    def latency_ms(self) -> float:
        """When all has ended."""
        return max([self.ended_ms, *(bar.end_ms for bar in self.bars)])

    def busy_ms(self, lane: int) -> float:
        """How long a lane computes."""
        return sum(bar.end_ms - bar.start_ms for bar in self.bars if bar.lane == lane)

    @property
    def overlap(self) -> float:
        """Busy time of all lanes that compute over latency: 1 is one lane at a time."""
        busy = sum(bar.end_ms - bar.start_ms for bar in self.bars if not is_copy_lane(bar.lane))
        return busy / self.latency_ms if self.latency_ms else 0.0


def predicted_lanes(plan: Plan) -> Lanes:
    """What the plan promises."""
    lanes = plan.schedule.lanes
    spans = zip(plan.segments, plan.segment_ms, strict=True)
    bars = (Bar(lanes[s[0]], start, end, _label(plan, s), _key(plan, s)) for s, (start, end) in spans)
    return Lanes("predicted", tuple(bars), plan.predicted.latency_ms)


def measured_lanes(plan: Plan, events: Sequence[Event]) -> Lanes:
    """What a traced run did."""
    bars = (
        Bar(e.lane, e.start_ms, e.end_ms, e.copied, "copies")
        if e.copied
        else Bar(e.lane, e.start_ms, e.end_ms, *(name(plan, plan.segments[e.segment]) for name in (_label, _key)))
        for e in events
    )
    return Lanes("measured", tuple(bars))


def lanes_summary(plan: Plan, sections: Sequence[Lanes]) -> list[str]:
    """Latency, idle time of each lane and overlap, predicted and measured; the prediction's error; the lower bound."""
    lines = []
    for section in sections:
        idle = ", ".join(
            f"{lane_name(lane)} {format_ms(section.latency_ms - section.busy_ms(lane))}" for lane in _lanes(section)
        )
        busy = f"{section.overlap:.2f} lanes busy on average"
        lines.append(f"{section.title}: {format_ms(section.latency_ms)}, {busy}; idle: {idle}")
    if len(sections) > 1 and sections[1].latency_ms:
        error = sections[0].latency_ms / sections[1].latency_ms - 1
        lines.append(f"the prediction is {error:+.1%} off what was measured")
    lines.append(f"no schedule on these lanes is faster than {format_ms(plan.lower_bound_ms)}")
    return lines


def timeline_html(title: str, sections: Sequence[Lanes], remarks: Sequence[str] = ()) -> str:
    """A self-contained page: each section's lanes over one common axis of time.

    Args:
        title: Heading of the page.
        sections: Predicted and measured lanes, for example.
        remarks: Lines of text below the drawing.
    """
    scale_ms = max((s.latency_ms for s in sections), default=0.0) or 1.0
    drawings = "\n".join(_section(section, scale_ms) for section in sections)
    notes = "".join(f"<li>{html.escape(remark)}</li>" for remark in remarks)
    return _PAGE.format(title=html.escape(title), drawings=drawings, notes=notes)


def chrome_trace(sections: Sequence[Lanes]) -> str:
    """The same as JSON in Chrome's trace event format: a process a section, a thread a lane, times in us."""
    events: list[dict[str, object]] = []
    for process, section in enumerate(sections):
        events.append(_meta("process_name", process, 0, section.title))
        events += [_meta("thread_name", process, lane, lane_name(lane)) for lane in _lanes(section)]
        for bar in section.bars:
            start, length = bar.start_ms * 1e3, (bar.end_ms - bar.start_ms) * 1e3
            events.append(
                {
                    "ph": "X",
                    "name": bar.label,
                    "pid": process,
                    "tid": bar.lane,
                    "ts": start,
                    "dur": length,
                    "cat": bar.key,
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _label(plan: Plan, segment: Sequence[int]) -> str:
    first = plan.operators[segment[0]]
    return first if len(segment) == 1 else f"{first} … {plan.operators[segment[-1]]} ({len(segment)} operators)"


def _key(plan: Plan, segment: Sequence[int]) -> str:
    """A layer's operators mostly share the head of their names: ``LSTM:l3.t17`` belongs to ``LSTM:l3``."""
    return plan.operators[segment[0]].rsplit(".", 1)[0].rsplit("/", 1)[0]


def _lanes(section: Lanes) -> list[int]:
    return display_order(bar.lane for bar in section.bars)


def _meta(kind: str, process: int, lane: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": {"name": name}}


def _section(section: Lanes, scale_ms: float) -> str:
    lanes = _lanes(section)
    height = len(lanes) * (_LANE_PX + _GAP_PX)
    colours = {key: at * 137 % 360 for at, key in enumerate(dict.fromkeys(b.key for b in section.bars))}
    names = "".join(f'<div style="height:{_LANE_PX}px">{lane_name(lane)}</div>' for lane in lanes)
    rectangles = "".join(
        f'<rect x="{bar.start_ms / scale_ms * _WIDTH:.3f}" y="{lanes.index(bar.lane) * (_LANE_PX + _GAP_PX)}" '
        f'width="{max((bar.end_ms - bar.start_ms) / scale_ms * _WIDTH, 0.2):.3f}" height="{_LANE_PX}" '
        f'fill="hsl({colours[bar.key]} 60% 60%)"><title>{html.escape(bar.label)}\n'
        f"{format_ms(bar.start_ms)} to {format_ms(bar.end_ms)}</title></rect>"
        for bar in section.bars
    )
    facts = f"{format_ms(section.latency_ms)}, {section.overlap:.2f} lanes busy on average"
    return (
        f'<h2>{html.escape(section.title)} <small>{facts}</small></h2><div class="chart">'
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
