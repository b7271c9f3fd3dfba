"""Timelines and tables."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from chrion import Plan, load
from chrion.benchmark.latency import Timing
from chrion.report import (
    bench_table,
    bench_verdict,
    chrome_trace,
    measured_chart,
    memory_line,
    plan_table,
    predicted_chart,
    timeline_html,
    verdict,
)
from chrion.runtime import Event
from chrion.scheduler import Prediction, fixed_plan
from helpers import alternating_lanes, branches


@pytest.fixture
def plan() -> Plan:
    """Two lanes in turn; segment s runs from s to s + 1 ms."""
    graph = load(branches())
    return fixed_plan(graph, alternating_lanes(graph))


def test_predicted_bars_are_the_plans_segments(plan: Plan) -> None:
    """Lane, start and end of each."""
    lanes = predicted_chart(plan)
    assert [(b.lane, b.start_ms, b.end_ms) for b in lanes.spans] == [
        (plan.schedule.lanes[s[0]], float(at), float(at + 1)) for at, s in enumerate(plan.segments)
    ]
    assert lanes.latency_ms == len(plan.segments)
    assert lanes.overlap == 1.0  # one at a time


def test_predicted_latency_counts_copies_after_the_last_bar(plan: Plan) -> None:
    """Outputs are copied back when the last segment has ended; measured lanes have bars for that."""
    lanes = predicted_chart(replace(plan, predicted=Prediction(1000.0, 0.0, 0.0)))
    assert lanes.latency_ms == 1000.0


def test_measured_bars_are_the_events(plan: Plan) -> None:
    """Two lanes busy at once for half of the time overlap by a half."""
    lanes = measured_chart(plan, [Event(1, 0, 0.0, 2.0), Event(2, 1, 1.0, 2.0)])
    assert [(b.lane, b.start_ms, b.end_ms) for b in lanes.spans] == [(1, 0.0, 2.0), (2, 1.0, 2.0)]
    assert lanes.spans[0].label == plan.operators[plan.segments[0][0]]
    assert lanes.overlap == 1.5


def test_the_trace_is_chromes_format(plan: Plan) -> None:
    """A process a section, a thread a lane, times in microseconds."""
    events = json.loads(chrome_trace([predicted_chart(plan), measured_chart(plan, [Event(2, 1, 0.5, 2.0)])]))[
        "traceEvents"
    ]
    bars = [e for e in events if e["ph"] == "X"]
    assert len(bars) == len(plan.segments) + 1
    assert (bars[-1]["pid"], bars[-1]["tid"], bars[-1]["ts"], bars[-1]["dur"]) == (1, 2, 500.0, 1500.0)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(0, 1): "cpu1", (0, 2): "cpu2", (1, 2): "cpu2"}


class _Balance(HTMLParser):
    """Notes tags that are opened and never closed, and bars."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.bars: list[tuple[float, float]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta", "input"}:
            self.open.append(tag)
        if tag == "rect":
            found = dict(attrs)
            self.bars.append((float(found["x"] or 0), float(found["width"] or 0)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else_and_shows_every_bar(plan: Plan) -> None:
    """No address in it; names are escaped; both sections share one axis."""
    measured = measured_chart(plan, [Event(1, 0, 0.0, 2.0 * len(plan.segments))])
    page = timeline_html(replace(plan, model="<model> & co"), [predicted_chart(plan), measured], ["a <remark>"])
    assert "<model>" not in page
    assert "a &lt;remark&gt;" in page
    assert not re.search(r"https?://|src=|@import|<link", page)
    parser = _Balance()
    parser.feed(page.replace("<!doctype html>", ""))
    assert parser.open == []
    n = len(plan.segments)
    assert parser.bars == [
        *((pytest.approx(500 * at / n, abs=0.01), pytest.approx(500 / n, abs=0.01)) for at in range(n)),
        (0.0, 1000.0),
    ]


def shown(thing: object) -> str:
    """A table as text."""
    console = Console(width=200, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    with console.file:
        console.print(thing)
        return console.export_text()


def test_the_plan_table_compares_with_the_accelerator(plan: Plan) -> None:
    """40 ms against 50 is 20 % less, 25 MB against 100 is 75 % less."""
    object.__setattr__(plan, "predicted", Prediction(40.0, 25.0, 25.0))
    object.__setattr__(plan, "accelerator_only", Prediction(50.0, 100.0, 100.0))
    text = shown(plan_table(plan))
    assert "-20.0 %" in text
    assert "-75.0 %" in text


def test_verdicts_are_honest(plan: Plan) -> None:
    """Met, missed, or no SLO; won, level, or lost."""
    assert verdict(plan).startswith("no SLO")
    object.__setattr__(plan, "slo_ms", 100.0)
    assert verdict(plan).startswith("meets")
    object.__setattr__(plan, "slo_ms", 1.0)
    assert verdict(plan).startswith("misses")
    for ours, expected in ((5.0, "hybrid wins: 0.50"), (10.1, "level: 1.01"), (20.0, "does not win here: 2.00")):
        timings = [Timing(n, ms, ms, ms, 5) for n, ms in (("hybrid", ours), ("a", 10.0), ("b", 11.0))]
        assert expected in bench_verdict(timings, "hybrid")
        assert "against a" in shown(bench_table(timings, "hybrid", 7.0))


@pytest.mark.parametrize(
    ("measured", "told"), [(412.5, "measured at most 412.5 MB"), (None, "not known"), (0.0, "0.0 MB")]
)
def test_memory_is_told_both_ways_beside_what_was_measured(measured: float | None, told: str) -> None:
    """Equation 4's sum, what an arena must hold, and the driver's word where there is one."""
    line = memory_line(Prediction(40.0, 948.1, 400.5), measured)
    assert all(text in line for text in ("948.1 MB", "400.5 MB", told))
