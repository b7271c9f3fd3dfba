"""The timeline page: its data and its safety."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from chrion import Plan, Profile, load
from chrion.graph import Graph
from chrion.report.lane_chart import measured_chart, predicted_chart
from chrion.report.timeline_html import script_json, timeline_html
from chrion.runtime import Event
from chrion.scheduler import fixed_plan
from helpers import FLOAT, branches, make_model, node, value
from timeline_pages import HOSTILE, SCRIPT, hostile, make_plan, make_profile


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
    return make_plan(graph)


@pytest.fixture
def profile(graph: Graph) -> Profile:
    return make_profile(graph)


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
