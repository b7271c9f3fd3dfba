"""Sessions for an execution provider that onnxruntime offers and that does not work on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from chrion.devices.probe import failure_reason
from chrion.runtime.selection.selector import SessionConfig
from chrion.zoo import build

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"

SESSION = f"""
import logging, sys
logging.basicConfig()
from chrion import HybridSession
session = HybridSession(sys.argv[1], providers=["{CUDA}", "{CPU}"])
assert session.wait_until_tuned(120)
assert session.get_providers() == ["{CPU}"]
"""
PLAIN = f"""
import sys
import onnxruntime
onnxruntime.InferenceSession(sys.argv[1], providers=["{CUDA}", "{CPU}"])
"""

without_cuda = pytest.mark.skipif(
    CUDA not in ort.get_available_providers() or failure_reason(CUDA) is None,
    reason="needs an onnxruntime with CUDA on a machine without it",
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the file of a small model."""
    path = tmp_path / "model.onnx"
    path.write_bytes(build("lstm", {"layers": 2, "seq": 8, "batch": 1, "io": 8}).SerializeToString())
    return path


def reports(code: str, model: Path, tune: str = "now") -> list[str]:
    """Return the lines about CUDA that a process with its own cache writes to stderr."""
    environment = {**os.environ, "CHRION_CACHE": str(model.parent / "cache"), "CHRION_TUNE": tune}
    done = subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-c", code, str(model)], check=True, capture_output=True, text=True, env=environment
    )
    return [line for line in done.stderr.splitlines() if CUDA in line]


@without_cuda
def test_a_broken_provider_is_reported_once(model: Path) -> None:
    """The first session of a machine and later ones print one line each, with the provider, the reason and a hint."""
    for _ in range(2):
        (line,) = reports(SESSION, model)
        assert "pip install 'chrion[cuda]'" in line


@without_cuda
def test_tuning_in_the_background_does_not_repeat_the_report(model: Path) -> None:
    """The session starts as a plain one, and prints no more about the provider than plain onnxruntime."""
    for _ in range(2):
        assert len(reports(SESSION, model, "background")) <= len(reports(PLAIN, model))


@pytest.mark.parametrize(
    ("providers", "options", "left", "left_options"),
    [
        ([CUDA, CPU], None, [CPU], None),
        ([CUDA], None, [CPU], None),
        ([CPU, CUDA], [{}, {"device_id": 1}], [CPU], [{}]),
        ([TENSORRT, (CUDA, {"device_id": 1}), CPU], None, [(CUDA, {"device_id": 1}), CPU], None),
        ([TENSORRT, CUDA], [{"a": 1}, {"b": 2}], [CUDA], [{"b": 2}]),
    ],
)
def test_the_first_accelerator_is_dropped_with_its_options(
    providers: list[Any], options: list[dict[str, Any]] | None, left: list[Any], left_options: Any
) -> None:
    """All other providers remain in their order, or the CPU alone if there is no other."""
    config = SessionConfig("", None, providers, options, None, None, None, None)
    reduced = config.without_accelerator()
    assert reduced.providers == left
    assert reduced.provider_options == left_options
