"""Fixtures of the tests of the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import onnx
import pytest

from chrion.cli import main
from chrion.zoo import build
from command_line import Chrion
from helpers import branches


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Chrion:
    """Return a function that runs the command in this process and returns its exit code, stdout and stderr.

    The current folder is empty.
    """
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
    """Return the path of a small model, ``m.onnx``."""
    path = tmp_path / "m.onnx"
    onnx.save(branches(), path)
    return path


@pytest.fixture
def lstm(tmp_path: Path) -> Path:
    """Return the path of the paper's baseline, ``lstm.onnx``."""
    path = tmp_path / "lstm.onnx"
    onnx.save(build("lstm-baseline"), path)
    return path
