"""Schedulers beside each other: who is compared, what is measured, and what becomes of those that fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import chrion
from chrion import Graph, Profile
from chrion.benchmark.comparison import Comparison, PolicyResult, plan_policies, time_plans
from chrion.cli import main
from chrion.errors import ScheduleError
from chrion.files import bundled_folder
from chrion.profiler.measure import synthetic_inputs
from chrion.report import comparison_json, comparison_table, comparison_verdict, plot_comparison
from chrion.scheduler import POLICIES, Policy, fixed_plan
from chrion.scheduler.policies.ios_merging import merged_variants
from helpers import FLOAT, alternating_lanes, branches, make_model, node, value

PAPER = str(bundled_folder("profiles") / "gtx1080ti-paper.json")
Chrion = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Chrion:
    """Run the command beside a small model, ``m.onnx``: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    onnx.save(branches(), "m.onnx")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["chrion", "compare", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capfd.readouterr()
        return int(exit_.value.code or 0), out, err

    return run


def compared(source: onnx.ModelProto, *policies: str) -> Comparison:
    """Plans of some policies for this machine."""
    graph = chrion.load(source)
    return plan_policies(graph, chrion.profile(graph), policies)


def test_every_policy_has_a_row(cli: Chrion) -> None:
    """One JSON object: predicted and measured, or why not; an accelerator that is missing is no failure."""
    code, out, err = cli("m.onnx", "--json", "--cycles", "1")
    assert (code, err.strip()) == (0, "")
    assert out.count("\n") == 1
    found = json.loads(out)
    rows = {row["policy"]: row for row in found["policies"]}
    assert list(rows) == list(POLICIES)
    assert "no accelerator" in rows["accelerator"]["reason"]
    assert rows["accelerator"]["predicted_ms"] is None
    for row in rows.values():
        if row["reason"] is None:
            assert row["predicted_ms"] > 0
            assert 0 < row["low_ms"] <= row["measured_ms"] <= row["high_ms"]
            assert row["lanes"] >= 1
            assert row["synchronisations"] >= row["lanes"] - 1 or row["segments"] == row["lanes"]
            assert row["planning_ms"] > 0
    assert [t["name"].split(",")[0] for t in found["plain"]] == ["onnxruntime"] * 3
    assert found["best_plain"] == min(found["plain"], key=lambda t: t["median_ms"])["name"]


def test_the_table_names_the_fastest_and_the_picture_is_one(cli: Chrion) -> None:
    """For people: rows of those that were asked for, in that order, a verdict, bars in a PNG file."""
    code, out, _ = cli("m.onnx", "--policies", "heft, cpu,heft", "--cycles", "1", "--plot", "c.png")
    assert code == 0
    assert out.index("heft") < out.index("cpu")
    assert "chrion-paper" not in out
    assert "best plain" in out
    assert "fastest policy: " in out
    assert Path("c.png").read_bytes().startswith(b"\x89PNG")


def test_another_machines_profile_is_predicted_only(cli: Chrion) -> None:
    """Nothing is run, and stderr says why."""
    code, out, err = cli("m.onnx", "--profile", PAPER, "--policies", "accelerator,cpu", "--json")
    assert code == 0
    assert "another machine" in err
    found = json.loads(out)
    assert [row["measured_ms"] for row in found["policies"]] == [None, None]
    assert all(row["predicted_ms"] > 0 for row in found["policies"])
    assert found["policies"][0]["memory_mb"] > 0
    assert (found["plain"], found["best_plain"]) == ([], None)
    code, out, _ = cli("m.onnx", "--profile", PAPER, "--policies", "accelerator,cpu", "--plot", "c.png")
    assert code == 0
    assert "fastest policy as predicted: " in out


def test_the_number_of_streams_and_what_is_estimated_are_told(cli: Chrion) -> None:
    """As many lanes as asked for, where there are two branches; none of these operators is in the paper's profile."""
    for streams in (1, 2):
        options = ("--profile", PAPER, "--policies", "greedy,nimble", "--streams", str(streams))
        found = json.loads(cli("m.onnx", *options, "--json")[1])
        assert [row["lanes"] for row in found["policies"]] == [streams, streams]
        assert found["estimated"] == found["operators"]
    assert "operators are not in the profile" in cli("m.onnx", *options)[1]


def test_what_ios_may_merge_is_measured_too(cli: Chrion, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile that policies are compared by holds the merged operators, if one of them merges."""
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.standard_normal((8, 4)).astype(np.float32) for i in range(2)}
    nodes = [node("MatMul", ["x", f"w{i}"], [f"p{i}"]) for i in range(2)] + [node("Mul", ["p0", "p1"], ["y"])]
    onnx.save(make_model(nodes, [value("x", FLOAT, [2, 8])], [value("y", FLOAT, [2, 4])], weights), "m.onnx")
    profiles: list[Profile] = []

    def kept(graph: Graph, profile: Profile, *arguments: Any, **options: Any) -> Comparison:
        profiles.append(profile)
        return plan_policies(graph, profile, *arguments, **options)

    monkeypatch.setattr("chrion.cli.comparing.plan_policies", kept)
    for policies in ("heft", "heft,ios"):
        assert cli("m.onnx", "--policies", policies, "--cycles", "1", "--json")[0] == 0
    (variant,) = merged_variants(chrion.load("m.onnx"))
    without, beside = (len(profile.missing(variant.dag)) for profile in profiles)
    assert (without > 0, beside) == (True, 0)


@pytest.mark.parametrize(
    "arguments", [("--policies", "heft,nix"), ("--policies", ""), ("--plot", "no/c.png"), ("--streams", "0")]
)
def test_bad_options_are_one_line(cli: Chrion, arguments: tuple[str, str]) -> None:
    """A policy that is none, no policy at all, a folder that is not there, no lane; nothing is measured first."""
    code, out, err = cli("m.onnx", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("chrion: error: ")
    assert err.count("\n") == 1


def test_a_policy_that_finds_no_plan_is_kept_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever its name; the others are compared all the same."""

    def failing(*_: Any) -> Any:
        raise ScheduleError("policy odd: there is an odd number of operators")

    monkeypatch.setitem(POLICIES, "odd", Policy("odd", "No plan for any graph.", failing))
    found = compared(branches(), "odd", "cpu")
    assert found.results[0].plan is None
    assert "odd number" in found.results[0].reason
    assert found.results[1].plan is not None
    assert comparison_json(found)["policies"][0]["reason"].startswith("policy odd")
    assert "no policy found a plan" in comparison_verdict(replace(found, results=found.results[:1]))
    plot_comparison(replace(found, results=found.results[:1]), tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_lanes_and_waits_are_those_of_the_program() -> None:
    """Two branches on two lanes that meet on one: one wait; all on one lane: none."""
    found = compared(branches(), "cpu")
    graph = found.graph
    names = {name: i for i, name in enumerate(graph.dag.names)}
    lanes = [2 if graph.dag.names[i].startswith("right") else 1 for i in range(len(names))]
    for placement, expected in ((lanes, (2, 1)), ([1] * len(lanes), (1, 0))):
        plan = fixed_plan(graph, placement)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("chrion.benchmark.comparison.partition", lambda *_, plan=plan, **__: plan)
            entry = plan_policies(graph, found.profile, ["cpu"]).results[0]
        assert (entry.lanes, entry.synchronisations) == expected


def test_plans_that_do_not_run_or_run_wrong_are_not_timed() -> None:
    """A plan of another model, and a model whose plain session gives something else."""
    found = compared(branches(), "cpu")
    other = chrion.load(branches(size=6))
    broken = PolicyResult("broken", fixed_plan(other, alternating_lanes(other)), 1.0)
    sound = PolicyResult("sound", fixed_plan(found.graph, alternating_lanes(found.graph)), 1.0)
    feed = synthetic_inputs(found.graph)
    measured = time_plans(replace(found, results=(broken, sound)), feed, rounds=1, trial_s=0.01)
    assert measured.results[0].reason.startswith("does not run: ")
    assert measured.results[0].timing is None
    assert measured.results[1].timing is not None
    assert len(comparison_table(measured).rows) == 2 + 3
    negated = branches()
    next(n for n in negated.graph.node if n.op_type == "Neg").op_type = "Abs"
    graph = replace(found.graph, source=negated.SerializeToString())
    measured = time_plans(replace(found, graph=graph, results=(sound,)), feed, rounds=1, trial_s=0.01)
    assert "differ from plain onnxruntime's" in measured.results[0].reason
    assert measured.results[0].timing is None
    assert all(t.runs >= 5 for t in measured.plain)
