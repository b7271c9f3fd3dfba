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
    """Run the command in this process, in an empty folder: exit code, stdout, stderr."""
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
    """A small model on disk, ``m.onnx``."""
    path = tmp_path / "m.onnx"
    onnx.save(branches(), path)
    return path


@pytest.fixture
def lstm(tmp_path: Path) -> Path:
    """The paper's baseline on disk, ``lstm.onnx``."""
    path = tmp_path / "lstm.onnx"
    onnx.save(build("lstm-baseline"), path)
    return path
