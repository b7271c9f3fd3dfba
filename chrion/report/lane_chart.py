"""Lanes over time, predicted or measured, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chrion.lane_numbers import display_order, is_copy_lane, lane_name
from chrion.runtime.execution.executor import Event
from chrion.scheduler.plan import Plan
from chrion.units import format_ms


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """A segment on a lane."""

    lane: int
    start_ms: float
    end_ms: float
    label: str
    #: Bars of one key have one colour.
    key: str


@dataclass(frozen=True, slots=True)
class LaneChart:
    """A set of bars with a heading: what was predicted, or what was measured."""

    title: str
    spans: tuple[LaneSpan, ...]
    #: When all has ended, if that is after the last span: copies that have no bars.
    ended_ms: float = 0.0

    @property
    def lanes(self) -> list[int]:
        """The lanes that have bars, in display order."""
        return display_order(span.lane for span in self.spans)

    @property
    def latency_ms(self) -> float:
        """When all has ended."""
        return max([self.ended_ms, *(span.end_ms for span in self.spans)])

    def busy_ms(self, lane: int) -> float:
        """How long a lane computes."""
        return sum(span.end_ms - span.start_ms for span in self.spans if span.lane == lane)

    @property
    def overlap(self) -> float:
        """Busy time of all lanes that compute over latency: 1 is one lane at a time."""
        busy = sum(span.end_ms - span.start_ms for span in self.spans if not is_copy_lane(span.lane))
        return busy / self.latency_ms if self.latency_ms else 0.0


def predicted_chart(plan: Plan) -> LaneChart:
    """What the plan promises."""
    lanes = plan.schedule.lanes
    spans = zip(plan.segments, plan.segment_ms, strict=True)
    bars = (LaneSpan(lanes[s[0]], start, end, _label(plan, s), _key(plan, s)) for s, (start, end) in spans)
    return LaneChart("predicted", tuple(bars), plan.predicted.latency_ms)


def measured_chart(plan: Plan, events: Sequence[Event]) -> LaneChart:
    """What a traced run did."""
    bars = (
        LaneSpan(e.lane, e.start_ms, e.end_ms, e.copied, "copies")
        if e.copied
        else LaneSpan(e.lane, e.start_ms, e.end_ms, *(name(plan, plan.segments[e.segment]) for name in (_label, _key)))
        for e in events
    )
    return LaneChart("measured", tuple(bars))


def chart_summary(plan: Plan, charts: Sequence[LaneChart]) -> list[str]:
    """Latency, idle time of each lane and overlap, predicted and measured; the prediction's error; the lower bound."""
    lines = []
    for chart in charts:
        idle = ", ".join(
            f"{lane_name(lane)} {format_ms(chart.latency_ms - chart.busy_ms(lane))}" for lane in chart.lanes
        )
        busy = f"{chart.overlap:.2f} lanes busy on average"
        lines.append(f"{chart.title}: {format_ms(chart.latency_ms)}, {busy}; idle: {idle}")
    if len(charts) > 1 and charts[1].latency_ms:
        error = charts[0].latency_ms / charts[1].latency_ms - 1
        lines.append(f"the prediction is {error:+.1%} off what was measured")
    lines.append(f"no schedule on these lanes is faster than {format_ms(plan.lower_bound_ms)}")
    return lines


def _label(plan: Plan, segment: Sequence[int]) -> str:
    first = plan.operators[segment[0]]
    return first if len(segment) == 1 else f"{first} … {plan.operators[segment[-1]]} ({len(segment)} operators)"


def _key(plan: Plan, segment: Sequence[int]) -> str:
    """A layer's operators mostly share the head of their names: ``LSTM:l3.t17`` belongs to ``LSTM:l3``."""
    return plan.operators[segment[0]].rsplit(".", 1)[0].rsplit("/", 1)[0]
