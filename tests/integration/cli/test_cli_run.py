"""``chrion run``, ``chrion bench`` and ``chrion report`` for default sessions and for given plans."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest

from chrion import Plan, Profile
from chrion.machine.cores import physical_cores
from command_line import PAPER, Chrion, assert_each_refused, assert_refused
from helpers import FLOAT, free_branches, make_model, node, value
from model_repository import columns
from seams.commands import (
    choose_plan,
    lack_cores_and_lanes,
    note_sessions,
    occupy_cores,
    offer_providers,
    shrink_demo,
    watch_runs,
)


def test_from_a_model_to_a_checked_run(cli: Chrion) -> None:
    """In the sequence build, profile, partition, run and report, each command finds the file of the previous one."""
    assert cli("model", "gru", "-o", "g.onnx", "--layers", "2", "--seq", "4", "--io", "8", "--batch", "1")[0] == 0
    assert cli("profile", "g.onnx", "--cores", "1")[0] == 0
    assert Profile.load("g.profile.json").cores == 1
    code, out, _ = cli("partition", "g.onnx", "--profile", "g.profile.json", "--json")
    assert code == 0
    assert json.loads(out)["accelerator_only"] is None
    code, out, _ = cli("run", "g.onnx", "--plan", "g.plan.json", "--repeat", "2", "--json")
    assert code == 0
    assert json.loads(out)["equal"] is True
    code, out, _ = cli("report", "g.plan.json", "--html", "t.html", "--trace", "t.json")
    assert code == 0
    assert '"schema":"chrion.timeline/1"' in Path("t.html").read_text(encoding="utf-8")
    assert json.loads(Path("t.json").read_text())["traceEvents"]


def test_run_takes_inputs_from_a_file(cli: Chrion, model: Path) -> None:
    """Inputs are read by name from the file's arrays; other arrays are ignored."""
    np.savez("x.npz", x=np.ones((2, 4), np.float32), other=np.zeros(3))
    code, out, _ = cli("run", str(model), "--input", "x.npz", "--repeat", "1")
    assert code == 0
    assert "outputs equal plain onnxruntime's" in out


def test_a_pipeline_of_columns_is_run_measured_and_planned(cli: Chrion, tmp_path: Path) -> None:
    """Columns of texts and numbers share the size of their rows, and texts may come from a file."""
    onnx.save(columns(), tmp_path / "columns.onnx")
    np.savez("x.npz", city=np.array([["Oslo"], ["é"], [""]]), distance=np.ones((3, 1), np.float32))
    for given in (("--input", "x.npz"), ("--shape", "rows=20")):
        code, out, _ = cli("run", "columns.onnx", *given, "--repeat", "1", "--json")
        assert (code, json.loads(out)["equal"]) == (0, True)
    code, out, _ = cli("bench", "columns.onnx", "--shape", "rows=20", "--rounds", "1", "--json")
    assert code == 0
    assert json.loads(out)
    code, out, _ = cli("partition", "columns.onnx", "--shape", "rows=20", "--hardware", "l4+epyc-16")
    assert code == 0
    assert "written: columns.plan.json" in out


def test_free_dimensions_are_those_of_the_inputs(cli: Chrion, tmp_path: Path) -> None:
    """``--shape`` is not needed with ``--input``; without both the message names the input."""
    onnx.save(free_branches(), tmp_path / "free.onnx")
    np.savez("x.npz", x=np.ones((3, 4), np.float32))
    code, out, _ = cli("run", "free.onnx", "--input", "x.npz", "--repeat", "1", "--json")
    assert (code, json.loads(out)["equal"]) == (0, True)
    assert_each_refused(cli, [((command, "free.onnx"), "x[batch x 4]") for command in ("run", "bench", "partition")])


@pytest.mark.parametrize("command", ["run", "bench", "compare"])
def test_inputs_that_the_model_refuses_are_named(cli: Chrion, tmp_path: Path, command: str) -> None:
    """Plain onnxruntime fails on them, too: one line has its reason, in place of a traceback."""
    nodes = [node("Gather", ["x", "i"], ["y"], name="pick")]
    ends = [value("x", FLOAT, [2]), value("i", onnx.TensorProto.INT64, [1])], [value("y", FLOAT, [1])]
    onnx.save(make_model(nodes, *ends), tmp_path / "m.onnx")
    np.savez("far.npz", x=np.ones(2, np.float32), i=np.array([9]))
    assert_refused(cli(command, "m.onnx", "--input", "far.npz"), "m.onnx: does not run on far.npz: Gather node 'pick'")
    nodes[:0] = [node("Sub", ["i", "nine"], ["j"])]
    nodes[1].input[1] = "j"
    onnx.save(make_model(nodes, *ends, {"nine": np.array(9)}), tmp_path / "m.onnx")
    assert_refused(cli(command, "m.onnx"), "m.onnx: does not run on synthetic inputs: Gather node 'pick'")


def test_a_plan_for_given_shapes_names_the_command_that_keeps_it(
    cli: Chrion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has the shapes of the input file and the precision, and runs as it is printed."""
    onnx.save(free_branches(), tmp_path / "free.onnx")
    np.savez("x.npz", x=np.ones((2, 4), np.float32))
    assert cli("partition", "free.onnx", "--shape", "batch=2", "--policy", "wavefront")[0] == 0
    choose_plan(monkeypatch, tmp_path / "free.plan.json")
    options = ("--precision", "bf16", "--max-error", "0.5")
    code, _, err = cli("run", "free.onnx", "--input", "x.npz", "--repeat", "1", *options)
    assert code == 0
    command = shlex.split(re.search(r"use the plan: chrion (.*)", err)[1])
    assert command == ["tune", "free.onnx", "--shape", "x=2x4", *options]
    assert cli(*command)[0] == 0


def test_a_session_of_a_small_model_runs_plain(cli: Chrion, model: Path) -> None:
    """A model that takes microseconds is run by plain onnxruntime, and the command reports this decision."""
    code, out, _ = cli("run", str(model), "--repeat", "2")
    assert code == 0
    assert "plain onnxruntime" in out
    assert "predicted" not in out
    found = json.loads(cli("run", str(model), "--repeat", "2", "--json")[1])
    assert (found["runs_plan"], found["predicted_ms"]) == (False, None)


def test_a_given_plan_or_policy_is_run_as_it_is(cli: Chrion, model: Path) -> None:
    """A given plan or policy is run, even if plain onnxruntime is faster."""
    assert cli("partition", str(model), "--policy", "wavefront")[0] == 0
    for options in (("--plan", "m.plan.json"), ("--policy", "wavefront")):
        found = json.loads(cli("run", str(model), *options, "--repeat", "2", "--json")[1])
        assert found["runs_plan"] is True
        assert found["predicted_ms"] > 0
    found = json.loads(cli("bench", str(model), "--plan", "m.plan.json", "--rounds", "1", "--json")[1])
    assert found["runs_plan"] is True
    assert found["predicted_ms"] == Plan.load("m.plan.json").predicted.latency_ms


def test_a_plan_of_another_machine_says_so_and_what_follows(cli: Chrion, model: Path) -> None:
    """In a line with the properties that differ; a plan of this machine says nothing."""
    assert cli("partition", str(model), "--policy", "wavefront")[0] == 0
    run = ("run", str(model), "--plan", "m.plan.json", "--repeat", "2")
    assert "another machine" not in cli(*run)[1]
    plan = json.loads(Path("m.plan.json").read_text())
    plan["machine"] |= {"cpu": "A Processor", "cores": 12}
    Path("m.plan.json").write_text(json.dumps(plan))
    line = "made for another machine (cpu A Processor, cores 12): its predictions do not hold here"
    assert line in cli(*run)[1].splitlines()


def test_shapes_that_are_not_given_are_those_of_the_plan(cli: Chrion, tmp_path: Path) -> None:
    """Of a model with free dimensions; other shapes, and another model, are named with what mends the command."""
    onnx.save(free_branches(), tmp_path / "free.onnx")
    assert cli("partition", "free.onnx", "--shape", "batch=2", "--policy", "wavefront")[0] == 0
    for command in (("run", "--repeat", "1"), ("bench", "--rounds", "1")):
        code, out, _ = cli(*command, "free.onnx", "--plan", "free.plan.json", "--json")
        assert (code, json.loads(out)["runs_plan"]) == (0, True)
    wrong = ("run", "free.onnx", "--plan", "free.plan.json", "--shape")
    about = (
        "does not fit model 'free': the plan is for batch=2, not batch=3 (give the plan's shapes, --shape batch=2, or"
    )
    assert_refused(cli(*wrong, "batch=3"), about)
    assert_refused(cli(*wrong, "x=3"), "'x' cannot be 3: the model declares batch x 4")


def test_a_report_of_another_model_says_so(cli: Chrion, tmp_path: Path, model: Path) -> None:
    """The message is about the model, and not about a shape of the plan that this model does not have."""
    onnx.save(free_branches(), tmp_path / "free.onnx")
    assert cli("partition", "free.onnx", "--shape", "batch=2", "--policy", "wavefront")[0] == 0
    report = ("report", "free.plan.json", "--measured", "--model")
    assert_refused(cli(*report, str(model)), f"plan of 'free' does not fit model {model}: ")
    assert cli(*report, "free.onnx")[0] == 0


def test_a_measured_report_says_if_other_processes_used_the_cores(
    cli: Chrion, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the words of the comparisons."""
    assert cli("partition", str(model), "--policy", "wavefront")[0] == 0
    for busy in (False, True):
        with monkeypatch.context() as patch:
            watch_runs(patch, busy=busy)
            code, out, _ = cli("report", "m.plan.json", "--measured", "--model", str(model))
        assert (code, "the machine was too busy for a reliable comparison" in out) == (0, busy)


def test_a_plan_whose_accelerator_is_missing_is_refused(
    cli: Chrion, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names the accelerator, also if the plan has the whole model on it, and is read from the model."""
    options = ("--profile", PAPER, "--policy", "accelerator", "--annotate", "a.onnx")
    assert cli("partition", str(model), *options)[0] == 0
    offer_providers(monkeypatch, {"CPUExecutionProvider": None, "CUDAExecutionProvider": "no driver"})
    about = "CUDAExecutionProvider does not work on this machine: no driver"
    assert_each_refused(cli, [((command, "a.onnx", "--plan", "a.onnx"), about) for command in ("run", "bench")])


def test_bench_prints_one_object(cli: Chrion, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The object has every session with its median and quartiles, and the ratio to the best plain session.

    Every trial opens a HybridSession with the options of the command, not another plain session.
    """
    opened = note_sessions(monkeypatch)
    code, out, _ = cli("bench", str(model), "--rounds", "3", "--slo", "10s", "--json")
    assert code == 0
    found = json.loads(out)
    times = {t["name"]: t["median_ms"] for t in found["timings"]}
    plain = {name: ms for name, ms in times.items() if name != "chrion"}
    assert len(plain) == 3
    assert found["ratio"] == pytest.approx(times["chrion"] / min(plain.values()))
    assert plain[found["best_plain"]] == min(plain.values())
    assert found["runs_plan"] is False
    assert [options["slo"] for options in opened] == ["10s"] * 3


def test_bench_says_what_the_session_chose(cli: Chrion, model: Path) -> None:
    """The output has the reason for the decision first and then the table."""
    code, out, _ = cli("bench", str(model), "--rounds", "1")
    assert code == 0
    assert out.startswith("plain onnxruntime on CPUExecutionProvider")
    assert "chrion runs plain onnxruntime; a difference from a session of the same configuration is noise" in out
    assert "chrion, predicted" not in out


def test_comparisons_have_no_verdict_if_other_processes_use_the_cores(
    cli: Chrion, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each comparison of bench, compare and demo asks once to be repeated, and calls no session faster than another.

    The demo shows its tables all the same.
    """
    occupy_cores(monkeypatch)
    shrink_demo(monkeypatch)
    for words in (
        ("bench", str(model), "--rounds", "1"),
        ("compare", str(model), "--rounds", "1", "--policies", "cpu"),
        ("demo",),
    ):
        code, out, err = cli(*words)
        said = (out + err).count("too busy for a reliable comparison: repeat it when no other process")
        assert (code, said) == (0, 2 if words == ("demo",) else 1)
        assert "used the cores" not in err
        assert "the fastest plain session (" not in out
        assert out.count("quartiles") == {"bench": 1, "compare": 0, "demo": 2}[words[0]]
    assert json.loads(cli("bench", str(model), "--rounds", "1", "--json")[1])["interference"] is True


@pytest.mark.parametrize("command", [("run", "--repeat", "2"), ("bench", "--rounds", "1")])
def test_a_missed_slo_is_exit_code_3(cli: Chrion, model: Path, command: tuple[str, ...]) -> None:
    """The measured latency must meet the SLO, also of a plain session.

    Stderr reports a miss, and stdout does not change.
    """
    for options in ((), ("--policy", "wavefront")):
        code, out, err = cli(*command, str(model), *options, "--slo", "1us", "--json")
        assert code == 3
        assert "the SLO of 1.00 us is missed: measured" in err
        assert json.loads(out)["model"] == "m"
        code, _, err = cli(*command, str(model), *options, "--slo", "10s", "--json")
        assert (code, "SLO" in err) == (0, False)


def test_wrong_outputs_are_exit_code_1(cli: Chrion) -> None:
    """Stdout and stderr say that the outputs of a model with random numbers differ."""
    random = [node("RandomUniform", [], ["r"], shape=[64]), node("Add", ["x", "r"], ["y"])]
    onnx.save(make_model(random, [value("x", FLOAT, [64])], [value("y", FLOAT, [64])]), "random.onnx")
    code, out, err = cli("run", "random.onnx", "--repeat", "1")
    assert code == 1
    assert "outputs DIFFER FROM plain onnxruntime's: largest difference 0." in out
    assert "error: outputs differ from plain onnxruntime's by 0." in err


def test_the_demo_runs_plans_and_shows_a_model_without_gain(cli: Chrion, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo checks its plan's outputs, times it beside all numbers of threads, and plans for the paper's machine."""
    shrink_demo(monkeypatch)
    code, out, err = cli("demo")
    assert code == 0
    headings = [line.split(":")[0] for line in out.splitlines() if re.match(r"\d\. ", line)]
    assert headings == ["1. Run", "2. Plan", "3. When it does not help"]
    assert "largest difference from plain onnxruntime: " in out
    cores = len(physical_cores())
    counts = [count for count in range(1, cores + 1) if count <= 8 or count.bit_count() == 1 or count == cores]
    assert err.count(f"chrion: timing {len(counts) + 2} sessions in 2 rounds ...") == 2
    assert all(re.search(rf"^onnxruntime, {count} thread", out, re.MULTILINE) for count in counts)
    assert {"accelerator only", "CPU only", "chrion"} <= {line.split("  ")[0] for line in out.splitlines()}
    slos = [line.split() for line in out.splitlines() if re.match(r"[3-6][05]\.0 ms ", line)]
    assert [float(row[0]) for row in slos] == [40, 50, 60]
    assert "native lanes are missing" not in out
    assert out.endswith("HybridSession keeps the plain session where no plan is faster\n")
    assert '"schema":"chrion.timeline/1"' in Path("demo.html").read_text(encoding="utf-8")
    first = Path("demo.html").read_bytes()
    code, out, _ = cli("demo")
    assert (code, "timeline for a browser, written: demo-2.html\n" in out) == (0, True)
    assert Path("demo.html").read_bytes() == first


def test_the_demo_says_what_is_missing(cli: Chrion, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one core and without native lanes, the demo names both before it starts, and runs all the same."""
    shrink_demo(monkeypatch)
    lack_cores_and_lanes(monkeypatch)
    code, out, _ = cli("demo")
    assert code == 0
    first, second = out.splitlines()[:2]
    assert first.startswith("one CPU core only: ")
    assert second.startswith("native lanes are missing: ")
