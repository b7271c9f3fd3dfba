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


def test_growth_is_noticed() -> None:
    """Memory that grows by more than a tenth, and more threads and files, are problems; a warm-up is none."""
    pytest.importorskip("h11")
    pytest.importorskip("grpc")
    from soak_serve import Sample, grown  # noqa: PLC0415 - needs the extra

    flat = [Sample(50.0 + 10 * i, 5, 9) for i in range(10)] + [Sample(200.0, 12, 20)] * 30
    assert grown(flat) == []
    leaking = [Sample(200.0 + 2 * i, 12 + i, 20 + i) for i in range(40)]
    assert [problem.split()[0] for problem in grown(leaking)] == ["memory_mb", "threads", "files"]
