"""The command line: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import chrion
from chrion import Plan, Profile
from chrion.cli import main
from chrion.files import bundled_folder
from chrion.zoo import build
from helpers import MACHINE, branches

PAPER = str(bundled_folder("profiles") / "gtx1080ti-paper.json")
Chrion = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Chrion:
    """Run the command in this process, in a folder of its own: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["chrion", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capfd.readouterr()
        return int(exit_.value.code or 0), out, err

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small model on disk."""
    path = tmp_path / "m.onnx"
    onnx.save(branches(), path)
    return path


@pytest.fixture
def lstm(tmp_path: Path) -> Path:
    """The paper's baseline on disk."""
    path = tmp_path / "lstm.onnx"
    onnx.save(build("lstm-baseline"), path)
    return path


KEYS = {
    "model",
    "operators",
    "policy",
    "cores",
    "alpha",
    "slo_ms",
    "meets_slo",
    "budget_mb",
    "meets_budget",
    "latency_ms",
    "memory_mb",
    "resident_mb",
    "on_accelerator",
    "on_cpu",
    "accelerator_only",
    "cpu_only",
    "plan",
}


def test_version_and_help_in_a_process_of_their_own() -> None:
    """The module runs as a command; without arguments it explains itself."""
    code = "from chrion.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout == f"chrion {chrion.__version__}\n"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)  # noqa: S603
    assert all(name in done.stdout for name in ("demo", "devices", "model", "profile", "partition", "run", "bench"))


def test_the_paper_plan_beats_the_accelerator(cli: Chrion, lstm: Path) -> None:
    """One JSON object on stdout with the promised keys, nothing on stderr, and the plan beside the model."""
    code, out, err = cli("partition", str(lstm), "--profile", PAPER, "--slo", "60ms", "--alpha", "0.3", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert out.count("\n") == 1
    assert set(found) == KEYS
    assert set(found["accelerator_only"]) == {"latency_ms", "memory_mb"}
    assert set(found["cpu_only"]) == {"latency_ms"}
    assert found["model"] == "lstm"
    assert found["meets_slo"] is True
    assert found["slo_ms"] == 60.0
    assert found["latency_ms"] < found["accelerator_only"]["latency_ms"]
    assert found["memory_mb"] < found["accelerator_only"]["memory_mb"]
    assert found["on_accelerator"] + found["on_cpu"] == found["operators"] == 1154
    plan = Plan.load(lstm.with_suffix(".plan.json"))
    assert Path(found["plan"]).resolve() == lstm.with_suffix(".plan.json")
    assert plan.predicted.latency_ms == found["latency_ms"]


def test_an_slo_out_of_reach_is_exit_code_3_and_a_plan_all_the_same(cli: Chrion, lstm: Path) -> None:
    """The fastest plan is written, and the table says by how much it misses."""
    code, out, _ = cli("partition", str(lstm), "--profile", PAPER, "--slo", "10ms", "-o", "p.json")
    assert code == 3
    assert "misses" in out
    plan = Plan.load("p.json")
    assert not plan.meets_slo
    assert any("misses it by" in r for r in plan.remarks)


@pytest.mark.parametrize("policy", ["chrion-paper", "heft"])
def test_a_gpu_budget_is_kept_and_told(cli: Chrion, lstm: Path, policy: str) -> None:
    """By the table, the summary and the plan; the resident memory counts."""
    options = ("partition", str(lstm), "--profile", PAPER, "--gpu-budget", "347MB", "--policy", policy)
    code, out, _ = cli(*options, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["resident_mb"] <= found["budget_mb"] == 347.0
    assert found["meets_budget"] is True
    plan = Plan.load(found["plan"])
    assert (plan.budget_mb, plan.meets_budget) == (347.0, True)
    assert "fits the GPU budget of 347.0 MB" in cli(*options)[1]


def test_a_budget_that_a_policy_cannot_keep_is_exit_code_3(cli: Chrion, lstm: Path) -> None:
    """Everything on the accelerator takes what it takes; the plan says how much more that is."""
    code, out, _ = cli(
        "partition", str(lstm), "--profile", PAPER, "--gpu-budget", "0.3GB", "--policy", "accelerator", "-o", "p.json"
    )
    assert code == 3
    assert "exceeds the GPU budget of 300.0 MB" in out
    plan = Plan.load("p.json")
    assert not plan.meets_budget
    assert any("the smallest exceeds it by 48.2 MB" in remark for remark in plan.remarks)


def test_the_table_has_the_plain_ways_beside_the_plan(cli: Chrion, lstm: Path) -> None:
    """Latency, memory and the verdict, for people."""
    code, out, _ = cli("partition", str(lstm), "--profile", PAPER, "--slo", "60ms")
    assert code == 0
    assert all(text in out for text in ("accelerator only", "CPU only", "chrion", "meets the SLO of 60.0 ms"))


def test_from_a_model_to_a_checked_run(cli: Chrion) -> None:
    """Build, profile, partition, run by the plan, report: each finds what the one before it wrote."""
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
    """Arrays by input name; others in the file are passed over."""
    np.savez("x.npz", x=np.ones((2, 4), np.float32), other=np.zeros(3))
    code, out, _ = cli("run", str(model), "--input", "x.npz", "--repeat", "1")
    assert code == 0
    assert "outputs equal plain onnxruntime's" in out


def test_bench_prints_one_object(cli: Chrion, model: Path) -> None:
    """Every rival with its median and quartiles, and the ratio to the best plain one."""
    code, out, _ = cli("bench", str(model), "--cycles", "1", "--json")
    assert code == 0
    found = json.loads(out)
    times = {t["name"]: t["median_ms"] for t in found["timings"]}
    plain = {name: ms for name, ms in times.items() if name != "hybrid"}
    assert len(plain) == 3
    assert found["ratio"] == pytest.approx(times["hybrid"] / min(plain.values()))
    assert plain[found["best_plain"]] == min(plain.values())


def test_devices_describes_the_machine(cli: Chrion) -> None:
    """Lanes and providers, as a table and as JSON."""
    code, out, _ = cli("devices", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["cores"] == len(found["lanes"])
    cpu = next(p for p in found["providers"] if p["name"] == "CPUExecutionProvider")
    assert (cpu["works"], cpu["reason"]) == (True, None)
    assert all(p["works"] or p["reason"] for p in found["providers"])
    assert found["provider"] is None or found["provider"] in {p["name"] for p in found["providers"] if p["works"]}
    assert "CPUExecutionProvider" in cli("devices")[1]


def test_models_are_listed(cli: Chrion) -> None:
    """Builders and specifications."""
    out = cli("model", "--list")[1].split()
    assert {"lstm", "gru", "rnn", "lstm-baseline"} <= set(out)


def wrecked(kind: str, path: Path) -> str:
    """A file that is not a model, or none at all."""
    good = branches().SerializeToString()
    contents = {"missing": None, "text": b"hello", "truncated": good[:-50], "empty": b"", "folder": None}
    if kind == "folder":
        path.mkdir()
    elif contents[kind] is not None:
        path.write_bytes(contents[kind])
    return str(path)


@pytest.mark.parametrize("command", ["profile", "partition", "run", "bench"])
@pytest.mark.parametrize("kind", ["missing", "text", "truncated", "empty", "folder"])
def test_what_is_no_model_is_one_line_and_exit_code_2(cli: Chrion, tmp_path: Path, command: str, kind: str) -> None:
    """For every command that takes one."""
    assert_refused(cli(command, wrecked(kind, tmp_path / "bad.onnx")), "bad.onnx")


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (["partition", "m.onnx", "--no-such-option"], "--no-such-option"),
        (["no-such-command"], "no-such-command"),
        (["partition"], "MODEL"),
        (["partition", "m.onnx", "--slo", "fast"], "slo"),
        (["partition", "m.onnx", "--slo", "-1ms"], "slo"),
        (["partition", "m.onnx", "--gpu-budget", "much"], "gpu budget"),
        (["partition", "m.onnx", "--gpu-budget", "-1MB"], "gpu budget"),
        (["sweep", "m.onnx", "--gpu-budget", "600 apples"], "gpu budget"),
        (["run", "m.onnx", "--plan", "other.json", "--gpu-budget", "1GB"], "--plan"),
        (["run", "m.onnx", "--plan", "other.json", "--streams", "2"], "--plan"),
        (["partition", "m.onnx", "--streams", "0"], "streams"),
        (["sweep", "m.onnx", "--streams", "0"], "streams"),
        (["run", "m.onnx", "--streams", "0"], "streams"),
        (["bench", "m.onnx", "--streams", "-1"], "streams"),
        (["partition", "m.onnx", "--measure-stages"], "policy ios"),
        (["partition", "m.onnx", "--alpha", "-1"], "alpha"),
        (["partition", "m.onnx", "--alpha", "nan"], "alpha"),
        (["partition", "m.onnx", "--alpha", "much"], "alpha"),
        (["partition", "m.onnx", "--cores", "0"], "cores"),
        (["partition", "m.onnx", "--cores", "100000"], "cores"),
        (["partition", "m.onnx", "--cores", "two"], "cores"),
        (["partition", "m.onnx", "--profile", PAPER, "--cores", "13"], "cores"),
        (["partition", "m.onnx", "--policy", "clever"], "clever"),
        (["partition", "m.onnx", "--policy", "accelerator"], "accelerator"),
        (["partition", "m.onnx", "--accelerator", "abacus"], "abacus"),
        (["partition", "m.onnx", "--profile", PAPER, "--accelerator", "cpu"], "--accelerator"),
        (["partition", "m.onnx", "--profile", "none.json"], "none.json"),
        (["partition", "m.onnx", "--profile", "damaged.json"], "damaged.json"),
        (["partition", "m.onnx", "--shape", "x"], "shape"),
        (["partition", "m.onnx", "--shape", "x=3x4"], "x"),
        (["partition", "m.onnx", "-o", "missing/p.json"], "missing/p.json"),
        (["partition", "m.onnx", "-o", "m.onnx/p.json"], "p.json"),
        (["partition", "m.onnx", "-o", "."], "cannot be written"),
        (["run", "m.onnx", "--plan", "other.json"], "other"),
        (["run", "m.onnx", "--plan", "damaged.json"], "damaged.json"),
        (["run", "m.onnx", "--plan", "other.json", "--slo", "5ms"], "--plan"),
        (["run", "m.onnx", "--repeat", "0"], "repeat"),
        (["run", "m.onnx", "--input", "none.npz"], "none.npz"),
        (["run", "m.onnx", "--input", "lacking.npz"], "'x'"),
        (["run", "m.onnx", "--input", "array.npy"], "array.npy"),
        (["run", "m.onnx", "--input", "short.npz"], "short.npz"),
        (["run", "m.onnx", "--input", "wrong.npz"], "x"),
        (["report", "damaged.json"], "damaged.json"),
        (["model"], "name"),
        (["model", "transformer"], "transformer"),
        (["model", "lstm", "--layers", "0"], "layers"),
        (["model", "lstm", "--layers", "many"], "layers"),
        (["model", "lstm", "--seed", "-1"], "seed"),
        (["model", "rnn", "--seq", "2", "--chunk", "3"], "chunk"),
        (["model", "rnn", "--seq", "2", "-o", "missing/m.onnx"], "missing"),
    ],
    ids=lambda value: " ".join(value).replace(PAPER, "PAPER") if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("model")
def test_bad_input_is_one_line_and_exit_code_2(cli: Chrion, tmp_path: Path, arguments: list[str], about: str) -> None:
    """No traceback; the line names what is wrong."""
    (tmp_path / "damaged.json").write_text('{"schema": "chrion.plan/1"}')
    np.savez(tmp_path / "lacking.npz", y=np.zeros(3))
    np.savez(tmp_path / "wrong.npz", x=np.zeros((3, 3), np.int64))
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "short.npz").write_bytes((tmp_path / "lacking.npz").read_bytes()[:-30])
    if "other.json" in arguments:
        onnx.save(branches(size=5), tmp_path / "other.onnx")
        assert cli("partition", "other.onnx", "-o", "other.json")[0] == 0
    assert_refused(cli(*arguments), about)


def assert_refused(result: tuple[int, str, str], about: str) -> None:
    """Exit code 2, nothing on stdout, exactly one line on stderr."""
    code, out, err = result
    lines = [line for line in err.splitlines() if line.strip()]
    assert (code, out) == (2, ""), err
    assert len(lines) == 1, err
    assert lines[0].startswith("chrion: error: ")
    assert about.lower() in lines[0].lower()


def test_a_failed_partition_leaves_no_plan(cli: Chrion, model: Path) -> None:
    """Nothing is written where nothing was planned."""
    cli("partition", str(model), "--policy", "clever")
    assert not model.with_suffix(".plan.json").exists()


def test_wrong_outputs_are_exit_code_1(cli: Chrion, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that differs from plain onnxruntime says so."""

    def wrong(*_: Any) -> float:
        return 0.5

    monkeypatch.setattr("chrion.cli.running.largest_difference", wrong)
    code, out, _ = cli("run", str(model), "--repeat", "1")
    assert code == 1
    assert "DIFFER FROM" in out


@pytest.mark.parametrize("policy", ["ios", "nimble", "opara", "wavefront", "greedy"])
def test_the_fields_schedulers_by_name(cli: Chrion, model: Path, policy: str) -> None:
    """Each plans, and its plan runs and is right."""
    assert cli("partition", str(model), "--policy", policy)[0] == 0
    plan = json.loads(model.with_suffix(".plan.json").read_text())
    assert plan["policy"] == policy
    assert cli("run", str(model), "--plan", str(model.with_suffix(".plan.json")))[0] == 0


def test_stages_are_measured_for_this_machine_only(cli: Chrion, model: Path) -> None:
    """Stages timed here say nothing of the machine that another profile is of."""
    measured = chrion.profile(chrion.load(model))
    replace(measured, machine=MACHINE).save(Path("other.json"))
    options = ("--policy", "ios", "--profile", "other.json")
    assert cli("partition", str(model), *options)[0] == 0
    assert_refused(cli("partition", str(model), *options, "--measure-stages"), "another machine")


def test_stages_can_be_measured(cli: Chrion, model: Path) -> None:
    """``--measure-stages`` gives a plan that runs; it needs the policy that has stages."""
    assert cli("partition", str(model), "--policy", "ios", "--measure-stages")[0] == 0
    assert cli("run", str(model), "--plan", str(model.with_suffix(".plan.json")))[0] == 0
    code, _, err = cli("partition", str(model), "--policy", "greedy", "--measure-stages")
    assert (code, "no stages to measure" in err) == (2, True)
    code, _, err = cli("partition", str(model), "--policy", "nimble", "--streams", "0")
    assert (code, "invalid number of streams 0" in err) == (2, True)
