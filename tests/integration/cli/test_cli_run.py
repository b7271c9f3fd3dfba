"""``chrion run``, ``chrion bench`` and ``chrion report`` for default sessions and for given plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from chrion import Plan, Profile
from chrion.cli import bench as bench_module
from chrion.devices import providers
from command_line import PAPER, Chrion, assert_refused
from helpers import branches


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


def test_free_dimensions_are_those_of_the_inputs(cli: Chrion, tmp_path: Path) -> None:
    """``--shape`` is not needed with ``--input``; without both the message names the input."""
    model = branches()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.save(model, tmp_path / "free.onnx")
    np.savez("x.npz", x=np.ones((3, 4), np.float32))
    code, out, _ = cli("run", "free.onnx", "--input", "x.npz", "--repeat", "1", "--json")
    assert (code, json.loads(out)["equal"]) == (0, True)
    for command in ("run", "bench", "partition"):
        assert_refused(cli(command, "free.onnx"), "x[batchx4]")


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


def test_a_plan_whose_accelerator_is_missing_is_refused(
    cli: Chrion, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names the accelerator, also if the plan has the whole model on it, and is read from the model."""
    monkeypatch.setattr(providers, "failure_reason", lambda _: "no driver")
    options = ("--profile", PAPER, "--policy", "accelerator", "--annotate", "a.onnx")
    assert cli("partition", str(model), *options)[0] == 0
    about = "CUDAExecutionProvider does not work on this machine: no driver"
    for command in ("run", "bench"):
        assert_refused(cli(command, "a.onnx", "--plan", "a.onnx"), about)


def test_bench_prints_one_object(cli: Chrion, model: Path) -> None:
    """The object has every session with its median and quartiles, and the ratio to the best plain session."""
    code, out, _ = cli("bench", str(model), "--rounds", "1", "--json")
    assert code == 0
    found = json.loads(out)
    times = {t["name"]: t["median_ms"] for t in found["timings"]}
    plain = {name: ms for name, ms in times.items() if name != "hybrid"}
    assert len(plain) == 3
    assert found["ratio"] == pytest.approx(times["hybrid"] / min(plain.values()))
    assert plain[found["best_plain"]] == min(plain.values())
    assert found["runs_plan"] is False


def test_bench_says_what_the_session_chose(cli: Chrion, model: Path) -> None:
    """The output has the reason for the decision first and then the table."""
    code, out, _ = cli("bench", str(model), "--rounds", "1")
    assert code == 0
    assert out.startswith("plain onnxruntime on CPUExecutionProvider")
    assert "hybrid, as predicted" not in out


@pytest.mark.parametrize("command", [("run", "--repeat", "2"), ("bench", "--rounds", "1")])
@pytest.mark.parametrize("options", [(), ("--policy", "wavefront")])
def test_a_missed_slo_is_exit_code_3(
    cli: Chrion, model: Path, command: tuple[str, ...], options: tuple[str, ...]
) -> None:
    """The measured latency must meet the SLO, also of a plain session.

    Stderr reports a miss, and stdout does not change.
    """
    code, out, err = cli(*command, str(model), *options, "--slo", "1us", "--json")
    assert code == 3
    assert "the SLO of 1 us is missed: measured" in err
    assert json.loads(out)["model"] == "m"
    code, _, err = cli(*command, str(model), *options, "--slo", "10s", "--json")
    assert (code, "SLO" in err) == (0, False)


def test_wrong_outputs_are_exit_code_1(cli: Chrion, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stdout and stderr say that outputs differ."""

    def wrong(*_: Any) -> float:
        return 0.5

    monkeypatch.setattr("chrion.cli.run.largest_difference", wrong)
    code, out, err = cli("run", str(model), "--repeat", "1")
    assert code == 1
    assert "DIFFER FROM" in out
    assert "outputs differ from plain onnxruntime's by 0.5" in err


def test_bench_times_the_session_that_was_chosen(cli: Chrion, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trial opens a HybridSession with the options of the command, not another plain session."""
    opened: list[dict[str, Any]] = []
    real = bench_module.HybridSession

    def noted(graph: Any, **arguments: Any) -> Any:
        opened.append(arguments)
        return real(graph, **arguments)

    monkeypatch.setattr(bench_module, "HybridSession", noted)
    assert cli("bench", str(model), "--rounds", "3", "--slo", "10s", "--json")[0] == 0
    assert [arguments["slo"] for arguments in opened] == ["10s"] * 3
