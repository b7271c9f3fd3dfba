"""Bad input: one line on stderr, exit code 2, and nothing measured or written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from command_line import PAPER, Chrion, assert_each_refused
from helpers import branches


def test_a_file_that_is_no_model_is_refused(cli: Chrion, tmp_path: Path) -> None:
    """The message names the file that is not a model, or does not exist."""
    good = branches().SerializeToString()
    for name, content in {"text": b"hello", "truncated": good[:-50], "empty": b""}.items():
        (tmp_path / f"{name}.onnx").write_bytes(content)
    (tmp_path / "folder.onnx").mkdir()
    commands = ("profile", "partition", "run", "bench", "sweep", "compare")
    files = [f"{name}.onnx" for name in ("missing", "text", "truncated", "empty", "folder")]
    assert_each_refused(cli, [((command, file), file) for command in commands for file in files])


@pytest.mark.usefixtures("model")
def test_bad_input_is_refused(cli: Chrion, tmp_path: Path) -> None:
    """Invalid input is refused without a traceback, and the line names the cause."""
    (tmp_path / "damaged.json").write_text('{"schema": "chrion.plan/1"}')
    (tmp_path / "text.npz").write_text("1, 2, 3")
    np.savez(tmp_path / "lacking.npz", y=np.zeros(3))
    np.savez(tmp_path / "wrong.npz", x=np.zeros((3, 3), np.int64))
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "short.npz").write_bytes((tmp_path / "lacking.npz").read_bytes()[:-30])
    onnx.save(branches(size=5), tmp_path / "other.onnx")
    assert cli("partition", "other.onnx", "--profile", PAPER, "--policy", "heft", "-o", "other.json")[0] == 0
    cases: list[tuple[list[str], str]] = [
        (["partition", "m.onnx", "--no-such-option"], "--no-such-option (see: chrion partition --help)"),
        (["report", "other.json", "--html"], "(see: chrion report --help)"),
        (["compare", "squeezenet"], "chrion model squeezenet -o squeezenet.onnx"),
        (["run", "m.onnx", "--shape", "x=2x5", "--shape", "x=3x5"], "--shape: x is given 2 times"),
        (["no-such-command"], "no-such-command"),
        (["plan", "no-such-command"], "no-such-command"),
        (["partition"], "MODEL"),
        (["partition", "m.onnx", "--slo", "fast"], "slo"),
        (["partition", "m.onnx", "--slo", "-1ms"], "slo"),
        (["run", "m.onnx", "--slo", "fast"], "slo"),
        (["partition", "m.onnx", "--gpu-budget", "much"], "budget"),
        (["partition", "m.onnx", "--gpu-budget", "-1MB"], "budget"),
        (["sweep", "m.onnx", "--gpu-budget", "600 apples"], "budget"),
        (["sweep", "m.onnx", "--alpha", "0:1e9:1e-9"], "--alpha"),
        (["run", "m.onnx", "--plan", "other.json", "--gpu-budget", "1GB"], "--plan"),
        (["run", "m.onnx", "--plan", "other.json", "--streams", "2"], "--plan"),
        (["bench", "m.onnx", "--plan", "other.json", "--policy", "chrion"], "--plan"),
        (["profile", "m.onnx", "--profile", PAPER], "--plot"),
        (["profile", "m.onnx", "--profile", PAPER, "--plot", "p.svg", "--fresh"], "--fresh"),
        (["profile", "m.onnx", "--profile", PAPER, "--plot", "p.svg", "-o", "o.json"], "-o"),
        (["profile", "m.onnx", "--profile", PAPER, "--plot", "p.svg", "--cores", "1"], "--cores"),
        (["partition", "m.onnx", "--streams", "0"], "streams"),
        (["sweep", "m.onnx", "--streams", "0"], "streams"),
        (["run", "m.onnx", "--streams", "0"], "streams"),
        (["bench", "m.onnx", "--streams", "-1"], "streams"),
        (["partition", "m.onnx", "--measure-stages"], "policy"),
        (["partition", "m.onnx", "--alpha", "-1"], "alpha"),
        (["partition", "m.onnx", "--alpha", "nan"], "alpha"),
        (["partition", "m.onnx", "--alpha", "much"], "alpha"),
        (["partition", "m.onnx", "--cores", "0"], "cores"),
        (["partition", "m.onnx", "--cores", "100000"], "cores"),
        (["partition", "m.onnx", "--cores", "two"], "cores"),
        (["partition", "m.onnx", "--profile", PAPER, "--cores", "13"], "cores"),
        (["partition", "m.onnx", "--policy", "clever"], "clever"),
        (["run", "m.onnx", "--policy", "clever"], "clever"),
        (["partition", "m.onnx", "--policy", "accelerator"], "accelerator"),
        (["partition", "m.onnx", "--accelerator", "abacus"], "abacus"),
        (["run", "m.onnx", "--accelerator", "abacus"], "abacus"),
        (["partition", "m.onnx", "--profile", PAPER, "--accelerator", "cpu"], "--accelerator"),
        (["partition", "m.onnx", "--profile", "none.json"], "none.json"),
        (["partition", "m.onnx", "--profile", "damaged.json"], "damaged.json"),
        (["partition", "m.onnx", "--shape", "x"], "shape"),
        (["partition", "m.onnx", "--shape", "x=3x4"], "x"),
        (["run", "m.onnx", "--plan", "other.json"], "other"),
        (["run", "m.onnx", "--plan", "damaged.json"], "damaged.json"),
        (["run", "m.onnx", "--repeat", "0"], "repeat"),
        (["bench", "m.onnx", "--rounds", "0"], "rounds"),
        (["run", "m.onnx", "--input", "none.npz"], "none.npz"),
        (["run", "m.onnx", "--input", "lacking.npz"], "'x'"),
        (["run", "m.onnx", "--input", "array.npy"], "array.npy: expected an .npz file with one array per input"),
        (["bench", "m.onnx", "--input", "text.npz"], "text.npz: expected an .npz file with one array per input"),
        (["run", "m.onnx", "--input", "short.npz"], "short.npz"),
        (["run", "m.onnx", "--input", "wrong.npz"], "x"),
        (["report", "damaged.json"], "damaged.json"),
        (["report", "other.json", "--measured"], "--model"),
        (["model"], "name"),
        (["model", "transformer"], "transformer"),
        (["model", "lstm", "--layers", "0"], "layers"),
        (["model", "lstm", "--layers", "many"], "layers"),
        (["model", "lstm", "--seed", "-1"], "seed"),
        (["model", "rnn", "--seq", "2", "--chunk", "3"], "chunk"),
        (["simulate"], "--list"),
        (["simulate", "nothing"], "nothing"),
        (["cache", "clear", "plans"], "plans"),
        (["cache", "size", "plans"], "plans"),
    ]
    before = sorted(tmp_path.iterdir())
    assert_each_refused(cli, cases)
    assert sorted(tmp_path.iterdir()) == before


def test_sizes_are_read_in_common_notations(cli: Chrion, model: Path) -> None:
    """Sizes are read in upper and lower case, with decimal and binary units."""
    for size, megabytes in {"600mb": 600.0, "1GiB": 2**30 / 1e6, "600MB": 600.0}.items():
        options = ("--profile", PAPER, "--policy", "first-fit", "--gpu-budget", size, "--force")
        code, out, _ = cli("partition", str(model), *options, "--json")
        assert (code, json.loads(out)["budget_mb"]) == (0, megabytes)
