"""The types of the package, as a user's type checker sees them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
from chrion import HybridSession, load, partition
reveal_type(HybridSession.explain)
reveal_type(load)
"""


def test_a_type_checker_knows_the_public_names(tmp_path: Path) -> None:
    """The package is marked as typed, so that mypy reads its annotations where it is installed."""
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "-c", CODE]
    others = {name: value for name, value in os.environ.items() if name != "MYPYPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=others)  # noqa: S603
    assert done.returncode == 0, done.stdout
    session, function, _ = done.stdout.splitlines()
    assert session.endswith('"def (self: chrion.runtime.session.HybridSession) -> str"')
    assert function.endswith('-> chrion.graph.model.Graph"')
