"""``chrion partition`` and ``chrion plan``."""

from __future__ import annotations

import json
import random
import re
import shlex
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

import chrion
from chrion import Plan
from chrion.graph.trees import FORMS
from command_line import PAPER, Chrion, assert_refused
from helpers import FLOAT, MACHINE, free_branches, make_model, node, value
from random_trees import random_ensemble, tree_model

KEYS = {
    "model",
    "operators",
    "policy",
    "cores",
    "alpha",
    "priced",
    "memory",
    "slo_ms",
    "meets_slo",
    "budget_mb",
    "meets_budget",
    "latency_ms",
    "memory_mb",
    "resident_mb",
    "frame_mb",
    "on_accelerator",
    "on_cpu",
    "accelerator_only",
    "cpu_only",
    "precision",
    "expected_error",
}


def test_the_plan_is_one_json_object(cli: Chrion, lstm: Path) -> None:
    """Stdout is one JSON object with the documented keys; the plan is in the current folder."""
    options = ("--policy", "chrion-paper", "--slo", "1.6ms", "--alpha", "0.3")
    code, out, err = cli("partition", str(lstm), "--profile", PAPER, *options, "--json")
    assert (code, err) == (0, "chrion: planning lstm ...\n")
    found = json.loads(out)
    assert out.count("\n") == 1
    assert set(found) == {*KEYS, "plan", "machine", "estimated"}
    assert set(found["accelerator_only"]) == {"latency_ms", "memory_mb"}
    assert set(found["cpu_only"]) == {"latency_ms"}
    assert found["model"] == "lstm"
    assert found["meets_slo"] is True
    assert found["slo_ms"] == 1.6
    assert found["priced"] is True
    assert found["latency_ms"] < found["accelerator_only"]["latency_ms"]
    assert found["memory_mb"] < found["accelerator_only"]["memory_mb"]
    assert found["on_accelerator"] + found["on_cpu"] == found["operators"] == 34
    assert found["plan"] == "lstm.plan.json"
    assert Plan.load("lstm.plan.json").predicted.latency_ms == found["latency_ms"]


def test_the_plan_is_written_to_the_current_folder(cli: Chrion, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is not written beside the model, whose folder may be shared or read-only."""
    (model.parent / "elsewhere").mkdir()
    monkeypatch.chdir(model.parent / "elsewhere")
    for command, name in (("profile", "m.profile.json"), ("partition", "m.plan.json")):
        assert cli(command, str(model))[0] == 0
        assert Path(name).is_file()
        assert not (model.parent / name).exists()


def test_an_slo_out_of_reach_is_exit_code_3_and_the_fastest_plan(cli: Chrion, lstm: Path) -> None:
    """The plan has the latency of the fastest plan as a remark; the command says it once, last and on stderr."""
    options = ("--profile", PAPER, "--policy", "heft", "--slo", "1ms")
    code, out, err = cli("partition", str(lstm), *options, "-o", "p.json")
    assert code == 3
    plan = Plan.load("p.json")
    assert not plan.meets_slo
    about = "no plan meets the SLO of 1.00 ms: the fastest takes"
    assert any(about in r for r in plan.remarks)
    assert "the SLO of 1.00 ms" not in out
    assert err.splitlines()[-1].startswith(f"chrion: warning: {about}")


def test_a_gpu_budget_is_kept_and_reported(cli: Chrion, lstm: Path) -> None:
    """The table, the JSON object and the plan report the budget, which limits the resident memory."""
    options = (
        "partition",
        str(lstm),
        "--profile",
        PAPER,
        "--gpu-budget",
        "346.5MB",
        "--policy",
        "chrion-paper",
        "--force",
    )
    code, out, _ = cli(*options, "--json")
    assert code == 0
    found = json.loads(out)
    assert 346 < found["resident_mb"] <= found["budget_mb"] == 346.5
    assert found["meets_budget"] is True
    plan = Plan.load(found["plan"])
    assert (plan.budget_mb, plan.meets_budget) == (346.5, True)
    assert "fits the GPU budget of 346.5 MB" in cli(*options)[1]


def test_a_budget_that_a_policy_cannot_keep_is_exit_code_3(cli: Chrion, lstm: Path) -> None:
    """Policy accelerator places every operator on the accelerator; the plan has its memory beside the budget."""
    options = ("--profile", PAPER, "--gpu-budget", "0.3GB", "--policy", "accelerator", "-o", "p.json")
    code, out, err = cli("partition", str(lstm), *options)
    assert code == 3
    assert (out + err).count("the GPU budget of 300.0 MB") == 1
    plan = Plan.load("p.json")
    assert not plan.meets_budget
    assert any("the smallest holds 346.6 MB" in remark for remark in plan.remarks)


def test_the_table_has_the_baselines_beside_the_plan(cli: Chrion, lstm: Path) -> None:
    """The table has the accelerator only, the CPU only, the plan and the verdict."""
    code, out, _ = cli("partition", str(lstm), "--profile", PAPER, "--policy", "heft", "--slo", "60ms")
    assert code == 0
    assert all(text in out for text in ("accelerator only", "CPU only", "heft", "meets the SLO of 60.0 ms"))
    cores = Plan.load("lstm.plan.json").cpu_only_cores
    assert next(line for line in out.splitlines() if line.startswith("CPU only")).split()[-1] == str(cores)
    assert 1 <= cores <= 12
    assert "CPU only: predicted by the Chrion paper's algorithm, with one core for each operator" in out.splitlines()
    assert out.splitlines()[-1] == "next: chrion report lstm.plan.json --html lstm.timeline.html"


def test_without_an_accelerator_the_reference_is_a_plain_session(cli: Chrion, tmp_path: Path) -> None:
    """The output says what the table compares with, and how to measure the plan beside plain onnxruntime.

    With a profile of another machine, or an older one, the reference is a prediction.
    """
    onnx.save(free_branches(), tmp_path / "a model.onnx")
    code, out, _ = cli("partition", "a model.onnx", "--shape", "batch=2", "--cores", "2", "-o", "p.json")
    assert code == 0
    plan = Plan.load("p.json")
    assert plan.cpu_only_measured
    assert plan.cpu_only_cores in {1, 2}
    assert f"CPU only: plain onnxruntime with {plan.cpu_only_cores} thread" in out
    assert plan.cpu_only is not None
    assert ("which sessions run plain: no gain" in out) == plan.is_plain
    loses = plan.predicted.latency_ms > 1.01 * plan.cpu_only.latency_ms
    assert ("slower than plain onnxruntime" in out) == loses
    given = ("a model.onnx", "--shape", "batch=2", "--hardware", "epyc-16", "--cores", "2", "-o", "estimated.json")
    assert "with one core for each operator; chrion bench compares with plain" in cli("partition", *given)[1]
    assert "--profile gtx1080ti-paper" not in out
    commands = out.splitlines()[-1].removeprefix("next: ").split("; ")
    assert commands[0] == "chrion bench 'a model.onnx' --shape batch=2 --plan p.json"
    for command in commands:
        words = shlex.split(command)[1:]
        assert cli(*words, *(["--rounds", "1"] if words[0] == "bench" else []))[0] == 0


def test_a_price_of_memory_without_an_accelerator_is_no_part_of_the_objective(cli: Chrion, model: Path) -> None:
    """The output says that alpha changes nothing, and which machines have an accelerator."""
    code, out, _ = cli("partition", str(model), "--cores", "2", "--alpha", "0.3")
    assert code == 0
    assert "objective: minimum latency\n" in out
    assert "alpha changes nothing: there is no accelerator" in out
    assert "--profile gtx1080ti-paper" in out
    assert "--hardware l4+epyc-16," in out
    assert "alpha" not in cli("plan", "show", "m.plan.json")[1].replace("alpha changes nothing", "")


def test_an_alpha_that_was_not_given_is_not_shown(cli: Chrion, lstm: Path) -> None:
    """All commands state the objective of the plan as ``partition`` does."""
    options = ("partition", str(lstm), "--profile", PAPER, "--policy", "chrion-paper", "--slo", "1.6ms", "--force")
    for alpha, objective in (
        ((), "objective: minimum memory (Eq. 4) within the SLO"),
        (("--alpha", "0.01"), "objective: minimum latency + 0.01 ms/MB * memory (Eq. 4)"),
    ):
        assert objective in cli(*options, *alpha)[1]
        for command in (
            ("report", "lstm.plan.json", "--html", "t.html", "--force"),
            ("plan", "show", "lstm.plan.json"),
        ):
            out = cli(*command)[1]
            assert objective in out
            assert ("ms/MB" in out) == bool(alpha)
        assert ("ms/MB" in Path("t.html").read_text(encoding="utf-8")) == bool(alpha)


def test_a_price_of_memory_is_no_part_of_an_slo_that_no_plan_meets(cli: Chrion, lstm: Path) -> None:
    """The plan that is written is the fastest, whatever its memory, and nothing says that alpha changes nothing."""
    code, out, err = cli("partition", str(lstm), "--profile", PAPER, "--slo", "0.01ms", "--alpha", "0.3")
    assert (code, "no plan meets the SLO of 10.0 us" in err) == (3, True)
    assert "objective: minimum latency\n" in out
    assert "alpha" not in out


def test_the_priced_memory_comes_first_and_the_other_beside_it(cli: Chrion, lstm: Path) -> None:
    """The paper's profile has no measured memory, so alpha prices Equation 4; the option chooses the other."""
    line = ("partition", str(lstm), "--profile", PAPER, "--slo", "60ms", "--alpha", "0.3", "--force")
    code, out, _ = cli(*line)
    assert code == 0
    assert "objective: minimum latency + 0.3 ms/MB * memory (Eq. 4)" in out
    assert "initial solution" not in out
    paper = Plan.load("lstm.plan.json")
    code, out, _ = cli(*line, "--memory", "resident", "--policy", "peft")
    assert code == 0
    assert "alpha changes nothing: policy peft does not weigh memory" in out
    assert (paper.memory, Plan.load("lstm.plan.json").memory) == ("paper", "resident")
    assert "initial solution: peft" in cli(*line, "--policy", "peft", "-v")[2]


def test_a_failed_partition_leaves_no_plan(cli: Chrion, model: Path) -> None:
    """If planning fails, no plan is written."""
    assert_refused(cli("partition", str(model), "--policy", "accelerator", "--accelerator", "none"), "accelerator")
    assert not Path("m.plan.json").exists()


def test_a_placement_is_explained_by_the_names_of_the_users_file(cli: Chrion, lstm: Path, model: Path) -> None:
    """The explanation has the lane of the operator that contains the node; an unknown name gets similar ones."""
    options = ("--profile", PAPER, "--policy", "heft", "--force", "--explain")
    code, out, _ = cli("partition", str(lstm), *options, "LSTM:l0.t0.h", "--json")
    assert code == 0
    assert "LSTM:l0.t0.h" in json.loads(out)["explanation"][0]
    lines = json.loads(cli("partition", str(model), *options, "sum", "--json")[1])["explanation"]
    assert lines[0].startswith("right_product/MatMulAddFusion (Gemm) is on ")  # into which onnxruntime fuses it
    assert lines[1].startswith("alone, it takes ")
    about = "unknown operator 'left_produkt' in model 'm' (did you mean 'left_product'"
    Path("m.plan.json").unlink()
    assert_refused(cli("partition", str(model), *options, "left_produkt"), about)
    assert not Path("m.plan.json").exists()


def test_published_schedulers_by_name(cli: Chrion, model: Path) -> None:
    """Each scheduler makes a plan that runs with equal outputs."""
    for policy in ("ios", "nimble", "opara", "wavefront", "greedy"):
        assert cli("partition", str(model), "--policy", policy, "--accelerator", "none", "--force")[0] == 0
        assert Plan.load("m.plan.json").policy == policy
        assert cli("run", str(model), "--plan", "m.plan.json", "--repeat", "1")[0] == 0, policy


def test_stages_are_measured_for_this_machine_only(cli: Chrion, model: Path) -> None:
    """Stages are not measured for a profile of another machine."""
    measured = chrion.profile(chrion.load(model))
    replace(measured, machine=MACHINE).save(Path("other.json"))
    options = ("--policy", "ios", "--profile", "other.json", "--force")
    assert cli("partition", str(model), *options)[0] == 0
    assert_refused(cli("partition", str(model), *options, "--measure-stages"), "another machine")


def test_stages_can_be_measured(cli: Chrion, model: Path) -> None:
    """With ``--measure-stages`` the IOS policy makes a plan that runs; other policies refuse the option."""
    assert cli("partition", str(model), "--policy", "ios", "--measure-stages", "--accelerator", "none")[0] == 0
    assert cli("run", str(model), "--plan", "m.plan.json")[0] == 0
    assert_refused(cli("partition", str(model), "--policy", "greedy", "--measure-stages"), "measures no stages")


def test_plan_show_shows_what_a_plan_holds(cli: Chrion, lstm: Path) -> None:
    """``plan show`` prints model, machine, policy, figures and each lane's operators, as tables and as JSON."""
    cli("partition", str(lstm), "--profile", PAPER, "--policy", "chrion-paper", "--slo", "1.6ms")
    plan = Plan.load("lstm.plan.json")
    code, out, err = cli("plan", "show", "lstm.plan.json")
    assert (code, err) == (0, "")
    for text in ("lstm: 34 operators", "GTX 1080 Ti", "policy", "gpu0", "cpu1", "by Equation 4", "meets the SLO"):
        assert text in out
    found = json.loads(cli("plan", "show", "lstm.plan.json", "--json")[1])
    assert set(found) == {*KEYS, "shapes", "machine", "estimated", "lanes"}
    assert sum(lane["operators"] for lane in found["lanes"]) == 34
    names = [name for lane in found["lanes"] for name in lane["operator_names"]]
    assert sorted(names) == sorted(plan.operators)
    assert sum(lane["segments"] for lane in found["lanes"]) == len(plan.segments)
    assert_refused(cli("plan", "show", "nothing.json"), "nothing.json")


def test_plan_without_a_command_shows_help(cli: Chrion) -> None:
    """The help of ``chrion plan`` names its subcommand."""
    code, out, err = cli("plan")
    assert (code, err) == (0, "")
    assert "show" in out


def test_a_size_of_zero_is_said(cli: Chrion, tmp_path: Path) -> None:
    """A plan for a request without elements comes with a warning that names the input; others have none."""
    path = tmp_path / "m.onnx"
    x, y = (value(name, FLOAT, ("batch", 4)) for name in "xy")
    onnx.save(make_model([node("Relu", ["x"], ["y"])], [x], [y]), path)
    for size, said in (("0", True), ("2", False)):
        words = ("partition", str(path), "--shape", f"batch={size}", "--profile", "gtx1080ti-paper", "--force")
        assert ("a size of 0 leaves x (0x4) without elements" in cli(*words)[2]) == said


def test_estimates_without_comparable_measurements_are_warned_of(cli: Chrion, lstm: Path, tmp_path: Path) -> None:
    """The paper's profile has single steps of LSTMs only: layers of many steps, and other types, are named."""
    paper = ("--profile", "gtx1080ti-paper", "--force")
    x, y = (value(name, FLOAT, (2, 4)) for name in "xy")
    onnx.save(make_model([node("Relu", ["x"], ["y"])], [x], [y]), tmp_path / "relu.onnx")
    assert cli("model", "lstm", "-o", "folded.onnx", "--layers", "2", "--chunk", "96")[0] == 0
    for model, types in (("relu.onnx", "Relu"), ("folded.onnx", "LSTM, Squeeze")):
        warning = f"100 % of the predicted time is extrapolated, since the profile has no comparable {types};"
        assert warning in " ".join(cli("partition", model, *paper)[2].split())
    assert "extrapolated" not in cli("partition", str(lstm), *paper)[2]


def test_a_price_without_effect_names_the_fixed_memory(cli: Chrion, lstm: Path) -> None:
    """If alpha prices resident memory in vain, the reason has the part that no placement changes."""
    words = ("partition", str(lstm), "--profile", "gtx1080ti-paper", "--alpha", "0.001", "--memory", "resident")
    out = " ".join(cli(*words)[1].split())
    assert re.search(r"alpha changes nothing: .* on; 345.0 MB of it is taken by any use of the accelerator", out)


def test_the_choice_for_trees_is_shown(cli: Chrion, tmp_path: Path) -> None:
    """One line names the form that the plan has, and what the others are predicted to take, or why they are missing."""
    made = random_ensemble(random.Random(2), "TreeEnsembleRegressor", trees=100, depth=6, targets=1)
    summed = replace(made, aggregate="SUM", transform="NONE")
    onnx.save(tree_model(summed, "TreeEnsembleRegressor"), tmp_path / "t.onnx")
    onnx.save(tree_model(replace(summed, transform="PROBIT"), "TreeEnsembleRegressor"), tmp_path / "probit.onnx")
    machine = ("--hardware", "l4+epyc-16", "--cores", "2", "-o", "p.json", "--force")
    for rows, chosen in (("1", ("kernel",)), ("20000", FORMS)):
        code, out, _ = cli("partition", "t.onnx", "--shape", f"rows={rows}", *machine, "--json")
        found = json.loads(out)
        trees = found["trees"]
        assert (code, trees["chosen"] in chosen, trees["refused"]) == (0, True, {})
        assert {*trees["predicted_ms"]} == {"kernel", *FORMS}
        assert trees["predicted_ms"][trees["chosen"]] == found["latency_ms"] == min(trees["predicted_ms"].values())
        [line] = [line for line in tables(cli, "t.onnx", rows, machine) if line.startswith("trees: ")]
        assert ("kernel, predicted" in line) is (chosen == ("kernel",))
    [line] = [line for line in tables(cli, "probit.onnx", "1", machine) if line.startswith("trees: ")]
    assert re.fullmatch(
        r"trees: onnxruntime's kernel, predicted \S+ \S+; no gathers, gemm: TreeEnsembleRegressor 'trees' has the "
        r"transform PROBIT, which no other operator has",
        line,
    )
    cpu = ("--hardware", "epyc-16", "--cores", "2", "-o", "p.json", "--force")
    [line] = [line for line in tables(cli, "t.onnx", "40", cpu) if line.startswith("trees: ")]
    assert re.fullmatch(r"trees: 2 parts, predicted \S+ \S+; onnxruntime's kernel \S+ \S+", line)
    predicted = json.loads(cli("partition", "t.onnx", "--shape", "rows=40", *cpu, "--json")[1])["trees"]["predicted_ms"]
    assert predicted["kernel"] / 2 <= predicted["2 parts"] < predicted["kernel"]  # two cores do the work of one


def tables(cli: Chrion, model: str, rows: str, options: tuple[str, ...]) -> list[str]:
    """Return the lines that the command prints for a number of rows."""
    code, out, err = cli("partition", model, "--shape", f"rows={rows}", *options)
    assert code == 0, err
    return out.splitlines()
