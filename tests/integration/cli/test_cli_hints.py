"""Answers of the command line to mistakes: the names that it knows, and the useful part of errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest

import chrion
from chrion import HybridSession, Profile
from chrion.errors import ChrionError, ModelError, OptionError
from command_line import PAPER, Chrion, assert_each_refused
from helpers import FLOAT, branches, free_branches, make_model, node, value


@pytest.fixture
def models(tmp_path: Path, cli: Chrion) -> None:
    """Put a model of fixed shapes, one of free dimensions, and one that onnxruntime refuses in the current folder."""
    del cli  # which changes to that folder
    onnx.save(branches(), tmp_path / "m.onnx")
    free = ["time", "batch", 4]
    onnx.save(
        make_model([node("Neg", ["x"], ["y"])], [value("x", FLOAT, free)], [value("y", FLOAT, free)]), "free.onnx"
    )
    wrong = make_model([node("NoSuchOperator", ["x"], ["y"])], [value("x", FLOAT, [2])], [value("y", FLOAT, [2])])
    onnx.save(wrong, tmp_path / "wrong.onnx")
    (tmp_path / "small.toml").write_text('seed = "many"\n')


@pytest.mark.usefixtures("models")
def test_mistakes_are_answered_by_what_is_known(cli: Chrion) -> None:
    """Names of the model, similar names, and the file of a wrong value."""
    assert_each_refused(
        cli,
        [
            (["partition", "free.onnx", "--shape", "q=4"], "no input or free dimension 'q' (its inputs are x"),
            (["partition", "free.onnx", "--shape", "tim=4"], "'tim' (did you mean 'time'?)"),
            (["partition", "free.onnx", "--shape", "time=96x1"], "'time' is a dimension: expected one size"),
            (["partition", "m.onnx", "--policy", "hef"], "unknown policy 'hef' (did you mean 'heft'?)"),
            (["partition", "m.onnx", "--polcy", "heft"], "no such option --polcy; did you mean '--policy'?"),
            (["partition", "m.onnx", "--frobnicate"], "no such option --frobnicate (see: chrion partition --help)"),
            (
                ["partition", "m.onnx", "--hardware", "--cores", "2"],
                "--hardware: expected a value, found the option --co",
            ),
            (["partition", "m.onnx", "--cores", "two"], "--cores: expected a whole number, found 'two'"),
            (["partition", "m.onnx", "--alpha", "much"], "--alpha: expected a number, found 'much'"),
            (["bench", "m.onnx", "--rounds", "0"], "--rounds: expected 1 or more, found '0'"),
            (
                ["partition", "m.onnx", "--slo", "x"],
                "--slo: expected a duration above zero, found 'x' (write it as 60ms, 0.0",
            ),
            (["partition", "m.onnx", "--gpu-budget", "x"], "a plain number is in MB)"),
            (
                ["partition", "m.onnx", "--profile", "m.onnx"],
                "m.onnx: expected a file of schema chrion.profile/1, found a m",
            ),
            (["run", "m.onnx", "--policy", "heft", "--slo", "x"], "500us; a plain number is in ms)"),
            (["simulate", "table7", "--set", "models.baselin.copies=2"], "did you mean 'baseline'?"),
            (["simulate", "table7", "--swep", "seed=1,2"], "did you mean '--sweep'?"),
            (["partition", "m.onnx", "--profile", "gtx1080ti-papr"], "(did you mean 'gtx1080ti-paper'?)"),
            (["modl", "lstm"], "Did you mean 'model'?"),
            (["simulate", "azure-capacity", "--set", "requets=3"], "did you mean"),
            (
                ["simulate", "table7", "--gpu-memory-gb", "3"],
                "no such option --gpu-memory-gb; values of the scenario are changed by --set KEY=VALUE",
            ),
            (["simulate", "table7", "--set", "servers=3"], "key 'servers' is a section (use servers.count"),
            (["simulate", "table7", "--set", "pattern=gpu"], "unknown key 'pattern' (did you mean 'patterns'?)"),
            (["simulate", "azure-capacty"], "did you mean 'azure-capacity'"),
            (["simulate", "small.toml"], "small.toml: seed: expected a whole number, found 'many'"),
            (
                ["simulate", "table7", "--set", "seed=-1"],
                "error: table7 with seed=-1: seed: expected a whole number of at least 0, found -1",
            ),
            *[
                ([command, "m.onnx", "--cores", "99"], "cores of this process, found 99")
                for command in ("partition", "run", "profile")
            ],
        ],
    )


@pytest.mark.usefixtures("models")
def test_an_error_of_onnxruntime_is_shortened(cli: Chrion) -> None:
    """The line has no code, no file of onnxruntime's source and no stack."""
    code, _, err = cli("run", "wrong.onnx")
    assert code == 2
    line = err.splitlines()[-1]
    assert "NoSuchOperator" in line
    assert "onnxruntime/core" not in err
    assert "[ONNXRuntimeError]" not in line


def test_a_stored_profile_is_found_by_its_name(cli: Chrion) -> None:
    """As models and scenarios are, also where there is no folder of profiles."""
    onnx.save(branches(), "m.onnx")
    options = ("--policy", "heft", "--force", "--json")
    named, given = (cli("partition", "m.onnx", "--profile", name, *options) for name in ("gtx1080ti-paper", PAPER))
    assert named[0] == 0
    assert named[:2] == given[:2]


def test_help_keeps_what_stands_in_brackets(cli: Chrion) -> None:
    """A table of a scenario is not taken for markup."""
    code, out, _ = cli("simulate", "--help")
    assert code == 0
    assert "the table [decoder]" in out


@pytest.mark.parametrize(
    ("cores", "message"),
    [
        *[(number, f"cores: expected a whole number from 1 to .*, found {number}") for number in (0, -1, 99)],
        *[(value, "cores: expected a whole number from 1 to ") for value in (1.5, "2", True)],
    ],
)
def test_a_session_refuses_cores_that_the_command_line_refuses(cores: Any, message: str) -> None:
    """Before it opens the model."""
    with pytest.raises(OptionError, match=message):
        HybridSession("no-such-model.onnx", cores=cores)


@pytest.mark.parametrize(("path", "found"), [("", "an empty path"), (".", "the folder ."), (Path(), "the folder .")])
def test_a_session_refuses_what_is_no_file(path: str | Path, found: str) -> None:
    """The error is of the project, and in one line."""
    with pytest.raises(ModelError, match=f"path_or_bytes: expected an ONNX model, found {found}"):
        HybridSession(path)


def test_partition_takes_graphs_with_shapes_only(tmp_path: Path) -> None:
    """The hints name the function that returns one, and the argument that fixes shapes."""
    onnx.save(free_branches(), tmp_path / "free.onnx")
    with pytest.raises(ChrionError, match=r"free dimensions in x\[batch x 4\] .*load\(MODEL, shapes={'batch': 1}\)"):
        chrion.partition(chrion.load(tmp_path / "free.onnx"), Profile.load(PAPER))
    with pytest.raises(ChrionError, match=r"expected a Graph, found 'x\.onnx' \(chrion\.load\(MODEL\) returns one\)"):
        chrion.partition("x.onnx", None)  # type: ignore[arg-type]


def test_a_session_is_printed_with_its_model_and_its_engine(tmp_path: Path) -> None:
    """In one line."""
    onnx.save(branches(), tmp_path / "towers.onnx")
    with HybridSession(tmp_path / "towers.onnx", tune="never") as session:
        shown = repr(session)
    assert shown.startswith("<HybridSession of towers: plain onnxruntime on CPUExecutionProvider")
    assert "\n" not in shown


def test_the_version_needs_no_library() -> None:
    """So that it takes no second of imports."""
    code = (
        "import sys\nsys.argv = ['chrion', '--version']\nfrom chrion.cli.entry import main\n"
        "try:\n    main()\nexcept SystemExit as exit_:\n    assert not exit_.code\n"
        "print({'onnxruntime', 'numpy', 'onnx', 'typer'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout.splitlines() == [f"chrion {chrion.__version__}", "set()"]
