"""The options ``--precision`` and ``--max-error``."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from chrion import Plan, Profile
from chrion.native import bfloat16_available
from command_line import PAPER, Chrion, assert_each_refused

STACK = ("model", "lstm", "-o", "m.onnx", "--layers", "3", "--seq", "8", "--io", "32", "--batch", "1")


@pytest.mark.skipif(not bfloat16_available(), reason="the processor does not multiply bfloat16")
def test_from_a_profile_to_a_checked_run(cli: Chrion) -> None:
    """A plan in bfloat16 states the error that it adds; a run measures it, and fails beyond what was expected."""
    assert cli(*STACK)[0] == 0
    assert cli("profile", "m.onnx", "--precision", "bf16")[0] == 0
    profiled = Profile.load("m.profile.json")
    assert profiled.precision == "bf16"
    faster = {s: replace(c, native_ms=c.native_ms and (0.0,) * len(c.cpu_ms)) for s, c in profiled.operators.items()}
    replace(profiled, operators=faster).save("m.profile.json")
    code, out, _ = cli("partition", "m.onnx", "--profile", "m.profile.json", "--json")
    assert (code, json.loads(out)["precision"]) == (0, "bf16")
    expected = json.loads(out)["expected_error"]
    assert 0 < expected < 0.05
    assert "expected error" in cli("plan", "show", "m.plan.json")[1]
    code, out, _ = cli("run", "m.onnx", "--plan", "m.plan.json", "--repeat", "2")
    assert code == 0
    assert "error of bf16 against plain onnxruntime's float32: 0." in out
    replace(Plan.load("m.plan.json"), expected_error=1e-7).save("wrong.json")
    code, out, err = cli("run", "m.onnx", "--plan", "wrong.json", "--repeat", "2")
    assert code == 1
    assert "of the largest, more than 5e-07" in err


def test_refused_options(cli: Chrion) -> None:
    """Each names the option, and what it contradicts."""
    assert cli(*STACK)[0] == 0
    cases = [
        (["partition", "m.onnx", "--precision", "fp8"], "--precision: expected float32 or bf16, found 'fp8'"),
        (["partition", "m.onnx", "--precision", "bf16", "--hardware", "l4+epyc-16"], "not allowed with --hardware"),
        (["partition", "m.onnx", "--precision", "bf16", "--profile", PAPER], "has costs in float32"),
        (["run", "m.onnx", "--max-error", "0.1"], "--max-error: not allowed without precision bf16"),
        (
            ["run", "m.onnx", "--precision", "bf16", "--max-error", "2"],
            "--max-error: expected a share of the largest output, such as 0.01, found 2.0",
        ),
        (["run", "m.onnx", "--plan", "m.plan.json", "--precision", "bf16"], "--plan: not allowed with"),
        (["tune", "m.onnx", "--max-error", "0.1"], "--max-error: not allowed without precision bf16"),
    ]
    assert_each_refused(cli, cases)
