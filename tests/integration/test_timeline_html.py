"""The timeline page: its data, its safety, and its behaviour in a browser if one is installed."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chrion.report
from browser import CHROMIUM
from chrion import Plan, Profile, load
from chrion.graph import Graph
from chrion.profiler import OperatorCost
from chrion.report import measured_chart, predicted_chart, timeline_html
from chrion.report.timeline_html import script_json
from chrion.runtime import Event
from chrion.scheduler import fixed_plan
from helpers import FLOAT, MACHINE, alternating_lanes, branches, make_model, node, value

FOLDER = Path(chrion.report.__file__).parent / "page"
SCRIPT = "".join((FOLDER / name).read_text(encoding="utf-8") for name in ("functions.js", "timeline.js"))
in_browser = pytest.mark.skipif(not CHROMIUM, reason="no chromium is installed")
HOSTILE = "</script><script>document.title='run'</script><img src=x onerror=\"document.title='run'\">@@DATA@@\u2028'\\"


class Page(HTMLParser):
    """The elements of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(page.replace("<!doctype html>", ""))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "input"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)

    @property
    def data(self) -> dict[str, Any]:
        """Return the JSON of the first script element."""
        content: dict[str, Any] = json.loads(self.text["script"][0])
        return content


@pytest.fixture
def graph() -> Graph:
    return load(branches())


@pytest.fixture
def plan(graph: Graph) -> Plan:
    """Return a plan on two alternating lanes; segment s runs from s to s + 1 ms."""
    return replace(fixed_plan(graph, alternating_lanes(graph)), slo_ms=7.5)


@pytest.fixture
def profile(graph: Graph) -> Profile:
    """Return a profile under which operator i takes i + 1 ms on a core."""
    costs = {s: OperatorCost("Op", (i + 1.0, i + 1.0), None) for i, s in enumerate(graph.dag.signatures)}
    return Profile(MACHINE, 2, None, costs)


def test_the_page_is_one_well_formed_file(plan: Plan, graph: Graph, profile: Profile) -> None:
    """Every element is closed, no resource is loaded, and the policy allows the page's own script only."""
    page = timeline_html(plan, [predicted_chart(plan)], ["a <remark>"], graph=graph, profile=profile)
    parsed = Page(page)
    assert parsed.open == []
    assert not re.search(r"https?://|@import|\burl\(", page)
    assert not any({"src", "href", "action"} & attributes.keys() for _, attributes in parsed.tags)
    assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)
    policy = next(a["content"] for t, a in parsed.tags if t == "meta" and "http-equiv" in a) or ""
    digest = base64.b64encode(hashlib.sha256("".join(parsed.text["script"][1:]).encode()).digest()).decode()
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert "a &lt;remark&gt;" in page


def test_the_header_names_machine_policy_and_slo(plan: Plan) -> None:
    """The header names the machine and the policy, and says whether each latency meets the SLO."""
    measured = measured_chart(plan, [Event(1, 0, 0.0, 9.0)])
    facts = Page(timeline_html(plan, [predicted_chart(plan), measured])).text
    found = dict(zip(facts["dt"], facts["dd"], strict=True))
    assert found["machine"] == str(plan.machine)
    assert found["policy"].startswith(plan.policy)
    assert found["SLO"] == "7.50 ms, met as predicted, missed as measured"
    assert (found["predicted latency"], found["measured latency"]) == ("4.00 ms", "9.00 ms")


def test_the_data_holds_every_operator_and_span(plan: Plan, graph: Graph, profile: Profile) -> None:
    """Operators have names, types, lanes, bytes and costs; spans are sorted by lane and time."""
    events = [Event(2, 1, 1.5, 2.0), Event(1, 0, 0.0, 2.0), Event(1 << 20, -1, 0.25, 0.5, "x")]
    charts = [predicted_chart(plan), measured_chart(plan, events)]
    data = Page(timeline_html(plan, charts, graph=graph, profile=profile)).data
    operators, dag = data["operators"], graph.dag
    assert operators["name"] == list(dag.names)
    assert operators["type"] == list(dag.op_types)
    assert operators["lane"] == [f"cpu{lane}" for lane in plan.schedule.lanes]
    assert operators["output_bytes"] == [32] * 4  # two rows of four floats
    assert operators["weight_bytes"] == [64 if kind in {"MatMul", "Gemm"} else 0 for kind in dag.op_types]
    assert operators["cpu_ms"] == operators["predicted_ms"] == [1.0, 2.0, 3.0, 4.0]
    assert operators["accelerator_ms"] is None
    assert sorted(i for segment in data["segments"] for i in segment) == list(range(4))
    assert data["slo_ms"] == 7.5
    predicted, measured = data["charts"]
    starts = dict(zip(predicted["spans"]["segment"], predicted["spans"]["start_ms"], strict=True))
    assert starts == {at: start for at, (start, _) in enumerate(plan.segment_ms)}
    assert [lane["name"] for lane in measured["lanes"]] == ["cpu1", "cpu2", "h2d"]
    assert measured["spans"]["lane"] == [0, 1, 2]
    assert measured["spans"]["start_ms"] == [0.0, 1.5, 0.25]
    assert measured["spans"]["segment"] == [0, 1, -1]
    assert measured["spans"]["copied"] == {"2": "x"}
    for chart in data["charts"]:
        lengths = {len(chart["spans"][key]) for key in ("lane", "start_ms", "end_ms", "segment")}
        assert len(lengths) == 1


def test_every_scheme_gives_each_operator_and_segment_a_mark(plan: Plan, graph: Graph) -> None:
    """Indices refer to names of the scheme, and no two categories have the same mark."""
    data = Page(timeline_html(plan, [predicted_chart(plan)], graph=graph)).data
    assert set(data["schemes"]) == {"type", "layer"}
    for scheme in data["schemes"].values():
        assert len(scheme["names"]) == len(scheme["marks"]) == len(scheme["shares"])
        assert len({tuple(mark[:2]) for mark in scheme["marks"]}) == len(scheme["marks"])
        assert set(scheme["of_operator"]) == set(range(len(scheme["names"])))
        assert len(scheme["of_segment"]) == len(data["segments"])
    assert set(data["schemes"]["type"]["names"]) == {"Relu", "MatMul", "Neg", "Gemm"}


def test_without_the_model_there_are_layers_only(plan: Plan) -> None:
    """Without the model, which has the operators' types, bars are coloured by layer."""
    data = Page(timeline_html(plan, [predicted_chart(plan)])).data
    assert (data["colour_by"], set(data["schemes"])) == ("layer", {"layer"})
    assert "type" not in data["operators"]


@pytest.mark.parametrize(("segments", "colour_by"), [(([0, 1], [2, 3]), "layer"), (([0], [1], [2], [3]), "type")])
def test_types_that_give_all_bars_one_colour_are_not_shown_first(
    segments: tuple[list[int], ...], colour_by: str
) -> None:
    """Without costs a bar shows one type: pairs of MatMul and Relu in one bar each would all show MatMul."""
    weight = {"w": np.eye(4, dtype=np.float32)}
    nodes = [
        node("MatMul", ["x", "w"], ["a"], name="one/product"),
        node("Relu", ["a"], ["b"], name="one/relu"),
        node("MatMul", ["b", "w"], ["c"], name="two/product"),
        node("Relu", ["c"], ["y"], name="two/relu"),
    ]
    graph = load(make_model(nodes, [value("x", FLOAT, [4, 4])], [value("y", FLOAT, [4, 4])], weight))
    plan = fixed_plan(graph, [1] * 4, segments=segments)
    assert Page(timeline_html(plan, [predicted_chart(plan)], graph=graph)).data["colour_by"] == colour_by


def test_a_slow_run_does_not_compress_the_prediction(plan: Plan) -> None:
    """Charts of similar length share a time scale; a measured run fifty times as long has one of its own."""
    for end_ms, shared in ((6.0, True), (250.0, False)):
        charts = [predicted_chart(plan), measured_chart(plan, [Event(1, 0, 0.0, end_ms)])]
        assert Page(timeline_html(plan, charts)).data["share_scale"] == shared


def hostile(plan: Plan) -> str:
    """Return the page of a plan whose model, operators, machine and remarks have hostile names."""
    machine = replace(plan.machine, cpu=HOSTILE)
    bad = replace(plan, model=HOSTILE, policy=HOSTILE, operators=(HOSTILE,) * 4, machine=machine)
    charts = [predicted_chart(bad), measured_chart(bad, [Event(1 << 20, -1, 0.0, 1.0, HOSTILE)])]
    return timeline_html(bad, charts, [HOSTILE])


def test_names_cannot_become_markup(plan: Plan) -> None:
    """Hostile names add no element to the page, and its data contains them unchanged."""
    harmless, page = Page(timeline_html(plan, [predicted_chart(plan)], ["r"])), Page(hostile(plan))
    expected = [tag for tag, _ in harmless.tags]
    added = [tag for tag, _ in page.tags if tag not in {"td", "tr"}]
    assert [tag for tag in added if tag not in {"div", "dt", "dd"}] == [
        tag for tag in expected if tag not in {"td", "tr", "div", "dt", "dd"}
    ]
    assert page.data["operators"]["name"] == [HOSTILE] * 4
    assert page.data["charts"][1]["spans"]["copied"] == {"0": HOSTILE}
    assert page.text["h1"] == [HOSTILE]
    assert page.open == []


def test_script_json_holds_no_character_of_html() -> None:
    """The text needs no escaping in a script element and is read back unchanged; NaN is refused."""
    text = script_json({"a": [HOSTILE, "<!--", 1.5, None]})
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == {"a": [HOSTILE, "<!--", 1.5, None]}
    with pytest.raises(ValueError, match="JSON"):
        script_json([float("nan")])


def test_the_script_can_stand_in_a_page() -> None:
    """The script contains nothing that would end its element, and builds no markup from text."""
    assert "</" not in SCRIPT
    assert "<!--" not in SCRIPT
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(", SCRIPT)


def test_a_large_plan_makes_a_page_of_a_few_megabytes(plan: Plan) -> None:
    """The page of 20 000 operators, most of it names, is below 4 MB."""
    n = 20_000
    schedule = replace(plan.schedule, order=tuple(range(n)), lanes=tuple(1 + i % 2 for i in range(n)))
    names = tuple(f"/encoder/layer.{i % 48}/attention/MatMul_{i}" for i in range(n))
    times = tuple((i * 0.01, (i + 1) * 0.01) for i in range(n))
    large = replace(plan, schedule=schedule, operators=names, segments=tuple((i,) for i in range(n)), segment_ms=times)
    page = timeline_html(large, [predicted_chart(large)] * 2)
    assert len(page) < 4_000_000
    assert len(Page(page).data["schemes"]["layer"]["names"]) == 22


# ---- In a browser


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


@in_browser
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


@in_browser
def test_durations_and_sizes_have_units(tmp_path: Path) -> None:
    """Durations have three digits and a suitable unit; zero is "0 ms", and a missing value "not known"."""
    times = evaluate(tmp_path, "[0, 1234, 59.31, 4.706, 0.83, 0.00042, null].map(formatMs)")
    assert times == ["0 ms", "1.23 s", "59.3 ms", "4.71 ms", "830 µs", "0.420 µs", "not known"]
    sizes = evaluate(tmp_path, "[0, 999, 1000, 132608, 4100000, null].map(formatBytes)")
    assert sizes == ["0 B", "999 B", "1.0 kB", "133 kB", "4.1 MB", "not known"]


@in_browser
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


@in_browser
def test_segments_are_divided_by_cost(tmp_path: Path) -> None:
    """A segment of two operators that cost 1 and 3 is divided at a quarter; without costs it is one bar."""
    data = "{operators: {predicted_ms: [1, 3]}, segments: [[0, 1]]}"
    chart = "{spans: {lane: [0], start_ms: [10], end_ms: [18], segment: [0]}}"
    bars = evaluate(tmp_path, f"laneBars({data}, {chart}, 0)")
    assert (bars["start"], bars["end"], bars["operator"]) == ([10, 12], [12, 18], [0, 1])
    whole = evaluate(tmp_path, f"laneBars({data.replace('predicted_ms: [1, 3]', '')}, {chart}, 0)")
    assert (whole["start"], whole["end"]) == ([10], [18])


@in_browser
def test_the_page_runs_with_hostile_names(plan: Plan, tmp_path: Path) -> None:
    """The legend is built, and no name is executed as code."""
    dom = browse(tmp_path, hostile(plan))
    assert "aria-pressed" in dom
    assert "<title>run</title>" not in dom
    assert "<img" not in dom


@in_browser
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
        return { clientX: box.left + x, clientY: box.top + plot.top + row * 32 + 14, pointerId: 1, cancelable: true };
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


@in_browser
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


@in_browser
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


@in_browser
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
