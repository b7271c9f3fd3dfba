"""A folder of temporary files that is too small for a model's weights."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from helpers import FLOAT, make_model, node, value

#: A file system of a megabyte over a folder, in a namespace of the command's own.
MOUNT = ["unshare", "-Urm", "sh", "-c", 'mount -t tmpfs -o size=1M tmpfs "$TMPDIR" && exec "$@"', "sh"]
CODE = """
import chrion, sys
try:
    chrion.load(sys.argv[1])
except OSError as error:
    print(error)
with chrion.HybridSession(sys.argv[1], tune="now") as session:
    print(session.plan, session.explain())
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model with 4 MB of weights."""
    weights = {f"w{i}": np.full((512, 512), i, np.float32) for i in range(4)}
    nodes = [node("MatMul", ["x", name], [f"p{name}"]) for name in weights]
    nodes.append(node("Sum", [f"p{name}" for name in weights], ["y"]))
    x, y = (value(name, FLOAT, [2, 512]) for name in "xy")
    onnx.save(make_model(nodes, [x], [y], weights), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command with a small folder of temporary files, the one in TMPDIR."""
    return subprocess.run([*MOUNT, *command], capture_output=True, text=True, check=False)  # noqa: S603 - our own


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare: not installed")
def test_the_folder_and_the_space_are_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is not blamed: loading raises an OSError, a session runs plain, and a command ends with exit code 1."""
    small = tmp_path / "small"
    small.mkdir()
    monkeypatch.setenv("TMPDIR", str(small))
    if run("true").returncode:
        pytest.skip("unshare: this user may not mount file systems")
    loaded = run(sys.executable, "-c", CODE, str(model))
    assert loaded.returncode == 0, loaded.stderr
    raised, explained = loaded.stdout.splitlines()
    for text in (raised, explained):
        assert f"no space in {small}: 4.2 MB of weights are written there, 1.0 MB were free" in text
        assert "TMPDIR" in text
    command = run(sys.executable, "-m", "chrion", "profile", str(model))
    assert command.returncode == 1
    assert f"no space in {small}" in command.stderr.splitlines()[-1]
