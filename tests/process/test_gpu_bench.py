"""The GPU benchmark in small sizes, with the CPU provider as the accelerator, and its page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_page
import pytest

from chrion import Profile

pytestmark = pytest.mark.slow
SCRIPT = Path(gpu_page.__file__).with_name("bench_gpu.py")
PARTS = {"overlap": 1, "table6": 2, "user": 1, "figure10": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the benchmark once in small sizes, and return the folder of its files."""
    folder = tmp_path_factory.mktemp("bench")
    command = [sys.executable, str(SCRIPT), "--toy", "--accelerator", "cpu", "-o", "gpu.json"]
    subprocess.run([*command, "--png", "o.png", "--profile", "p.json"], cwd=folder, check=True)  # noqa: S603 - a script of the repository
    return folder


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    """Return the results of the run."""
    found: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    return found


def test_every_case_runs(result: dict[str, Any]) -> None:
    """No case of any part fails or is left out."""
    for name, count in PARTS.items():
        part = result["parts"][name]
        assert (part["failed"], part["left_out"], len(part["cases"])) == ({}, [], count), name


def test_patterns_are_predicted_and_measured(result: dict[str, Any]) -> None:
    """Each of the four patterns has a predicted and a measured latency, and the CPU pattern uses no GPU memory."""
    for case in result["parts"]["table6"]["cases"].values():
        assert set(case) == set(gpu_page.PATTERNS)
        assert all(row["predicted"]["latency_ms"] > 0 and row["measured"]["median_ms"] > 0 for row in case.values())
        assert case["gpu"]["on_accelerator"] == case["gpu"]["operators"]
        assert (case["cpu"]["on_accelerator"], case["cpu"]["measured_mb"]) == (0, 0.0)


def test_the_traced_plan_uses_both_devices(result: dict[str, Any], folder: Path) -> None:
    """The plan places operators on the accelerator and on cores, and the trace is drawn."""
    row = result["parts"]["overlap"]["cases"]["lstm-baseline"]
    assert 0 < row["on_accelerator"] < row["operators"]
    assert 0 <= row["both_sides_ms"] <= row["latency_ms"]
    assert (folder / "o.png").read_bytes().startswith(b"\x89PNG")


def test_the_measurements_are_written_as_a_profile(folder: Path) -> None:
    """The file is a profile with costs of the accelerator."""
    stored = Profile.load(folder / "p.json")
    assert stored.accelerator == "CPUExecutionProvider"
    assert any(o.op_type == "LSTM" and o.accelerator_ms is not None for o in stored.operators.values())


def test_the_page_shows_every_case(result: dict[str, Any]) -> None:
    """The page has a row for every case, the warning about small sizes, and the aims."""
    page = gpu_page.format_page(result)
    assert "Toy sizes" in page
    assert all(f"| {name} |" in page for part in ("table6", "user") for name in result["parts"][part]["cases"])
    assert page.count("aim") >= 2
    assert "## Overlap" in page
    assert "Not measured" not in page
