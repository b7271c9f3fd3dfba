"""The behaviour of the timeline page in a browser."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from browser import CHROMIUM
from browser import browse as open_page
from chrion import Graph, Plan, Profile, load
from chrion.report.categories import (
    BACKGROUND,
    COLOURS,
    DARK_BACKGROUND,
    DARK_COLOURS,
    DARK_OTHER_COLOUR,
    OTHER_COLOUR,
)
from chrion.report.lane_chart import measured_chart, predicted_chart
from chrion.report.timeline_html import timeline_html
from chrion.runtime import Event
from helpers import branches
from timeline_pages import SCRIPT, contrast, hostile, make_plan, make_profile

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium is installed")
#: A function that returns a CSS colour in hexadecimal digits.
HEX = """(css) => "#" + css.match(/\\d+/g).slice(0, 3)
  .map((c) => Number(c).toString(16).padStart(2, "0")).join("").toUpperCase()"""
#: A function that returns the colours of large parts of a panel's first lane, without those of the page and of text.
AREAS = f"""(panel) => {{
  const box = panel.plot, width = Math.floor(box.right - box.left), counts = new Map();
  const pixels = panel.canvas.getContext("2d").getImageData(Math.ceil(box.left) + 2, box.top + 2, width - 20, 24).data;
  for (let i = 0; i < pixels.length; i += 4) {{
    if (pixels[i + 3] !== 255) continue;
    const colour = ({HEX})(`rgb(${{pixels[i]}}, ${{pixels[i + 1]}}, ${{pixels[i + 2]}})`);
    counts.set(colour, (counts.get(colour) || 0) + 1);
  }}
  const own = ({HEX})(getComputedStyle(document.body).backgroundColor);
  const texts = [own, "#FFFFFF", "#000000"];
  const large = [...counts].filter(([, count]) => count > pixels.length / 400);
  return large.map(([colour]) => colour).filter((colour) => !texts.includes(colour));
}}"""


@pytest.fixture
def graph() -> Graph:
    return load(branches())


@pytest.fixture
def plan(graph: Graph) -> Plan:
    return make_plan(graph)


@pytest.fixture
def profile(graph: Graph) -> Profile:
    return make_profile(graph)


def browse(folder: Path, page: str) -> str:
    """Return a page's elements after its scripts have run."""
    (folder / "page.html").write_text(page, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=15000", "--window-size=1200,900"]
    flags += ["--disable-extensions", "--no-first-run", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    command = [CHROMIUM, *flags, (folder / "page.html").as_uri()]
    environment = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)  # noqa: S603 - chromium
    return done.stdout


def evaluate(folder: Path, expression: str) -> Any:
    """Return the value of an expression that uses the script's pure functions."""
    body = f"(function(document) {{ {SCRIPT}\nreturn {expression}; }})(undefined)"
    shown = f"document.querySelector('pre').textContent = JSON.stringify({body})"
    page = f"<!doctype html><meta charset=utf-8><pre></pre><script>{shown}</script>"
    return json.loads(html.unescape(browse(folder, page).split("<pre>")[1].split("</pre>")[0]))


def test_ticks(tmp_path: Path) -> None:
    """Steps are 1, 2 or 5 x 10^n at every zoom.

    Labels are distinct and accurate to a thousandth of a step, and there are 3 to 11 of them.
    """
    ranges = [
        (start, start + 10.0**power * factor)
        for start in (0.0, 0.0371, 52.0314159, 1234.5678)
        for power in range(-5, 6)
        for factor in (1.0, 1.7, 3.3, 9.9)
    ]
    found = evaluate(tmp_path, f"{json.dumps(ranges)}.map(([start, end]) => makeTicks(start, end, 10))")
    scales = {"s": 1000.0, "ms": 1.0, "µs": 1e-3}
    for (start, end), axis in zip(ranges, found, strict=True):
        scale = scales[axis["unit"]]
        times = [tick["ms"] for tick in axis["ticks"]]
        labels = [tick["label"] for tick in axis["ticks"]]
        assert 3 <= len(times) <= 11, (start, end)
        assert all(start - 1e-9 * end <= ms <= end * (1 + 1e-9) for ms in times)
        steps = {float(f"{b - a:.2g}") for a, b in pairwise(times)}
        assert len(steps) == 1, (start, end, steps)
        assert f"{steps.pop() / scale:.0e}"[0] in "125"
        assert len(set(labels)) == len(labels)
        step = times[1] - times[0]
        assert all(abs(float(label) * scale - ms) <= step / 1000 for label, ms in zip(labels, times, strict=True))


def test_durations_and_sizes_have_units(tmp_path: Path) -> None:
    """Durations have three digits and a suitable unit; zero is "0 ms", and a missing value "not known"."""
    times = evaluate(tmp_path, "[0, 1234, 59.31, 4.706, 0.83, 0.00042, null].map(formatMs)")
    assert times == ["0 ms", "1.23 s", "59.3 ms", "4.71 ms", "830 µs", "0.420 µs", "not known"]
    sizes = evaluate(tmp_path, "[0, 999, 1000, 132608, 4100000, null].map(formatBytes)")
    assert sizes == ["0 B", "999 B", "1.0 kB", "133 kB", "4.1 MB", "not known"]


def test_zooming_keeps_the_time_under_the_pointer(tmp_path: Path) -> None:
    """Views stay within the chart and never become empty after any number of zooms and moves."""
    view = evaluate(tmp_path, "zoomed({start: 10, end: 30}, 0.25, 0.5, 100)")
    assert (view["start"] + 0.25 * (view["end"] - view["start"]), view["end"] - view["start"]) == (15.0, 10.0)
    assert evaluate(tmp_path, "zoomed({start: 10, end: 30}, 0.25, 100, 100)") == {"start": 0, "end": 100}
    assert evaluate(tmp_path, "moved({start: 10, end: 30}, 1000, 100)") == {"start": 80, "end": 100}
    assert evaluate(tmp_path, "moved({start: 10, end: 30}, -1000, 100)") == {"start": 0, "end": 20}
    deep = evaluate(
        tmp_path,
        "Array(500).fill(0.5).reduce((view, factor) => zoomed(view, 0.7, factor, 100), {start: 0, end: 100})",
    )
    assert 0 < deep["end"] - deep["start"] <= 1e-5 * 1.001


def test_segments_are_divided_by_cost(tmp_path: Path) -> None:
    """A segment of two operators that cost 1 and 3 is divided at a quarter; without costs it is one bar."""
    data = "{operators: {predicted_ms: [1, 3]}, segments: [[0, 1]]}"
    chart = "{spans: {lane: [0], start_ms: [10], end_ms: [18], segment: [0]}}"
    bars = evaluate(tmp_path, f"laneBars({data}, {chart}, 0)")
    assert (bars["start"], bars["end"], bars["operator"]) == ([10, 12], [12, 18], [0, 1])
    whole = evaluate(tmp_path, f"laneBars({data.replace('predicted_ms: [1, 3]', '')}, {chart}, 0)")
    assert (whole["start"], whole["end"]) == ([10], [18])


def test_narrow_bars_are_merged(tmp_path: Path) -> None:
    """Adjacent narrow bars form blocks of the given width; gaps and wide bars end a block."""
    starts = [0, 1, 2, 3, 4, 5, 20, 21, 40]
    ends = [1, 2, 3, 4, 5, 15, 21, 22, 41]
    bars = f"{{start: {starts}, end: {ends}}}"
    found = evaluate(
        tmp_path, f"mergeBars({bars}, 2, 3).map((group) => [group.first, group.last, group.start, group.end])"
    )
    assert found == [[0, 2, 0, 3], [3, 4, 3, 5], [5, 5, 5, 15], [6, 7, 20, 22], [8, 8, 40, 41]]
    apart = evaluate(tmp_path, f"mergeBars({bars}, 0.5, 3).length")
    assert apart == len(starts)


def test_blocks_show_the_shares_of_their_categories(tmp_path: Path) -> None:
    """Categories with small shares are added up; together the shares are one, also of bars without duration."""
    bars = "{start: [0, 6, 9, 9.5], end: [6, 9, 9.5, 10]}"
    group = "{first: 0, last: 3}"
    found = evaluate(tmp_path, f"sharesOf({bars}, {group}, (at) => [2, 0, 1, 3][at], 0.2)")
    assert found["categories"] == 4
    assert [(part["category"], pytest.approx(part["share"])) for part in found["parts"]] == [
        (0, 0.3),
        (2, 0.6),
        (None, 0.1),
    ]
    none = evaluate(tmp_path, "sharesOf({start: [1, 1], end: [1, 1]}, {first: 0, last: 1}, (at) => at, 0)")
    assert [part["share"] for part in none["parts"]] == [0.5, 0.5]


def test_labels_are_short_names_in_a_readable_colour(tmp_path: Path) -> None:
    """A label has neither folders nor the type of an unnamed node, and a contrast of at least 4.5 to its bar."""
    names = ["/encoder/layer.3/MatMul", "LSTM:l3.t17.h", "Conv_12", "a:", "/"]
    assert evaluate(tmp_path, f"{json.dumps(names)}.map(shortName)") == ["MatMul", "l3.t17.h", "Conv_12", "a:", "/"]
    colours = [*COLOURS, *DARK_COLOURS, OTHER_COLOUR, DARK_OTHER_COLOUR]
    inks = evaluate(tmp_path, f"{json.dumps(colours)}.map(inkOn)")
    assert all(contrast(ink, colour) >= 4.5 for ink, colour in zip(inks, colours, strict=True))


def large_page(plan: Plan, count: int = 1154) -> str:
    """Return the page of a plan of many short operators of twelve layers on two lanes."""
    schedule = replace(plan.schedule, order=tuple(range(count)), lanes=tuple(1 + i % 2 for i in range(count)))
    names = tuple(f"LSTM:l{i % 12}.t{i // 12}.h" for i in range(count))
    times = tuple((0.01 * (i // 2), 0.01 * (i // 2 + 1)) for i in range(count))
    segments = tuple((i,) for i in range(count))
    large = replace(plan, schedule=schedule, operators=names, segments=segments, segment_ms=times, slo_ms=None)
    return timeline_html(large, [predicted_chart(large)])


def test_a_large_plan_is_blocks_until_it_is_zoomed(plan: Plan, tmp_path: Path) -> None:
    """A click on a block of many operators zooms in to it, and the bars that are then wide enough can be selected."""
    script = """
      const groups = () => { const { view, plot } = panel, scale = (view.end - view.start) / (plot.right - plot.left);
        return mergeBars(panel.lanes[0], 5 * scale, 64 * scale).length; };
      const before = [groups(), panel.view.end - panel.view.start];
      click(1, 0);
      const zoomed = panel.view.end - panel.view.start, none = chosen() === undefined;
      click((panel.view.start + panel.view.end) / 2 + 0.004, 0);
      return { before, zoomed, none, chosen: chosen() };
    """
    seen = drive(tmp_path, large_page(plan), script)
    blocks, whole = seen["before"]
    assert blocks < 30
    assert seen["zoomed"] < whole / 10
    assert seen["none"]
    assert seen["chosen"].startswith("LSTM:l")


@pytest.mark.parametrize("dark", [False, True])
def test_bars_stand_out_from_their_background(plan: Plan, dark: bool, tmp_path: Path) -> None:  # noqa: FBT001 - a parameter
    """Every large area of a lane has a contrast of at least 3 to the page, and nothing overflows at 390 pixels."""
    (tmp_path / "page.html").write_text(large_page(plan), encoding="utf-8")
    (tmp_path / "browser").mkdir()
    with open_page("about:blank", tmp_path / "browser") as page:
        page.emulate(390, dark=dark)
        page.go((tmp_path / "page.html").as_uri())
        page.wait_for("typeof chrionTimeline !== 'undefined' && chrionTimeline.panels[0]?.plot?.right > 0")
        assert page.value("document.documentElement.scrollWidth") <= 390
        background = page.value(f"({HEX})(getComputedStyle(document.body).backgroundColor)")
        assert background == (DARK_BACKGROUND if dark else BACKGROUND)
        seen = page.wait_for(f"({AREAS})(chrionTimeline.panels[0])")
    assert len(seen) >= 1
    assert all(contrast(colour, background) >= 3 for colour in seen)


def test_the_page_runs_with_hostile_names(plan: Plan, tmp_path: Path) -> None:
    """The legend is built, and no name is executed as code."""
    dom = browse(tmp_path, hostile(plan))
    assert "aria-pressed" in dom
    assert "<title>run</title>" not in dom
    assert "<img" not in dom


def test_the_page_draws_its_charts(plan: Plan, graph: Graph, profile: Profile, tmp_path: Path) -> None:
    """Both charts and the legend of operator types appear."""
    charts = [predicted_chart(plan), measured_chart(plan, [Event(1, 0, 0.0, 4.0)])]
    dom = browse(tmp_path, timeline_html(plan, charts, graph=graph, profile=profile))
    assert dom.count('role="application"') == 2
    assert all(f">{name}</span>" in dom for name in ("Relu", "MatMul", "Neg", "Gemm"))
    assert 'value="type"' in dom


def drive(folder: Path, page: str, script: str) -> Any:
    """Return the result of a script that acts on a page as a user does; the page's policy is removed for the script."""
    page = re.sub(r"<meta http-equiv=[^>]*>", "", page)
    helpers = """
      const [first] = document.querySelectorAll("#charts canvas"), panel = chrionTimeline.panels[0];
      const press = (key) => first.dispatchEvent(new KeyboardEvent("keydown", { key, cancelable: true }));
      const spot = (ms, row) => {
        const box = first.getBoundingClientRect(), { plot, view } = panel;
        const x = plot.left + ((ms - view.start) / (view.end - view.start)) * (plot.right - plot.left);
        return { clientX: box.left + x, clientY: box.top + plot.top + row * 35 + 15, pointerId: 1, cancelable: true };
      };
      first.setPointerCapture = () => {};
      const click = (ms, row) => ["pointerdown", "pointerup"].forEach(
        (name) => first.dispatchEvent(new PointerEvent(name, spot(ms, row))));
      const wheel = (ms, deltaY) => first.dispatchEvent(new WheelEvent("wheel", { ...spot(ms, 0), deltaY }));
      const chosen = () => (document.querySelector("#details h2") || {}).textContent;
    """
    drawn = "typeof chrionTimeline !== 'undefined' && chrionTimeline.panels[0]?.plot?.right > 0"
    act = f"const act = () => {{ if (!({drawn})) {{ setTimeout(act, 50); return; }}\n{helpers}\n"
    act += f"const seen = (() => {{ {script} }})();\n"
    act += "const out = document.createElement('pre'); out.id = 'seen'; out.textContent = JSON.stringify(seen);"
    act += "document.body.append(out); }; setTimeout(act, 500);"
    for _ in range(3):  # on a busy machine a browser's virtual time can end before its first frame is drawn
        dom = browse(folder, page.replace("</body>", f"<script>{act}</script></body>"))
        if '<pre id="seen">' in dom:
            break
    return json.loads(html.unescape(dom.split('<pre id="seen">')[1].split("</pre>")[0]))


def test_the_page_is_used_by_mouse(plan: Plan, graph: Graph, profile: Profile, tmp_path: Path) -> None:
    """A click selects the operator under it, the wheel zooms at the pointer, and a double click resets the view."""
    page = timeline_html(plan, [predicted_chart(plan)], graph=graph, profile=profile)
    script = """
      click(0.5, 0);
      const name = chosen(), text = document.querySelector("#details").textContent, before = panel.view;
      wheel(2, -300);
      const zoomed = panel.view;
      first.dispatchEvent(new MouseEvent("dblclick"));
      return { name, text, before, zoomed, after: panel.view };
    """
    seen = drive(tmp_path, page, script)
    assert seen["name"] == plan.operators[plan.segments[0][0]]
    for fact in ("cpu1", "predicted", "inputs", "outputs", "weights", "one core takes 1.00 ms"):
        assert fact in seen["text"]
    before, zoomed = seen["before"], seen["zoomed"]
    assert zoomed["end"] - zoomed["start"] < 0.7 * (before["end"] - before["start"])
    share = (2 - before["start"]) / (before["end"] - before["start"])
    assert (2 - zoomed["start"]) / (zoomed["end"] - zoomed["start"]) == pytest.approx(share, abs=0.002)  # to a pixel
    assert seen["after"] == before


def test_the_page_is_used_by_keyboard(plan: Plan, graph: Graph, profile: Profile, tmp_path: Path) -> None:
    """Keys step through bars and lanes, zoom, move, reset and clear the selection."""
    page = timeline_html(plan, [predicted_chart(plan)], graph=graph, profile=profile)
    script = """
      const names = [], spans = [];
      for (const key of [".", ".", "ArrowDown", ","]) { press(key); names.push(chosen()); }
      for (const key of ["+", "ArrowRight", "-", "Home"]) { press(key); spans.push(panel.view); }
      press("Escape");
      return { names, spans, cleared: chosen() === undefined };
    """
    seen = drive(tmp_path, page, script)
    lanes = {lane: [s for s in plan.segments if plan.schedule.lanes[s[0]] == lane] for lane in (1, 2)}
    first, second = (plan.operators[lanes[1][at][0]] for at in (0, 1))
    below = [plan.operators[segment[0]] for segment in lanes[2]]
    assert seen["names"][:2] == [first, second]
    assert seen["names"][2] in below
    assert seen["names"][3] == below[0]
    zoomed, shifted, out, reset = seen["spans"]
    assert reset["start"] == 0
    assert zoomed["end"] - zoomed["start"] == pytest.approx(reset["end"] / 2)
    assert shifted["start"] > zoomed["start"]
    assert out["end"] - out["start"] == pytest.approx(reset["end"])
    assert seen["cleared"]


def test_colours_search_and_scales_are_controls(plan: Plan, graph: Graph, profile: Profile, tmp_path: Path) -> None:
    """The page switches between types and layers, highlights a category, finds operators and shares the time scale."""
    charts = [predicted_chart(plan), measured_chart(plan, [Event(1, 0, 0.0, 40.0)])]
    page = timeline_html(plan, charts, graph=graph, profile=profile)
    script = """
      const legend = () => [...document.querySelectorAll("#legend .name")].map((item) => item.textContent);
      const types = legend();
      document.querySelector('input[value="layer"]').click();
      const layers = legend();
      document.querySelector("#legend button").click();
      const pressed = document.querySelectorAll('#legend button[aria-pressed="true"]').length;
      document.querySelector("#find").value = "RIGHT";
      document.querySelector("#find-form").requestSubmit();
      const found = [chosen(), document.querySelector("#found").textContent];
      const ends = () => chrionTimeline.panels.map((other) => other.view.end);
      const apart = ends();
      document.querySelector("#share-scale").click();
      return { types, layers, pressed, found, apart, together: ends() };
    """
    seen = drive(tmp_path, page, script)
    assert sorted(seen["types"]) == ["Gemm", "MatMul", "Neg", "Relu"]
    assert len(seen["layers"]) == len(set(seen["layers"])) > 0
    assert seen["layers"] != seen["types"]
    assert seen["pressed"] == 1
    matching = [name for name in plan.operators if "right" in name]
    assert seen["found"] == [matching[0], f"1 of {len(matching)}"]
    assert seen["apart"][1] > 5 * seen["apart"][0]
    assert seen["together"][0] == seen["together"][1]
