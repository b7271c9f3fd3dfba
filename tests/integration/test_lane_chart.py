"""Charts of lanes, their summary and their trace."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from chrion import Plan, load
from chrion.report.lane_chart import (
    LaneChart,
    LaneSpan,
    chart_summary,
    chrome_trace,
    measured_chart,
    predicted_chart,
    prediction_error,
    share_scale,
)
from chrion.runtime import Event
from chrion.scheduler import Prediction, fixed_plan
from helpers import alternating_lanes, branches


@pytest.fixture
def plan() -> Plan:
    """Return a plan on two alternating lanes; segment s runs from s to s + 1 ms."""
    graph = load(branches())
    return fixed_plan(graph, alternating_lanes(graph))


def test_predicted_spans_are_the_plans_segments(plan: Plan) -> None:
    """A span has the lane, start and end of the plan's segment."""
    chart = predicted_chart(plan)
    assert [(b.lane, b.start_ms, b.end_ms) for b in chart.spans] == [
        (plan.schedule.lanes[s[0]], float(at), float(at + 1)) for at, s in enumerate(plan.segments)
    ]
    assert chart.latency_ms == len(plan.segments)
    assert chart.overlap == 1.0  # one at a time


def test_a_wide_segment_has_a_span_on_each_core() -> None:
    """Predicted and measured, a segment on two cores keeps both busy."""
    graph = load(branches())
    n = len(graph.dag)
    plan = fixed_plan(graph, [1] * n, widths=[2] * n)
    assert [(b.lane, b.segment) for b in predicted_chart(plan).spans] == [(1, 0), (2, 0)]
    measured = measured_chart(plan, [Event(1, 0, 0.5, 2.0)])
    assert [(b.lane, b.start_ms, b.end_ms) for b in measured.spans] == [(1, 0.5, 2.0), (2, 0.5, 2.0)]


def test_predicted_latency_includes_copies_after_the_last_span(plan: Plan) -> None:
    """The latency includes the copies of outputs after the last segment. A predicted chart has no spans of copies."""
    chart = predicted_chart(replace(plan, predicted=Prediction(1000.0, 0.0, 0.0)))
    assert chart.latency_ms == 1000.0


def test_measured_spans_are_the_events(plan: Plan) -> None:
    """Two lanes that run in parallel for half of the time overlap by a half."""
    chart = measured_chart(plan, [Event(1, 0, 0.0, 2.0), Event(2, 1, 1.0, 2.0)])
    assert [(b.lane, b.start_ms, b.end_ms) for b in chart.spans] == [(1, 0.0, 2.0), (2, 1.0, 2.0)]
    assert chart.spans[0].label == plan.operators[plan.segments[0][0]]
    assert chart.overlap == 1.5


def test_a_trace_has_chromes_event_format(plan: Plan) -> None:
    """Charts are processes, lanes are threads, and times are in microseconds."""
    events = json.loads(chrome_trace([predicted_chart(plan), measured_chart(plan, [Event(2, 1, 0.5, 2.0)])]))[
        "traceEvents"
    ]
    bars = [e for e in events if e["ph"] == "X"]
    assert len(bars) == len(plan.segments) + 1
    assert (bars[-1]["pid"], bars[-1]["tid"], bars[-1]["ts"], bars[-1]["dur"]) == (1, 2, 500.0, 1500.0)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(0, 1): "cpu1", (0, 2): "cpu2", (1, 2): "cpu2"}


@pytest.mark.parametrize(
    ("predicted_ms", "measured_ms", "line"),
    [
        (8.0, 10.0, "prediction error: -20.0 % of the measured latency"),
        (12.0, 10.0, "prediction error: +20.0 % of the measured latency"),
        (10.0, 10.0, "prediction error: +0.0 % of the measured latency"),
        (1.0, 71.4, "the measured latency is 71.40 times the predicted one"),
        (1.0, 1930.0, "the measured latency is 1930 times the predicted one"),
        (30.0, 10.0, "the measured latency is 0.33 times the predicted one"),
    ],
)
def test_a_large_prediction_error_is_a_factor(predicted_ms: float, measured_ms: float, line: str) -> None:
    """The error is a percentage up to a factor of two, and a factor beyond that."""
    assert prediction_error(predicted_ms, measured_ms) == line


def test_the_summary_has_idle_times_in_one_unit_and_only_those_of_lanes_that_are_idle(plan: Plan) -> None:
    """That of the latency; a lane that is busy throughout is left out, also if rounding makes it busier than that."""
    spans = (LaneSpan(1, 0.0, 1.1, "a", 0), LaneSpan(1, 1.1, 3.3, "b", 1), LaneSpan(1, 0.0, 1e-17, "c", 2))
    lines = chart_summary(plan, [LaneChart("predicted", spans)])
    assert lines[0] == "predicted: 3.30 ms, 1.00 lanes busy on average"
    assert lines[-1].startswith("lower bound of any schedule")
    others = (LaneSpan(2, 0.0, 3.26, "d", 3), LaneSpan(3, 0.0, 3.297, "e", 4), LaneSpan(4, 0.0, 1.0, "f", 5))
    line = chart_summary(plan, [LaneChart("predicted", (*spans, *others))])[0]
    assert line.endswith("; idle: cpu2 0.04 ms, cpu4 2.30 ms")


@pytest.mark.parametrize(("latencies", "shared"), [((10.0, 29.0), True), ((10.0, 31.0), False), ((0.0, 5.0), True)])
def test_charts_of_similar_length_share_a_scale(latencies: tuple[float, float], shared: bool) -> None:  # noqa: FBT001
    """Charts share a scale unless one is more than three times as long as another.

    A chart without spans has no length.
    """
    charts = [LaneChart("x", (LaneSpan(1, 0.0, ms, "a", 0),)) for ms in latencies]
    assert share_scale(charts) == shared
