"""The server against Triton's client, which runs in a process of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from server_process import Server

CLIENT = Path(__file__).parents[2] / "triton_checks.py"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tritonclient") is None, reason="tritonclient: pip install 'tritonclient[all]'"
)


@pytest.mark.parametrize("check", ["http", "grpc", "asyncio", "stream", "management", "errors"])
def test_tritons_client(server: Server, check: str) -> None:
    """Triton's client finds what the protocol promises."""
    command = [sys.executable, str(CLIENT), str(server.http), str(server.grpc), check]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.splitlines()[-1] == "passed"
