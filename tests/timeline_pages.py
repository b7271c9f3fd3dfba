"""A plan and a profile for the tests of timeline pages, a page with hostile names, and the contrast of colours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import chrion.report
from chrion import Graph, Plan, Profile
from chrion.profiler import OperatorCost
from chrion.report.lane_chart import measured_chart, predicted_chart
from chrion.report.timeline_html import timeline_html
from chrion.runtime import Event
from chrion.scheduler import fixed_plan
from helpers import MACHINE, alternating_lanes

_FOLDER = Path(chrion.report.__file__).parent / "page"
#: The script of a page.
SCRIPT = "".join((_FOLDER / name).read_text(encoding="utf-8") for name in ("functions.js", "timeline.js"))
#: A name that would be executed if it became markup.
HOSTILE = "</script><script>document.title='run'</script><img src=x onerror=\"document.title='run'\">@@DATA@@\u2028'\\"


def make_plan(graph: Graph) -> Plan:
    """Return a plan on two alternating lanes; segment s runs from s to s + 1 ms."""
    return replace(fixed_plan(graph, alternating_lanes(graph)), slo_ms=7.5)


def make_profile(graph: Graph) -> Profile:
    """Return a profile under which operator i takes i + 1 ms on a core."""
    costs = {s: OperatorCost("Op", (i + 1.0, i + 1.0), None) for i, s in enumerate(graph.dag.signatures)}
    return Profile(MACHINE, 2, None, costs)


def hostile(plan: Plan) -> str:
    """Return the page of a plan whose model, operators, machine and remarks have hostile names."""
    machine = replace(plan.machine, cpu=HOSTILE)
    bad = replace(plan, model=HOSTILE, policy=HOSTILE, operators=(HOSTILE,) * 4, machine=machine)
    charts = [predicted_chart(bad), measured_chart(bad, [Event(1 << 20, -1, 0.0, 1.0, HOSTILE)])]
    return timeline_html(bad, charts, [HOSTILE])


def linear(colour: str) -> list[float]:
    """Return linear red, green and blue of an sRGB colour."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, 1 to 21, by WCAG 2."""
    found = [
        sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True)) for colour in (one, other)
    ]
    dark, light = sorted(found)
    return (light + 0.05) / (dark + 0.05)
