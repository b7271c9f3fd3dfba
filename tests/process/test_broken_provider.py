"""Probes of execution providers, and sessions for one that onnxruntime offers and that does not work here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnxruntime as ort
import pytest

from chrion.devices.probe import failure_reason, probe_provider
from chrion.zoo import build

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

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
        assert "pip install 'chrion[cuda]'" in line or "this machine has no GPU" in line


@without_cuda
def test_tuning_in_the_background_does_not_repeat_the_report(model: Path) -> None:
    """The session starts as a plain one, and prints no more about the provider than plain onnxruntime."""
    for _ in range(2):
        assert len(reports(SESSION, model, "background")) <= len(reports(PLAIN, model))


def test_probes_of_providers() -> None:
    """The probe of the CPU provider succeeds, and that of a missing provider has a reason."""
    assert probe_provider(CPU).reason is None
    assert "NoSuch" in (probe_provider("NoSuchExecutionProvider").reason or "")
