"""``chrion partition --explain``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import onnx
import pytest

from chrion.cli import main
from helpers import branches


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the path of a small model, in which onnxruntime fuses the node ``sum`` with its input."""
    path = tmp_path / "m.onnx"
    onnx.save(branches(), path)
    return path


def explain(monkeypatch: pytest.MonkeyPatch, model: Path, name: str) -> int:
    """Run the command for a name and return its exit code."""
    monkeypatch.setattr(
        sys, "argv", ["chrion", "partition", str(model), "--accelerator", "none", "--json", "--explain", name]
    )
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


def test_a_name_of_the_file_is_explained(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The explanation has the lane of the operator that contains the node."""
    assert explain(monkeypatch, model, "sum") == 0
    lines = json.loads(capfd.readouterr().out)["explanation"]
    assert lines[0].startswith("right_product/MatMulAddFusion (Gemm) is on cpu")
    assert lines[1].startswith("alone, it takes ")


def test_an_unknown_name_is_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The line contains the most similar names."""
    assert explain(monkeypatch, model, "left_produkt") == 2
    error = capfd.readouterr().err
    assert "unknown operator 'left_produkt' in model 'm' (did you mean 'left_product'" in error
    assert "Traceback" not in error
