"""Bad input: one line on stderr, exit code 2, and nothing measured or written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from command_line import PAPER, Chrion, assert_refused
from helpers import branches


def wrecked(kind: str, path: Path) -> str:
    """Return the path of a file that is not a model, or does not exist."""
    good = branches().SerializeToString()
    contents = {"missing": None, "text": b"hello", "truncated": good[:-50], "empty": b"", "folder": None}
    if kind == "folder":
        path.mkdir()
    elif contents[kind] is not None:
        path.write_bytes(contents[kind] or b"")
    return str(path)


@pytest.mark.parametrize("command", ["profile", "partition", "run", "bench", "sweep", "compare"])
@pytest.mark.parametrize("kind", ["missing", "text", "truncated", "empty", "folder"])
def test_a_file_that_is_no_model_is_refused(cli: Chrion, tmp_path: Path, command: str, kind: str) -> None:
    """The message names the file that is not a model."""
    assert_refused(cli(command, wrecked(kind, tmp_path / "bad.onnx")), "bad.onnx")


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (["partition", "m.onnx", "--no-such-option"], "--no-such-option (see: chrion partition --help)"),
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
    ],
    ids=lambda value: " ".join(value).replace(PAPER, "PAPER") if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("model")
def test_bad_input_is_refused(cli: Chrion, tmp_path: Path, arguments: list[str], about: str) -> None:
    """Invalid input is refused without a traceback, and the line names the cause."""
    (tmp_path / "damaged.json").write_text('{"schema": "chrion.plan/1"}')
    (tmp_path / "text.npz").write_text("1, 2, 3")
    np.savez(tmp_path / "lacking.npz", y=np.zeros(3))
    np.savez(tmp_path / "wrong.npz", x=np.zeros((3, 3), np.int64))
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "short.npz").write_bytes((tmp_path / "lacking.npz").read_bytes()[:-30])
    if "other.json" in arguments:
        onnx.save(branches(size=5), tmp_path / "other.onnx")
        assert cli("partition", "other.onnx", "-o", "other.json")[0] == 0
    assert_refused(cli(*arguments), about)


@pytest.mark.parametrize("size", ["600mb", "1GiB", "600MB"])
def test_sizes_are_read_in_common_notations(cli: Chrion, model: Path, size: str) -> None:
    """Sizes are read in upper and lower case, with decimal and binary units."""
    assert cli("partition", str(model), "--gpu-budget", size)[0] == 0
