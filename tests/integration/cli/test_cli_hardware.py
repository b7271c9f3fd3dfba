"""``chrion hardware``, and ``--hardware`` of the commands that plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import chrion
from chrion import Plan, Profile
from chrion.hardware import hardware
from chrion.profiler.hardware_profile import estimate_profile
from command_line import PAPER, Chrion, assert_each_refused, assert_refused

MACHINE = ("--hardware", "l4+epyc-16", "--cores", "2")
MARK = "estimated from datasheets"


@pytest.fixture
def model(cli: Chrion) -> str:
    assert cli("model", "lstm", "-o", "small.onnx", "--layers", "2", "--seq", "4", "--io", "48")[0] == 0
    return "small.onnx"


def test_hardware_lists_parts_and_shows_figures_with_sources(cli: Chrion) -> None:
    """The table names every part; a machine's tables and JSON have a source for each figure."""
    code, out, _ = cli("hardware")
    assert code == 0
    for name in ("l4", "h200", "gtx-1080-ti", "epyc-16", "laptop-8", "pcie-5"):
        assert f"\n{name} " in out
    listed = json.loads(cli("hardware", "--json")[1])
    assert {"name": "t4", "kind": "accelerator", "title": "NVIDIA T4"} in listed["parts"]
    code, out, _ = cli("hardware", "l4+epyc-16")
    assert code == 0
    assert "NVIDIA L4 Tensor Core GPU datasheet" in out
    found = json.loads(cli("hardware", "l4+epyc-16", "--json")[1])
    assert found["estimated"] is True
    figures = {part["name"]: part["figures"] for part in found["parts"]}
    assert figures["l4"]["memory_gb"] == {"value": 24, "source": "NVIDIA L4 Tensor Core GPU datasheet"}
    assert list(figures) == ["epyc-16", "l4", "pcie-4"]


def test_a_plan_from_datasheets_is_marked_wherever_it_is_shown(cli: Chrion, model: str) -> None:
    """Tables, JSON, the explanation, the plan file, its report, its page and its picture data say it."""
    code, out, _ = cli("partition", model, *MACHINE, "--policy", "accelerator", "--explain", "LSTM:l0.t0.h")
    assert code == 0
    assert out.count(MARK) == 3  # the table's title, the line below it, and the explanation
    plan = Plan.load("small.plan.json")
    assert plan.machine.hardware == "l4+epyc-16"
    assert plan.estimated == len(plan.operators)
    found = json.loads(cli("partition", model, *MACHINE, "--policy", "accelerator", "--force", "--json")[1])
    assert MARK in found["machine"]
    assert found["estimated"] == found["operators"]
    out = cli("plan", "show", "small.plan.json")[1]
    assert MARK in out
    assert "predicted" not in out
    shown = json.loads(cli("plan", "show", "small.plan.json", "--json")[1])
    assert (shown["machine"]["hardware"], shown["estimated"]) == ("l4+epyc-16", found["operators"])
    code, out, _ = cli("report", "small.plan.json", "--html", "r.html", "--trace", "t.json")
    assert code == 0
    assert MARK in out
    assert "\nestimated: " in out
    page = Path("r.html").read_text(encoding="utf-8")
    assert MARK in page
    assert "<dt>estimated latency</dt>" in page
    assert '"name": "estimated"' in Path("t.json").read_text(encoding="utf-8")


def test_sweeps_comparisons_and_profiles_are_marked(cli: Chrion, model: str) -> None:
    """Their tables and JSON name the machine with the mark; nothing is measured."""
    assert MARK in cli("sweep", model, *MACHINE, "--alpha", "0,1", "--policy", "heft")[1]
    assert (
        MARK in json.loads(cli("sweep", model, *MACHINE, "--alpha", "0,1", "--policy", "heft", "--json")[1])["machine"]
    )
    code, out, err = cli("compare", model, *MACHINE, "--policies", "heft,cpu")
    assert code == 0
    assert MARK in out
    assert "another machine" in err
    found = json.loads(cli("compare", model, *MACHINE, "--policies", "heft", "--json")[1])
    assert found["estimated"] == found["operators"]
    code, out, _ = cli("profile", model, *MACHINE)
    assert code == 0
    assert MARK in out
    assert Profile.load("small.profile.json").machine.hardware == "l4+epyc-16"


def test_files_of_users_and_corrections_are_used(cli: Chrion, model: str, tmp_path: Path) -> None:
    """A TOML file takes part in a machine; a profile of the same operators corrects the estimates."""
    source = Path(chrion.__file__).parents[1] / "profiles" / "hardware" / "l4.toml"
    text = source.read_text(encoding="utf-8")
    Path("mine.toml").write_text(text.replace('NVIDIA L4"', 'My GPU"', 1), encoding="utf-8")
    options = ("--hardware", "./mine.toml+epyc-16", "--cores", "1", "--policy", "accelerator", "--force", "--json")
    found = json.loads(cli("partition", model, *options)[1])
    assert "My GPU" in found["machine"]
    graph = chrion.load(model)
    estimated = estimate_profile(graph, hardware("l4+epyc-16"), 1)
    content = json.loads(estimated.to_json())
    for cost in content["operators"].values():
        cost["accelerator_ms"] *= 3
    content["machine"]["hardware"] = None
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps(content), encoding="utf-8")
    slower = json.loads(cli("partition", model, *options, "--corrections", str(measured))[1])
    assert slower["latency_ms"] > 1.5 * found["latency_ms"]
    assert "corrected by" in cli("partition", model, *options[:-1], "--corrections", str(measured))[1]


def test_wrong_machines_are_refused(cli: Chrion, model: str) -> None:
    """One line on stderr, exit code 2, and no plan file."""
    cases: list[tuple[tuple[str, ...], str]] = [
        (("--hardware", "l5+epyc-16"), "unknown part 'l5'"),
        (("--hardware", "l4"), "a processor is missing"),
        (("--hardware", "l4+./no.toml"), "no.toml: cannot be read"),
        (("--hardware", "l4+epyc-16", "--cores", "17"), "cores: expected 1 to 16, the cores of epyc-16, found 17"),
        (("--hardware", "l4+epyc-16", "--cores", "0"), "--cores: expected 1 or more, found '0'"),
        (("--hardware", "l4+epyc-16", "--accelerator", "none"), "--accelerator"),
        (("--hardware", "l4+epyc-16", "--profile", PAPER), "--profile"),
        (("--hardware", "l4+epyc-16", "--corrections", "no.json"), "no.json"),
        (("--hardware", "l4+epyc-16", "--corrections", PAPER), "none of the model's operators"),
        (("--corrections", PAPER), "--corrections: not allowed without --hardware"),
    ]
    assert_each_refused(cli, [(("partition", model, *options), about) for options, about in cases])
    assert not Path("small.plan.json").exists()


def test_a_damaged_file_is_refused_in_one_line(cli: Chrion, model: str) -> None:
    """The line names the file and the key."""
    Path("mine.toml").write_text(
        'kind = "link"\ntitle = "x"\n[figures]\nbandwidth_gb_per_s = -1\nefficiency = 1\nlatency_us = 1\n',
        encoding="utf-8",
    )
    for command in (("hardware", "l4+mine.toml"), ("partition", model, "--hardware", "l4+epyc-16+mine.toml")):
        assert_refused(cli(*command), "mine.toml: bandwidth_gb_per_s: expected a number above 0")
