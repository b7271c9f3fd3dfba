"""Charts of lanes over time, the segments of a plan as predicted or as measured in one request, and their trace."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chrion.common.lane_numbers import display_order, is_copy_lane, lane_name
from chrion.common.units import format_ms, format_ms_like
from chrion.runtime.execution.executor import Event
from chrion.scheduler.plan import Plan

#: Charts whose latencies differ by a greater factor have separate time scales by default: the shorter one would use
#: less than a third of the width.
_COMMON_SCALE = 3.0
#: An SLO greater than the latency by more than this factor is outside the time axis: the chart would be mostly empty.
_SLO_SCALE = 2.0


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """One segment's run, or one copy, on a lane. A segment on several cores has a span on each of their lanes."""

    lane: int
    start_ms: float
    end_ms: float
    #: The segment's operators, or the name of the copied value.
    label: str
    #: Index of the plan's segment; -1 for a copy.
    segment: int = -1


@dataclass(frozen=True, slots=True)
class LaneChart:
    """The spans of all lanes of one request."""

    #: ``predicted`` or ``measured``.
    title: str
    spans: tuple[LaneSpan, ...]
    #: Predicted end of the request in ms, which may be after the last span, because predicted copies have no spans; 0
    #: if the chart is measured.
    end_ms: float = 0.0

    @property
    def lanes(self) -> list[int]:
        """The lanes that have spans, in display order."""
        return display_order(span.lane for span in self.spans)

    @property
    def latency_ms(self) -> float:
        """Time from the start of the request to its end, in ms."""
        return max([self.end_ms, *(span.end_ms for span in self.spans)])

    def busy_ms(self, lane: int) -> float:
        """Return the total duration of the spans of a lane, in ms."""
        return sum(span.end_ms - span.start_ms for span in self.spans if span.lane == lane)

    @property
    def overlap(self) -> float:
        """Mean number of computing lanes that are busy at a time; 1.0 means that lanes never run in parallel."""
        busy = sum(span.end_ms - span.start_ms for span in self.spans if not is_copy_lane(span.lane))
        return busy / self.latency_ms if self.latency_ms else 0.0


def predicted_chart(plan: Plan) -> LaneChart:
    """Return the chart of a plan's predicted segments; its title is ``estimated`` if no cost was measured."""
    spans = tuple(
        LaneSpan(lane, start_ms, end_ms, _label(plan, segment), at)
        for at, (segment, (start_ms, end_ms)) in enumerate(zip(plan.segments, plan.segment_ms, strict=True))
        for lane in plan.schedule.occupied(segment[0])
    )
    title = "estimated" if plan.machine.hardware else "predicted"
    return LaneChart(title, spans, plan.predicted.latency_ms)


def measured_chart(plan: Plan, events: Sequence[Event]) -> LaneChart:
    """Return the chart of one traced request."""
    spans: list[LaneSpan] = []
    for e in events:
        if e.copied:
            spans.append(LaneSpan(e.lane, e.start_ms, e.end_ms, e.copied))
            continue
        segment = plan.segments[e.segment]
        label = _label(plan, segment)
        occupied = plan.schedule.occupied(segment[0])
        spans += [LaneSpan(lane, e.start_ms, e.end_ms, label, e.segment) for lane in occupied]
    return LaneChart("measured", tuple(spans))


def share_scale(charts: Sequence[LaneChart]) -> bool:
    """Return whether one time scale suits all charts: no latency is more than three times another."""
    latencies = [chart.latency_ms for chart in charts if chart.latency_ms > 0]
    return not latencies or max(latencies) <= _COMMON_SCALE * min(latencies)


def axis_end_ms(chart: LaneChart, slo_ms: float | None) -> float:
    """Return the end of a chart's time axis in ms, after its last span and after the SLO unless that is far away."""
    end_ms = chart.latency_ms or 1.0
    if slo_ms is not None and end_ms < slo_ms <= _SLO_SCALE * end_ms:
        end_ms = slo_ms
    return 1.02 * end_ms


def chart_summary(plan: Plan, charts: Sequence[LaneChart]) -> list[str]:
    """Return lines of text: the latency, overlap and idle times of each chart, prediction error and lower bound."""
    lines = []
    for chart in charts:
        idle = ", ".join(_idle_times(chart))
        busy = f"{chart.overlap:.2f} lanes busy on average"
        lines.append(f"{chart.title}: {format_ms(chart.latency_ms)}, {busy}" + (f"; idle: {idle}" if idle else ""))
    if len(charts) > 1 and charts[1].latency_ms:
        lines.append(prediction_error(charts[0].latency_ms, charts[1].latency_ms))
    lines.append(f"lower bound of any schedule on these lanes: {format_ms(plan.lower_bound_ms)}")
    return lines


def _idle_times(chart: LaneChart) -> Iterator[str]:
    """Yield the idle time of each lane in the unit of the latency, but not that of a lane without any."""
    never = format_ms_like(0.0, chart.latency_ms)
    for lane in chart.lanes:
        idle = format_ms_like(max(0.0, chart.latency_ms - chart.busy_ms(lane)), chart.latency_ms)
        if idle != never:
            yield f"{lane_name(lane)} {idle}"


def prediction_error(predicted_ms: float, measured_ms: float) -> str:
    """Return one line that compares a predicted latency with the measured one, as a percentage or as a factor."""
    if predicted_ms <= 0 or not 0.5 <= predicted_ms / measured_ms <= 2:
        factor = measured_ms / predicted_ms if predicted_ms > 0 else math.inf
        return f"the measured latency is {factor:.{0 if factor >= 100 else 2}f} times the predicted one"
    return f"prediction error: {(predicted_ms / measured_ms - 1) * 100:+.1f} % of the measured latency"


def _label(plan: Plan, segment: Sequence[int]) -> str:
    first = plan.operators[segment[0]]
    return first if len(segment) == 1 else f"{first} … {plan.operators[segment[-1]]} ({len(segment)} operators)"


def chrome_trace(charts: Sequence[LaneChart]) -> str:
    """Return charts as JSON in Chrome's trace event format: a process per chart, a thread per lane, times in us."""
    events: list[dict[str, object]] = []
    for process, chart in enumerate(charts):
        events.append(_meta("process_name", process, 0, chart.title))
        events += [_meta("thread_name", process, lane, lane_name(lane)) for lane in chart.lanes]
        for span in chart.spans:
            start, length = span.start_ms * 1e3, (span.end_ms - span.start_ms) * 1e3
            events.append(
                {
                    "ph": "X",
                    "name": span.label,
                    "pid": process,
                    "tid": span.lane,
                    "ts": start,
                    "dur": length,
                    "cat": "copy" if span.segment < 0 else "segment",
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _meta(kind: str, process: int, lane: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": {"name": name}}
