"""A minute's soak of the server; an hour's is ``scripts/soak_serve.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts open files as Linux does")
def test_a_minute_leaves_nothing_behind() -> None:
    """Mixed requests for a minute leave memory, threads and open files flat, and no valid request fails."""
    command = [sys.executable, str(SCRIPTS / "soak_serve.py"), "--minutes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)  # noqa: S603
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{kind}: " in done.stdout for kind in ("valid", "grpc", "stream", "wrong", "leaves", "cancels"))
