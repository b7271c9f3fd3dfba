"""Lanes over time as an HTML page: one file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chrion.common.lane_numbers import lane_name
from chrion.common.units import format_mb, format_ms
from chrion.graph.model import Graph
from chrion.profiler.profiles import Profile
from chrion.report.lane_chart import LaneChart, prediction_error
from chrion.report.tables import objective
from chrion.report.timeline_data import OperatorFacts, timeline_data
from chrion.scheduler.plan import Plan

_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = ("functions.js", "timeline.js")
#: Characters that could end a script element or start a comment in it.
_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def timeline_html(
    plan: Plan,
    charts: Sequence[LaneChart],
    remarks: Sequence[str] = (),
    *,
    graph: Graph | None = None,
    profile: Profile | None = None,
) -> str:
    """Return a page that shows charts of lanes, to be zoomed, searched and clicked on.

    The page's content security policy allows its own script and nothing else, so that no name in a model can run code.

    Args:
        plan: The plan.
        charts: The predicted and, if known, the measured chart.
        remarks: Lines of text.
        graph: The model's graph; gives the operators' types and sizes.
        profile: The profile that the plan was made with; together with ``graph`` it gives the operators' costs.

    Raises:
        PlanError: The plan is not for this graph.
    """
    data = timeline_data(plan, charts, remarks, OperatorFacts.of(plan, graph, profile))
    script = "".join((_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _fill(
        (_FOLDER / "timeline.html").read_text(encoding="utf-8"),
        {
            "TITLE": html.escape(f"{plan.model}: timeline"),
            "MODEL": html.escape(plan.model),
            "DIGEST": digest,
            "STYLE": (_FOLDER / "timeline.css").read_text(encoding="utf-8"),
            "FACTS": _facts(plan, charts),
            "SUMMARY": _summary(charts),
            "REMARKS": "".join(f"<li>{html.escape(remark)}</li>" for remark in remarks),
            "DATA": script_json(data),
            "SCRIPT": script,
        },
    )


def script_json(content: Any) -> str:
    """Return JSON for a script element; characters with a meaning in HTML are escaped."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Replace each ``@@NAME@@`` of a template; a value that contains such text is left as it is."""
    return re.sub(r"@@([A-Z]+)@@", lambda match: values[match[1]], template)


def _facts(plan: Plan, charts: Sequence[LaneChart]) -> str:
    """Return the header's list of terms and values."""
    facts = {
        "policy": plan.policy,
        "objective": objective(plan),
        "machine": str(plan.machine),
        "operators": f"{plan.operator_counts} in {len(plan.segments)} segments",
    }
    if plan.accelerator:
        facts["accelerator memory"] = f"{format_mb(plan.predicted.resident_mb)} resident"
    facts["SLO"] = "none" if plan.slo_ms is None else ", ".join([_time(plan.slo_ms), *_verdicts(plan.slo_ms, charts)])
    facts |= {f"{chart.title} latency": _time(chart.latency_ms) for chart in charts}
    if len(charts) > 1 and charts[1].latency_ms:
        facts["accuracy"] = prediction_error(charts[0].latency_ms, charts[1].latency_ms)
    facts["lower bound"] = _time(plan.lower_bound_ms)
    return "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in facts.items())


def _verdicts(slo_ms: float, charts: Sequence[LaneChart]) -> list[str]:
    return [f"{'met' if chart.latency_ms <= slo_ms else 'missed'} as {chart.title}" for chart in charts]


def _summary(charts: Sequence[LaneChart]) -> str:
    """Return the rows of the table of lanes."""
    return "".join(
        f"<tr><td>{html.escape(chart.title)}</td><td>{lane_name(lane)}</td><td>{_time(chart.busy_ms(lane))}</td>"
        f"<td>{_time(max(0.0, chart.latency_ms - chart.busy_ms(lane)))}</td></tr>"
        for chart in charts
        for lane in chart.lanes
    )


def _time(ms: float) -> str:
    """Return a duration in the page's notation."""
    return "0 ms" if ms == 0 else format_ms(ms).replace(" us", " µs")
