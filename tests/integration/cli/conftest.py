"""Fixtures of the tests of the command line."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from chrion.zoo import build
from helpers import branches


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the path of a small model, ``m.onnx``."""
    path = tmp_path / "m.onnx"
    onnx.save(branches(), path)
    return path


@pytest.fixture
def lstm(tmp_path: Path) -> Path:
    """Return the path of ``lstm.onnx``, a small stack of 34 operators with the cells of the paper's baseline."""
    path = tmp_path / "lstm.onnx"
    onnx.save(build("lstm-baseline", {"layers": 4, "seq": 8}), path)
    return path
