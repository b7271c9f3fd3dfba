"""``chrion compare``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from chrion.scheduler import policy_names
from command_line import PAPER, Chrion, assert_each_refused, assert_refused
from helpers import FLOAT, make_model, node, value

pytestmark = pytest.mark.usefixtures("model")


def test_every_policy_has_a_row(cli: Chrion) -> None:
    """The JSON object has each policy's predicted and measured latency, or the reason why there is none."""
    code, out, _ = cli("compare", "m.onnx", "--json", "--rounds", "1")
    assert code == 0
    assert out.count("\n") == 1
    found = json.loads(out)
    rows = {row["policy"]: row for row in found["policies"]}
    assert list(rows) == policy_names()
    assert "no accelerator" in rows["accelerator"]["reason"]
    assert rows["accelerator"]["predicted_ms"] is None
    for row in rows.values():
        if row["reason"] is None:
            assert row["predicted_ms"] > 0
            assert 0 < row["low_ms"] <= row["measured_ms"] <= row["high_ms"]
            assert row["lanes"] >= 1
            assert row["synchronisations"] >= row["lanes"] - 1 or row["segments"] <= row["lanes"]
            assert row["planning_ms"] > 0
    assert [t["name"].split(",")[0] for t in found["plain"]] == ["onnxruntime"] * 3
    assert found["best_plain"] == min(found["plain"], key=lambda t: t["median_ms"])["name"]


def test_the_table_names_the_fastest_and_the_picture_is_drawn(cli: Chrion) -> None:
    """The table has the chosen policies in the given order; the picture is a PNG file."""
    code, out, _ = cli("compare", "m.onnx", "--policies", "heft, cpu,heft", "--rounds", "1", "--plot", "c.png")
    assert code == 0
    assert out.index("heft") < out.index("cpu")
    assert "chrion-paper" not in out
    assert "fastest plain" in out
    assert "fastest policy: " in out
    assert Path("c.png").read_bytes().startswith(b"\x89PNG")


def test_a_policy_without_its_package_is_left_out(cli: Chrion, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default; where it is named, the package is asked for."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "ortools"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ortools", None)
    code, out, _ = cli("compare", "m.onnx", "--profile", PAPER, "--json")
    assert code == 0
    assert {row["policy"] for row in json.loads(out)["policies"]} == {*policy_names()} - {"exact"}
    assert_refused(cli("compare", "m.onnx", "--profile", PAPER, "--policies", "cpu,exact"), "needs OR-Tools")


def test_plans_for_another_machine_are_predicted_only(cli: Chrion) -> None:
    """Plans for another machine's profile are not run, and stderr says why."""
    code, out, err = cli("compare", "m.onnx", "--profile", PAPER, "--policies", "accelerator,cpu", "--json")
    assert code == 0
    assert "another machine" in err
    found = json.loads(out)
    assert [row["measured_ms"] for row in found["policies"]] == [None, None]
    assert all(row["predicted_ms"] > 0 for row in found["policies"])
    assert found["policies"][0]["memory_mb"] > 0
    assert (found["plain"], found["best_plain"]) == ([], None)
    options = ("--profile", PAPER, "--policies", "accelerator,cpu", "--plot", "c.png")
    code, out, _ = cli("compare", "m.onnx", *options)
    assert code == 0
    assert "fastest policy (predicted): " in out


def test_streams_and_estimated_operators_are_reported(cli: Chrion) -> None:
    """Two branches use as many lanes as given; none of these operators is in the paper's profile."""
    for streams in (1, 2):
        options = ("--profile", PAPER, "--policies", "greedy,nimble", "--streams", str(streams))
        found = json.loads(cli("compare", "m.onnx", *options, "--json")[1])
        assert [row["lanes"] for row in found["policies"]] == [streams, streams]
        assert found["estimated"] == found["operators"]
    assert "operators are not in the profile" in cli("compare", "m.onnx", *options)[1]


def test_operators_that_ios_may_merge_are_measured(cli: Chrion, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile holds the merged operators if one of the policies merges."""
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.standard_normal((8, 4)).astype(np.float32) for i in range(2)}
    nodes = [node("MatMul", ["x", f"w{i}"], [f"p{i}"]) for i in range(2)] + [node("Mul", ["p0", "p1"], ["y"])]
    onnx.save(make_model(nodes, [value("x", FLOAT, [2, 8])], [value("y", FLOAT, [2, 4])], weights), "m.onnx")
    monkeypatch.setenv("CHRION_CACHE", "cache")
    measured = []
    for policies in ("heft", "heft,ios", "heft,ios"):
        assert cli("compare", "m.onnx", "--policies", policies, "--rounds", "1", "--json")[0] == 0
        measured.append(json.loads(cli("cache", "size", "measurements", "--json")[1])["entries"])
    alone, merged, again = measured
    assert alone < merged == again


def test_bad_options_are_refused(cli: Chrion) -> None:
    """Invalid options are refused before anything is measured."""
    options = [
        (("--policies", "heft,nix"), "nix"),
        (("--policies", ""), "--policies"),
        (("--plot", "no/c.png"), "no folder no"),
        (("--streams", "0"), "streams"),
    ]
    assert_each_refused(cli, [(("compare", "m.onnx", *words), about) for words, about in options])


def test_policies_are_compared_within_a_budget(cli: Chrion) -> None:
    """Each policy plans within the budget; what cannot is marked and does not win."""
    options = ("compare", "m.onnx", "--profile", PAPER, "--policies")
    code, out, _ = cli(*options, "chrion,first-fit,layers,accelerator,cpu", "--gpu-budget", "1MB", "--json")
    assert code == 0
    rows = {row["policy"]: row for row in json.loads(out)["policies"]}
    assert {name for name, row in rows.items() if not row["meets_budget"]} == {"accelerator"}
    assert rows["accelerator"]["resident_mb"] > 1
    assert all(row["resident_mb"] <= 1 for name, row in rows.items() if name != "accelerator")
    out = cli(*options, "accelerator,cpu", "--gpu-budget", "1MB")[1]
    held = "345.0 MB resident, of which the accelerator's context takes 345.0 MB"
    assert f"accelerator: exceeds the GPU budget of 1.0 MB with {held}" in out.splitlines()
    assert "fastest policy (predicted): cpu" in out
    assert "no plan fits" in cli(*options, "accelerator", "--gpu-budget", "0MB")[1]
    assert_refused(cli("compare", "m.onnx", "--gpu-budget", "1XB"), "--gpu-budget: expected a size")
