"""Full disks under the server's temporary files and its cache: a model that needs them shrinks, others are served."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from chrion import load
from chrion.scheduler import fixed_plan
from helpers import alternating_lanes
from model_repository import product, put
from server_process import serving

SIDE = 600
X = np.ones((1, SIDE), np.float32)


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """Return a folder under which a command can have a small disk of its own."""
    if sys.platform != "linux":
        pytest.skip("disks of a process: only on Linux")
    folder = tmp_path / "disk"
    folder.mkdir()
    tried = subprocess.run([*on_disk(folder, "size=64k"), "true"], check=False, capture_output=True)  # noqa: S603
    if tried.returncode:
        pytest.skip("unshare, mount: not allowed")
    return folder


def on_disk(folder: Path, options: str) -> list[str]:
    """Return a command that runs another one with a disk in memory at a folder."""
    script = 'mount -t tmpfs -o "$0" none "$1" && shift && exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, options, str(folder)]


@pytest.mark.parametrize("options", ["size=64k", "size=1200k"])
def test_a_plan_whose_weights_cannot_be_written(
    tmp_path: Path, small_disk: Path, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is served by its variant without a plan; nothing is left on the disk, and other models are served."""
    file = put(tmp_path / "models", "m", product(SIDE, layers=3))
    put(tmp_path / "models", "other", product(SIDE, seed=1))
    graph = load(str(file))
    fixed_plan(graph, alternating_lanes(graph)).save(file.parent / "lanes.plan.json")
    (expected,) = ort.InferenceSession(file).run(None, {"x": X})
    for name in ("TMPDIR", "CHRION_CACHE"):
        monkeypatch.setenv(name, str(small_disk))
    with serving(tmp_path / "models", within=on_disk(small_disk, options)) as server:
        status, found, _ = server.infer("m", X)
        assert status == 200, found
        assert np.allclose(found["outputs"][0]["data"], expected.ravel(), rtol=1e-5)
        assert server.metric("chrion_model_load_failures_total", model="m") == 1
        assert server.metric("chrion_model_resident_bytes", model="m", variant="cpu", device="host") > 0
        assert server.infer("other", X)[0] == 200
        left = Path(f"/proc/{server.process.pid}/root{small_disk}")
        assert sum(path.stat().st_size for path in left.rglob("*") if path.is_file()) < 1000


def test_stand_ins_that_cannot_be_written(small_disk: Path) -> None:
    """A full disk under the stand-ins of a replay is one line."""
    command = [*on_disk(small_disk, "size=64k,nr_inodes=3"), sys.executable, "-m", "chrion", "replay", "table7"]
    command += ["--write-models", str(small_disk / "models")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].endswith("cannot be written: No space left on device")
